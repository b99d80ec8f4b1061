"""Two ranks each read a part of an entry; together they tell whether it is what was recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.processes import run_script

NBYTES = 4 * (64 * 900 + 900 + 900 * 301 + 301)
FILES = {"one": "__0_0.distcp", "listed": "__1_0.distcp", "three": "__1_0.distcp", "flat": "flat.pt"}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank was told, by strategy, source, damage and whether it was to be compared."""
    out = tmp_path_factory.mktemp("compare")
    run_script(str(Path(__file__).with_name("compare_world.py")), str(out))
    return [json.loads((out / f"told{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("strategy", ["direct", "broadcast"])
@pytest.mark.parametrize("source", FILES)
def test_all_of_a_source_is_compared(told: list[dict[str, Any]], strategy: str, source: str) -> None:
    for rank in told:
        assert rank[f"{strategy} {source} good True"] == {"checked_bytes": NBYTES, "unchecked": []}


@pytest.mark.parametrize("strategy", ["direct", "broadcast"])
@pytest.mark.parametrize("source", FILES)
def test_damage_is_refused_on_all_ranks_and_names_rank_and_file(
    told: list[dict[str, Any]], strategy: str, source: str
) -> None:
    first, second = (rank[f"{strategy} {source} bad True"] for rank in told)
    assert first == second
    assert first["error"] == "IntegrityError"
    assert "check_source=False" in first["hint"]
    (problem,) = first["problems"]
    assert problem.startswith("ranks 0-1: " if strategy == "direct" else "rank 0: ")
    assert (
        f"1.weight: {FILES[source]}: bytes " in problem or f"and 1 more: {FILES[source]}: bytes " in problem
    )


@pytest.mark.parametrize("strategy", ["direct", "broadcast"])
@pytest.mark.parametrize("source", FILES)
def test_damage_passes_where_it_may(told: list[dict[str, Any]], strategy: str, source: str) -> None:
    for rank in told:
        assert rank[f"{strategy} {source} bad False"] == {"checked_bytes": 0, "unchecked": []}
