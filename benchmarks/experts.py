"""preshard and consolidate of a model whose experts transformers fuses, beside `cp -r` of the same bytes.

    python benchmarks/experts.py DIRECTORY [--gigabytes 10] [--experts 64] [--runs 5] [--only preshard] [--variant "preshard, asked"]

DIRECTORY gets a generated Qwen3-MoE with single experts, its pre-sharded form, where they are fused, and in turn
every output: three times the model's size, twice with `--only preshard`. Whole processes are timed, from their start to the end of a `sync`,
`--dry-run` is all that comes before bytes move, a constant. What is "asked" starts a child that asks transformers how the
experts are fused; what is "kept" finds that child's answer in the cache, which is SHARDKIT_CACHE in DIRECTORY. Each has a cp of its own source just before it, in every second round just after, and medians are
printed. Peak memory is the kernel's high-water mark of the process, or
of its child if that is larger.
"""

from __future__ import annotations

import shutil
import sys
from functools import partial
from pathlib import Path

from common import (
    HERE,
    Found,
    Report,
    Variant,
    alternate,
    common_options,
    copies,
    figures,
    process,
    run,
    work_in,
)


def whole(arguments: list[str], cache: str, output: Path) -> Found:
    """Run a command of shardkit with this SHARDKIT_CACHE, and measure all of it."""
    command = [sys.executable, "-m", "shardkit", *arguments[:2], str(output), *arguments[2:], "--no-progress"]
    return process(command, SHARDKIT_CACHE=cache)


def main() -> None:
    parser = common_options(__doc__, gigabytes=10.0, runs=5)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--only", choices=("preshard", "consolidate"))
    parser.add_argument("--variant", help='one line of the table alone, such as "preshard, asked"')
    args = parser.parse_args()
    work = work_in(args.directory)
    model, sharded = work / "model", work / "sharded"
    sizes = ["--gigabytes", str(args.gigabytes), "--experts", str(args.experts)]
    print(run([sys.executable, str(HERE / "model.py"), str(model), *sizes]).strip())
    preshard = ["preshard", str(model), "--world-size", "8"]
    if args.only != "preshard":
        whole(preshard, "off", sharded)
    consolidate = ["consolidate", str(sharded), "--base", str(model)]
    size = sum(path.stat().st_size for path in model.iterdir())
    with Report(args) as report:
        for source, command in ((model, preshard), (sharded, consolidate)):
            if args.only not in (None, command[0]):
                continue
            kept = str(work / "cache")
            whole([*command, "--dry-run"], kept, work / "output")
            variants: dict[str, Variant] = {
                f"{name}, {state}": partial(whole, arguments, cache)
                for name, arguments in ((command[0], command), ("--dry-run", [*command, "--dry-run"]))
                for state, cache in (("asked", "off"), ("kept", kept))
                if args.variant in (None, f"{name}, {state}")
            }
            if not variants:
                continue
            rows = alternate(source, work / "output", variants, args.runs)
            table = f"{command[0]}, {size / 1e9:.2f} GB"
            report.add(table, "cp -r", **copies(rows))
            for name, row in rows.items():
                report.add(table, name, **figures(row))
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
