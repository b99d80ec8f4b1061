"""Real gloo worlds that train, save, and go on from what reshard wrote with stock `dcp.load`.

    python train_world.py BASE

Two ranks train and save base/two, then train on and say what came out. The checkpoint is resharded for other
worlds, each of which loads it, compares every bit with what it loads from base/two itself, and trains the same steps
on the same global batches. Every world writes base/<name>.json and base/<name>.pt.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardkit
from tests.worlds.processes import end_world, fork, wait

torch.set_num_threads(1)

STEPS = 5
BATCH = 12
WORLDS: dict[str, tuple[int, ...]] = {"one": (1,), "three": (3,), "four": (4,), "hsdp": (2, 2), "back": (2,)}
"""Mesh of each world that goes on; "back" is the way there and back again."""


class Model(nn.Module):
    """Odd sizes, a dim 0 smaller than some worlds, a buffer; float64, so that only orders of sums differ."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 10)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(10, 23), nn.GELU(), nn.Linear(23, 10)) for _ in range(3)
        )
        self.norm = nn.LayerNorm(10)
        self.score = nn.Linear(10, 2, bias=False)
        self.register_buffer("scale", torch.full((3,), 0.5))
        self.double()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.score(self.norm(hidden)).mean(1) * self.scale.mean()


def start(shape: tuple[int, ...]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard")[-len(shape) :])
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> list[float]:
    """Take STEPS steps on the batches `first ..`; return the global losses."""
    losses, share = [], BATCH // dist.get_world_size()
    for step in range(first, first + STEPS):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 37, (BATCH, 6), generator=generator)
        labels = torch.randint(0, 2, (BATCH,), generator=generator)
        mine = slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)
        loss = nn.functional.cross_entropy(model(tokens[mine]), labels[mine])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, optim = get_state_dict(model, optimizer)
    return {"model": weights, "optim": optim, "step": STEPS, "note": {"by": "us"}}


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():  # stale values must not pass for loaded ones
        for parameter in model.parameters():
            parameter.fill_(77)
    found = state(model, optimizer)
    found["step"], found["note"] = 0, {}
    dcp.load(found, checkpoint_id=path)
    assert found["step"] == STEPS, found["step"]
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"])


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Every leaf by its path; tensors gathered whole."""
    if isinstance(tree, dict):
        return {k: v for key, value in tree.items() for k, v in flat(value, f"{prefix}{key}.").items()}
    if isinstance(tree, DTensor):
        return {prefix: tree.full_tensor()}
    return {prefix: tree}


def finish(base: Path, name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    losses = train(model, optimizer, STEPS)
    weights = flat(state(model, optimizer)["model"])
    if dist.get_rank() == 0:
        torch.save(weights, base / f"{name}.pt")
        (base / f"{name}.json").write_text(json.dumps(losses))


def first_run(base: Path) -> None:
    model, optimizer = start((2,))
    train(model, optimizer, 0)
    dcp.save(state(model, optimizer), checkpoint_id=base / "two")
    finish(base, "two", model, optimizer)


def next_run(base: Path, name: str) -> None:
    model, optimizer = start(WORLDS[name])
    load(base / "two", model, optimizer)
    expected = flat(state(model, optimizer))
    load(base / name, model, optimizer)
    found = flat(state(model, optimizer))
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        same = torch.equal(value, found[key]) if isinstance(value, torch.Tensor) else value == found[key]
        assert same, f"{name}: {key} differs"
    finish(base, name, model, optimizer)


def world(base: Path, name: str, size: int, work: Any) -> None:
    def rank(number: int) -> None:
        os.environ.update(RANK=str(number), WORLD_SIZE=str(size), LOCAL_RANK=str(number))
        dist.init_process_group(
            "gloo", init_method=f"file://{base}/{name}.store", rank=number, world_size=size
        )
        work()
        end_world()

    wait([fork(partial(rank, number)) for number in range(size)])


def main() -> None:
    base = Path(sys.argv[1])
    world(base, "two", 2, partial(first_run, base))
    for name, shape in WORLDS.items():
        mesh = ",".join(
            f"{axis}={n}" for axis, n in zip(("dp_replicate", "dp_shard")[-len(shape) :], shape, strict=True)
        )
        source = base / ("three" if name == "back" else "two")
        shardkit.reshard(source, str(base / name), mesh=mesh)
    shardkit.reshard(base / "two", str(base / "straight"), world_size=2)
    for name, shape in WORLDS.items():
        world(base, name, prod(shape), partial(next_run, base, name))


if __name__ == "__main__":
    main()
