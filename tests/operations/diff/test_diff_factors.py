"""Factors of OSFT beside dense weights, and beside other factors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardkit
from shardkit.cli.diff import render
from shardkit.errors import LayoutError
from shardkit.operations.diff import sides
from tests.operations.consolidate.checkpoints import hub, save, training_state, weights
from tests.osft.factored import K, Q, factored

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning")

TRAINED = "osft_params.S_low"


def trained(state: dict[str, torch.Tensor], name: str = f"{Q}.{TRAINED}") -> dict[str, torch.Tensor]:
    return {**state, name: state[name] * 1.01}


def test_the_model_that_they_were_made_of(tmp_path: Path) -> None:
    dense = weights(torch.bfloat16)
    checkpoint = save(training_state(factored(dense)), tmp_path / "step-3")
    result = shardkit.diff(checkpoint, hub(tmp_path / "hub", dense), as_dtype="bf16")
    assert not result.differences
    assert {tensor.status for tensor in result.tensors if tensor.name in (f"{Q}.weight", f"{K}.weight")} <= {
        "equal",
        "folded",
    }
    assert "A: folded from factors of OSFT: 2 weights" in result.notes
    assert len(result.tensors) == len(dense)


def test_in_float32_folding_misses_some_bits(tmp_path: Path) -> None:
    dense = weights()
    result = shardkit.diff(
        hub(tmp_path / "hub", dense), save({"model": factored(dense)}, tmp_path / "step-3")
    )
    assert [tensor.name for tensor in result.tensors if tensor.symbol != "="] == [
        f"{K}.weight",
        f"{Q}.weight",
    ]
    assert result.count("folded") == 2
    assert all(
        tensor.num_changed and tensor.stats is None for tensor in result.tensors if tensor.symbol == "~"
    )
    lines = render(result)
    assert "~  2 weights folded: equal within the accuracy of factors" in lines
    assert lines[-1] == "equal after folding"


def test_what_training_changed_is_a_difference(tmp_path: Path) -> None:
    dense = weights()
    checkpoint = save({"model": trained(factored(dense))}, tmp_path / "step-3")
    result = shardkit.diff(checkpoint, hub(tmp_path / "hub", dense))
    assert [tensor.name for tensor in result.differences] == [f"{Q}.weight"]


def test_consolidated_weights_are_the_factors(tmp_path: Path) -> None:
    checkpoint = save({"model": trained(factored(weights()))}, tmp_path / "step-3")
    for dtype in ("fp32", "bf16"):
        shardkit.consolidate(checkpoint, tmp_path / dtype, dtype=dtype)
        assert not shardkit.diff(checkpoint, tmp_path / dtype, as_dtype=dtype).differences


@pytest.mark.parametrize(("changed", "note"), [("osft_params.V_low", "the same"), ("osft_V_high", "differ")])
def test_factor_by_factor(changed: str, note: str, tmp_path: Path) -> None:
    """Only the trained ones may differ between two steps of a training."""
    state = factored(weights())
    one = save({"model": state}, tmp_path / "step-3")
    two = save({"model": trained(state, f"{Q}.{changed}")}, tmp_path / "step-4")
    result = shardkit.diff(one, two)
    assert [tensor.name for tensor in result.differences] == [f"{Q}.{changed}"]
    said = [line for line in result.notes if line.startswith("frozen factors")]
    assert len(said) == 1
    assert f"frozen factors {note}" in said[0].replace("are the same", "the same")
    assert (f"in 1 of 2 weights, so these are two trainings: {Q}" in said[0]) == (note == "differ")


def test_other_ranks_are_folded(tmp_path: Path) -> None:
    dense = weights()
    one = save({"model": factored(dense)}, tmp_path / "step-3")
    two = save({"model": factored(dense, (Q,))}, tmp_path / "step-4")
    result = shardkit.diff(one, two)
    assert not result.differences
    assert sum(note.endswith("weights") or note.endswith("1 weight") for note in result.notes) == 2
    assert not any("frozen" in note for note in result.notes)


def test_a_missing_factor(tmp_path: Path) -> None:
    state = factored(weights())
    del state[f"{Q}.osft_U_high"]
    checkpoint = save({"model": state}, tmp_path / "step-3")
    with pytest.raises(LayoutError, match="are incomplete"):
        shardkit.diff(checkpoint, hub(tmp_path / "hub", weights()))
    assert shardkit.diff(checkpoint, checkpoint, all_tensors=True).is_equal


def test_bands_out_of_larger_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight is folded in few passes over V, and given on in the bands of the other side."""
    dense = {f"{Q}.weight": torch.randn(96, 40), f"{K}.weight": torch.randn(40, 96)}
    checkpoint = save({"model": factored(dense)}, tmp_path / "step-3")
    monkeypatch.setattr(sides, "_FOLDED_BYTES", 3000)
    monkeypatch.setattr("shardkit.operations.diff.options._MAX_VALUES", 130)
    result = shardkit.diff(checkpoint, hub(tmp_path / "hub", dense, None))
    assert result.count("folded") == 2
