"""Moments of an optimizer that are one rank's part of what they belong to: every verb that reads them warns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import shardkit

# torch's own: a save without a process group.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning")


@pytest.mark.parametrize("folders", [("", ""), ("pytorch_model_fsdp_0", "optimizer_0")])
def test_moments_of_one_rank_are_a_warning_of_every_verb(tmp_path: Path, folders: tuple[str, str]) -> None:
    """As plain tensors on each of two ranks are stored; beside the model, and as accelerate lays the two out."""
    weights = {"up.weight": torch.ones(64, 32), "norm.weight": torch.ones(32)}
    half = {name: {"exp_avg": each[::2].clone(), "step": torch.ones(())} for name, each in weights.items()}
    parts = {folders[0]: {"model": weights}} | {folders[1]: {"optimizer": {"state": half}}}
    if folders[0] == folders[1]:
        parts = {"": {"model": weights, "optimizer": {"state": half}}}
    for folder, state in parts.items():
        dcp.save(state, checkpoint_id=tmp_path / "run" / folder)
    run = tmp_path / "run"
    found = shardkit.verify(run, full=True)
    results = [found, shardkit.reshard(run, tmp_path / "out", world_size=3)]
    results += [shardkit.inspect(run), shardkit.inspect(tmp_path / "out")] if len(parts) == 1 else []
    assert found.ok
    for result in results:
        (warning,) = (each for each in result.warnings if "moments" in each)
        assert warning.startswith("2 of 2 moments of the optimizer have 1/2 of their parameter's rows")
        assert warning.endswith(": optimizer.state.norm.weight.exp_avg, optimizer.state.up.weight.exp_avg")
    assert len(found.doubts) == 1
    out = shardkit.reshard(run, tmp_path / "weights", world_size=3, no_optimizer=True)
    assert not [each for each in out.warnings if "moments" in each]
    assert out.num_optimizer_tensors == 0
    assert any("left out (--no-optimizer)" in note for note in out.notes)
