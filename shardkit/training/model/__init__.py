"""The model before and after it has weights: build it on meta, compare it with its source, complete and check it.

Internal: import from `shardkit`.
"""
