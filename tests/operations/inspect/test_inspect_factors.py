"""What inspect says of weights that are stored as factors of OSFT."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardkit
from shardkit.cli.inspect import render
from tests.operations.consolidate.checkpoints import hub, save, training_state, weights
from tests.osft.factored import K, Q, factored

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning")

BOTH = (Q, Q.replace("layers.0", "layers.1"), K)


@pytest.mark.parametrize("form", ["dcp", "hub"])
def test_targets_and_ranks(form: str, tmp_path: Path) -> None:
    state, at = factored(weights(), BOTH), tmp_path / "it"
    result = shardkit.inspect(hub(at, state) if form == "hub" else save(training_state(state), at))
    before = "" if form == "hub" else "model."
    assert {(each.path, each.count, each.shape, each.rank, each.num_directions) for each in result.osft} == {
        (before + Q.replace("layers.0", "layers.{0,1}"), 2, (16, 16), 8, 16),
        (before + K, 1, (8, 16), 4, 8),
    }
    lines = [line.strip() for line in render(result) if "frozen" in line]
    assert any(line.endswith(f"{before}{K} [8, 16]: 4 of 8 directions frozen") for line in lines)
    assert any(line.endswith("8 of 16 directions frozen x2") for line in lines)
    assert not result.warnings


def test_a_set_that_is_not_whole_is_a_warning(tmp_path: Path) -> None:
    state = factored(weights())
    del state[f"{Q}.osft_S_high"]
    result = shardkit.inspect(save({"model": state}, tmp_path / "it"))
    assert not result.osft
    assert f"model.{Q}: lacks osft_S_high" in result.warnings[0]
