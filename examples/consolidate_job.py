# /// script
# requires-python = ">=3.10"
# dependencies = ["shardkit[stores]"]
#
# [tool.uv.sources]
# shardkit = { path = ".." }
# ///
"""Consolidate next to where the checkpoint is, with nothing installed but uv; torch is not needed.

    uv run consolidate_job.py CHECKPOINT [OUTPUT] [OPTION]...       as `shardkit consolidate`

docs/install.md has whole lines.
"""

import sys

from shardkit.cli import main

if __name__ == "__main__":
    main(["consolidate", *sys.argv[1:]], prog_name="shardkit")
