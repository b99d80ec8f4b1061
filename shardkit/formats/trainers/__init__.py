"""Checkpoints as trainers leave them: one module for each format, which opens it to a `Checkpoint`.

Internal: import from `shardkit`.
"""
