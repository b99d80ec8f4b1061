"""Factors of OSFT, and the optimizer's state of the trained ones, keep their bits on any number of ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import shardkit
from shardkit.files import manifest
from tests.bits import raw
from tests.operations.consolidate.checkpoints import save, training_state, weights
from tests.osft.factored import Q, factored
from tests.osft.presharded import unpacked

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning")


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_to_any_number_of_ranks(world_size: int, tmp_path: Path) -> None:
    checkpoint = save(training_state(factored(weights())), tmp_path / "step-3")
    shardkit.reshard(checkpoint, tmp_path / "out", world_size=world_size)
    assert shardkit.diff(checkpoint, tmp_path / "out", all_tensors=True).is_equal
    assert shardkit.verify(tmp_path / "out", full=True).ok
    dcp_to_torch_save(tmp_path / "out", tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt")
    name = f"{Q}.osft_params.V_low"
    assert found["optim"]["state"][name]["exp_avg"].shape == found["model"][name].shape == (8, 16)
    described = manifest.read(str(tmp_path / "out"))
    assert isinstance(described, manifest.Presharded)
    cut = f"S({int(16 % world_size == 0)})"
    for fqn in (f"model.{name}", f"optim.state.{name}.exp_avg"):
        assert described.tensors[fqn].placements == (cut,)
    shardkit.consolidate(tmp_path / "out", tmp_path / "hub")
    assert not shardkit.diff(checkpoint, tmp_path / "hub").differences


def test_no_cast_rounds_a_factor(tmp_path: Path) -> None:
    state = factored(weights())
    checkpoint = save({"model": state}, tmp_path / "step-3")
    shardkit.reshard(checkpoint, tmp_path / "out", world_size=2, dtype="bf16")
    dcp_to_torch_save(tmp_path / "out", tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt")["model"]
    for name, value in state.items():
        is_factor = ".osft_" in name
        assert found[name].dtype == (torch.float32 if is_factor else torch.bfloat16)
        assert not is_factor or raw(found[name]) == raw(value)


def test_what_preshard_recorded_is_carried_over(tmp_path: Path) -> None:
    """By an earlier version, which computed factors."""
    unpacked(tmp_path)
    one = manifest.read(str(tmp_path / "factors"))
    assert isinstance(one, manifest.Presharded)
    assert one.osft is not None
    for dtype, dense in {"keep": "float32", "bf16": "bfloat16"}.items():
        shardkit.reshard(tmp_path / "factors", tmp_path / dtype, world_size=3, dtype=dtype)
        two = manifest.read(str(tmp_path / dtype))
        assert isinstance(two, manifest.Presharded)
        assert two.osft == replace(one.osft, dense_dtype=dense)
    assert shardkit.verify(tmp_path / "keep", full=True).ok
    shardkit.consolidate(tmp_path / "keep", tmp_path / "back", base=tmp_path / "dense")
    assert not shardkit.diff(tmp_path / "keep", tmp_path / "back", as_dtype="bf16").differences
