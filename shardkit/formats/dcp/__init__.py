"""torch's distributed checkpoints: `.metadata` and `.distcp` files, read and written.

Internal: import from `shardkit`.
"""

from shardkit.files.home import METADATA as METADATA
