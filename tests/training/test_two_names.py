"""A model that is registered under two names: each of its tensors is written once, or as often as in the base."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import shardkit


class Twice(nn.Module):
    """A model that is registered under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))
        self.decoder = self.encoder


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("stored", ["encoder", "decoder", None])
def test_a_tensor_of_two_names_is_written_once(stored: str | None, tmp_path: Path) -> None:
    """Under the name that the files had which training began with, whatever has been saved and resharded since."""
    model = Twice()
    if stored is not None:
        whole = {f"{stored}.{name}": value.clone() for name, value in model.encoder.state_dict().items()}
        (tmp_path / "hub").mkdir()
        save_file(whole, tmp_path / "hub" / "model.safetensors")
        shardkit.load_into(model, tmp_path / "hub")
        shardkit.save(model, tmp_path / "first")
        model = Twice()
        shardkit.load_into(model, tmp_path / "first")
    shardkit.save(model, tmp_path / "saved")
    shardkit.reshard(tmp_path / "saved", tmp_path / "two", world_size=2)
    for name in ("saved", "two"):
        result = shardkit.consolidate(tmp_path / name, tmp_path / f"{name}-hub")
        found = load_file(tmp_path / f"{name}-hub" / "model.safetensors")
        assert found.keys() == {f"{stored or 'encoder'}.{each}" for each in model.encoder.state_dict()}
        assert len(result.ties) == 3
        assert not [warning for warning in result.warnings if "config.json" not in warning]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_both_names_are_written_if_the_base_has_both(tmp_path: Path) -> None:
    model = Twice()
    shardkit.save(model, tmp_path / "saved")
    (tmp_path / "base").mkdir()
    save_file(
        {name: value.clone() for name, value in model.state_dict().items()},
        tmp_path / "base" / "model.safetensors",
    )
    (tmp_path / "base" / "config.json").write_text("{}")
    shardkit.consolidate(tmp_path / "saved", tmp_path / "out", base=tmp_path / "base")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
