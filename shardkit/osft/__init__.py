"""Orthogonal subspace fine-tuning: which weights become factors, how they are computed, folded, and used by a module.

Internal: import from `shardkit`.
"""
