"""Two ranks each read a part of an entry; together they tell whether it is what was recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.worlds.processes import run_script

NBYTES = 4 * (64 * 900 + 900 + 900 * 301 + 301)
FILES = {
    "one": "__0_0.distcp",
    "listed": "__1_0.distcp",
    "three": "__1_0.distcp",
    "flat": "flat.pt",
    "hub": "model.safetensors",
}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("compare")
    run_script(str(Path(__file__).parents[1] / "compare_world.py"), str(directory))
    return directory


@pytest.fixture(scope="module")
def told(out: Path) -> list[dict[str, Any]]:
    """What each of two ranks was told, by strategy, source, damage and whether it was to be compared."""
    return [json.loads((out / f"told{rank}of2.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def told_of_four(out: Path) -> list[dict[str, Any]]:
    """What each of four ranks was told, by way of wrapping, strategy, source and damage."""
    return [json.loads((out / f"told{rank}of4.json").read_text()) for rank in range(4)]


@pytest.mark.parametrize("strategy", ["direct", "broadcast"])
@pytest.mark.parametrize("source", FILES)
def test_all_of_a_source_is_compared(told: list[dict[str, Any]], strategy: str, source: str) -> None:
    for rank in told:
        assert rank[f"{strategy} {source} good True"] == {
            "checked_bytes": NBYTES,
            "unchecked": [],
        }


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
    names = "and 1 more" if source == "flat" else "1.weight"
    assert f"{names}: {FILES[source]}: bytes " in problem


@pytest.mark.parametrize("strategy", ["direct", "broadcast"])
@pytest.mark.parametrize("source", FILES)
def test_damage_passes_where_it_may(told: list[dict[str, Any]], strategy: str, source: str) -> None:
    for rank in told:
        assert rank[f"{strategy} {source} bad False"] == {"checked_bytes": 0, "unchecked": []}


@pytest.mark.parametrize("source", ["one", "hub"])
def test_load_into_refuses_damage_too(told: list[dict[str, Any]], source: str) -> None:
    for rank in told:
        assert rank[f"load_into {source} good True"] is None
        assert rank[f"load_into {source} bad False"] is None
        refused = rank[f"load_into {source} bad True"]
        assert refused["error"] == "IntegrityError"
        (problem,) = refused["problems"]
        assert problem.startswith("ranks 0-1: 1.weight: ")
        assert f"{FILES[source]}: bytes " in problem


def test_columns_of_a_ranks_own_copy_are_compared(told: list[dict[str, Any]]) -> None:
    """Ranks that hold columns read overlapping spans, or a run for each row: what one read proves nothing of another's."""
    first, second = (rank["copies"] for rank in told)
    assert first == second
    assert len(first) == 20
    for key, answer in first.items():
        assert answer == (True if key.endswith("None") else "IntegrityError"), key


@pytest.mark.parametrize("way", ["hsdp", "fsdp x tp"])
@pytest.mark.parametrize("strategy", ["direct", "broadcast"])
@pytest.mark.parametrize("source", ["one", "three", "listed", "hub"])
def test_replicas_and_parts_along_both_dims_count_once(
    told_of_four: list[dict[str, Any]], way: str, strategy: str, source: str
) -> None:
    for rank in told_of_four:
        assert rank[f"{way} {strategy} {source} good"] == {"checked_bytes": NBYTES, "unchecked": []}
    first, *others = (rank[f"{way} {strategy} {source} bad"] for rank in told_of_four)
    assert all(other == first for other in others)
    assert first["error"] == "IntegrityError"
    (problem,) = first["problems"]
    assert f"1.weight: {FILES[source]}: bytes " in problem
