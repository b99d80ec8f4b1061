"""What an earlier version pre-sharded as factors is shown, verified, compared, folded and moved like any checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import shardkit
from shardkit.files import manifest
from tests.osft.presharded import unpacked


@pytest.fixture
def there(tmp_path: Path) -> Path:
    return unpacked(tmp_path)


def test_it_is_shown_and_verified(there: Path) -> None:
    shown = shardkit.inspect(there / "factors")
    assert sum(each.count for each in shown.osft) == 7
    assert shardkit.verify(there / "factors", full=True).ok


def test_it_is_folded_to_the_weights_that_it_was_computed_of(there: Path) -> None:
    """In their bf16 nearly all are equal, and the others are neighbours."""
    result = shardkit.consolidate(there / "factors", there / "back", base=there / "dense")
    assert "folded from factors of OSFT: 7 weights" in result.notes
    found, expected = (load_file(there / each / "model.safetensors") for each in ("back", "dense"))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype is torch.bfloat16
        assert torch.allclose(found[name].float(), value.float(), rtol=2**-7, atol=0), name
    assert not shardkit.diff(there / "factors", there / "back", as_dtype="bf16").differences


def test_its_factors_are_kept_or_cut_for_another_mesh(there: Path) -> None:
    shardkit.reshard(there / "factors", there / "three", world_size=3)
    for one in ("factors", "three"):
        shardkit.consolidate(there / one, there / f"{one}-kept", keep_factors=True)
    assert shardkit.diff(there / "factors-kept", there / "three-kept").is_equal
    one, two = (manifest.read(str(there / each)) for each in ("factors", "three"))
    assert isinstance(one, manifest.Presharded)
    assert isinstance(two, manifest.Presharded)
    assert two.osft == one.osft
