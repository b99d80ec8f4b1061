"""Factors of OSFT: sets that are not whole, shapes that do not fit, frozen directions that are not orthonormal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardkit
from shardkit.formats.registry import open_checkpoint
from shardkit.operations.verify.orthonormality import distance
from shardkit.transfer.sources import SourceFiles
from tests.operations.consolidate.checkpoints import save, training_state, weights
from tests.osft.factored import K, Q, factored

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning")


def test_whole_sets(tmp_path: Path) -> None:
    checkpoint = save(training_state(factored(weights())), tmp_path / "step-3")
    assert shardkit.verify(checkpoint).ok
    result = shardkit.verify(checkpoint, full=True)
    assert result.ok
    assert any(
        note.startswith("frozen directions of 2 weights are orthonormal within") for note in result.notes
    )


def test_what_is_missing_or_does_not_fit(tmp_path: Path) -> None:
    state = factored(weights())
    del state[f"{Q}.osft_S_high"]
    result = shardkit.verify(save({"model": state}, tmp_path / "step-3"))
    assert [problem.details for problem in result.problems] == [(f"model.{Q}: lacks osft_S_high",)]
    state = factored(weights())
    state[f"{K}.osft_S_high"] = torch.ones(3)
    result = shardkit.verify(save({"model": state}, tmp_path / "step-4"))
    assert "do not match" in result.problems[0].message


@pytest.mark.parametrize("name", ["osft_U_high", "osft_V_high"])
def test_directions_that_are_not_orthonormal(name: str, tmp_path: Path) -> None:
    state = factored(weights())
    changed = state[f"{Q}.{name}"].clone()
    changed[1, 2] += 0.01
    checkpoint = save({"model": {**state, f"{Q}.{name}": changed}}, tmp_path / "step-3")
    assert shardkit.verify(checkpoint).ok
    result = shardkit.verify(checkpoint, full=True)
    assert [problem.tensor for problem in result.problems] == [f"model.{Q}.{name}"]
    assert "not orthonormal" in result.problems[0].message


def test_half_precision_is_expected_to_be_off(tmp_path: Path) -> None:
    state = {name: value.bfloat16() for name, value in factored(weights()).items()}
    assert shardkit.verify(save({"model": state}, tmp_path / "step-3"), full=True).ok


@pytest.mark.parametrize("is_v", [False, True])
def test_the_distance(is_v: bool, tmp_path: Path) -> None:
    """Told from random vectors, in bands: near to what the whole product says."""
    torch.manual_seed(0)
    columns = torch.linalg.qr(torch.randn(500, 60).double())[0] + 1e-3 * torch.randn(500, 60)
    products = columns.T @ columns - torch.eye(60)
    expected = float((products**2).mean(dim=1).max().sqrt())
    name = "a.osft_V_high" if is_v else "a.osft_U_high"
    stored = (columns.T if is_v else columns).float().contiguous()
    catalog = open_checkpoint(str(save({name: stored}, tmp_path / "it"))).select([name])
    with SourceFiles(catalog.files) as files, files.reader() as reader:
        assert distance(catalog, name, reader) == pytest.approx(expected, rel=0.6)
