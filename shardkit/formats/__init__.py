"""Checkpoints of every format: opened to catalogs, written from images.

Internal: import from `shardkit`.
"""
