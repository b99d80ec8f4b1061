"""From the names that a checkpoint stores to the names that the Hub uses.

Pure: names, shapes and dtypes in, names and expressions out; nothing is opened but the rule sets of the package.

Internal: import from `shardkit`.
"""
