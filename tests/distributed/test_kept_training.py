"""Training goes on from checkpoints that trainers keep in forms of their own, optimizer and all, once they are resharded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.distributed.kept_world import WORLDS
from tests.worlds.processes import run_script

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kept")
    run_script("distributed/kept_world.py", str(path))  # compares bits of the optimizer's state as it goes
    return path


@pytest.mark.parametrize(("form", "name"), [(form, name) for form in WORLDS for name in WORLDS[form]])
def test_losses_and_parameters_are_those_of_the_run_itself(base: Path, form: str, name: str) -> None:
    expected, found = (json.loads((base / f"{form}-{run}.json").read_text()) for run in ("two", name))
    assert len(set(expected)) == 5
    assert found == pytest.approx(expected, rel=1e-12)
    weights = torch.load(base / f"{form}-{name}.pt")
    for key, value in torch.load(base / f"{form}-two.pt").items():
        torch.testing.assert_close(weights[key], value, rtol=1e-9, atol=1e-12)
