"""reshard of one file with model and optimizer: settings of all groups, by torch's own reader and on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import shardkit
from shardkit.cli import main
from shardkit.errors import SourceError
from tests.worlds.ranks import Ranks

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore:torch.distributed is disabled", "ignore:Failed to initialize"
)


def build(*, is_sharded: bool = False) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 4))
    if is_sharded:
        fully_shard(model)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1, "lr": 0.01},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0, "lr": 0.005},
    ]
    return model, torch.optim.AdamW(groups, betas=(0.8, 0.95))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> list[float]:
    losses = []
    for seed in seeds:
        torch.manual_seed(seed)
        loss = model(torch.randn(8, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model, optimizer = build()
    train(model, optimizer, range(3))
    return model, optimizer


def by_name(**options: bool) -> dict[str, Any]:
    model, optim = get_state_dict(
        *trained(), options=StateDictOptions(full_state_dict=True, cpu_offload=True, **options)
    )
    return {"model": model, "optim": optim, "step": 3}


FORMS: dict[str, Callable[[], dict[str, Any]]] = {
    "nested": by_name,
    "flat": lambda: by_name(flatten_optimizer_state_dict=True),
    "deeper": lambda: {"app": {key: value for key, value in by_name().items() if key != "step"}},
    "two": lambda: {"model": by_name()["model"], "optimizers": {n: by_name()["optim"] for n in "ab"}},
    "a number in its state": lambda: with_number(by_name()),
    "a tensor for a rate": lambda: with_rate(by_name()),
    "no state": lambda: {
        **by_name(),
        "optim": {"state": {}, "param_groups": by_name()["optim"]["param_groups"]},
    },
    "the optimizer alone": lambda: by_name()["optim"],
}


def with_number(state: dict[str, Any]) -> dict[str, Any]:
    state["optim"]["state"]["0.weight"]["step"] = 3
    return state


def with_rate(state: dict[str, Any]) -> dict[str, Any]:
    state["optim"]["param_groups"][0]["lr"] = torch.tensor(0.01)
    return state


@pytest.mark.parametrize("form", FORMS)
def test_it_becomes_what_stock_save_makes_of_the_same_dict(form: str, tmp_path: Path) -> None:
    state = FORMS[form]()
    torch.save(state, tmp_path / "ckpt.pt")
    result = shardkit.reshard(tmp_path / "ckpt.pt", tmp_path / "out", world_size=2)
    assert result.warnings == ()
    assert not [note for note in result.notes if "param_groups" in note]
    state.pop("step", None)
    dcp.save(state, checkpoint_id=tmp_path / "stock", no_dist=True)
    ours, theirs = (dcp.FileSystemReader(tmp_path / name).read_metadata() for name in ("out", "stock"))
    assert ours.planner_data == theirs.planner_data
    for name, entry in theirs.state_dict_metadata.items():
        assert type(ours.state_dict_metadata[name]) is type(entry), name
    assert shardkit.verify(tmp_path / "out").ok


def numbered() -> dict[str, Any]:
    model, optimizer = trained()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def lightning() -> dict[str, Any]:
    state = numbered()
    return {
        "pytorch-lightning_version": "2.6.6",
        "state_dict": state["model"],
        "optimizer_states": [state["optimizer"]],
    }


@pytest.mark.parametrize(
    ("make", "place"),
    [(numbered, "optimizer"), (lightning, "optimizer_states.0")],
    ids=["torch", "lightning"],
)
def test_a_numbered_state_is_left_out(make: Callable[[], dict[str, Any]], place: str, tmp_path: Path) -> None:
    torch.save(make(), tmp_path / "a.ckpt")
    result = shardkit.reshard(tmp_path / "a.ckpt", tmp_path / "out", world_size=2)
    assert result.warnings == (
        f"the optimizer's state is left out ({place}): {place}: its parameters are numbered, and a state "
        "can be resharded only by name; only weights are written",
    )
    assert (result.num_tensors, result.num_optimizer_tensors, result.num_objects) == (4, 0, 0)
    command = ["reshard", str(tmp_path / "a.ckpt"), str(tmp_path / "again"), "--world-size", "2"]
    told = CliRunner().invoke(main, command)
    assert told.exit_code == 0
    assert "resume on" not in told.output


def test_half_of_an_optimizer_is_none(tmp_path: Path) -> None:
    """One of two is numbered, or a moment has no plain values."""
    both = {**by_name(), "second": numbered()["optimizer"]}
    torch.save(both, tmp_path / "two.pt")
    odd = by_name()
    odd["optim"]["state"]["0.weight"]["exp_avg"] = torch.ones(9, 6).to_sparse()
    torch.save(odd, tmp_path / "odd.pt")
    for name, what in (
        ("two", "second: its parameters are"),
        ("odd", "optim: optim.state.0.weight.exp_avg is not"),
    ):
        result = shardkit.reshard(tmp_path / f"{name}.pt", tmp_path / name, world_size=2)
        assert what in result.warnings[0]
        assert result.num_optimizer_tensors == 0


def test_a_numbered_optimizer_alone_is_refused(tmp_path: Path) -> None:
    torch.save(trained()[1].state_dict(), tmp_path / "optimizer.pt")
    with pytest.raises(SourceError, match=r"^optimizer\.pt is the state dict of an optimizer"):
        shardkit.reshard(tmp_path / "optimizer.pt", tmp_path / "out", world_size=2)


def _first(out: Path) -> None:
    torch.save(by_name(), out / "ckpt.pt")
    shardkit.reshard(out / "ckpt.pt", out / "resharded", world_size=2)


two = Ranks(__name__, 2, first=_first)


@two.test
def test_training_goes_on_to_the_digit(out: Path) -> None:
    truth = train(*trained(), range(5, 8))
    model, optimizer = build(is_sharded=True)
    train(model, optimizer, range(1))
    for group in optimizer.param_groups:
        group.update(lr=9.0, weight_decay=9.0, betas=(0.1, 0.1))
    weights, optim = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": optim}
    dcp.load(state, checkpoint_id=out / "resharded")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert dist.get_world_size() == 2
    assert train(model, optimizer, range(5, 8)) == truth
    assert [(g["lr"], g["weight_decay"], len(g["params"])) for g in optimizer.param_groups] == [
        (0.01, 0.1, 2),
        (0.005, 0.0, 2),
    ]
