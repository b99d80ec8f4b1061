"""An optimizer's state in files of `torch.save`: what is taken over, and what is not and why."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from shardkit.errors import IntegrityError, SourceError
from shardkit.formats.contract.optimizer import OptimizerState, UnusableOptimizer
from shardkit.formats.rankfiles.optimizer import Parameter, open_optimizer_files
from tests.formats.reading import expected, objects_of, read_tensor, tensors_of

MODEL = [Parameter("a.weight", (4, 3)), Parameter("a.bias", (4,)), Parameter("b.weight", (2, 4))]


def run_adamw() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 4), "b": torch.nn.Linear(4, 2, bias=False)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, weight_decay=0.5)
    model["b"](model["a"](torch.ones(2, 3))).sum().backward()
    optimizer.step()
    return model, optimizer


def named(state: dict[str, Any]) -> dict[str, Any]:
    names = [parameter.name for parameter in MODEL]
    states = {names[number]: leaves for number, leaves in state["state"].items()}
    groups = [
        {**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]
    ]
    return {"state": states, "param_groups": groups}


def opened(tmp_path: Path, *states: Any) -> OptimizerState | UnusableOptimizer:
    names = [f"optim_{rank}.pt" for rank in range(len(states))]
    for name, state in zip(names, states, strict=True):
        torch.save(state, tmp_path / name)
    return open_optimizer_files(str(tmp_path), names, MODEL)


def check(found: OptimizerState | UnusableOptimizer, state: dict[str, Any]) -> None:
    """Hold an opened state against one that has names."""
    assert isinstance(found, OptimizerState), found.reason
    tensors, others = {}, {}
    for name, leaves in state["state"].items():
        for leaf, value in leaves.items():
            (tensors if isinstance(value, torch.Tensor) else others)[f"state.{name}.{leaf}"] = value
    for number, group in enumerate(state["param_groups"]):
        for key, value in group.items():
            (tensors if isinstance(value, torch.Tensor) else others)[f"param_groups.{number}.{key}"] = value
    assert tensors_of(found) == expected(tensors)
    assert objects_of(found) == others


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize("is_named", [False, True])
def test_whole_states(tmp_path: Path, num_files: int, is_named: bool) -> None:
    """Of one file, or the same in all."""
    _, optimizer = run_adamw()
    state = optimizer.state_dict()
    found = opened(tmp_path, *[named(state) if is_named else state] * num_files)
    check(found, named(state))
    assert any("only numbered" in note for note in found.notes) is not is_named
    paths = found.catalog.paths
    assert paths is not None
    assert paths["state.a.weight.exp_avg"] == ("state", "a.weight", "exp_avg")
    assert paths["param_groups.0.betas"] == ("param_groups", 0, "betas")


def test_a_learning_rate_that_is_a_tensor(tmp_path: Path) -> None:
    _, optimizer = run_adamw()
    state = named(optimizer.state_dict())
    state["param_groups"][0]["lr"] = torch.tensor(0.125)
    check(opened(tmp_path, state), state)


def test_numbers_that_are_no_tensors_stay_what_they_are(tmp_path: Path) -> None:
    state = {
        "state": {0: {"step": 3, "momentum_buffer": torch.ones(4, 3)}},
        "param_groups": [{"lr": 1, "params": [0, 1, 2]}],
    }
    check(opened(tmp_path, state), named(state))


def test_what_is_no_plain_data_is_left_out_and_named(tmp_path: Path) -> None:
    _, optimizer = run_adamw()
    state = named(optimizer.state_dict())
    found = opened(
        tmp_path, {**state, "param_groups": [{**state["param_groups"][0], "device": torch.device("cpu")}]}
    )
    check(found, state)
    assert isinstance(found, OptimizerState)
    assert any("param_groups.0.device" in note for note in found.notes)


def test_a_few_bytes_that_ask_for_millions_of_settings_are_refused(tmp_path: Path) -> None:
    group = {**{str(number): number for number in range(1000)}, "params": [0]}
    torch.save({"state": {}, "param_groups": [group] * 4000}, tmp_path / "optim.pt")
    assert (tmp_path / "optim.pt").stat().st_size < 100_000
    with pytest.raises(SourceError, match="more than 262144 settings"):
        open_optimizer_files(str(tmp_path), ["optim.pt"], [Parameter("a", (2,))])


def test_an_optimizer_that_has_not_stepped(tmp_path: Path) -> None:
    model, _ = run_adamw()
    state = torch.optim.AdamW(model.parameters()).state_dict()
    check(opened(tmp_path, state), named(state))


def test_names_that_the_optimizer_has_go_before_order(tmp_path: Path) -> None:
    """Of parameters of one shape, in another order than the model's: nothing else could tell."""
    model = [Parameter("a.weight", (4, 4)), Parameter("b.weight", (4, 4)), Parameter("c.weight", (4, 4))]
    values = {parameter.name: torch.nn.Parameter(torch.ones(4, 4)) for parameter in model}
    for number, value in enumerate(values.values(), start=1):
        value.grad = torch.full((4, 4), float(number))
    wrapped = {f"_orig_mod.{name}": value for name, value in values.items()}
    order = [[("b.weight", values["b.weight"])], list(reversed(wrapped.items()))[::2]]
    optimizer = torch.optim.AdamW(
        [{"params": group, "weight_decay": float(number)} for number, group in enumerate(order)]
    )
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optim.pt")
    found = open_optimizer_files(str(tmp_path), ["optim.pt"], model)
    assert isinstance(found, OptimizerState), found.reason
    for name, value in values.items():
        (stored,) = expected({"": optimizer.state[value]["exp_avg"]}).values()
        assert read_tensor(found.catalog, f"state.{name}.exp_avg") == stored[2], name
    groups = [objects_of(found)[f"param_groups.{number}.params"] for number in range(2)]
    assert groups == [["b.weight"], ["c.weight", "a.weight"]]
    assert not any("only numbered" in note for note in found.notes)


