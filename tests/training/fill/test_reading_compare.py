"""Several ranks each read a part of an entry; together they tell whether it is what was recorded."""

from __future__ import annotations

import itertools
import shutil
import warnings
from collections.abc import Callable, Iterable
from math import prod
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardkit
from shardkit.errors import IntegrityError
from shardkit.transfer.checks import CheckedSource
from tests.bits import flip
from tests.worlds.ranks import Ranks, same_error

pytestmark = pytest.mark.prove

NBYTES = 4 * (64 * 900 + 900 + 900 * 301 + 301)
STRATEGIES = ("direct", "broadcast")
SOURCES = {
    "one": ("one", "__0_0.distcp"),
    "listed": ("listed", "__1_0.distcp"),
    "three": ("three", "__1_0.distcp"),
    "flat": ("flat.pt", "flat.pt"),
    "hub": ("hub", "model.safetensors"),
}
"""Where each source lies under `good` and `bad`, and the file that is damaged in the latter."""


def build() -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 900), nn.Linear(900, 301))
    for number, parameter in enumerate(model.parameters()):
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))
    return model


def make_sources(out: Path) -> None:
    """One file, three shards by stock torch's chunks, three by shardkit's manifest, a Hub model with a manifest, and one
    storage for all; each twice."""
    warnings.simplefilter("ignore")  # of stock torch, which saves without a process group
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


two = Ranks(__name__, 2, first=make_sources)
four = Ranks(__name__, 4)


def build_on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(64, 900), nn.Linear(900, 301))


def shard(model: nn.Module, *, mesh: DeviceMesh) -> None:
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


class Case(NamedTuple):
    strategy: Any
    source: str

    def path(self, out: Path, kind: str) -> Path:
        return out / kind / SOURCES[self.source][0]


def cases(sources: Iterable[str]) -> dict[str, Case]:
    return {" ".join(each): Case(*each) for each in itertools.product(STRATEGIES, sources)}


def start(
    source: Path, strategy: Any, wrap: Callable[[nn.Module], None], *, check_source: bool = True
) -> CheckedSource:
    """Start a model, and return what was compared."""
    ctx = shardkit.prepare(build_on_meta, str(source))
    wrap(ctx.model)
    shardkit.finalize(ctx.model, ctx, strategy=strategy, check_source=check_source)
    assert ctx.checked is not None
    return ctx.checked


def on_two(model: nn.Module) -> None:
    shard(model, mesh=init_device_mesh("cpu", (2,)))


@two.test_each(cases(SOURCES))
def test_all_of_a_source_is_compared(case: Case, out: Path) -> None:
    checked = start(case.path(out, "good"), case.strategy, on_two)
    assert checked.checked_bytes == NBYTES
    assert checked.unchecked == ()


@two.test_each(cases(SOURCES))
def test_damage_is_refused_on_all_ranks_and_names_rank_and_file(case: Case, out: Path) -> None:
    error = same_error(lambda: start(case.path(out, "bad"), case.strategy, on_two))
    assert error["error"] == "IntegrityError"
    assert "check_source=False" in error["hint"]
    (problem,) = error["problems"]
    assert problem.startswith("ranks 0-1: " if case.strategy == "direct" else "rank 0: ")
    names = "and 1 more" if case.source == "flat" else "1.weight"
    assert f"{names}: {SOURCES[case.source][1]}: bytes " in problem


@two.test_each(cases(SOURCES))
def test_damage_passes_where_it_may(case: Case, out: Path) -> None:
    checked = start(case.path(out, "bad"), case.strategy, on_two, check_source=False)
    assert checked.checked_bytes == 0
    assert checked.unchecked == ()


