"""Translate the names that a checkpoint stores into the names that the Hub uses.

Pure: names, shapes and dtypes go in, names and expressions come out. The only files read are rule sets.

Internal: import from `shardkit`.
"""
