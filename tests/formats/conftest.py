"""State dicts of a tiny model, saved as trainers save them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def save_dcp() -> Callable[[Mapping[str, Any], Path], Path]:
    """Return a function that saves a state dict with stock `dcp.save` from this process alone."""
    from tests.formats.dcp.samples import save

    return lambda state, directory: Path(save(dict(state), directory))


@pytest.fixture
def weights() -> dict[str, Any]:
    """A flat state dict with a Hub model's names."""
    import torch

    names = ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight")
    return {name: torch.arange(12.0).reshape(4, 3) + n for n, name in enumerate(names)}


@pytest.fixture
def adam(weights: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict for those weights."""
    state = {name: {"exp_avg": tensor + 1, "step": tensor[0, 0]} for name, tensor in weights.items()}
    return {"state": state, "param_groups": [{"lr": 0.1, "params": list(weights)}]}


@pytest.fixture(scope="session")
def rank_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with what `rank_world` saves; tests copy from it."""
    out = tmp_path_factory.mktemp("rank-files")
    script = Path(__file__).with_name("rank_world.py")
    path = os.pathsep.join([str(script.parents[2]), *filter(None, sys.path)])
    subprocess.run(
        [sys.executable, str(script), str(out)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=600,
    )
    return out