@two.test_each(("one", "hub"))
def test_load_into_refuses_damage_too(source: str, out: Path) -> None:
    place, file = SOURCES[source]

    def load(kind: str, *, check_source: bool) -> None:
        model = build_on_meta()
        on_two(model)
        shardkit.load_into(model, out / kind / place, check_source=check_source)

    load("good", check_source=True)
    load("bad", check_source=False)
    error = same_error(lambda: load("bad", check_source=True))
    assert error["error"] == "IntegrityError"
    (problem,) = error["problems"]
    assert problem.startswith("ranks 0-1: 1.weight: ")
    assert f"{file}: bytes " in problem


class Columns(NamedTuple):
    sizes: tuple[int, ...]
    damage: float | None
    """Where in one rank's part its own copy is damaged: rank 1's past the middle, rank 0's before; None nowhere."""

    @property
    def name(self) -> str:
        return f"{'x'.join(map(str, self.sizes))} {self.damage}"


COLUMNS = [
    Columns(sizes, damage)
    for sizes in ((600, 800), (300, 2050), (7, 90, 80), (9, 2200, 2))
    for damage in (None, 0.1, 0.4, 0.6, 0.99)
]


@two.test_each({case.name: case for case in COLUMNS})
def test_columns_of_a_ranks_own_copy_are_compared(case: Columns, out: Path) -> None:
    """Ranks that hold columns read overlapping spans, or a run for each row: what one read proves nothing of another's.

    Each rank reads its own copy, as on disks of nodes. No bytes are compared beforehand: where they show that copies
    differ, rank 0's is sent.
    """
    mesh, rank, (sizes, damage) = init_device_mesh("cpu", (2,)), dist.get_rank(), case
    weight = torch.arange(prod(sizes), dtype=torch.float32).view(sizes)
    path = out / f"copies {case.name}" / str(rank)
    if rank == 0:  # two saves would be two checkpoints
        dcp.save({"weight": weight}, checkpoint_id=path, no_dist=True)
        shutil.copytree(path, path.with_name("1"))
    dist.barrier()
    dim = len(sizes) - 1 if sizes[-1] > 2 else 1
    mine = weight.tensor_split(2, dim)[rank]
    if damage is not None and rank == (damage > 0.5):
        value = mine.flatten()[int(damage * mine.numel())].item()
        flip(path / "__0_0.distcp", weight.flatten()[int(value) :], 0)
    model = nn.Module()
    empty = distribute_tensor(torch.zeros(sizes), mesh, [Shard(dim)])
    model.register_parameter("weight", nn.Parameter(empty))
    with mock.patch("shardkit.training.fill.strategy.take_samples", return_value=""):
        if damage is None:
            shardkit.load_into(model, path)
            assert torch.equal(model.weight.to_local(), mine)
        else:
            error = same_error(lambda: shardkit.load_into(model, path))
            assert error["error"] == IntegrityError.__name__


def with_replicas(model: nn.Module) -> None:
    shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")))


def cut_along_both_dims(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    parallelize_module(model, mesh["b"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    shard(model, mesh=mesh["a"])


def cut_in_four(model: nn.Module) -> None:
    """Columns of the second weight, of which the ranks in the middle have neighbours on both sides."""
    mesh = init_device_mesh("cpu", (4,))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})


@four.test_each(
    {
        f"{way} {name}": (wrap, case)
        for way, wrap in (
            ("hsdp", with_replicas),
            ("fsdp x tp", cut_along_both_dims),
            ("tp", cut_in_four),
        )
        for name, case in cases(("one", "three", "listed", "hub")).items()
    }
)
def test_replicas_and_parts_along_both_dims_count_once(
    way_and_case: tuple[Callable[[nn.Module], None], Case], out: Path
) -> None:
    wrap, case = way_and_case
    checked = start(case.path(out, "good"), case.strategy, wrap)
    assert checked.checked_bytes == NBYTES
    assert checked.unchecked == ()
    error = same_error(lambda: start(case.path(out, "bad"), case.strategy, wrap))
    assert error["error"] == "IntegrityError"
    (problem,) = error["problems"]
    assert f"1.weight: {SOURCES[case.source][1]}: bytes " in problem
