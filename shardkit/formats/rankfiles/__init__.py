"""Assemble checkpoints that have one file of `torch.save` for each rank, including those with flat tensors.

Internal: import from `shardkit`.
"""
