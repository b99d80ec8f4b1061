"""Training goes on from a resharded checkpoint as it would have gone on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.worlds.processes import run_script

WORLDS = ["one", "three", "four", "hsdp", "back"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("train")
    run_script("distributed/train_world.py", str(path))  # compares bits as it goes
    return path


@pytest.mark.parametrize("name", WORLDS)
def test_losses_and_parameters_are_those_of_the_run_itself(base: Path, name: str) -> None:
    expected, found = (json.loads((base / f"{run}.json").read_text()) for run in ("two", name))
    assert len(set(expected)) == 5
    assert found == pytest.approx(expected, rel=1e-12)
    weights = torch.load(base / f"{name}.pt")
    for key, value in torch.load(base / "two.pt").items():
        torch.testing.assert_close(weights[key], value, rtol=1e-9, atol=1e-12)


def test_there_and_back_gives_the_same_bytes(base: Path) -> None:
    names = sorted(path.name for path in (base / "straight").iterdir())
    assert names == sorted(path.name for path in (base / "back").iterdir())
    for name in names:
        if name != "shardkit.json":  # it names the source's files
            assert (base / "back" / name).read_bytes() == (base / "straight" / name).read_bytes(), name
