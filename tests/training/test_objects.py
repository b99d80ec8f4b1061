"""Sharded tensors where torch's DCP does not look for them: in objects, of which one rank's is saved."""

from __future__ import annotations

import warnings
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardkit
from shardkit.cli.reshard import render
from tests.worlds.ranks import Ranks

pytestmark = pytest.mark.dist

two = Ranks(__name__, 2)


@dataclass
class Average:
    weights: Any


class Pair(NamedTuple):
    first: Any


class Projector:
    """As GaLore keeps one in an optimizer's state; every rank has all of its matrix."""

    def __init__(self, matrix: DTensor) -> None:
        self.rank, self.ortho_matrix = 4, matrix


def cut() -> DTensor:
    return distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (2,)), [Shard(0)])


def copied() -> DTensor:
    return distribute_tensor(torch.eye(4), init_device_mesh("cpu", (2,)), [Replicate()])


def small() -> nn.Module:
    model = nn.Module()
    model.weight = nn.Parameter(cut())
    return model


LOST: dict[str, Callable[[], Any]] = {
    "tuple": lambda: (cut(),),
    "named tuple": lambda: Pair(cut()),
    "dict in a tuple": lambda: ({"a": cut()},),
    "list in a dict in a set": lambda: {"a": {(cut(),)}},
    "dataclass": lambda: Average([cut()]),
    "deque": lambda: deque([cut()]),
    "frozen set": lambda: frozenset([cut()]),
    "partial": lambda: partial(Average, weights=cut()),
    "module in a tuple": lambda: (small(),),
}
WHOLE: dict[str, Callable[[], Any]] = {
    "list": lambda: [cut()],
    "dict": lambda: {"a": {"b": cut()}},
    "ordered dict": lambda: OrderedDict(a=cut()),
    "plain tensor in a tuple": lambda: (torch.ones(3), "text", 1),
}


def saved(out: Path, name: str, value: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shardkit.save(small(), out / name, extra={"x": value})
    return [str(each.message) for each in caught if issubclass(each.category, UserWarning)]


@two.test_each(LOST.keys())
def test_save_warns_of_sharded_tensors_in_objects(name: str, out: Path) -> None:
    told = saved(out, name, LOST[name]())
    if dist.get_rank() == 0:
        assert len(told) == 1
        assert "with that rank's rows alone" in told[0]
        assert "(extra.x" in told[0]
        assert "In a list or a dict" in told[0]


@two.test_each(WHOLE.keys())
def test_save_says_nothing_where_torch_saves_them_whole(name: str, out: Path) -> None:
    assert saved(out, name, WHOLE[name]()) == []


@two.test
def test_save_warns_of_an_object_of_an_optimizer(out: Path) -> None:
    told = saved(out, "projector", {"projector": Projector(copied())})
    assert dist.get_rank() or "(extra.x.projector)" in told[0]


@two.test
def test_stock_torch_saves_state_dicts_as_objects(out: Path) -> None:
    """As `verify` and the others get them, below."""
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save({"model": {"w": cut()}, "step": 3}, checkpoint_id=out / "flat off", planner=planner)
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save({"model": {"w": torch.ones(8)}}, checkpoint_id=out / "flat off, plain", planner=planner)
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save({"w": cut(), "optim": {"w": cut()}}, checkpoint_id=out / "flat off, in part", planner=planner)
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save({"model": {"w": cut()}}, checkpoint_id=out / "flat off, alone", planner=planner)
    alone = DTensor.from_local(torch.ones(8), DeviceMesh("cpu", [dist.get_rank()]), [Shard(0)])
    dcp.save({"w": cut(), "x": (alone,)}, checkpoint_id=out / "mesh of one")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two.folder(tmp_path_factory)


@pytest.mark.parametrize("name", [*LOST, "flat off, in part"])
def test_the_verbs_name_them(out: Path, name: str, tmp_path: Path) -> None:
    path, entry = out / name, "optim" if name == "flat off, in part" else "extra.x"
    lost = "of which torch saves the rows of one rank; those of the others are in no file: " + entry
    checked = shardkit.verify(path, full=True)
    assert any(lost in line for line in checked.doubts)
    assert "no problem found" not in checked.headline()
    assert any(lost in line for line in shardkit.inspect(path).warnings)
    assert any(lost in line for line in shardkit.diff(path, path).notes)
    written = shardkit.reshard(path, tmp_path / "four", world_size=4)
    assert [each.partition(".a")[0] for each in written.distributed_objects] == [entry]
    assert any(line.startswith("training cannot resume from it: ") for line in written.warnings)
    assert "resume on" not in "\n".join(render(written))
    assert any(lost in line for line in shardkit.inspect(tmp_path / "four").warnings)


@pytest.mark.parametrize("name", WHOLE)
def test_the_verbs_are_silent_where_nothing_is_lost(out: Path, name: str, tmp_path: Path) -> None:
    assert shardkit.verify(out / name).headline().endswith("no problem found")
    written = shardkit.reshard(out / name, tmp_path / "four", world_size=4)
    assert (written.distributed_objects, written.warnings) == ((), ())


def test_what_every_rank_has_whole_is_bound_to_its_mesh(out: Path, tmp_path: Path) -> None:
    checked = shardkit.verify(out / "projector")
    assert checked.doubts == ()
    assert any("fit the mesh of this save alone: extra.x.projector" in note for note in checked.notes)
    written = shardkit.reshard(out / "projector", tmp_path / "four", world_size=4)
    assert written.distributed_objects == ("extra.x.projector",)
    assert "resume on" not in "\n".join(render(written))


def test_what_a_mesh_of_one_rank_has_is_whole_on_any_number_of_ranks(out: Path, tmp_path: Path) -> None:
    shardkit.reshard(out / "mesh of one", tmp_path / "four", world_size=4)
    for path in (out / "mesh of one", tmp_path / "four"):
        checked = shardkit.verify(path)
        assert checked.doubts == ()
        assert any("fit the mesh of this save alone: x" in note for note in checked.notes)


@pytest.mark.parametrize("name", ["flat off", "flat off, alone"])  # the latter has one rank's file
def test_a_state_dict_that_was_saved_as_an_object_is_lost_in_part(out: Path, name: str) -> None:
    with pytest.raises(
        shardkit.SourceError, match=r"saved as one object, of which DCP keeps the rows of one"
    ) as error:
        shardkit.inspect(out / name)
    assert str(error.value.problems[0]).startswith("model: ")
    assert "FSDP1" not in str(error.value.hint)
    assert "flatten_state_dict=False" in str(error.value.hint)
    (problem,) = shardkit.verify(out / name, full=True).problems
    assert "has no tensors" in problem.message
    assert problem.details[0].startswith("model: ")


def test_one_of_plain_tensors_can_be_saved_again(out: Path) -> None:
    with pytest.raises(shardkit.SourceError, match=r"has no tensors: .* saved as one object") as error:
        shardkit.inspect(out / "flat off, plain")
    assert "DefaultLoadPlanner(flatten_state_dict=False)" in str(error.value.hint)
    assert not any("whole" in note for note in shardkit.verify(out / "flat off, plain").notes)
