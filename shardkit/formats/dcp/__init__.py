"""torch's distributed checkpoints: `.metadata` and `.distcp` files, read and written.

Internal: import from `shardkit`.
"""

METADATA = ".metadata"
"""The file that says what a checkpoint holds. It is written last."""
