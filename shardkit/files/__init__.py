"""Files and stores: all reads and writes, and outputs that appear atomically. No torch.

Internal: import from `shardkit`.
"""
