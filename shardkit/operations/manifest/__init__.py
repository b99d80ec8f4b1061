"""A manifest for a checkpoint that somebody else wrote.

Internal: import from `shardkit`.
"""
