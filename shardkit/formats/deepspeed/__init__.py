"""DeepSpeed's checkpoints: ZeRO partitions, universal checkpoints, their optimizer.

Internal: import from `shardkit`.
"""
