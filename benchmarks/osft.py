"""Factors of OSFT: the decomposition beside the one of others, and loading what a job has saved.

    python benchmarks/osft.py DIRECTORY [--layers 3] [--hidden 1024] [--inner 2816] [--runs 3] [--only PART]

DIRECTORY gets a generated Llama in bf16, and its factors. Printed are medians of

serial   all targets one after the other in one process with one thread, in seconds of the processor: as shardkit decomposes and measures them, and
         by `torch.linalg.svd` in float32, as mini_trainer 0.9.0 does when a training starts (create_svd_dict; its way
         through one process of many). Targets that are nearly singular are apart: shardkit takes longer for them.
loading  `finalize` of factors that 4 gloo ranks have saved, beside a plain read: each rank reads its own file into fresh
         memory. Seconds are those of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from common import Report, json_option, run, spread, work_in

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
MODEL = """
import sys, torch, transformers
path, hidden, inner, layers = sys.argv[1], *map(int, sys.argv[2:])
config = transformers.LlamaConfig(hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
    num_attention_heads=8, num_key_value_heads=4, vocab_size=512, tie_word_embeddings=False)
torch.manual_seed(0)
transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
"""
SERIAL = """
import json, sys, time, torch
from safetensors import safe_open
from shardkit.osft.plan import Candidate, OsftPlan, choose_targets
from shardkit.osft.svd import factorise
torch.set_num_threads(1)

def theirs(weight, target):
    left, sizes, right = torch.linalg.svd(weight.float(), full_matrices=False)
    k = target.rank
    parts = left[:, :k], sizes[:k], right[:k], left[:, k:], sizes[k:], right[k:]
    return left, right, [part.contiguous().clone() for part in parts]

def distance(rows):
    return float((rows @ rows.T - torch.eye(len(rows), dtype=rows.dtype)).abs().max())

with safe_open(sys.argv[1], "pt") as file:
    weights = {name: Candidate(tuple(file.get_slice(name).get_shape()), "Linear") for name in file.keys()}
    for target in choose_targets(OsftPlan(ratio=0.3), weights, "llama")[0]:
        weight = file.get_tensor(target.weight)
        for way in sys.argv[2:]:
            begun = time.process_time()  # of a process with one thread: others on the machine count less
            found = factorise(weight, target) if way == "ours" else theirs(weight, target)
            seconds = time.process_time() - begun
            if way == "ours":
                algorithm, six = found.algorithm, found.tensors
                found = (
                    torch.cat((six["osft_U_high"], six["osft_params.U_low"]), 1),
                    torch.cat((six["osft_V_high"], six["osft_params.V_low"])),
                )
            worst = max(distance(found[0].T.double()), distance(found[1].double()))
            print(json.dumps([target.path, way, algorithm, seconds, worst]), flush=True)
"""
LOAD = """
import mmap, os, sys, time, numpy, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import shardkit
torch.set_num_threads(1)
model, factors, store = sys.argv[1:]
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", store=dist.FileStore(store, 4), rank=rank, world_size=4)
mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))

context = shardkit.prepare(model, model, osft=0.3)
shardkit.save(shardkit.finalize(shardkit.wrap(context.model, mesh), context), factors, overwrite=True)
del context
path = f"{factors}/__{rank}_0.distcp"
size = os.path.getsize(path)

def read():
    view = memoryview(torch.empty(size, dtype=torch.uint8).numpy())
    with open(path, "rb", buffering=0) as file:
        done = 0
        while done < len(view):
            done += file.readinto(view[done : done + (8 << 20)])

def touch():
    held = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held.madvise(mmap.MADV_HUGEPAGE)
    numpy.frombuffer(held, numpy.uint8)[::4096] = 1
    dist.barrier()

def timed(work):
    touch()
    dist.barrier()
    begun = time.monotonic()
    work()
    slowest = torch.tensor(time.monotonic() - begun)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)

for _ in range(2):
    plain = timed(read)
    context = shardkit.prepare(model, factors)
    wrapped = shardkit.wrap(context.model, mesh)
    loaded = timed(lambda: shardkit.finalize(wrapped, context))
    del context, wrapped
if rank == 0:
    print(plain, loaded)
dist.barrier()
dist.destroy_process_group()
"""  # the first round brings the files into the page cache; `touch` has a virtual machine's host give the memory before


def serial(weights: Path) -> list[list[object]]:
    """Return a line for each target and way."""
    done = subprocess.run(
        [sys.executable, "-c", SERIAL, str(weights), "ours", "theirs"],
        env={**os.environ, **ONE_THREAD},
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def add_serial(report: Report, rounds: list[list[list[object]]]) -> None:
    seconds: dict[tuple[object, object], list[float]] = defaultdict(list)
    worst: dict[tuple[object, object], float] = defaultdict(float)
    for lines in rounds:
        totals: dict[tuple[object, object], float] = defaultdict(float)
        for _, way, algorithm, took, distance in lines:
            totals[algorithm, way] += took  # type: ignore[operator]
            worst[algorithm, way] = max(worst[algorithm, way], distance)  # type: ignore[type-var]
        for key, total in totals.items():
            seconds[key].append(total)
    for algorithm, way in sorted(seconds, key=str):
        number = sum(line[1:3] == [way, algorithm] for line in rounds[0])
        found = spread(seconds[algorithm, way], "cpu", "_s")
        what = f"{way}, {algorithm}"
        report.add("serial", what, targets=number, **found, orthogonal_to=worst[algorithm, way])


def load(source: Path, output: Path, store: Path) -> tuple[float, ...]:
    """Have factors saved in `output`; return the seconds of a plain read, those of `finalize`, and their ratio."""
    children = [
        subprocess.Popen(
            [sys.executable, "-c", LOAD, str(source), str(output), str(store)],
            env={**os.environ, **ONE_THREAD, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(4)
    ]
    said = [child.communicate()[0] for child in children]
    store.unlink(missing_ok=True)
    plain_s, loaded_s = map(float, said[0].split())
    return plain_s, loaded_s, loaded_s / plain_s


def medians(runs: int, measure: Callable[[], tuple[float, ...]]) -> list[float]:
    return [statistics.median(each) for each in zip(*(measure() for _ in range(runs)), strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    for name, default in (("layers", 3), ("hidden", 1024), ("inner", 2816), ("runs", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", choices=("serial", "loading"))
    json_option(parser)
    args = parser.parse_args()
    work = work_in(args.directory)
    source, output = work / "model", work / "output"
    run([sys.executable, "-c", MODEL, str(source), *map(str, (args.hidden, args.inner, args.layers))])
    weights = source / "model.safetensors"
    with Report(args) as report:
        if args.only in (None, "serial"):
            add_serial(report, [serial(weights) for _ in range(args.runs)])
        if args.only in (None, "loading"):
            plain_s, loaded_s, ratio = medians(args.runs, lambda: load(source, output, work / "store"))
            size = sum(path.stat().st_size for path in output.glob("*.distcp"))
            found = {"runs": args.runs, "elapsed_s": loaded_s, "read_s": plain_s, "ratio": ratio}
            report.add("loading", "finalize", **found, moved_bytes=size)
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
