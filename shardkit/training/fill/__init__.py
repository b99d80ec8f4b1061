"""From a source to the parameters' memory: it is opened, then each rank reads its own part, or a few read and send.

Internal: import from `shardkit`.
"""
