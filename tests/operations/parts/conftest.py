"""A tiny model, and what one process makes of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import shardkit
from tests.contents import contents


@pytest.fixture
def model(make_hub: Callable[..., Path]) -> Path:
    return make_hub({f"layers.{n}.weight": torch.randn(8, 6) for n in range(4)})


@pytest.fixture
def whole(model: Path, tmp_path: Path) -> dict[str, bytes]:
    """Its files for four ranks, by name."""
    out = tmp_path / "whole"
    shardkit.preshard(model, out, world_size=4, layout="declared", sha256=True)
    return contents(out)
