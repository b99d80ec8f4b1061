"""Remote files: the interface of an object store (`contract`), the kinds of stores, and reading by ranges.

`stores` adds directories and open files, and is used through `storage`.

Internal: import from `shardkit`.
"""
