"""Publish the newest checkpoint of a run again and again, each on a branch of its own, while the run goes on.

    python publish_run.py checkpoints my-org/my-model
    python publish_run.py run my-org/my-model --base my-model

It reads files that the trainer has finished, uses no GPU, and never touches the run. Ctrl-C ends it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time

import shardkit


def publish_newest(run: str, repo: str, base: str | None, seen: set[str]) -> str | None:
    """Upload the newest complete checkpoint, unless it was seen before; return the name of its branch."""
    try:
        newest = shardkit.resolve_checkpoint(run)
    except shardkit.ShardkitError as error:  # nothing is complete yet
        print(error, flush=True)
        return None
    if newest.path in seen:
        return None
    parts = os.path.relpath(newest.path, run).split(os.sep)
    branch = f"step-{newest.step}" if newest.step is not None else "-".join(parts)
    output = f"publishing-{branch}"
    result = shardkit.consolidate(
        newest.path,
        output,
        base=base,
        dtype="base" if base else "bf16",
        push_to_hub=repo,
        branch=branch,
        private=True,
        overwrite=True,  # what an interrupted upload has left
    )
    shutil.rmtree(output)  # it is on the Hub
    seen.add(newest.path)
    print(f"{newest.path}: {result.pushed_to}, branch {branch}", flush=True)
    return branch


def main() -> None:
    """Look every minute."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", help="directory in which the trainer makes its checkpoints")
    parser.add_argument("repo", help="repo on the Hub; it is made, private, if it does not exist")
    parser.add_argument(
        "--base", help="model that the run started from, unless the checkpoints have its config"
    )
    parser.add_argument("--every", type=float, default=60, help="seconds between two looks")
    options = parser.parse_args()
    seen = set[str]()
    while True:
        try:
            publish_newest(options.run, options.repo, options.base, seen)
        except (
            shardkit.ShardkitError
        ) as error:  # the Hub cannot be reached, or the trainer removed the checkpoint
            print(error, flush=True)
        time.sleep(options.every)


if __name__ == "__main__":
    main()
