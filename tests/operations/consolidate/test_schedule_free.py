"""--weights eval: the weights that `optimizer.eval()` of a schedule-free optimizer gives, to the bit.

tests/data/schedulefree has states of the real optimizers, and what they gave.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardkit
from shardkit.errors import SourceError, UsageError
from tests.operations.consolidate.checkpoints import assert_bit_equal, load, save
from tests.worlds.ranks import Ranks

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore:torch.distributed is disabled", "ignore:Failed to initialize"
)

DATA = Path(__file__).parents[2] / "data" / "schedulefree" / "states.json"
STATES = json.loads(DATA.read_text())
KINDS = [kind for kind in STATES if kind not in ("the wrapper", "Lookahead")]
TIED = "lm_head.weight"


def tensors(tree: Any) -> Any:
    if isinstance(tree, dict) and tree.keys() == {"tensor"}:
        dtype, shape, content = tree["tensor"]
        made = torch.frombuffer(bytearray.fromhex(content), dtype=getattr(torch, dtype))
        return made.reshape(shape)
    if isinstance(tree, dict):
        return {key: tensors(value) for key, value in tree.items()}
    return [tensors(value) for value in tree] if isinstance(tree, list) else tree


def state(kind: str) -> dict[str, Any]:
    """Return what was saved: {"model": ..., "optim": as `get_state_dict` has it}."""
    content: dict[str, Any] = tensors(STATES[kind])
    return {key: content[key] for key in ("model", "optim")}


def expected(kind: str) -> dict[str, torch.Tensor]:
    content: dict[str, torch.Tensor] = tensors(STATES[kind]["eval"])
    return content


def flat(optim: dict[str, Any]) -> dict[str, Any]:
    """Return a state as `flatten_optimizer_state_dict` has it."""
    states = {
        f"state.{fqn}.{leaf}": v for fqn, leaves in optim["state"].items() for leaf, v in leaves.items()
    }
    return states | {
        f"param_groups.{fqn}.{key}": value
        for group in optim["param_groups"]
        for fqn in group["params"]
        for key, value in group.items()
        if key != "params"
    }


def assert_evaluated(path: Path, out: Path, kind: str, **options: Any) -> shardkit.ConsolidateResult:
    result = shardkit.consolidate(path, out, weights="eval", **options)
    written, truth = load(out), expected(kind)
    if TIED not in written:
        del truth[TIED]
    assert_bit_equal(written, truth)
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_every_optimizer_to_the_bit(kind: str, tmp_path: Path) -> None:
    saved = save(state(kind), tmp_path / "saved")
    result = assert_evaluated(saved, tmp_path / "out", kind)
    assert result.weights == "eval"
    assert not [line for line in result.warnings if "schedule-free" in line]
    assert any("computed as optimizer.eval()" in line for line in result.notes)
    assert any(tensor.ne(state(kind)["model"][name]).any() for name, tensor in expected(kind).items())


@pytest.mark.parametrize("kind", KINDS)
def test_without_it_there_is_a_warning(kind: str, tmp_path: Path) -> None:
    result = shardkit.consolidate(save(state(kind), tmp_path / "saved"), tmp_path / "out")
    (line,) = [line for line in result.warnings if "schedule-free" in line]
    told = "saved in training mode of a schedule-free optimizer (optim.param_groups."
    assert line.startswith((f"{told}{{0..1}}.train_mode)", f"{told}0.train_mode"))
    assert "--weights eval" in line
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in state(kind)["model"].items())


PLACES: dict[str, Callable[[dict[str, Any], Path], Path]] = {
    "flat": lambda tree, path: save({**tree["model"], "optimizer": flat(tree["optim"])}, path),
    "accelerate": lambda tree, path: in_folders(tree, path),
    "Lightning": lambda tree, path: save({"state_dict": tree["model"], "optimizer_0": tree["optim"]}, path),
    "one file": lambda tree, path: in_file({"model": tree["model"], "optim": tree["optim"]}, path / "a.pt"),
    "one flat file": lambda tree, path: in_file({**tree, "optim": flat(tree["optim"])}, path / "a.pt"),
    "accelerate, whole": lambda tree, path: in_files(tree, path),
}


def in_folders(tree: dict[str, Any], path: Path) -> Path:
    save({"model": tree["model"]}, path / "pytorch_model_fsdp_0")
    save({"optimizer": tree["optim"]}, path / "optimizer_0")
    return path


def in_file(tree: dict[str, Any], path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    torch.save(tree, path)
    return path


def in_files(tree: dict[str, Any], path: Path) -> Path:
    in_file(tree["model"], path / "pytorch_model_fsdp.bin")
    in_file(tree["optim"], path / "optimizer.bin")
    return path


@pytest.mark.parametrize("place", PLACES)
def test_wherever_the_state_lies(place: str, tmp_path: Path) -> None:
    saved = PLACES[place](state("AdamW fp32"), tmp_path / "step-3")
    plain = shardkit.consolidate(saved, tmp_path / "plain")
    assert any("not those to publish" in line for line in plain.warnings)
    assert_evaluated(saved, tmp_path / "out", "AdamW fp32")


def test_it_is_cast_like_any_other(tmp_path: Path) -> None:
    saved = save(state("AdamW fp32"), tmp_path / "saved")
    shardkit.consolidate(saved, tmp_path / "out", weights="eval", dtype="bf16")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(t, expected("AdamW fp32")[name].bfloat16()) for name, t in written.items())


def test_a_part_of_the_model(tmp_path: Path) -> None:
    saved = save(state("SGD"), tmp_path / "saved")
    shardkit.consolidate(saved, tmp_path / "out", weights="eval", include=["*norm*"])
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == {"model.norm.weight", "model.norm.bias"}
    assert all(torch.equal(tensor, expected("SGD")[name]) for name, tensor in written.items())


def test_each_parameter_goes_by_its_own_group(tmp_path: Path) -> None:
    tree = state("AdamW fp32")
    tree["optim"]["param_groups"][1]["train_mode"] = False
    saved = save(tree, tmp_path / "saved")
    shardkit.consolidate(saved, tmp_path / "out", weights="eval")
    written, truth = load_file(tmp_path / "out" / "model.safetensors"), expected("AdamW fp32")
    kept = tree["optim"]["param_groups"][1]["params"]
    assert all(
        torch.equal(t, (tree["model"] if name in kept else truth)[name]) for name, t in written.items()
    )


def test_in_evaluation_mode_the_weights_are_right(tmp_path: Path) -> None:
    tree = state("AdamW fp32")
    for group in tree["optim"]["param_groups"]:
        group["train_mode"] = False
    saved = save(tree, tmp_path / "saved")
    for weights in ("model", "eval"):
        result = shardkit.consolidate(saved, tmp_path / weights, weights=weights)
        assert not [line for line in result.warnings if "schedule-free" in line]
        written = load_file(tmp_path / weights / "model.safetensors")
        assert all(torch.equal(t, tree["model"][name]) for name, t in written.items())
    assert any("the weights are x already" in note for note in result.notes)


def test_a_state_that_does_not_say_its_mode(tmp_path: Path) -> None:
    """schedulefree's wrapper keeps mode and momentum to itself."""
    saved = save(state("the wrapper"), tmp_path / "saved")
    result = shardkit.consolidate(saved, tmp_path / "out")
    assert any("does not say in which mode" in line for line in result.warnings)
    with pytest.raises(SourceError, match="mode and beta are not known"):
        shardkit.consolidate(saved, tmp_path / "eval", weights="eval")


