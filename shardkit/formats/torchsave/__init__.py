"""Files of `torch.save`: the archive, its records, and tensors where they lie; nothing in them is run.

Internal: import from `shardkit`.
"""
