"""Loading a sharded model in 4 gloo ranks: shardkit's finalize beside a plain read and the peers.

    python benchmarks/load.py DIRECTORY [--gigabytes 3] [--runs 3] [--ranks 4] [--peers] [--only NAME]

DIRECTORY gets a generated Qwen3 model, what preshard makes of it for this and another world, and for the peers a
checkpoint of stock torch in one file: four times `--gigabytes`. A peer's ranks take up to five times as much memory. Ranks are forked from one process that has imported
everything. Variants run in turn, again and again, each run beside a plain read: each rank reads its own pre-sharded file
into fresh memory. Memory of that size is touched and given back before each. Medians are printed, and the smallest and largest ratio.

`seconds` are those of the slowest rank, from a barrier until its weights are there: of `finalize`, or of what a peer
does after the model is wrapped. `extra` is the peak of anonymous memory beyond what was there before and beyond the shard, of
the worst rank (`source`: of rank 0). `read` are the bytes that the ranks together read, to those of the model; `sent` are the
bytes through the loopback device, to the same. In the last two columns mapped files do not count. Where there is a GPU, a last
row says how fast a load onto it is beside reading and copying alone (benchmarks/overlap.py).
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import HERE, Report, common_options, run, spread, wait_for, work_in
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardkit


class Sources(NamedTuple):
    """What lies in the directory."""

    hub: Path
    matching: Path
    other: Path
    one_file: Path


Load = Callable[[nn.Module, Any], object]
"""Gives a wrapped model on meta its weights; the second is what was prepared."""


class Variant(NamedTuple):
    """A way to load."""

    source: str
    """Field of `Sources`."""
    load: Load | None
    """None for those that build and load in one call."""
    options: dict[str, Any]
    """Of `prepare`."""
    peer: bool = False


class Memory:
    """Samples this process's anonymous memory."""

    def __enter__(self) -> Memory:
        self.before = self.peak = anonymous_bytes()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        self.peak = max(self.peak, anonymous_bytes())

    def _watch(self) -> None:
        while not self._ends.wait(0.004):
            self.peak = max(self.peak, anonymous_bytes())


def anonymous_bytes() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))


def read_bytes() -> int:
    with open("/proc/self/io") as file:
        return int(file.read().split()[1])


def loopback_bytes() -> int:
    with open("/proc/net/dev") as file:
        return next(int(line.split()[9]) for line in file if line.strip().startswith("lo:"))


def finalize(strategy: str, source_rank: str = "global") -> Load:
    def load(model: nn.Module, context: Any) -> None:
        shardkit.finalize(model, context, strategy=strategy, source_rank=source_rank)

    return load


def stock_load(model: nn.Module, context: Any) -> None:
    model.to_empty(device="cpu")
    dcp.load(model.state_dict(), checkpoint_id=context.source)


