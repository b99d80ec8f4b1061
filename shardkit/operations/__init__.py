"""The verbs: a folder for each of preshard, consolidate, reshard, verify, inspect and diff, and the modules they share.

Internal: import from `shardkit`.
"""
