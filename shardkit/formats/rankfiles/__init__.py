"""One file of `torch.save` for each rank: its parts put together, flat ones too.

Internal: import from `shardkit`.
"""
