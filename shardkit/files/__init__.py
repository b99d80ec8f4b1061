"""Places where bytes lie: every read and write of a file, and how a directory appears whole. No torch.

Internal: import from `shardkit`.
"""
