"""Real gloo worlds that load a model of many MiB: how much memory and how many bytes each rank takes for it.

    python finalize_world_memory.py OUT

Writes OUT/<world>-<rank>.json, by scenario, all in bytes.
It is a script: memory is measured in fresh processes.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardkit
from shardkit.training.finalize import load_into
from shardkit.training.ranks.local import local_shards
from tests.worlds.processes import fork, return_freed_memory, wait

torch.set_num_threads(1)
WIDTH, ROWS, LAYERS = 1024, 5000, 8  # 157 MiB in bf16, in tensors of 10 MiB


class Layer(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, ROWS, bias=False, dtype=dtype)
        self.down = nn.Linear(ROWS, WIDTH, bias=False, dtype=dtype)
        self.norm = nn.Parameter(torch.empty(WIDTH, dtype=dtype))


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(dtype) for _ in range(LAYERS)])


def make_source(out: Path) -> None:
    torch.manual_seed(0)
    row = torch.randn(2 * WIDTH * ROWS).bfloat16()
    state = {}
    for number, (name, value) in enumerate(Model(torch.bfloat16).state_dict().items()):
        state[name] = row[number : number + value.numel()].view(value.shape).clone()  # every tensor another
    (out / "model").mkdir()
    save_file(state, out / "model/model.safetensors")
    (out / "model/config.json").write_text("{}")
    shardkit.preshard(str(out / "model"), str(out / "pre"), world_size=2, wrap="none")


def make_small(out: Path) -> Path:
    (out / "small").mkdir()
    save_file(nn.Linear(2, 2).state_dict(), out / "small/model.safetensors")
    (out / "small/config.json").write_text("{}")
    return out / "small"


def shard(model: Model, mesh: Any) -> None:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def one_axis(model: Model) -> None:
    shard(model, init_device_mesh("cpu", (2,)))


def hybrid(model: Model) -> None:
    shard(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")))


def both(model: Model) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    shard(model, mesh["dp"])


def plain(model: Model) -> None:
    """Every rank holds all of it."""


class Watch:
    """Anonymous memory at its highest, and bytes read by system calls, of a block."""

    def __enter__(self) -> Watch:
        return_freed_memory()
        self._ended, self.peak, self._own = threading.Event(), 0, 0
        self._thread = threading.Thread(target=self._look)
        self._before, self._read = self._anonymous(), read_bytes()
        self._thread.start()
        self._begin = time.monotonic()
        return self

    def _look(self) -> None:
        while not self._ended.wait(0.001):
            self.peak = max(self.peak, self._anonymous())

    def _anonymous(self) -> int:
        with open("/proc/self/status") as file:
            text = file.read()
        self._own += len(text)
        return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("RssAnon")) * 1024

    def __exit__(self, *_: object) -> None:
        self.seconds = time.monotonic() - self._begin
        self._ended.set()
        self._thread.join()
        self.peak = max(self.peak, self._anonymous()) - self._before
        self.read = read_bytes() - self._read - self._own


def read_bytes() -> int:
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])


def measure(
    out: Path,
    source: str,
    wrap: Callable[[Model], None],
    strategy: str,
    dtype: torch.dtype = torch.bfloat16,
    source_rank: str = "global",
) -> dict[str, Any]:
    with torch.device("meta"):
        model = Model(dtype)
    wrap(model)
    given: Any = out / source
    if source == "memory":  # of the last rank; the others may not even have touched as much before
        last, state = dist.get_world_size() - 1, None
        if dist.get_rank() == last:
            state = {
                name: value.clone() for name, value in load_file(out / "model/model.safetensors").items()
            }
        given = shardkit.from_rank(state, rank=last)
    with Watch() as watch:
        load_into(model, given, strategy=strategy, source_rank=source_rank)
    shards = local_shards(model)
    with safe_open(out / "model/model.safetensors", "pt") as file:
        for each in shards:
            window = tuple(slice(o, o + s) for o, s in zip(*each.parts[0].region, strict=True))
            assert torch.equal(each.tensor, file.get_slice(each.fqn)[window].to(dtype)), each.fqn
    return {
        "extra": watch.peak - sum(each.tensor.nbytes for each in shards),
        "held": sum(each.tensor.nbytes for each in shards),
        "read": watch.read,
        "seconds": watch.seconds,
    }


MEASURES: dict[int, dict[str, tuple[Any, ...]]] = {
    2: {
        "direct": ("model", one_axis, "direct"),
        "direct-presharded": ("pre", one_axis, "direct"),
        "direct-cast": ("model", one_axis, "direct", torch.float32),
        "broadcast": ("model", one_axis, "broadcast"),
        "broadcast-cast": ("model", one_axis, "broadcast", torch.float32),
        "from-rank": ("memory", one_axis, "auto"),
        "from-rank-cast": ("memory", one_axis, "auto", torch.float32),
    },
    4: {
        "direct-replicas": ("model", hybrid, "direct"),
        "direct-plain": ("model", plain, "direct"),
        "direct-both": ("pre", both, "direct"),
        "broadcast-both": ("model", both, "broadcast"),
        "broadcast-replica": ("model", hybrid, "broadcast", torch.bfloat16, "replica"),
    },
}


def run(rank: int, size: int, name: str, out: Path) -> None:
    """One measurement in a process that has loaded nothing before: freed memory would be used again."""
    store = f"file://{out}/store-{name}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    found = measure(out, *MEASURES[size][name])
    (out / f"{name}-{rank}.json").write_text(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    out = Path(sys.argv[1])
    return_freed_memory()
    make_source(out)
    load_into(nn.Linear(2, 2), make_small(out))  # imports what is imported late, once for all
    for size, measures in MEASURES.items():
        for name in measures:
            wait([fork(partial(run, rank, size, name, out)) for rank in range(size)])
