"""Tensors that are made of stored ones, box by box: the seam (`derive`, `bound`), and a codec for each way.

Internal: import from `shardkit`.
"""
