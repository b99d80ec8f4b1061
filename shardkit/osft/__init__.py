"""Orthogonal subspace fine-tuning: choosing, computing, storing and folding factors of weights, and the layer for them.

Internal: import from `shardkit`.
"""