def numbered_state(step: float = 5.0, lr: float = 0.5, params: tuple[int, ...] = (0, 1, 2)) -> dict[str, Any]:
    states = {
        number: {"step": torch.tensor(step), "exp_avg": torch.zeros(MODEL[number].shape)}
        for number in sorted(params)
    }
    return {"state": states, "param_groups": [{"lr": lr, "params": list(params)}]}


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["a.weight", "a.bias", "c.weight"], "does not have: c.weight"),
        (["b.weight", "a.bias", "a.weight"], "another shape than the parameter"),
        (["a.weight", "a.bias", "a.bias"], "another shape|twice"),
    ],
)
def test_names_that_are_not_the_models_are_told(tmp_path: Path, names: list[str], reason: str) -> None:
    state = numbered_state()
    state["param_groups"][0]["param_names"] = names
    del state["state"][2]
    found = opened(tmp_path, state)
    assert isinstance(found, UnusableOptimizer)
    assert re.search(reason, found.reason)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (numbered_state(step=6.0), "step of a.weight, step of a.bias, step of b.weight"),
        (numbered_state(lr=0.25), "lr of group 0"),
        (numbered_state(params=(1, 0, 2)), "params of group 0"),
        ({**numbered_state(), "param_groups": [{"lr": 0.5, "params": [0]}] * 2}, "2 groups"),
    ],
)
def test_files_of_two_saves_are_refused(tmp_path: Path, other: dict[str, Any], reason: str) -> None:
    with pytest.raises(IntegrityError, match="from another save") as caught:
        opened(tmp_path, numbered_state(), numbered_state(), other)
    assert caught.value.problems == (f"optim_2.pt: not as in optim_0.pt: {reason}",)


def test_factored_states_are_not_taken_for_those_of_vectors(tmp_path: Path) -> None:
    """A row of sums has the shape of a bias; here, of the only ones there are of that shape."""
    model = [Parameter("a.weight", (4, 4)), Parameter("a.bias", (4,))]
    leaves = {"step": 3, "exp_avg_sq_row": torch.ones(4), "exp_avg_sq_col": torch.ones(4)}
    torch.save({"state": {0: leaves}, "param_groups": [{"params": [0]}]}, tmp_path / "optim.pt")
    found = open_optimizer_files(str(tmp_path), ["optim.pt"], model)
    assert isinstance(found, UnusableOptimizer)
    assert "exp_avg_sq_col, exp_avg_sq_row do not have a parameter's shape" in found.reason