def test_lookahead_is_a_warning(tmp_path: Path) -> None:
    saved = save(state("Lookahead"), tmp_path / "saved")
    result = shardkit.consolidate(saved, tmp_path / "out")
    assert any(line.startswith("saved by a Lookahead optimizer") for line in result.warnings)


def test_another_optimizer_has_no_such_weights(tmp_path: Path) -> None:
    tree = state("AdamW fp32")
    for group in tree["optim"]["param_groups"]:
        del group["train_mode"]
    for leaves in tree["optim"]["state"].values():
        leaves["n"] = leaves["exp_avg_sq"] = torch.ones(2)  # as FTRL has beside z
    saved = save(tree, tmp_path / "saved")
    assert not [line for line in shardkit.consolidate(saved, tmp_path / "out").warnings if "free" in line]
    with pytest.raises(UsageError, match="no state of a schedule-free optimizer"):
        shardkit.consolidate(saved, tmp_path / "eval", weights="eval")


def _odd_dtype(tree: dict[str, Any]) -> None:
    tree["model"] = {name: tensor.bfloat16() for name, tensor in tree["model"].items()}


def _no_betas(tree: dict[str, Any]) -> None:
    tree["optim"]["param_groups"][0]["betas"] = (0.0, 0.9)


def _no_weight(tree: dict[str, Any]) -> None:
    del tree["model"]["model.norm.bias"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_odd_dtype, "float32 .*the weight bfloat16"),
        (_no_betas, "or 0"),
        (_no_weight, "no weight model.norm.bias"),
    ],
)
def test_what_cannot_be_computed_is_refused(
    change: Callable[[dict[str, Any]], None], reason: str, tmp_path: Path
) -> None:
    tree = state("AdamW fp32")
    change(tree)
    with pytest.raises(SourceError, match="cannot be computed") as caught:
        shardkit.consolidate(save(tree, tmp_path / "saved"), tmp_path / "out", weights="eval")
    assert any(re.search(reason, line) for line in caught.value.problems)


