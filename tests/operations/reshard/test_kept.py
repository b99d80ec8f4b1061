"""reshard of checkpoints that are not DCP inside: what becomes of the optimizer's state, by torch's own reader."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import shardkit
from shardkit.cli import main
from tests.operations.reshard.test_reshard import flat

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore:torch.distributed is disabled", "ignore:Failed to initialize"
)

HOME = Path(os.environ.get("SHARDKIT_FIXTURES", "nowhere")) / "sharded"
KEPT = {
    "accelerate_fsdp1_nodcp_w2": "",
    "verl_fsdp1_w3": "global_step_2",
    "verl_fsdp2_w2": "global_step_2",
}
"""Fixtures with an optimizer in a form of its own and the truth about it; the checkpoint in each."""


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 70), torch.nn.BatchNorm1d(70), torch.nn.Linear(70, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, weight_decay=0.5)
    for _ in range(3):
        model(torch.randn(8, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """accelerate's FULL_STATE_DICT: a file with the whole model, one with the whole optimizer by FQN."""
    path = tmp_path / "saved"
    path.mkdir()
    weights, optim = get_state_dict(*trained())
    torch.save(weights, path / "pytorch_model_fsdp.bin")
    torch.save(optim, path / "optimizer.bin")
    return path


def whole(path: Path, tmp_path: Path) -> dict[str, Any]:
    dcp_to_torch_save(path, tmp_path / "whole.pt")
    state: dict[str, Any] = torch.load(tmp_path / "whole.pt", weights_only=False)
    return state


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return found.dtype == expected.dtype and torch.equal(found, expected)
    return bool(found == expected and type(found) is type(expected))


def test_stock_load_gives_model_and_optimizer_back(saved: Path, tmp_path: Path) -> None:
    result = shardkit.reshard(saved, tmp_path / "out", world_size=2)
    assert result.warnings == ()
    assert (result.num_tensors, result.num_optimizer_tensors) == (9, 18)
    assert all(size > max(result.file_bytes) / 2 for size in result.file_bytes)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(5, 70), torch.nn.BatchNorm1d(70), torch.nn.Linear(70, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=9.0)
    weights, optim = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": optim}
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    for found, expected in zip((model, optimizer), trained(), strict=True):
        ours, theirs = flat(found.state_dict()), flat(expected.state_dict())
        assert ours.keys() == theirs.keys()
        assert all(same(ours[key], value) for key, value in theirs.items())


def test_names_are_those_that_stock_save_gives(saved: Path, tmp_path: Path) -> None:
    weights, optim = get_state_dict(*trained())
    dcp.save({"model": weights, "optim": optim}, checkpoint_id=tmp_path / "stock", no_dist=True)
    shardkit.reshard(saved, tmp_path / "out", world_size=2)
    ours, theirs = (dcp.FileSystemReader(tmp_path / name).read_metadata() for name in ("out", "stock"))
    assert ours.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()
    assert ours.planner_data == theirs.planner_data
    for name, entry in theirs.state_dict_metadata.items():
        assert type(ours.state_dict_metadata[name]) is type(entry), name
    assert shardkit.verify(tmp_path / "out").ok


def test_dtypes_go_by_group_and_steps_stay(saved: Path, tmp_path: Path) -> None:
    shardkit.reshard(saved, tmp_path / "out", world_size=3, dtype="fp16", optimizer_dtype="bf16")
    state, (_, optim) = whole(tmp_path / "out", tmp_path), get_state_dict(*trained())
    assert state["model"]["0.weight"].dtype == torch.float16
    for name, leaves in optim["state"].items():
        found = state["optim"]["state"][name]
        assert same(found["exp_avg"], leaves["exp_avg"].bfloat16())
        assert same(found["step"], leaves["step"])
    assert state["optim"]["param_groups"][0]["lr"] == 0.25


def test_the_same_input_gives_the_same_bytes(saved: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        shardkit.reshard(saved, tmp_path / name, world_size=2)
    for path in sorted((tmp_path / "one").iterdir()):
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes(), path.name


def test_back_to_one_rank_and_out_again_is_bit_equal(saved: Path, tmp_path: Path) -> None:
    shardkit.reshard(saved, tmp_path / "three", world_size=3)
    shardkit.reshard(tmp_path / "three", tmp_path / "one", world_size=1)
    ours, theirs = (flat(whole(tmp_path / name, tmp_path)) for name in ("one", "three"))
    assert ours.keys() == theirs.keys()
    assert all(same(ours[key], value) for key, value in theirs.items())


def test_other_settings_than_those_of_adamw(saved: Path, tmp_path: Path) -> None:
    """What a note says to do about settings that the checkpoint does not have works."""
    optim = torch.load(saved / "optimizer.bin", weights_only=True)
    for group in optim["param_groups"]:
        del group["fused"], group["amsgrad"]
    torch.save(optim, saved / "optimizer.bin")
    result = shardkit.reshard(saved, tmp_path / "out", world_size=2)
    (note,) = [note for note in result.notes if "allow_partial_load" in note]
    assert "amsgrad, fused" in note
    weights, target = get_state_dict(*trained())
    target["param_groups"][0]["lr"] = 0.0
    state = {"model": weights, "optim": target}
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True, planner=planner)
    assert (state["optim"]["param_groups"][0]["lr"], state["optim"]["param_groups"][0]["amsgrad"]) == (
        0.25,
        False,
    )


