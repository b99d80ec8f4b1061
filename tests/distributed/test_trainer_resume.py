"""Trainers resume, with their own code, from what reshard made of the checkpoints that they saved."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.worlds.processes import run_script

pytestmark = [pytest.mark.prove, pytest.mark.dist, pytest.mark.parametrize("size", [3, 1])]


def run_trainers(package: str, base: Path) -> Path:
    """Run all trainers of a package, which is not imported here: that would take seconds."""
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    run_script(f"distributed/trainers/{package}_cases.py", str(base), env={"CUDA_VISIBLE_DEVICES": ""})
    return base


@pytest.fixture(scope="module")
def lightning(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_trainers("lightning", tmp_path_factory.mktemp("lightning"))


@pytest.fixture(scope="module")
def accelerate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_trainers("accelerate", tmp_path_factory.mktemp("accelerate"))


def check(folder: Path, size: int) -> None:
    """Compare each step's loss and learning rate with those of the run itself."""
    reference, resumed = (json.loads((folder / f"{world}.json").read_text()) for world in (2, size))
    for column in zip(*reference, strict=True):
        assert len(set(column)) == 6  # another step's values would be seen
    assert [number for number, _, _ in resumed] == [3, 4, 5]
    for found, expected in zip(resumed, reference[3:], strict=True):
        assert found == pytest.approx(expected, rel=0, abs=1e-10)
    for checkpoint, ranks in ((folder, 2), (folder / str(size), size)):
        files = {path.name for path in (checkpoint / "checkpoint-3").rglob("*.distcp")}
        assert files == {f"__{rank}_0.distcp" for rank in range(ranks)}


@pytest.mark.parametrize("case", ["trainer-fsdp2", "trainer-fsdp", "fabric-fsdp2", "fabric-fsdp"])
def test_lightning(lightning: Path, case: str, size: int) -> None:
    check(lightning / case, size)


@pytest.mark.parametrize("case", ["accelerate", "transformers"])
def test_accelerate(accelerate: Path, case: str, size: int) -> None:
    check(accelerate / case, size)
