"""What somebody waits for who types a command: whole processes, each beside a `cp -r` of the same bytes.

    python benchmarks/felt.py DIRECTORY [--gigabytes 3] [--runs 7] [--ranks 32] [--many-ranks 1024] [--only PART]

DIRECTORY (on tmpfs, on a disk, ...) gets a generated model, a stock checkpoint of it (`sharded.py`) and in turn every output: three times
`--gigabytes`. The parts:

- preshard: with the layout's trace kept from a run before, and with nothing kept; a dry run of both
- consolidate: the checkpoint of `--ranks`, its source checked; a dry run is what comes before bytes move
- chunks: the same of `--many-ranks`, whose chunks are many and small

Each run has a cp of its own source's bytes just before it, in every second round just after. Seconds are from the start of the
process to the end of a `sync`; medians.
"""

from __future__ import annotations

import shutil
import sys
from functools import partial
from pathlib import Path

from common import HERE, Found, Report, alternate, common_options, copies, figures, process, run, work_in

PARTS = ("preshard", "consolidate", "chunks")


def whole(words: list[str], options: list[str], cache: str, output: Path) -> Found:
    """Run a command of shardkit with this SHARDKIT_CACHE, and measure all of it."""
    command = [sys.executable, "-m", "shardkit", *words, str(output), *options, "--no-progress"]
    return process(command, SHARDKIT_CACHE=cache)


def main() -> None:
    parser = common_options(__doc__, gigabytes=3.0, runs=7)
    parser.add_argument("--ranks", default="32")
    parser.add_argument("--many-ranks", default="1024")
    parser.add_argument("--only", action="append", choices=PARTS, help="default: all parts")
    args = parser.parse_args()
    work, parts = work_in(args.directory), args.only or PARTS
    model, sharded, output, kept = work / "model", work / "sharded", work / "output", str(work / "cache")
    make = [sys.executable, str(HERE / "model.py"), str(model), "--gigabytes", str(args.gigabytes)]
    print(run(make).strip())
    world = ["--world-size", args.ranks]

    def compare(report: Report, table: str, words: list[str], ways: dict[str, tuple[list[str], str]]) -> None:
        variants = {name: partial(whole, words, options, cache) for name, (options, cache) in ways.items()}
        rows = alternate(model, output, variants, args.runs)
        report.add(table, "cp -r", **copies(rows))
        for name, row in rows.items():
            report.add(table, name, **figures(row))

    with Report(args) as report:
        if "preshard" in parts:
            whole(["preshard", str(model)], [*world, "--dry-run"], kept, output)
            ways = {
                "kept": (world, kept),
                "first time": (world, "off"),
                "dry run, kept": ([*world, "--dry-run"], kept),
                "dry run, first time": ([*world, "--dry-run"], "off"),
            }
            compare(report, "preshard", ["preshard", str(model)], ways)
        for part, ranks in (("consolidate", args.ranks), ("chunks", args.many_ranks)):
            if part in parts:
                shutil.rmtree(sharded, ignore_errors=True)
                run([sys.executable, str(HERE / "sharded.py"), str(model), str(sharded), "--ranks", ranks])
                ways = {"whole": ([], kept), "dry run": (["--dry-run"], kept)}
                compare(report, part, ["consolidate", str(sharded)], ways)
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
