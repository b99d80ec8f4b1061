"""Files that lie elsewhere: what a store of objects has to answer (`contract`), the kinds of stores, and reading by ranges.

`stores` makes directories and open files of it, and `storage` is the way there.

Internal: import from `shardkit`.
"""
