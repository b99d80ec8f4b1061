"""Start a sharded model in three phases (prepare, wrap, finalize), save it, and diagnose it.

Internal: import from `shardkit`.
"""
