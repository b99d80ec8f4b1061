"""preshard --osft: its decomposition beside the one of others, its processes beside bare ones, and its memory.

    python benchmarks/osft.py DIRECTORY [--layers 3] [--hidden 1024] [--inner 2816] [--jobs 2] [--runs 3] [--only PART]

DIRECTORY gets a generated Llama in bf16 and in turn every output. Printed are medians of

serial   all targets one after the other in one process with one thread, in seconds of the processor: as shardkit decomposes and measures them, and
         by `torch.linalg.svd` in float32, as mini_trainer 0.9.0 does when a training starts (create_svd_dict; its way
         through one process of many). Targets that are nearly singular are apart: shardkit takes longer for them.
workers  `shardkit preshard --osft` as a whole, and as many bare processes that read the same weights, decompose and
         measure them, and write nothing, dealt in the same order. What the layout's trace answers is kept from a run before.
memory   the high-water mark of the largest of these processes, and what a target of that size is reckoned with.
loading  `finalize` of the factors in 4 gloo ranks, beside a plain read: each rank reads its own file into fresh memory.
         Seconds are those of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from common import TORCH, Report, json_option, run, spread, work_in

from shardkit.core.factored import Target
from shardkit.osft.svd import svd_nbytes

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
    weights = {name: Candidate(tuple(file.get_slice(name).get_shape())) for name in file.keys()}
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
BARE = """
import sys, torch
from safetensors import safe_open
from shardkit.core.factored import Target
from shardkit.osft.svd import factorise
torch.set_num_threads(1)
print(flush=True)
with safe_open(sys.argv[1], "pt") as file:
    for line in sys.stdin:
        path, rank = line.split()
        weight = file.get_tensor(f"{path}.weight")
        factorise(weight, Target(path=path, rows=weight.shape[0], columns=weight.shape[1], rank=int(rank)))
        print(flush=True)
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


def whole(source: Path, output: Path, jobs: int, cache: Path) -> tuple[float, int]:
    """Run preshard, and return its seconds and the high-water mark of its largest process."""
    command = [sys.executable, "-m", "shardkit", "preshard", str(source), str(output), "--world-size", "4"]
    command += ["--osft", "0.3", "--jobs", str(jobs), "--no-progress"]
    begun = time.monotonic()
    child = os.posix_spawn(
        command[0],
        command,
        {**os.environ, "SHARDKIT_CACHE": str(cache)},
        file_actions=[(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_WRONLY, 0) for stream in (1, 2)],
    )
    _, status, used = os.wait4(child, 0)
    elapsed_s = time.monotonic() - begun
    assert not status, command
    return elapsed_s, used.ru_maxrss * 1024


def bare(weights: Path, output: Path, jobs: int) -> float:
    """Deal the same targets to bare processes, costliest first; return the seconds from their start to their end."""
    modules = json.loads((output / "shardkit.json").read_text())["osft"]["modules"]
    costs = {
        path: 4 * max(m["shape"]) * min(m["shape"]) ** 2 + 9 * min(m["shape"]) ** 3
        for path, m in modules.items()
    }
    left = sorted(modules, key=lambda path: -costs[path])
    begun = time.monotonic()
    children = [
        subprocess.Popen(
            [sys.executable, "-c", BARE, str(weights)],
            env={**os.environ, **ONE_THREAD},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(jobs)
    ]
    waiting = set(range(jobs))
    with selectors.DefaultSelector() as ready:
        for number, child in enumerate(children):
            ready.register(child.stdout, selectors.EVENT_READ, number)  # type: ignore[arg-type]
        while waiting:
            for key, _ in ready.select():
                child = children[key.data]
                assert child.stdin
                assert child.stdout
                child.stdout.readline()
                if left:
                    path = left.pop(0)
                    child.stdin.write(f"{path} {modules[path]['rank']}\n")
                    child.stdin.flush()
                else:
                    ready.unregister(key.fileobj)
                    child.stdin.close()
                    waiting.remove(key.data)
        for child in children:
            assert child.wait() == 0
    return time.monotonic() - begun


def add_workers(report: Report, runs: int, jobs: int, source: Path, output: Path, cache: Path) -> None:
    weights = source / "model.safetensors"

    def beside() -> tuple[float, ...]:
        bare_s = bare(weights, output, jobs)
        shutil.rmtree(output)
        elapsed_s, peak = whole(source, output, jobs, cache)
        return bare_s, elapsed_s, bare_s / elapsed_s, peak

    bare_s, elapsed_s, ratio, peak = medians(runs, beside)
    modules = json.loads((output / "shardkit.json").read_text())["osft"]["modules"]
    formula = max(
        svd_nbytes(Target(path="", rows=each["shape"][0], columns=each["shape"][1], rank=each["rank"]))
        for each in modules.values()
    )
    base = int(run([sys.executable, "-c", TORCH]))
    report.add(
        "workers",
        f"preshard --osft --jobs {jobs}",
        runs=runs,
        elapsed_s=elapsed_s,
        bare_s=bare_s,
        bare_to_whole=ratio,
        peak_bytes=peak,
        torch_bytes=base,
        reckoned_bytes=formula,
    )


def load(source: Path, output: Path, store: Path) -> tuple[float, ...]:
    """Return the seconds of a plain read, those of `finalize`, and how many times the one the other is."""
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
    for name, default in (("layers", 3), ("hidden", 1024), ("inner", 2816), ("jobs", 2), ("runs", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", choices=("serial", "workers", "loading"))
    json_option(parser)
    args = parser.parse_args()
    work = work_in(args.directory)
    source, output, cache = work / "model", work / "output", work / "cache"
    run([sys.executable, "-c", MODEL, str(source), *map(str, (args.hidden, args.inner, args.layers))])
    weights = source / "model.safetensors"
    whole(source, output, args.jobs, cache)  # its trace is kept
    with Report(args) as report:
        if args.only in (None, "serial"):
            add_serial(report, [serial(weights) for _ in range(args.runs)])
        if args.only in (None, "workers"):
            add_workers(report, args.runs, args.jobs, source, output, cache)
        if args.only in (None, "loading"):
            plain_s, loaded_s, ratio = medians(args.runs, lambda: load(source, output, work / "store"))
            size = sum(path.stat().st_size for path in output.glob("*.distcp"))
            found = {"runs": args.runs, "elapsed_s": loaded_s, "read_s": plain_s, "ratio": ratio}
            report.add("loading", "finalize", **found, moved_bytes=size)
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
