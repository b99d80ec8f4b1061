"""The verbs: a folder for each of preshard, consolidate, reshard, verify, inspect and diff; and modules that they share.

Internal: import from `shardkit`.
"""
