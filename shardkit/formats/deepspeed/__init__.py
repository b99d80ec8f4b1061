"""DeepSpeed's checkpoints: ZeRO partitions, universal checkpoints, experts, and the optimizer's state.

Internal: import from `shardkit`.
"""
