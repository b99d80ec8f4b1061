"""Parameters that no FSDP unit can have train as they do in one process: numbers, and what is of another dtype."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import shardkit
from tests.training.conftest import World, run_world
from tests.training.outside_world import CASES, OUTSIDE

pytestmark = pytest.mark.dist
NAMES = [" ".join(map(str, case)) for case in CASES]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return run_world("outside_world.py", tmp_path_factory.mktemp("outside"))


@pytest.mark.parametrize("name", NAMES)
def test_gradients_and_weights_are_those_of_one_process(world: World, name: str) -> None:
    ranks = world.found("outside")
    assert len(ranks) == 4
    for each in ranks:
        assert each[name]["outside"] == OUTSIDE
        assert each[name]["gradients"] < 1e-5
        assert each[name]["weights"] < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_what_was_trained_is_saved_and_consolidated(world: World, name: str, tmp_path: Path) -> None:
    saved = world.out / f"saved-{name.replace(' ', '-')}"
    shardkit.consolidate(saved, str(tmp_path / "out"), base=str(world.out / "model"))
    found, expected = load_file(tmp_path / "out/model.safetensors"), torch.load(world.out / "weights.pt")
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype
        assert found[key].shape == value.shape
        assert float((found[key] - value).abs().max()) < 1e-5
