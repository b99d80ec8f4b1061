"""Tensors computed from stored ones, box by box: `derive` and `bound` add them to catalogs, codecs compute them.

Internal: import from `shardkit`.
"""
