"""Training goes on from a resharded checkpoint as it would have gone on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import shardkit
from tests.distributed.meshes import Shape, mesh_text
from tests.distributed.training import (
    STEPS,
    Model,
    assert_same_leaves,
    assert_same_run,
    flat,
    group_of_one,
    keep_run,
    start,
    train,
)
from tests.worlds.ranks import Ranks

pytestmark = pytest.mark.prove

two = Ranks(__name__, 2)
one = Ranks(__name__, 1)
three = Ranks(__name__, 3)
four = Ranks(__name__, 4)

WORLDS: dict[str, Shape] = {"one": (1,), "three": (3,), "four": (4,), "hsdp": (2, 2), "back": (2,)}
"""Mesh of each world that goes on; "back" is the way there and back again."""


def begin(shape: Shape) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    return start(Model(), shape)


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, optim = get_state_dict(model, optimizer)
    return {"model": weights, "optim": optim, "step": STEPS, "note": {"by": "us"}}


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Load with stock torch; return everything that the model and the optimizer have then."""
    with torch.no_grad():  # stale values must not pass for loaded ones
        for parameter in model.parameters():
            parameter.fill_(77)
    found = state(model, optimizer)
    found["step"], found["note"] = 0, {}
    dcp.load(found, checkpoint_id=path)
    assert found["step"] == STEPS, found["step"]
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"])
    return flat(state(model, optimizer))


@two.test
def test_two_ranks_train_and_what_they_save_is_resharded(out: Path) -> None:
    model, optimizer = begin((2,))
    train(model, optimizer, 0)
    dcp.save(state(model, optimizer), checkpoint_id=out / "two")
    losses = train(model, optimizer, STEPS)
    weights = flat(get_state_dict(model, optimizer)[0])
    if dist.get_rank() == 0:
        keep_run(losses, weights, out / "two.run")
        for name, shape in WORLDS.items():
            source = out / ("three" if name == "back" else "two")
            shardkit.reshard(source, str(out / name), mesh=mesh_text(shape))
        shardkit.reshard(out / "two", str(out / "straight"), world_size=2)


def check_goes_on(name: str, out: Path) -> None:
    """Every bit is what the first checkpoint gives, and the same steps come to the same."""
    model, optimizer = begin(WORLDS[name])
    expected = load(out / "two", model, optimizer)
    assert_same_leaves(load(out / name, model, optimizer), expected)
    losses = train(model, optimizer, STEPS)
    assert_same_run(losses, flat(get_state_dict(model, optimizer)[0]), out / "two.run")


@two.test
def test_two_ranks_go_on_from_there_and_back(out: Path) -> None:
    check_goes_on("back", out)


@one.test
def test_one_rank_goes_on(out: Path) -> None:
    with group_of_one():
        check_goes_on("one", out)


@three.test
def test_three_ranks_go_on(out: Path) -> None:
    check_goes_on("three", out)


@four.test_each(["four", "hsdp"])
def test_four_ranks_go_on(name: str, out: Path) -> None:
    check_goes_on(name, out)


@pytest.mark.dist
def test_there_and_back_gives_the_same_bytes(tmp_path_factory: pytest.TempPathFactory) -> None:
    out = two.folder(tmp_path_factory)
    names = sorted(path.name for path in (out / "straight").iterdir())
    assert names == sorted(path.name for path in (out / "back").iterdir())
    for name in names:
        if name != "shardkit.json":  # it names the source's files
            assert (out / "back" / name).read_bytes() == (out / "straight" / name).read_bytes(), name
