"""Orthogonal subspace fine-tuning: which weights become factors, how they are computed, stored, folded, and used by a layer.

Internal: import from `shardkit`.
"""
