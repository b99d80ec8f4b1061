"""Two real gloo ranks, then four, fill a model from sources with and without damage and write what they were told.

python compare_world.py OUT
"""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardkit
from shardkit.errors import ShardkitError
from tests.worlds.processes import fork, wait

torch.set_num_threads(1)
warnings.simplefilter("ignore")


def build() -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 900), nn.Linear(900, 301))
    for number, parameter in enumerate(model.parameters()):
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))
    return model


def flip(path: Path, held: torch.Tensor, at: int) -> None:
    """Change one bit, `at` bytes into what a file holds of a tensor."""
    content = bytearray(path.read_bytes())
    content[content.index(held.contiguous().view(torch.uint8).numpy().tobytes()) + at] ^= 8
    path.write_bytes(content)


def make_sources(out: Path) -> None:
    """One file, three shards by stock torch's chunks, three by shardkit's manifest, a Hub model with a manifest, and one
    storage for all; each twice."""
    state = dict(build().state_dict())
    for name in ("good", "bad"):
        dcp.save(state, checkpoint_id=out / name / "one", no_dist=True)
        shardkit.reshard(out / name / "one", out / name / "listed", world_size=3)
        shardkit.reshard(out / name / "one", out / name / "three", world_size=3)
        (out / name / "three" / "shardkit.json").unlink()
        flat = torch.cat([value.flatten() for value in state.values()])
        views, at = {}, 0
        for key, value in state.items():
            views[key] = flat[at : at + value.numel()].view(value.shape)
            at += value.numel()
        torch.save(views, out / name / "flat.pt")
        shardkit.consolidate(out / name / "one", out / name / "hub", manifest=True)
    weight = state["1.weight"]
    flip(out / "bad" / "one" / "__0_0.distcp", weight, 700_000)
    for folder in ("listed", "three"):
        flip(out / "bad" / folder / "__1_0.distcp", weight[101:202], 300_000)  # of both ranks' rows
    flip(out / "bad" / "flat.pt", weight, 5)
    flip(out / "bad" / "hub" / "model.safetensors", weight, 700_000)


SOURCES = {
    "one": "one",
    "listed": "listed",
    "three": "three",
    "flat": "flat.pt",
    "hub": "hub",
}


def answers(out: Path) -> dict[str, Any]:
    """Fill from every source, in both ways; and what is wrapped already."""
    told: dict[str, Any] = {}
    mesh = init_device_mesh("cpu", (2,))
    for strategy in ("direct", "broadcast"):
        for name, file in SOURCES.items():
            for kind, check in (("good", True), ("bad", True), ("bad", False)):
                key, source = f"{strategy} {name} {kind} {check}", out / kind / file
                told[key] = answer(source, check, strategy, partial(shard, mesh=mesh))
    for name in ("one", "hub"):
        for kind, check in (("good", True), ("bad", True), ("bad", False)):
            model = build_on_meta()
            shard(model, mesh=mesh)
            try:
                shardkit.load_into(model, out / kind / SOURCES[name], check_source=check)
            except ShardkitError as error:
                told[f"load_into {name} {kind} {check}"] = refusal(error)
            else:
                told[f"load_into {name} {kind} {check}"] = None
    return told


def copies(out: Path) -> dict[str, Any]:
    """Each rank reads its own copy, as on disks of nodes; one of them is damaged in what rank 1 keeps, or rank 0."""
    told: dict[str, Any] = {}
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    for sizes in ((600, 800), (300, 2050), (7, 90, 80), (9, 2200, 2)):
        weight = torch.arange(prod(sizes), dtype=torch.float32).view(sizes)
        for at in (None, 0.1, 0.4, 0.6, 0.99):
            path = out / f"copies{len(told)}" / str(rank)
            if rank == 0:  # two saves would be two checkpoints
                dcp.save({"weight": weight}, checkpoint_id=path, no_dist=True)
                shutil.copytree(path, path.with_name("1"))
            dist.barrier()
            dim = len(sizes) - 1 if sizes[-1] > 2 else 1
            mine = weight.tensor_split(2, dim)[rank]
            if at is not None and rank == (at > 0.5):
                value = mine.flatten()[int(at * mine.numel())].item()
                flip(path / "__0_0.distcp", weight.flatten()[int(value) :], 0)
            model = nn.Module()
            empty = distribute_tensor(torch.zeros(sizes), mesh, [Shard(dim)])
            model.register_parameter("weight", nn.Parameter(empty))
            key = f"{sizes} {at}"
            try:
                shardkit.load_into(model, path)
            except ShardkitError as error:
                told[key] = type(error).__name__
            else:
                told[key] = torch.equal(model.weight.to_local(), mine)  # type: ignore[operator,union-attr]
    return told


def answers_of_four(out: Path) -> dict[str, Any]:
    """Fill what two ranks hold the same of, and what is cut along both dims."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))

    def cut(model: nn.Module) -> None:
        parallelize_module(model, mesh["b"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        shard(model, mesh=mesh["a"])

    ways = {"hsdp": partial(shard, mesh=mesh), "fsdp x tp": cut}
    return {
        f"{way} {strategy} {name} {kind}": answer(out / kind / SOURCES[name], True, strategy, wrap)
        for way, wrap in ways.items()
        for strategy in ("direct", "broadcast")
        for name in ("one", "three", "listed", "hub")
        for kind in ("good", "bad")
    }


def shard(model: nn.Module, *, mesh: DeviceMesh) -> None:
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def answer(source: Path, check: bool, strategy: str, wrap: Callable[[nn.Module], None]) -> dict[str, Any]:
    """Return what a rank is told of a source."""
    ctx = shardkit.prepare(build_on_meta, str(source))
    wrap(ctx.model)
    try:
        shardkit.finalize(ctx.model, ctx, strategy=strategy, check_source=check)
    except ShardkitError as error:
        return refusal(error)
    assert ctx.checked is not None
    unchecked = [[part.reason, part.num_entries, part.entry_bytes] for part in ctx.checked.unchecked]
    return {"checked_bytes": ctx.checked.checked_bytes, "unchecked": unchecked}


def refusal(error: ShardkitError) -> dict[str, Any]:
    return {"error": type(error).__name__, "problems": list(error.problems), "hint": error.hint}


def build_on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(64, 900), nn.Linear(900, 301))


def work(rank: int, out: Path, size: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{out}/store{size}", rank=rank, world_size=size)
    told = {**answers(out), "copies": copies(out)} if size == 2 else answers_of_four(out)
    (out / f"told{rank}of{size}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    out = Path(sys.argv[1])
    make_sources(out)
    for size in (2, 4):
        wait([fork(partial(work, rank, out, size)) for rank in range(size)])
