"""Where an output comes to be: on a disk, or in a store.

Internal: import from `shardkit`.
"""
