"""What a terabyte, a thousand ranks and a million chunks cost before and beside the moving of bytes.

    python benchmarks/scale.py DIRECTORY [--runs 5] [--terabytes 1 10] [--chunks 1000000]

Plans are measured by `--dry-run` on models whose files have headers and sizes but no data, so that a terabyte takes no
room. For `.metadata` a checkpoint of so many chunks is really written, of tensors of 16 KB for 1,024 ranks; with 1,000,000
chunks DIRECTORY gets 1.5 GB. Whole processes; medians.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from pathlib import Path

from common import HERE, Found, common_options, process, run, work_in

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
    parser.add_argument("--terabytes", type=int, nargs="*", default=[1, 10])
    args = parser.parse_args()
    work = work_in(args.directory)
    cache = {"SHARDKIT_CACHE": str(work / "cache")}

    def measure(what: str, command: list[str], made: Path | None = None) -> None:
        found: list[Found] = []
        for _ in range(args.runs):
            if made is not None:
                shutil.rmtree(made, ignore_errors=True)
            found.append(process(command, **cache))
        seconds = [each["elapsed_s"] for each in found]
        peak = statistics.median(each["peak_bytes"] for each in found) / (1 << 20)
        cpu_s = statistics.median(each["cpu_s"] for each in found)
        spread = f"{min(seconds):.2f}-{max(seconds):.2f}"
        print(
            f"{what:60} {statistics.median(seconds):8.2f} {spread:>14} {cpu_s:8.2f} {peak:8.0f}", flush=True
        )

    print(f"{'':60} {'seconds':>8} {'(min-max)':>14} {'CPU s':>8} {'peak MiB':>8}")
    for terabytes in args.terabytes:
        model = work / f"{terabytes}tb"
        options = ["--gigabytes", str(1000 * terabytes), "--hidden", str(HIDDEN), "--experts", str(EXPERTS)]
        said = run([sys.executable, str(HERE / "model.py"), str(model), *options, "--sparse"])
        print(said.strip())
        dry = ["preshard", str(model), str(work / "out"), "--dry-run", "--world-size"]
        process(shardkit(*dry, str(RANKS)), **cache)  # what transformers answers is kept
        for ranks in (64, RANKS):
            name = f"{terabytes} TB"
            measure(f"{name}, plan for {ranks} ranks", shardkit(*dry, str(ranks)))
        measure(f"{name}, a plan of part 3/256", shardkit(*dry, str(RANKS), "--part", "3/256"))
        shutil.rmtree(model)

    model, out = work / "tiny", work / "sharded"
    count = -(-args.chunks // RANKS)
    run([sys.executable, "-c", TINY, str(model), str(count), str(RANKS), str(WIDTH)])
    world = ["--world-size", str(RANKS), "--wrap", "none"]
    print(f"{count * RANKS:,} chunks")
    measure("plan", shardkit("preshard", str(model), str(out), *world, "--dry-run"))
    measure("write all", shardkit("preshard", str(model), str(out), *world), out)
    size = (out / ".metadata").stat().st_size
    print(
        f".metadata: {size / 1e6:.0f} MB; shardkit.json: {(out / 'shardkit.json').stat().st_size / 1e6:.0f} MB"
    )
    (out / "shardkit.json").unlink()
    measure("open .metadata with all checks (inspect)", shardkit("inspect", str(out))[:-1])
    measure(
        "plan the way back (consolidate --dry-run)",
        shardkit("consolidate", str(out), str(work / "hf"), "--dry-run"),
    )
    half = ["--world-size", str(RANKS // 2), "--dry-run"]
    measure(
        "plan for half the ranks (reshard --dry-run)",
        shardkit("reshard", str(out), str(work / "half"), *half),
    )
    print(json.dumps({"runs": args.runs, "python": sys.version.split()[0]}))
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
