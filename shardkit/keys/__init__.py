"""From the names that a checkpoint stores to the names that the Hub uses.

Pure: names, shapes and dtypes in, names out; nothing is opened.

Internal: import from `shardkit`.
"""
