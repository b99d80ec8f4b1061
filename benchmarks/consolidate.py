"""consolidate beside `cp -r` of the model's bytes, on the same file system, in the same run.

    python benchmarks/consolidate.py DIRECTORY [--gigabytes 3] [--runs 5] [--ranks 32] [--hidden 2048] [--peers]
        [--only PART]

DIRECTORY (on tmpfs, on a disk, ...) gets a generated model, a stock torch checkpoint of it (`sharded.py`) and,
in turn, every output: three times `--gigabytes`, with `--peers` four times. The parts:

- sharded: the bf16 model as a DCP checkpoint of `--ranks`, which may be given several times (16x2: a grid);
- optimizer: an fp32 model of a third of the size with AdamW's state, saved by 4 real ranks;
- safetensors: the bf16 model as torch's DCP-HF shards of 32 ranks;
- start: the seconds until Python, and until the command line, is there.

Each run of a variant has a cp of the Hub model just before it, in every second round just after, and medians
are printed. A variant's seconds are those of `shardkit.consolidate(...)`, without interpreter and imports (torch's
too, where a dtype is converted); `start` are those of interpreter and imports, `decide` those until bytes begin to move. Ratios are to its `cp`.
On a disk both sides include a `sync`. Peak memory is of the whole process. `read` are the bytes read by the process to those of the model (mapped pages are not counted).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
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
    run,
    spread,
    work_in,
)

CHILD = """
import time
import shardkit
operation = shardkit.consolidate
ready = time.time()

import json, os, resource, sys

class Clock:
    def start(self, total_bytes, label):
        self.started = time.monotonic()
    def advance(self, num_bytes):
        pass
    def finish(self):
        pass

def read_bytes():
    with open("/proc/self/io") as file:
        return int(file.read().split()[1])

options, clock = json.loads(sys.argv[1]), Clock()
spawned = options.pop("spawned")
if "dtype" in options:
    import torch
before, begun = read_bytes(), time.monotonic()
operation(progress=clock, **options)
os.sync()
elapsed_s = time.monotonic() - begun
print(json.dumps({"elapsed_s": elapsed_s, "start_s": ready - spawned, "decide_s": clock.started - begun,
    "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    "read_bytes": read_bytes() - before, "torch": "torch" in sys.modules}))
"""
SAME = {"--digest none": {"digest": "none"}, "--digest crc32": {"digest": "crc32"}}
CAST = {"same dtype": {}, "--dtype bf16": {"dtype": "bf16"}}
PEERS = {
    "torch + huggingface_hub": "huggingface_hub",
    "accelerate": "accelerate",
    "lightning": "lightning",
    "torch safetensors": "torch",
}
"""Their names in `consolidate_peer.py`, and the packages that they need."""
PARTS = ("sharded", "optimizer", "safetensors", "start")


def consolidate(source: Path, options: Mapping[str, object], output: Path) -> Found:
    os.sync()
    arguments = {"checkpoint": str(source), "output": str(output), **options, "spawned": time.time()}
    return json.loads(run([sys.executable, "-c", CHILD, json.dumps(arguments)]))


def peer(source: Path, name: str, output: Path) -> Found:
    os.sync()
    command = [sys.executable, str(HERE / "consolidate_peer.py"), name, str(source), str(output)]
    return json.loads(run(command).splitlines()[-1])


def make_model(work: Path, gigabytes: float, *flags: str) -> None:
    shutil.rmtree(work / "model", ignore_errors=True)
    command = [sys.executable, str(HERE / "model.py"), str(work / "model"), "--gigabytes", str(gigabytes)]
    print(f"\n{' '.join(['model:', *flags])} {run([*command, *flags]).strip()}")


def make_checkpoint(work: Path, *flags: str) -> Path:
    source, begun = work / "checkpoint", time.monotonic()
    shutil.rmtree(source, ignore_errors=True)
    run([sys.executable, str(HERE / "sharded.py"), str(work / "model"), str(source), *flags])
    sizes = [path.stat().st_size for path in source.iterdir()]
    seconds = time.monotonic() - begun
    print(f"\nsharded.py {' '.join(flags)}: {sum(sizes) / 1e9:.2f} GB, {len(sizes)} files ({seconds:.0f} s)")
    return source


def compare(
    report: Report,
    table: str,
    work: Path,
    source: Path,
    ours: Mapping[str, Mapping[str, object]],
    peers: Sequence[str],
    runs: int,
) -> None:
    """Add the rows of one checkpoint: the copy, ours, and the peers."""
    there = [name for name in peers if find_spec(PEERS[name]) is not None]
    variants: dict[str, Variant] = {
        **{name: partial(consolidate, source, options) for name, options in ours.items()},
        **{name: partial(peer, source, name) for name in there},
    }
    rows = alternate(work / "model", work / "output", variants, runs)
    model_bytes = sum(path.stat().st_size for path in (work / "model").glob("*.safetensors"))
    report.add(table, "cp -r", **copies(rows))
    for name, row in rows.items():
        found = figures(row)
        report.add(table, name, **found, read=found["read_bytes"] / model_bytes)
    for name in peers:
        if name not in there:
            report.leave_out(f"{table}: {name}", "not installed")


def measure_start(report: Report, runs: int) -> None:
    for name, arguments in {
        "python": ["-c", "pass"],
        "import shardkit, consolidate": ["-c", "import shardkit; shardkit.consolidate"],
        "shardkit consolidate --help": ["-m", "shardkit", "consolidate", "--help"],
        "import torch": ["-c", "import torch"],
    }.items():
        seconds = []
        for _ in range(runs):
            begun = time.monotonic()
            run([sys.executable, *arguments])
            seconds.append(time.monotonic() - begun)
        report.add("start", name, runs=runs, **spread(seconds, "elapsed", "_s"))


def main() -> None:
    parser = common_options(__doc__, gigabytes=3.0, runs=5)
    parser.add_argument("--hidden", default="2048", help="the model's hidden size: how large its tensors are")
    parser.add_argument("--ranks", action="append", help="default: 32, 1 and 1024")
    parser.add_argument("--peers", action="store_true", help="also other tools, where they are installed")
    parser.add_argument("--only", action="append", choices=PARTS, help="default: all parts")
    args = parser.parse_args()
    work, parts = work_in(args.directory), args.only or PARTS
    with Report(args) as report:
        if "sharded" in parts or "safetensors" in parts:
            make_model(work, args.gigabytes, "--hidden", args.hidden)
        if "sharded" in parts:
            for ranks in args.ranks or ("32", "1", "1024"):
                source = make_checkpoint(work, "--ranks", ranks)
                peers = ("torch + huggingface_hub", "accelerate", "lightning") if args.peers else ()
                compare(report, f"{ranks} ranks, hidden {args.hidden}", work, source, SAME, peers, args.runs)
        if "safetensors" in parts:
            source = make_checkpoint(work, "--ranks", "32", "--safetensors")
            peers = ("torch safetensors",) if args.peers else ()
            compare(report, "safetensors, 32 ranks", work, source, SAME, peers, args.runs)
        if "optimizer" in parts:
            make_model(work, args.gigabytes / 3, "--fp32")
            source = make_checkpoint(work, "--ranks", "4", "--optimizer")
            # accelerate keeps the optimizer in a checkpoint of its own.
            peers = ("torch + huggingface_hub", "lightning") if args.peers else ()
            compare(report, "with an optimizer, 4 ranks", work, source, CAST, peers, args.runs)
        if "start" in parts:
            measure_start(report, args.runs)
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
