"""Regions, meshes, dtypes, catalogs, text and threads. No torch, no I/O.

Internal: import from `shardkit`.
"""
