"""preshard beside `cp -r` of the same bytes, on the same file system, in the same run.

    python benchmarks/preshard.py DIRECTORY [--gigabytes 3] [--runs 5] [--peer]

DIRECTORY (on tmpfs, on a disk, ...) gets a generated model and, in turn, every output; it needs three
times the model's size. Runs alternate (cp, then each variant, then again), and medians are printed. A
variant's seconds are those of `shardkit.preshard(...)`, without interpreter and imports; its ratio is to the
`cp` just before it. On a disk both sides include a `sync`. Peak memory is beyond `python -c "import torch"`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
CHILD = """
import json, os, resource, sys, time
import shardkit
from shardkit.operations import preshard
options = json.loads(sys.argv[1])
begun = time.monotonic()
result = shardkit.preshard(**options)
os.sync()
print(json.dumps({"elapsed_s": time.monotonic() - begun, "shares": result.shares_extents,
    "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "layout": result.layout}))
"""
TORCH = "import resource, torch; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)"


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


def copy(source: Path, output: Path, *flags: str) -> float:
    os.sync()
    begun = time.monotonic()
    run(["cp", "-r", *flags, str(source), str(output)])
    os.sync()
    return time.monotonic() - begun


def preshard(source: Path, output: Path, **options: object) -> dict[str, float]:
    os.sync()
    arguments = json.dumps({"source": str(source), "output": str(output), "world_size": 32, **options})
    return json.loads(run([sys.executable, "-c", CHILD, arguments]))


def used_bytes(path: Path) -> int:
    """Bytes in use once the file system has come to rest: some free a removed file's blocks later."""
    used = -1
    while True:
        os.sync()
        status = os.statvfs(path)
        before, used = used, (status.f_blocks - status.f_bfree) * status.f_frsize
        if before == used:
            return used
        time.sleep(0.3)


def peer(source: Path, output: Path, ranks: int) -> dict[str, float]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    return json.loads(run([*torchrun, str(HERE / "peer.py"), str(source), str(output)]).splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--gigabytes", type=float, default=3.0)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--peer", action="store_true", help="also load, fully_shard and dcp.save in 4 processes"
    )
    args = parser.parse_args()
    work = args.directory / "shardkit-benchmark"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    print(
        run(
            [sys.executable, str(HERE / "model.py"), str(work / "model"), "--gigabytes", str(args.gigabytes)]
        ).strip()
    )
    # Without config.json the layout is declared: tracing is a constant few seconds of imports in a child.
    config = work / "config.json"
    (work / "model" / "config.json").rename(config)
    print(f"file system: {run(['stat', '-f', '-c', '%T', str(work)]).strip()}, cores: {os.cpu_count()}")
    baseline = int(run([sys.executable, "-c", TORCH]))
    variants: dict[str, Callable[[Path], dict[str, float]]] = {
        "--digest none": lambda out: preshard(work / "model", out, digest="none"),
        "--digest crc32": lambda out: preshard(work / "model", out),
        "--dtype fp16": lambda out: preshard(work / "model", out, dtype="fp16"),
    }
    if args.peer:
        variants["peer, 4 ranks"] = lambda out: peer(work / "traced", out, 4)
        (work / "traced").mkdir()
        for path in (*sorted((work / "model").iterdir()), config):
            os.link(path, work / "traced" / path.name)
    copies: list[float] = []
    rows: dict[str, list[tuple[float, float, float, int]]] = {name: [] for name in variants}
    output = work / "output"
    shares = can_reflink(work)
    for _ in range(args.runs):
        for name, variant in variants.items():
            copies.append(copy(work / "model", output, "--reflink=never"))
            shutil.rmtree(output)
            before = used_bytes(work)
            found = variant(output)
            extra = used_bytes(work) - before
            rows[name].append(
                (found["elapsed_s"], found["elapsed_s"] / copies[-1], found["peak_bytes"], extra)
            )
            shutil.rmtree(output)
    size = sum(path.stat().st_size for path in (work / "model").iterdir())
    print(f"shares extents: {'yes' if shares else 'no'}; python with torch: {baseline / 2**20:.0f} MiB")
    print(
        f"{'':16} {'seconds':>8} {'to cp':>6} {'(min-max)':>12} {'peak MiB':>9} {'- torch':>8} {'disk used':>9}"
    )
    print(f"{'cp -r':16} {statistics.median(copies):8.2f} {1:6.2f} {min(copies):5.2f}-{max(copies):.2f} s")
    for name, found in rows.items():
        seconds, ratios, peaks, extras = zip(*found, strict=True)
        spread = f"{min(ratios):.2f}-{max(ratios):.2f}"
        peak, extra = statistics.median(peaks) / 2**20, statistics.median(extras) / size
        print(
            f"{name:16} {statistics.median(seconds):8.2f} {statistics.median(ratios):6.2f} {spread:>12} "
            f"{peak:9.0f} {peak - baseline / 2**20:8.0f} {extra:9.2%}"
        )
    shutil.rmtree(work)


def can_reflink(work: Path) -> bool:
    (work / "a").write_bytes(bytes(1 << 16))
    command = ["cp", "--reflink=always", str(work / "a"), str(work / "b")]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


if __name__ == "__main__":
    main()
