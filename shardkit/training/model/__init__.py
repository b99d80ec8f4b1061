"""The model before and after it has weights: built on meta, held against its source, completed, proved.

Internal: import from `shardkit`.
"""