def test_an_optimizer_that_cannot_be_taken_over_is_a_warning(saved: Path, tmp_path: Path) -> None:
    torch.save({"state": torch.ones(2)}, saved / "optimizer.bin")
    result = shardkit.reshard(saved, tmp_path / "out", world_size=2)
    (warning,) = result.warnings
    assert "(optimizer.bin): optimizer.bin is not the state dict of an optimizer; only weights" in warning
    assert result.num_optimizer_tensors == 0
    assert "0.weight" in dcp.FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata


@pytest.mark.parametrize("name", ["optimizer_1.bin", "optimizer_0_rank0.bin"])
def test_several_optimizers_are_told(saved: Path, tmp_path: Path, name: str) -> None:
    (saved / name).write_bytes((saved / "optimizer.bin").read_bytes())
    (warning,) = shardkit.reshard(saved, tmp_path / "out", world_size=2).warnings
    assert "there are several of them" in warning


def test_a_damaged_optimizer_is_refused(saved: Path, tmp_path: Path) -> None:
    os.truncate(saved / "optimizer.bin", 1000)
    with pytest.raises(shardkit.SourceError, match=r"optimizer\.bin: .*cut short"):
        shardkit.reshard(saved, tmp_path / "out", world_size=2)
    assert not (tmp_path / "out").exists()


def test_the_command_line(saved: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["reshard", str(saved), str(tmp_path / "out"), "--world-size", "2"])
    assert done.exit_code == 0, done.output
    assert "9 tensors, 18 of the optimizer, 12 byte entries" in done.output
    assert "model. and optim." in done.output


@pytest.mark.shared
@pytest.mark.skipif(not HOME.is_dir(), reason="SHARDKIT_FIXTURES names no directory with checkpoints")
@pytest.mark.parametrize("name", KEPT)
def test_every_tensor_and_setting_that_trainers_saved(name: str, tmp_path: Path) -> None:
    home = HOME / name
    result = shardkit.reshard(home / "ckpt" / KEPT[name], tmp_path / "out", world_size=4)
    assert result.warnings == ()
    assert max(result.file_bytes) < 1.5 * min(result.file_bytes)
    found = {
        key[1:].replace("/", "."): value
        for key, value in flat(whole(tmp_path / "out", tmp_path)["optim"]).items()
    }
    expected = json.loads((home / "truth/optim.sha256.json").read_text())
    for key, entry in expected.items():
        value = found.pop(key)
        digest = hashlib.sha256(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        assert (str(value.dtype), list(value.shape)) == (f"torch.{entry['dtype']}", entry["shape"]), key
        assert digest.hexdigest() == entry["sha256"], key
    betas = found.pop("param_groups.0.betas")
    found |= {f"param_groups.0.betas.{number}": beta for number, beta in enumerate(betas)}
    settings = json.loads((home / "truth/optim.json").read_text())
    assert sorted(map(str, found.items())) == sorted(map(str, settings.items()))


@pytest.mark.shared
@pytest.mark.skipif(not HOME.is_dir(), reason="SHARDKIT_FIXTURES names no directory with checkpoints")
def test_deepspeed_moments_by_its_own_rule(tmp_path: Path) -> None:
    """One flat tensor of ZeRO-3: each parameter's part of each rank, one after the other."""
    tag = HOME / "deepspeed_zero3_bf16_w2/ckpt/global_step2"
    shardkit.reshard(tag.parent, tmp_path / "out", world_size=3)
    found = whole(tmp_path / "out", tmp_path)
    shapes = torch.load(tag / "zero_pp_rank_0_mp_rank_00_model_states.pt", weights_only=True)["param_shapes"][
        0
    ]
    flats = [flat_tensors(tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt") for rank in range(2)]
    for leaf in ("exp_avg", "exp_avg_sq"):
        at = 0
        for name, shape in shapes.items():
            part = -(-shape.numel() // 2)
            halves = torch.cat([held[leaf][at : at + part] for held in flats])
            assert same(found["optim"]["state"][name][leaf], halves[: shape.numel()].reshape(shape)), name
            assert same(found["optim"]["state"][name]["step"], torch.tensor(2.0))
            at += part


def flat_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read a file of DeepSpeed with torch, past the classes that it names."""
    allowed = {"deepspeed.runtime.zero.config.ZeroStageEnum", "deepspeed.runtime.fp16.loss_scaler.LossScaler"}
    made = [
        (type(name.rpartition(".")[2], (), {"__init__": lambda self, *args: None}), name) for name in allowed
    ]
    with warnings.catch_warnings(), torch.serialization.safe_globals(made):
        state = torch.load(path, weights_only=True)
    moments: dict[str, torch.Tensor] = state["optimizer_state_dict"]["optimizer_state_dict"]["state"][0]
    return moments