def full_state(context: Any, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    if dist.get_rank() > 0:
        return {}
    state = {}
    for file in sorted(Path(context.source).glob("*.safetensors")):
        state.update(load_file(file))
    return {name: value if dtype is None else value.to(dtype) for name, value in state.items()}


def broadcast_from_rank0(model: nn.Module, context: Any) -> None:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    model.to_empty(device="cpu")
    dtype = next(model.parameters()).dtype
    set_model_state_dict(
        model, full_state(context, None if dtype == torch.bfloat16 else dtype), options=options
    )


def accelerate_load(model: nn.Module, context: Any) -> None:
    from types import SimpleNamespace

    from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict

    plugin = SimpleNamespace(cpu_offload=None)
    accelerator = SimpleNamespace(
        is_main_process=dist.get_rank() == 0,
        device=torch.device("cpu"),
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=None,
    )
    fsdp2_load_full_state_dict(accelerator, model, full_state(context, None))


VARIANTS = {
    "direct, pre-sharded": Variant("matching", finalize("direct"), {}),
    "direct, Hub directory": Variant("hub", finalize("direct"), {}),
    "direct, pre-sharded for 6": Variant("other", finalize("direct"), {}),
    "direct, pre-sharded, to fp32": Variant("matching", finalize("direct"), {"dtype": "fp32"}),
    "broadcast": Variant("hub", finalize("broadcast"), {}),
    "broadcast, to fp32": Variant("hub", finalize("broadcast"), {"dtype": "fp32"}),
    "dcp.load, matching shards": Variant("matching", stock_load, {}, peer=True),
    "dcp.load, one file": Variant("one_file", stock_load, {}, peer=True),
    "broadcast_from_rank0": Variant("hub", broadcast_from_rank0, {}, peer=True),
    "broadcast_from_rank0, fp32": Variant("hub", broadcast_from_rank0, {"dtype": "fp32"}, peer=True),
    "accelerate": Variant("hub", accelerate_load, {}, peer=True),
    "transformers": Variant("hub", None, {}, peer=True),
}


def plain_read(sources: Sources) -> None:
    """What a rank cannot do without: its own file, once, into memory that is new."""
    path = sources.matching / f"__{dist.get_rank()}_0.distcp"
    memory = torch.empty(path.stat().st_size, dtype=torch.uint8)
    view = memoryview(memory.numpy())
    with path.open("rb", buffering=0) as file:
        done = 0
        while done < len(view):
            done += file.readinto(view[done : done + (8 << 20)])


def wrap(model: nn.Module, mesh: DeviceMesh) -> None:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def measure(variant: Variant | None, sources: Sources, mesh: DeviceMesh) -> dict[str, float]:
    """Load once in this rank and say what it took."""
    shard = 0
    model: nn.Module
    load: Callable[[], object]
    if variant is None:
        load = lambda: plain_read(sources)  # noqa: E731
    elif variant.load is None:
        load = lambda: from_pretrained(sources.hub)  # noqa: E731
    else:
        context = (
            shardkit.prepare(str(sources.hub), str(getattr(sources, variant.source)), **variant.options)
            if (variant.source != "one_file")
            else prepared_for_stock(sources)
        )
        model = context.model
        wrap(model, mesh)
        fill = variant.load
        load = lambda: fill(model, context)  # noqa: E731
        shard = sum(p.to_local().nbytes for p in model.parameters())
    dist.barrier()
    sent, read, begun = loopback_bytes(), read_bytes(), time.monotonic()
    with Memory() as memory:
        kept = load()
        elapsed = time.monotonic() - begun
    read = read_bytes() - read
    dist.barrier()
    if variant is not None and variant.load is None:
        shard = sum(p.to_local().nbytes for p in kept.parameters())
    del kept
    return {
        "seconds": elapsed,
        "extra": memory.peak - memory.before - shard,
        "read": read,
        "sent": loopback_bytes() - sent,
    }


def prepared_for_stock(sources: Sources) -> Any:
    """A model for a checkpoint whose place stock torch alone has to know."""
    context = shardkit.prepare(str(sources.hub), str(sources.hub))
    context.source = str(sources.one_file)
    return context


def from_pretrained(hub: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(fsdp_size=dist.get_world_size())
    return AutoModelForCausalLM.from_pretrained(hub, distributed_config=config, dtype="auto")


def touch(sources: Sources) -> None:
    """Have a virtual machine's host give the memory of all shards in fp32 before it counts: its first touch may take seconds."""
    nbytes = 2 * sum(path.stat().st_size for path in sources.hub.glob("*.safetensors"))
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        held.madvise(mmap.MADV_HUGEPAGE)
        for start in range(0, nbytes, mmap.PAGESIZE):
            held[start] = 1


def in_ranks(variant: Variant | None, sources: Sources, num_ranks: int) -> list[dict[str, float]]:
    """Fork a world, load, and gather what each rank measured."""
    touch(sources)
    with tempfile.TemporaryDirectory() as scratch:
        children = []
        for rank in range(num_ranks):
            child = os.fork()
            if child == 0:
                with contextlib.suppress(BaseException):
                    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
                    os.environ.update(
                        LOCAL_WORLD_SIZE=str(num_ranks), MASTER_ADDR="localhost", MASTER_PORT="29511"
                    )
                    os._exit(one_rank(variant, sources, Path(scratch), rank, num_ranks))
                os._exit(1)
            children.append(child)
        wait_for(children)
        return [json.loads((Path(scratch) / f"{rank}.json").read_text()) for rank in range(num_ranks)]


def one_rank(variant: Variant | None, sources: Sources, scratch: Path, rank: int, num_ranks: int) -> int:
    try:
        torch.set_num_threads(1)
        store = dist.FileStore(str(scratch / "store"), num_ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
        mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("dp_shard",))
        found = measure(variant, sources, mesh)
        (scratch / f"{rank}.json").write_text(json.dumps(found))
    except BaseException:
        import traceback

        traceback.print_exc()
        return 1
    return 0


def make_sources(work: Path, gigabytes: float, num_ranks: int, *, peers: bool) -> Sources:
    sources = Sources(work / "model", work / "matching", work / "other", work / "one-file")
    print(
        run([sys.executable, str(HERE / "model.py"), str(sources.hub), "--gigabytes", str(gigabytes)]).strip()
    )
    for path, world_size in ((sources.matching, num_ranks), (sources.other, 6)):
        shardkit.preshard(str(sources.hub), str(path), world_size=world_size)
    if peers:
        state = {}
        for file in sorted(sources.hub.glob("*.safetensors")):
            state.update(load_file(file))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(state, checkpoint_id=sources.one_file, no_dist=True)
    return sources


def measure_all(
    report: Report, names: list[str], sources: Sources, num_ranks: int, runs: int, peer_runs: int
) -> None:
    """Add a row for each variant, and one for the plain reads beside them."""
    model_bytes = sum(path.stat().st_size for path in sources.hub.glob("*.safetensors"))
    found: dict[str, list[list[dict[str, float]]]] = {name: [] for name in names}
    ratios: dict[str, list[float]] = {name: [] for name in names}
    reads = []
    for turn in range(runs):
        for name in names:
            if VARIANTS[name].peer and turn >= peer_runs:
                continue
            plain = slowest(in_ranks(None, sources, num_ranks))
            reads.append(plain)
            ranks = in_ranks(VARIANTS[name], sources, num_ranks)
            found[name].append(ranks)
            ratios[name].append(slowest(ranks) / plain)
    report.add(
        "loading", "plain read of the own file", runs=len(reads), **spread(reads, "elapsed", "_s"), ratio=1
    )
    for name in names:
        of = found[name]
        report.add(
            "loading",
            name,
            runs=len(of),
            **spread([slowest(ranks) for ranks in of], "elapsed", "_s"),
            **spread(ratios[name], "ratio"),
            extra_bytes=statistics.median(max(rank["extra"] for rank in ranks[1:] or ranks) for ranks in of),
            source_extra_bytes=statistics.median(ranks[0]["extra"] for ranks in of),
            read=statistics.median(sum(rank["read"] for rank in ranks) for ranks in of) / model_bytes,
            sent=statistics.median(ranks[0]["sent"] for ranks in of) / model_bytes,
        )


def slowest(ranks: list[dict[str, float]]) -> float:
    return max(rank["seconds"] for rank in ranks)


def main() -> None:
    parser = common_options(__doc__, gigabytes=3.0, runs=3)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--peers", action="store_true", help="also other loaders, where they are installed")
    parser.add_argument("--peer-runs", type=int, help="runs of these; default: as many")
    parser.add_argument("--only", action="append", choices=VARIANTS, help="default: all")
    args = parser.parse_args()
    work = work_in(args.directory)
    names = [name for name in args.only or VARIANTS if args.peers or not VARIANTS[name].peer]
    with Report(args) as report:
        if find_spec("accelerate") is None and "accelerate" in names:
            names.remove("accelerate")
            report.leave_out("accelerate", "not installed")
        sources = make_sources(work, args.gigabytes, args.ranks, peers=args.peers)
        import transformers  # once, before the ranks are forked  # noqa: F401

        measure_all(report, names, sources, args.ranks, args.runs, args.peer_runs or args.runs)
        if torch.cuda.is_available():
            shutil.rmtree(sources.matching)
            shardkit.preshard(str(sources.hub), str(sources.matching), world_size=1)
            words = [str(HERE / "overlap.py"), str(sources.hub), str(sources.matching)]
            report.add("onto the device", "finalize", **json.loads(run([sys.executable, *words])))
        else:
            report.leave_out("onto a device", "there is no GPU")
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
