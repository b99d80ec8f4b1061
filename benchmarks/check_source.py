"""What it costs to compare a source with its checksums as it moves: with and without, in turn, in fresh processes.

    python benchmarks/check_source.py SCRATCH [--gb 2] [--runs 7] [--jobs keep,reshard,bf16,finalize]

makes a stock DCP checkpoint of 2 shards below SCRATCH, and prints for each job the medians of seconds and of CPU seconds
(user and system), and the median of the pairs' ratios with the range in which it lies with 95 % certainty. The jobs:
consolidate and reshard with the same dtype, consolidate with a cast, and finalize in one process, from what the page cache
holds of the stock checkpoint and of a pre-sharded one.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import sys
import warnings
from pathlib import Path

from common import Report, json_option, run

_JOB = """
import json, resource, sys, time, warnings
warnings.simplefilter("ignore")
source, out, job, check = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4] == "on"
import shardkit
if job == "finalize":
    import torch
    from torch import nn
    shapes = json.loads(sys.argv[5])
    model = nn.Module()
    for name, shape in shapes.items():
        layer = nn.Module()
        layer.register_parameter("weight", nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False))
        model.add_module(name, layer)
    context = shardkit.prepare(lambda: model, source)
def used():
    found = resource.getrusage(resource.RUSAGE_SELF)
    return found.ru_utime + found.ru_stime
cpu, begun = used(), time.perf_counter()
if job == "finalize":
    shardkit.finalize(context.model, context, check_source=check)
    checked = context.checked.checked_bytes
elif job == "reshard":
    checked = shardkit.reshard(source, out, world_size=3, check_source=check).checked_bytes
else:
    checked = shardkit.consolidate(source, out, dtype=job, check_source=check).checked_bytes
print(json.dumps({"elapsed_s": time.perf_counter() - begun, "cpu_s": used() - cpu, "checked_bytes": checked}))
"""


def make(directory: Path, num_bytes: int) -> tuple[Path, Path, dict[str, list[int]]]:
    """Return a stock checkpoint in two shards, a pre-sharded one, and the tensors' shapes."""
    import torch
    import torch.distributed.checkpoint as dcp

    import shardkit

    warnings.simplefilter("ignore")
    shapes = {f"l{number}": [4096, 2048] for number in range(max(num_bytes // (4 * 4096 * 2048), 1))}
    whole, listed, stock = directory / "whole", directory / "listed", directory / "stock"
    dcp.save(
        {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()},
        checkpoint_id=whole,
        no_dist=True,
    )
    shardkit.reshard(whole, listed, world_size=2)
    shutil.rmtree(whole)
    shutil.copytree(listed, stock)
    for own in (*stock.glob("*.json"),):  # without them it is as stock torch leaves it
        own.unlink()
    return stock, listed, shapes


def measure(
    report: Report, job: str, source: Path, out: Path, num_runs: int, shapes: dict[str, list[int]]
) -> None:
    """Add a job's row."""
    found: dict[str, list[dict[str, float]]] = {"on": [], "off": []}
    for number in range(num_runs + 1):  # the first is not counted
        for check in ("on", "off") if number % 2 else ("off", "on"):
            done = run([sys.executable, "-c", _JOB, str(source), str(out), job, check, json.dumps(shapes)])
            shutil.rmtree(out, ignore_errors=True)
            if number:
                found[check].append(json.loads(done))
    assert all(each["checked_bytes"] for each in found["on"])
    row: dict[str, object] = {"runs": num_runs}
    for key in ("elapsed", "cpu"):
        on, off = ([each[f"{key}_s"] for each in found[check]] for check in ("on", "off"))
        pairs = [a / b for a, b in zip(on, off, strict=True)]
        low, high = median_range(pairs)
        row |= {
            f"{key}_off_s": statistics.median(off),
            f"{key}_s": statistics.median(on),
            f"{key}_ratio": statistics.median(pairs),
            f"{key}_ratio_low": low,
            f"{key}_ratio_high": high,
        }
    report.add("checked", f"{job} {source.name}", **row)


def median_range(values: list[float]) -> tuple[float, float]:
    """Return between which two of the values the median lies with 95 % certainty, whatever their distribution; at worst the ends."""
    ordered, total = sorted(values), len(values)
    # The median is below the k-th smallest as rarely as `total` throws of a coin show heads less than k times.
    ranks = (
        k
        for k in range(1, total // 2 + 1)
        if 2 * sum(math.comb(total, i) for i in range(k)) <= 0.05 * 2**total
    )
    rank = max(ranks, default=1)
    return ordered[rank - 1], ordered[-rank]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", metavar="SCRATCH", type=Path)
    parser.add_argument("--gb", type=float, default=2)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--jobs", default="keep,reshard,bf16,finalize")
    json_option(parser)
    options = parser.parse_args()
    directory = options.directory / "check-source"
    directory.mkdir()
    try:
        stock, listed, shapes = make(directory, int(options.gb * 1e9))
        with Report(options) as report:
            for job, source in (
                ("keep", stock),
                ("reshard", stock),
                ("bf16", stock),
                ("finalize", stock),
                ("finalize", listed),
            ):
                if job in options.jobs.split(","):
                    measure(report, job, source, directory / "out", options.runs, shapes)
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
