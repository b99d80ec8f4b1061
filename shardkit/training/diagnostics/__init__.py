"""Looking at a sharded model: its units, dtypes and ties, and memory by phase.

Internal: import from `shardkit`.
"""