def test_flat_parameters_in_groups_of_their_own_order_are_refused(tmp_path: Path) -> None:
    """Rates by layer, the last one first: sizes alone would put each layer's moments under another."""
    model = [Parameter(f"layers.{number}.weight", (4, 4)) for number in range(2)]
    states = {number: {"exp_avg": torch.full((8,), float(number))} for number in range(2)}
    groups = [{"lr": 1.0, "params": [0]}, {"lr": 0.5, "params": [1]}]
    for rank in range(2):
        torch.save({"state": states, "param_groups": groups}, tmp_path / f"{rank}.pt")
    found = open_optimizer_files(str(tmp_path), ["0.pt", "1.pt"], model)
    assert isinstance(found, UnusableOptimizer)
    assert "in 2 groups" in found.reason


def test_flat_parameters_of_two_saves_are_refused(tmp_path: Path) -> None:
    other = flat_state(12)
    other["state"][0]["step"] += 1
    with pytest.raises(IntegrityError, match="from another save"):
        opened(tmp_path, flat_state(12), other)


def flat_state(*lengths: int) -> dict[str, Any]:
    states = {
        number: {"step": torch.tensor(2.0), "exp_avg": torch.zeros(length)}
        for number, length in enumerate(lengths)
    }
    return {"state": states, "param_groups": [{"lr": 1.0, "params": list(states)}]}


def part(number: int, value: torch.Tensor) -> dict[str, Any]:
    """A state whose parameter is named, and which is less than the whole."""
    return {
        "state": {MODEL[number].name: {"exp_avg": value}},
        "param_groups": [{"params": [MODEL[number].name]}],
    }


@pytest.mark.parametrize(
    ("states", "reason"),
    [
        ([{"exp_avg": torch.ones(2)}], "not the state dict of an optimizer"),
        ([torch.ones(2)], "not the state dict of an optimizer"),
        ([{"state": {}, "param_groups": [{"lr": 1.0}]}], "not the state dict of an optimizer"),
        ([flat_state(9), flat_state(9)], "their sizes do not show"),
        ([flat_state(12), flat_state(11)], "their sizes do not show"),
        ([part(0, torch.ones(2, 3))] * 2, "exp_avg of a.weight is a rank's own part"),
        ([part(0, torch.ones(4, 3).to_sparse())], "not stored as plain values"),
        ([part(0, torch.ones(4, 3)), part(1, torch.ones(4))], "a state of parameter a.bias, which other files"),
        ([{"state": {0: {"m": torch.ones(3, 4)}}, "param_groups": [{"params": [0, 1, 2]}]}], "the shapes of its states"),
        ([{"state": {0: {}, "a": {}}, "param_groups": []}], "some are named"),
    ],
)  # fmt: skip
def test_what_cannot_be_placed_is_told(tmp_path: Path, states: list[Any], reason: str) -> None:
    found = opened(tmp_path, *states)
    assert isinstance(found, UnusableOptimizer)
    assert reason in found.reason


def test_every_damaged_file_is_listed(tmp_path: Path) -> None:
    _, optimizer = run_adamw()
    for rank in range(3):
        torch.save(optimizer.state_dict(), tmp_path / f"{rank}.pt")
    for rank in (1, 2):
        (tmp_path / f"{rank}.pt").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(SourceError, match="2 of 3 files cannot be read"):
        open_optimizer_files(str(tmp_path), [f"{rank}.pt" for rank in range(3)], MODEL)


def test_flat_parameters_of_two_ranks(tmp_path: Path) -> None:
    """One flat parameter of all three, with padding at its end."""
    whole, states = torch.arange(24.0), [flat_state(12), flat_state(12)]
    for state, half in zip(states, whole.chunk(2), strict=True):
        state["state"][0]["exp_avg"] = half.clone()
    groups = [{"lr": 1.0, "params": [parameter.name for parameter in MODEL]}]
    expected_state, at = {"state": dict[str, Any](), "param_groups": groups}, 0
    for name, shape, _ in MODEL:
        size = torch.Size(shape).numel()
        expected_state["state"][name] = {
            "step": torch.tensor(2.0), "exp_avg": whole[at : at + size].reshape(shape),
        }  # fmt: skip
        at += size
    found = opened(tmp_path, *states)
    check(found, expected_state)
    assert isinstance(found, OptimizerState)
    assert not found.shows_cuts
