"""Region arithmetic, dtypes, sizes, meshes, catalogs: pure, no torch, no I/O.

Internal: import from `shardkit`.
"""
