"""Factors of weights, computed by processes and written straight into the holes of files.

Internal: import from `shardkit`.
"""
