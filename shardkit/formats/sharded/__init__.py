"""Sharded checkpoints as trainers leave them: one module for each layout, each opening to a `Checkpoint`."""
