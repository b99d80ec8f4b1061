"""OSFT in a training job: models with factors, factors computed by all ranks, and steps that stay out of what is frozen.

Internal: import from `shardkit`.
"""
