"""Checkpoints as trainers leave them: one module for each format, each opens to a `Checkpoint`.

Internal: import from `shardkit`.
"""