def numbered(*, has_names: bool = False) -> dict[str, Any]:
    """Return what `optimizer.state_dict()` gives; it has names if the optimizer was made of named parameters."""
    tree = state("AdamW fp32")
    numbers = {fqn: number for number, fqn in enumerate(tree["optim"]["state"])}
    tree["optim"]["state"] = {numbers[fqn]: leaves for fqn, leaves in tree["optim"]["state"].items()}
    for group in tree["optim"]["param_groups"]:
        names, group["params"] = group["params"], [numbers[fqn] for fqn in group["params"]]
        if has_names:
            group["param_names"] = names
    return tree


def in_hub(tree: dict[str, Any], path: Path) -> Path:
    """Save as the Trainer does without FSDP."""
    in_file(tree["optim"], path / "optimizer.pt")
    weights = {name: tensor.contiguous() for name, tensor in tree["model"].items() if name != TIED}
    save_file(weights, path / "model.safetensors")
    return path


NUMBERED: dict[str, Callable[[dict[str, Any], Path], Path]] = {
    "one file": lambda tree, path: in_file(tree, path / "a.ckpt"),
    "DCP": lambda tree, path: save(tree, path),
    "Hub": in_hub,
}


@pytest.mark.parametrize("place", NUMBERED)
def test_numbered_states_are_warned_of_and_refused(place: str, tmp_path: Path) -> None:
    path = NUMBERED[place](numbered(), tmp_path / "checkpoint-3")
    result = shardkit.consolidate(path, tmp_path / "out")
    assert any("not those to publish" in line for line in result.warnings)
    with pytest.raises(SourceError, match="which state belongs to which weight is unknown"):
        shardkit.consolidate(path, tmp_path / "eval", weights="eval")


@pytest.mark.parametrize("place", ["one file", "DCP"])
def test_numbers_with_names(place: str, tmp_path: Path) -> None:
    path = NUMBERED[place](numbered(has_names=True), tmp_path / "checkpoint-3")
    assert_evaluated(path, tmp_path / "out", "AdamW fp32")


two = Ranks(__name__, 2)


@two.test
def test_of_real_ranks(out: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    tree = state("SGD")

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(tensor, mesh, [Shard(0)])

    tree["model"] = {name: cut(tensor) for name, tensor in tree["model"].items()}
    tree["optim"]["state"] = {
        fqn: {leaf: cut(tensor) for leaf, tensor in leaves.items()}
        for fqn, leaves in tree["optim"]["state"].items()
    }
    dcp.save(tree, checkpoint_id=out / "saved")
    if mesh.get_rank() == 0:
        assert_evaluated(out / "saved", out / "hub", "SGD")
