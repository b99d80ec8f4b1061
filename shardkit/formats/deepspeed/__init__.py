"""DeepSpeed's checkpoints: ZeRO partitions, universal checkpoints, their optimizer."""
