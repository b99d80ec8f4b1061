"""Checkpoints of particular trainers: one module for each format, which opens it to a `Checkpoint`.

Internal: import from `shardkit`.
"""
