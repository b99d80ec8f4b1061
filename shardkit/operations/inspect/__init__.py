"""What a checkpoint holds, from its headers alone.

Internal: import from `shardkit`.
"""
