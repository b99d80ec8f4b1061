"""Fill the parameters' memory from an opened source: each rank reads its own part, or a few ranks read and send.

Internal: import from `shardkit`.
"""
