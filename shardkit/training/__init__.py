"""Starting a sharded model in three phases (prepare, wrap, finalize), saving it, and looking at it.

Internal: import from `shardkit`.
"""
