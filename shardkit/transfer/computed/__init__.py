"""Catalogs of weights that are computed from stored tensors: dequantised and folded ones, box by box.

Internal: import from `shardkit`.
"""
