"""OSFT in a training job: models with factors, factors computed by all ranks, steps outside the frozen subspace.

Internal: import from `shardkit`.
"""
