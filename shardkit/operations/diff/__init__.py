"""What differs between two checkpoints, whatever their formats.

Internal: import from `shardkit`.
"""
