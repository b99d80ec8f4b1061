"""--weights ema of averages that are no part of the model's dict: in an optimizer's state, or in a folder beside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
)
from torch.distributed.fsdp import fully_shard

import shardkit
from shardkit.errors import ShardkitError, UsageError
from tests.operations.consolidate.checkpoints import assert_bit_equal, load, save
from tests.worlds.ranks import Ranks

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore:torch.distributed is disabled", "ignore:Failed to initialize"
)

Tensors = dict[str, torch.Tensor]


def trained(make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Module()
    model.model = torch.nn.Module()
    model.model.layers = torch.nn.ModuleList([torch.nn.Linear(4, 6), torch.nn.Linear(6, 4)])
    model.lm_head = torch.nn.Linear(4, 5, bias=False)
    optimizer = make(model.parameters(), lr=0.1)
    for _ in range(3):
        layers = [*model.model.layers, model.lm_head]
        hidden = torch.randn(3, 4)
        for layer in layers:
            hidden = layer(hidden)
        hidden.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def halves(weights: Tensors) -> Tensors:
    return {name: tensor * 0.5 for name, tensor in weights.items()}


def assert_averaged(path: Path, out: Path, expected: Tensors) -> shardkit.ConsolidateResult:
    result = shardkit.consolidate(path, out, weights="ema")
    assert result.weights == "ema"
    assert_bit_equal(load(out), expected)
    return result


def flat_with(leaf: str, values: Tensors, *, attribute: str = "") -> dict[str, Any]:
    """Return torchtitan's dict: the model's tensors at the top, and an optimizer with one more leaf."""
    model, optimizer = trained()
    weights = get_model_state_dict(model)
    optim = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    more = {f"state.{attribute}{name}.{leaf}": tensor for name, tensor in values.items()}
    return {**weights, "optimizer": {**optim, **more}, "train_state": {"step": torch.tensor(3)}}


def weights() -> Tensors:
    state: Tensors = get_model_state_dict(trained()[0])
    return state


@pytest.mark.parametrize("leaf", ["ema_params", "param_ema", "averaged_weights", "shadow_params"])
def test_in_a_state_that_names_them(leaf: str, tmp_path: Path) -> None:
    path = save(flat_with(leaf, halves(weights())), tmp_path / "step-3")
    result = assert_averaged(path, tmp_path / "out", halves(weights()))
    assert (
        f"averaged weights taken from the optimizer's state, optimizer.state.*.{leaf}: 5 tensors"
        in result.notes
    )
    plain = shardkit.consolidate(path, tmp_path / "plain")
    assert plain.num_tensors == 5
    assert not [note for note in plain.notes if "averaged" in note]


def test_torchs_averaged_sgd(tmp_path: Path) -> None:
    model, optimizer = trained(lambda params, lr: torch.optim.ASGD(params, lr=lr, t0=0))
    state, optim = get_state_dict(model, optimizer)
    path = save({"model": state, "optim": optim}, tmp_path / "saved")
    truth = {name: leaves["ax"] for name, leaves in optim["state"].items()}
    assert any(not torch.equal(truth[name], tensor) for name, tensor in state.items())
    assert_averaged(path, tmp_path / "out", truth)


def test_one_file_and_an_attribute_above_the_model(tmp_path: Path) -> None:
    tree = {
        "state_dict": {f"net.{name}": tensor for name, tensor in weights().items()},
        "optimizer_0": {
            "state": {f"net.{name}": {"ema_params": tensor} for name, tensor in halves(weights()).items()},
            "param_groups": [{"lr": 0.1, "params": [f"net.{name}" for name in weights()]}],
        },
    }
    assert_averaged(save(tree, tmp_path / "saved"), tmp_path / "out", halves(weights()))
    torch.save(tree, tmp_path / "a.pt")
    assert_averaged(tmp_path / "a.pt", tmp_path / "of-file", halves(weights()))


def test_what_has_no_average_is_named(tmp_path: Path) -> None:
    some = {name: tensor for name, tensor in halves(weights()).items() if name != "lm_head.weight"}
    path = save(flat_with("ema_params", some), tmp_path / "step-3")
    result = assert_averaged(path, tmp_path / "out", some)
    assert any("no average of 1 tensor of the model" in line for line in result.warnings)


def test_a_moment_with_such_a_name_is_not_taken(tmp_path: Path) -> None:
    """The command in the hint takes it, if a person says so."""
    path = save(flat_with("grad_ema", halves(weights())), tmp_path / "step-3")
    with pytest.raises(UsageError, match="no averaged weights that can be recognised") as caught:
        shardkit.consolidate(path, tmp_path / "out", weights="ema")
    assert caught.value.problems == ("optimizer.state.*.grad_ema: 5 tensors",)
    assert "optimizer.state" in str(caught.value.hint)
    assert "--exclude '*.exp_avg'" in str(caught.value.hint)
    others = ["*.exp_avg", "*.exp_avg_sq", "*.step"]
    shardkit.consolidate(
        path, tmp_path / "out", root="optimizer.state", exclude=others, rename=[r"\.grad_ema$="]
    )
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == weights().keys()


def test_numbered_ones_are_refused(tmp_path: Path) -> None:
    model, optimizer = trained()
    state = optimizer.state_dict()
    for number, tensor in enumerate(weights().values()):
        state["state"][number]["ema_params"] = tensor
    torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "a.pt")
    with pytest.raises(UsageError, match="no averaged weights that can be recognised") as caught:
        shardkit.consolidate(tmp_path / "a.pt", tmp_path / "out", weights="ema")
    assert "only numbered" in caught.value.problems[0]
    assert "save the averaged model's state dict" in str(caught.value.hint)


def test_one_of_several_has_to_be_chosen(tmp_path: Path) -> None:
    tree = flat_with("ema_params", halves(weights()))
    tree = {"model": weights(), "ema": halves(weights()), "optimizer": tree["optimizer"]}
    with pytest.raises(UsageError, match="2 sets of averaged weights"):
        shardkit.consolidate(save(tree, tmp_path / "saved"), tmp_path / "out", weights="ema")


BESIDE: dict[str, tuple[str, str, Callable[[Tensors, Path], object]]] = {
    "SimpleTuner": ("pytorch_model_fsdp_0", "ema/ema_model_fsdp", save),
    "a folder": ("model", "ema", save),
    "of the same name": ("unet", "unet_ema", save),
    "in the step": ("", "ema_model", save),
    "safetensors": ("pytorch_model_fsdp_0", "ema", lambda state, path: in_hub(state, path)),
    "a file": ("", "ema_weights.pt", lambda state, path: torch.save(state, path)),
}


def in_hub(state: Tensors, path: Path) -> None:
    path.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path / "model.safetensors")


@pytest.mark.parametrize("where", BESIDE)
def test_beside_the_models_folder(where: str, tmp_path: Path) -> None:
    model, averages, save_averages = BESIDE[where]
    step = tmp_path / "step-3"
    save({"model": weights()} if "fsdp" in model else weights(), step / model)
    (step / averages).parent.mkdir(exist_ok=True)
    save_averages(halves(weights()), step / averages)
    result = assert_averaged(step / model, tmp_path / "out", halves(weights()))
    assert any("beside the model's" in note for note in result.notes)
    plain = shardkit.consolidate(step / model, tmp_path / "plain")
    assert torch.equal(load(tmp_path / "plain")["lm_head.weight"], weights()["lm_head.weight"])
    assert not [note for note in plain.notes if "averaged weights taken" in note]


def test_averages_of_another_step_are_not_taken(tmp_path: Path) -> None:
    for name in ("step-3", "step-4", "ema"):
        save(weights(), tmp_path / "run" / name)
    for name in ("step-3", "step-4-ema"):
        torch.save(weights(), tmp_path / f"{name}.pt")
    for path in (tmp_path / "run" / "step-3", tmp_path / "step-3.pt"):
        with pytest.raises(ShardkitError, match="holds no averaged weights"):
            shardkit.consolidate(path, tmp_path / "out", weights="ema")


def test_several_beside(tmp_path: Path) -> None:
    step = tmp_path / "step-3"
    save({"model": weights()}, step / "pytorch_model_fsdp_0")
    for name in ("ema_0", "ema_1"):
        save(weights(), step / name)
    with pytest.raises(UsageError, match="2 sets of averaged weights found beside") as caught:
        shardkit.consolidate(step, tmp_path / "out", weights="ema")
    assert [line.rpartition("/")[2] for line in caught.value.problems] == ["ema_0", "ema_1"]


two = Ranks(__name__, 2)


@two.test
def test_of_real_ranks(out: Path) -> None:
    model, _ = trained()
    truth = halves(weights())
    fully_shard(model)
    state = get_model_state_dict(model)
    tree = {
        **state,
        "optimizer": {f"state.{name}.ema_params": tensor * 0.5 for name, tensor in state.items()}
        | {f"param_groups.{name}.lr": 0.1 for name in state},
    }
    dcp.save(tree, checkpoint_id=out / "step-3")
    if torch.distributed.get_rank() == 0:
        assert_averaged(out / "step-3", out / "hub", truth)
