"""Whether a checkpoint is whole: structure, checksums, or held against another one.

Internal: import from `shardkit`.
"""
