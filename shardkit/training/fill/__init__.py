"""From stored bytes to the parameters' memory: each rank reads its own, or a few read and send.

Internal: import from `shardkit`.
"""
