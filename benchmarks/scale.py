"""What a terabyte, a thousand ranks and a million chunks cost before and beside the moving of bytes.

    python benchmarks/scale.py DIRECTORY [--runs 5] [--terabytes 1 10] [--chunks 1000000] [--files 100000]

Plans are measured by `--dry-run` on models whose files have headers and sizes but no data, so that a terabyte takes no
room. For `.metadata` a checkpoint of so many chunks is really written, of tensors of 16 KB for 1,024 ranks; with 1,000,000
chunks DIRECTORY gets 1.5 GB. The files are a Hub model's, of one tensor of 16 bytes each. 0 leaves chunks or files out. Whole processes; medians.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from common import HERE, Found, Report, common_options, process, run, spread, work_in

RANKS, WIDTH = 1024, 8
# As DeepSeek-V3 and larger: 256 experts a layer.
HIDDEN, EXPERTS = 7168, 256

TINY = """
import json, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
out, count, rows, width = Path(sys.argv[1]), *map(int, sys.argv[2:])
out.mkdir()
save_file({f"layers.{n}.weight": torch.randn(rows, width, dtype=torch.bfloat16) for n in range(count)}, out / "model.safetensors")
"""

FILES = """
import json, struct, sys
from pathlib import Path
out, count = Path(sys.argv[1]), int(sys.argv[2])
out.mkdir()
weight_map = {}
for number in range(count):
    name = f"model-{number + 1:06d}-of-{count:06d}.safetensors"
    fqn = f"layers.{number}.weight"
    text = json.dumps({fqn: {"dtype": "BF16", "shape": [8], "data_offsets": [0, 16]}}).encode()
    text += b" " * (-len(text) % 8)
    (out / name).write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))
    weight_map[fqn] = name
index = {"metadata": {"total_size": 16 * count}, "weight_map": weight_map}
(out / "model.safetensors.index.json").write_text(json.dumps(index))
"""
LIST = """
import os, sys
assert all(entry.stat().st_size for entry in os.scandir(sys.argv[1]))
"""
# As `dcp.load` reads it on the coordinator, and as `dcp.save` writes it.
UNPICKLE = """
import pickle, sys
from pathlib import Path
import torch.distributed.checkpoint
found = pickle.loads((Path(sys.argv[1]) / ".metadata").read_bytes())
sys.argv[2:] and pickle.dumps(found)
"""

# A dry run refuses a disk that is too small, and no disk here holds ten terabytes.
ROOMY = """
import shutil, sys
shutil.disk_usage = lambda path: shutil._ntuple_diskusage(1 << 60, 0, 1 << 60)
from shardkit.cli import main
sys.exit(main())
"""


def shardkit(*arguments: str) -> list[str]:
    return [sys.executable, "-c", ROOMY, *arguments, "--no-progress"]


def main() -> None:
    parser = common_options(__doc__, gigabytes=0, runs=5)
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--terabytes", type=float, nargs="*", default=[1, 10])
    args = parser.parse_args()
    work = work_in(args.directory)

    def measure(
        table: str,
        what: str,
        command: list[str],
        made: Path | None = None,
        *,
        kept: bool = True,
        **more: object,
    ) -> None:
        cache = {"SHARDKIT_CACHE": str(work / "cache") if kept else "off"}
        found: list[Found] = []
        for _ in range(args.runs):
            if made is not None:
                shutil.rmtree(made, ignore_errors=True)
            found.append(process(command, **cache))
        report.add(
            table,
            what,
            runs=args.runs,
            **spread([each["elapsed_s"] for each in found], "elapsed", "_s"),
            cpu_s=statistics.median(each["cpu_s"] for each in found),
            peak_bytes=statistics.median(each["peak_bytes"] for each in found),
            **more,
        )

    with Report(args) as report:
        for terabytes in args.terabytes:
            terabyte(work, terabytes, measure)
        if args.chunks:
            many_chunks(work, args.chunks, measure)
        if args.files:
            many_files(work, args.files, measure)
    shutil.rmtree(work)


Measure = Callable[..., None]
"""(table, what, command, output to remove before each run, whether what transformers answers is kept, further figures)."""


def terabyte(work: Path, terabytes: float, measure: Measure) -> None:
    """Plan for a model of headers and sizes alone."""
    model, name = work / "model", f"{terabytes:g} TB"
    options = ["--gigabytes", str(1000 * terabytes), "--hidden", str(HIDDEN), "--experts", str(EXPERTS)]
    print(run([sys.executable, str(HERE / "model.py"), str(model), *options, "--sparse"]).strip())
    index = json.loads((model / "model.safetensors.index.json").read_text())
    sizes = {"tensors": len(index["weight_map"]), "files": len(set(index["weight_map"].values()))}
    dry = ["preshard", str(model), str(work / "out"), "--dry-run", "--world-size"]
    plan = shardkit(*dry, str(RANKS))
    measure(name, f"plan for {RANKS} ranks, transformers asked", plan, kept=False, **sizes)
    process(plan, SHARDKIT_CACHE=str(work / "cache"))  # what transformers answers is kept
    measure(name, f"plan for {RANKS} ranks", plan, **sizes)
    measure(name, "plan of part 3 of 256", shardkit(*dry, str(RANKS), "--part", "3/256"), **sizes)
    shutil.rmtree(model)


def many_chunks(work: Path, chunks: int, measure: Measure) -> None:
    """Write a checkpoint of many chunks, and plan from it."""
    model, out = work / "tiny", work / "sharded"
    count = -(-chunks // RANKS)
    run([sys.executable, "-c", TINY, str(model), str(count), str(RANKS), str(WIDTH)])
    world = ["--world-size", str(RANKS), "--wrap", "none"]
    table, sizes = "chunks", {"chunks": count * RANKS}
    measure(table, "plan", shardkit("preshard", str(model), str(out), *world, "--dry-run"), **sizes)
    measure(table, "write all", shardkit("preshard", str(model), str(out), *world), out, **sizes)
    sizes["metadata_bytes"] = (out / ".metadata").stat().st_size
    (out / "shardkit.json").unlink()
    measure(table, "open .metadata with all checks (inspect)", shardkit("inspect", str(out))[:-1], **sizes)
    measure(
        table,
        "plan the way back (consolidate --dry-run)",
        shardkit("consolidate", str(out), str(work / "hf"), "--dry-run"),
        **sizes,
    )
    half = ["--world-size", str(RANKS // 2), "--dry-run"]
    measure(
        table,
        "plan for half the ranks (reshard --dry-run)",
        shardkit("reshard", str(out), str(work / "half"), *half),
        **sizes,
    )
    measure(table, "torch: unpickle .metadata", [sys.executable, "-c", UNPICKLE, str(out)], **sizes)
    measure(table, "torch: pickle it again", [sys.executable, "-c", UNPICKLE, str(out), "dump"], **sizes)
    shutil.rmtree(out)
    shutil.rmtree(model)


def many_files(work: Path, count: int, measure: Measure) -> None:
    """Look at a directory of many small safetensors files."""
    model = work / "files"
    run([sys.executable, "-c", FILES, str(model), str(count)])
    measure("files", "list them", [sys.executable, "-c", LIST, str(model)], files=count)
    measure("files", "open all headers (inspect)", shardkit("inspect", str(model))[:-1], files=count)
    world = ["--world-size", str(RANKS), "--wrap", "none", "--dry-run"]
    measure("files", "plan", shardkit("preshard", str(model), str(work / "out"), *world), files=count)
    shutil.rmtree(model)


if __name__ == "__main__":
    main()
