"""preshard beside `cp -r` of the same bytes, on the same file system, in the same run.

    python benchmarks/preshard.py DIRECTORY [--gigabytes 3] [--runs 5] [--peer]

DIRECTORY (on tmpfs, on a disk, ...) gets a generated model and, in turn, every output; it needs three
times the model's size. Each run of a variant has a cp of its own just before it, in every second round just
after, and medians are printed. A variant's seconds are those of `shardkit.preshard(...)`, without interpreter
and imports; its ratio is to its `cp`. On a disk both sides include a `sync`. Peak memory is of the whole process.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

from common import (
    HERE,
    Found,
    Report,
    Variant,
    alternate,
    can_reflink,
    common_options,
    copies,
    figures,
    run,
    work_in,
)

CHILD = """
import json, os, resource, sys, time
import shardkit
import shardkit.operations.preshard
options = json.loads(sys.argv[1])
begun = time.monotonic()
result = shardkit.preshard(**options)
os.sync()
print(json.dumps({"elapsed_s": time.monotonic() - begun, "shares": result.shares_extents,
    "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "layout": result.layout}))
"""


def preshard(source: Path, output: Path, **options: object) -> Found:
    os.sync()
    arguments = json.dumps({"source": str(source), "output": str(output), "world_size": 32, **options})
    return json.loads(run([sys.executable, "-c", CHILD, arguments]))


def peer(source: Path, output: Path, ranks: int) -> Found:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    return json.loads(run([*torchrun, str(HERE / "peer.py"), str(source), str(output)]).splitlines()[-1])


def main() -> None:
    parser = common_options(__doc__, gigabytes=3.0, runs=5)
    parser.add_argument(
        "--peer", action="store_true", help="also load, fully_shard and dcp.save in 4 processes"
    )
    args = parser.parse_args()
    work = work_in(args.directory)
    print(
        run(
            [sys.executable, str(HERE / "model.py"), str(work / "model"), "--gigabytes", str(args.gigabytes)]
        ).strip()
    )
    # Without config.json the layout is declared: tracing is a constant few seconds of imports in a child.
    config = work / "config.json"
    (work / "model" / "config.json").rename(config)
    variants: dict[str, Variant] = {
        "--digest none": lambda out: preshard(work / "model", out, digest="none"),
        "--digest crc32": lambda out: preshard(work / "model", out),
        "--dtype fp16": lambda out: preshard(work / "model", out, dtype="fp16"),
    }
    if args.peer:
        variants["peer, 4 ranks"] = lambda out: peer(work / "traced", out, 4)
        (work / "traced").mkdir()
        for path in (*sorted((work / "model").iterdir()), config):
            os.link(path, work / "traced" / path.name)
    rows = alternate(work / "model", work / "output", variants, args.runs)
    table = "shared extents" if can_reflink(work) else "same bytes"
    with Report(args) as report:
        report.add(table, "cp -r", **copies(rows))
        for name, row in rows.items():
            report.add(table, name, **figures(row))
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
