"""From an opened source to the parameters' memory: each rank reads its own part, or a few read and send.

Internal: import from `shardkit`.
"""
