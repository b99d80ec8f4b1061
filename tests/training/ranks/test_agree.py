"""Every rank hears of every other's trouble."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardkit.errors import IntegrityError, ResourceError, ShardkitError
from shardkit.training.ranks.agree import agree, gather_json
from tests.worlds.processes import run_script

Told = list[dict[str, Any]]
PROBLEMS = ["a.distcp", "b.distcp"]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    out = tmp_path_factory.mktemp("agree")
    run_script("training/agree_world.py", str(out))
    return [json.loads(Path(out, f"{rank}.json").read_text()) for rank in range(3)]


def same(told: Told, scenario: str) -> dict[str, Any]:
    """What all ranks heard."""
    assert all(each[scenario] == told[0][scenario] for each in told)
    return told[0][scenario]


@pytest.mark.dist
def test_values_of_all_ranks_in_order(told: Told) -> None:
    assert same(told, "values") == [{"rank": rank, "text": "ä" * rank} for rank in range(4)]


@pytest.mark.dist
def test_without_an_error_nobody_raises(told: Told) -> None:
    assert same(told, "nobody") == {}


@pytest.mark.dist
def test_the_error_of_one_rank_is_raised_on_all_and_names_it(told: Told) -> None:
    error = same(told, "one")
    assert (error["error"], error["message"]) == ("IntegrityError", "a file is damaged")
    assert error["problems"] == [f"rank 2: {problem}" for problem in PROBLEMS]
    assert error["hint"] == "copy it again"


@pytest.mark.dist
def test_equal_errors_are_folded(told: Told) -> None:
    assert same(told, "same")["problems"] == [f"ranks 0, 2-3: {problem}" for problem in PROBLEMS]


@pytest.mark.dist
def test_different_errors_have_the_class_that_they_share(told: Told) -> None:
    assert same(told, "sources")["error"] == "SourceError"
    error = same(told, "kinds")
    assert (error["error"], error["message"]) == ("ShardkitError", "3 of 4 ranks failed")
    assert error["problems"] == [
        "rank 0: names differ",
        "rank 2: a file is damaged",
        *(f"rank 2: {problem}" for problem in PROBLEMS),
        "rank 3: OSError: [Errno 28] No space left",
    ]


@pytest.mark.dist
def test_an_exception_that_is_not_ours_is_told_with_its_type(told: Told) -> None:
    assert same(told, "bug")["problems"] == ["rank 3: ZeroDivisionError"]


@pytest.mark.dist
def test_a_rank_that_is_interrupted_raises_its_own_and_the_others_hear_of_it(told: Told) -> None:
    assert told[0]["stopped"] == {"error": "KeyboardInterrupt"}
    assert told[1]["stopped"]["problems"] == ["rank 0: KeyboardInterrupt"] == told[2]["stopped"]["problems"]


@pytest.mark.dist
def test_a_group_names_global_ranks(told: Told) -> None:
    assert told[1]["group"]["problems"] == ["rank 3: disk full"]
    assert told[1]["group"]["error"] == "ResourceError"


@pytest.mark.dist
def test_a_killed_rank_ends_the_others_with_the_phase(told: Told) -> None:
    for each in told:
        assert each["killed"]["exit_code"] == ResourceError.exit_code
        assert each["killed"]["message"] == "another rank was lost during reading"


def test_alone_without_a_process_group() -> None:
    assert gather_json({"a": (1, 2)}) == [{"a": [1, 2]}]
    agree(None)
    error = IntegrityError("damaged")
    with pytest.raises(IntegrityError) as caught:
        agree(error)
    assert caught.value is error
    with pytest.raises(ShardkitError, match="damaged"):
        agree(error)
