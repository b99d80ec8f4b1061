"""Models started in three phases by real ranks are the ones that transformers loads; and what goes wrong is told to all."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.training.finalize_world import SCENARIOS
from tests.training.finalize_world_failures import KILLS
from tests.training.finalize_world_failures import SIZE as NUM_FAILING
from tests.worlds.processes import run_script

pytestmark = pytest.mark.dist
Told = dict[str, dict[str, Any]]
EVERY = [(size, scenario.name) for size, scenarios in SCENARIOS.items() for scenario in scenarios]


def run_world(script: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp(script)
    run_script(f"training/{script}.py", str(out))
    return out


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Told]]:
    """What each rank found, by world size."""
    out = run_world("finalize_world", tmp_path_factory)
    return {
        size: [json.loads((out / f"{size}-{rank}.json").read_text()) for rank in range(size)]
        for size in SCENARIOS
    }


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_world("finalize_world_failures", tmp_path_factory)


NOT_COMPARED = "weights: not compared: 6 tensors or storages, 9.0 MiB: no CRC-32 is recorded"


def told(failed: Path, scenario: str) -> list[dict[str, Any]]:
    """What each rank was told; none had waited for another in vain."""
    every = [json.loads((failed / f"failures-{rank}.json").read_text()) for rank in range(NUM_FAILING)]
    assert "imed out" not in json.dumps([each[scenario] for each in every])
    return [each[scenario] for each in every]


def error(failed: Path, scenario: str) -> dict[str, Any]:
    """The error that all ranks were told."""
    every = told(failed, scenario)
    assert (
        len({json.dumps([each["error"], each.get("message"), each.get("problems")]) for each in every}) == 1
    )
    assert every[0]["error"] is not None
    return every[0]


@pytest.mark.parametrize(("size", "name"), EVERY, ids=[f"{size}-{name}" for size, name in EVERY])
def test_a_started_model_is_the_classic_one(started: dict[int, list[Told]], size: int, name: str) -> None:
    assert [each[name]["wrong"] for each in started[size]] == [""] * size


def test_what_the_source_lacks_is_the_same_in_any_world(started: dict[int, list[Told]]) -> None:
    alone = started[1][0]["initialised"]
    assert alone["wrong"] == ""
    assert alone["values"]["grown"]["model.embed_tokens.weight"][0][0] > 101
    for size in (2, 4):
        for each in started[size]:
            assert each["initialised"] == alone


@pytest.mark.parametrize("strategy", ["direct", "broadcast"])
def test_load_into_fills_what_anybody_wrapped(started: dict[int, list[Told]], strategy: str) -> None:
    assert [each[f"load_into-{strategy}"]["wrong"] for each in started[2]] == ["", ""]


@pytest.mark.parametrize("scenario", ["hidden-auto", "hidden-source-auto"])
def test_a_rank_without_the_source_is_sent_its_part(failed: Path, scenario: str) -> None:
    every = told(failed, scenario)
    assert [each["error"] for each in every] == [None] * NUM_FAILING
    rank = 1 if scenario == "hidden-auto" else 0
    line = f"weights: broadcast, not direct: rank {rank}: "
    assert [len(each["log"]) for each in every] == [2, 0, 0]
    assert every[0]["log"][0].startswith(line)
    assert every[0]["log"][0].endswith("nowhere: no such path, and not a repo id either")
    assert every[0]["log"][1] == NOT_COMPARED


def test_direct_without_the_source_on_one_rank(failed: Path) -> None:
    found = error(failed, "hidden-direct")
    assert found["error"] == "SourceError"
    assert found["message"] == "1 of 3 ranks cannot read the source by themselves"
    assert found["problems"][0].startswith("rank 1: ")
    assert "broadcast" in found["hint"]


def test_the_strategy_is_logged_once(failed: Path) -> None:
    logs = [each["log"] for each in told(failed, "random-buffer")]
    assert logs == [["weights: direct: all 3 ranks see the same weights", NOT_COMPARED], [], []]


@pytest.mark.parametrize(("scenario", "rank"), [("truncated-direct", 1), ("truncated-broadcast", 0)])
def test_a_file_that_was_cut_short(failed: Path, scenario: str, rank: int) -> None:
    found = error(failed, scenario)
    assert found["error"] == "IntegrityError"
    assert found["problems"] == [f"rank {rank}: model.safetensors"]


def test_a_source_that_fails_in_the_middle_keeps_nobody_waiting(failed: Path) -> None:
    found = error(failed, "unreadable")
    assert found["error"] == "ResourceError"
    assert found["problems"] == ["rank 0: OSError: [Errno 5] Input/output error"]


def test_ranks_that_see_other_weights(failed: Path) -> None:
    assert error(failed, "other-direct")["problems"] == ["rank 2: other weights than rank 0"]
    every = told(failed, "other-auto")
    assert [each["error"] for each in every] == [None] * NUM_FAILING
    line = "weights: broadcast, not direct: rank 2: other weights than rank 0"
    assert every[0]["log"] == [line, NOT_COMPARED]


def test_a_buffer_that_a_wrapper_made_persistent(failed: Path) -> None:
    assert error(failed, "persistent")["problems"] == ["ranks 0-2: angles: not in the source"]


def test_a_tie_that_a_wrapper_broke_is_mended(failed: Path) -> None:
    assert [each["error"] for each in told(failed, "untied")] == [None] * NUM_FAILING


def test_a_tie_across_units_is_refused_before_anything_is_read(failed: Path) -> None:
    found = error(failed, "apart")
    assert found["error"] == "LayoutError"
    assert found["problems"] == ["ranks 0-2: head.weight and embed.weight"]


def test_an_attribute_on_meta_on_one_rank_is_refused_on_all(failed: Path) -> None:
    found = error(failed, "attribute")
    assert found["error"] == "IntegrityError"
    assert found["problems"] == ["rank 1: blocks.0.extra: tensor attribute still on meta"]


def test_a_model_that_does_not_fit_is_told_every_difference(failed: Path) -> None:
    found = error(failed, "misfit")
    assert found["error"] == "LayoutError"
    lines = "\n".join(found["problems"])
    for line in (
        "missing: blocks.1.gain [3]",
        "unexpected: embed.weight [30, 8]",
        "dtype: large: int32 in the model, float32 in the source",
        "shape: blocks.0.weight: [9, 8] in the model, [8, 8] in the source",
    ):
        assert f"ranks 0-2: {line}" in lines


def test_load_into_refuses_buffers_that_nobody_computes(failed: Path) -> None:
    lines = "\n".join(error(failed, "buffers")["problems"])
    assert "angles: a buffer that is in no checkpoint" in lines
    assert "plain: a tensor attribute" in lines


def test_buffers_that_differ_between_ranks_become_those_of_rank_0(failed: Path) -> None:
    values = {each["value"] for each in told(failed, "random-buffer")}
    assert len(values) == 1


def test_an_unknown_strategy(failed: Path) -> None:
    assert error(failed, "option")["error"] == "UsageError"


@pytest.mark.parametrize("name", list(KILLS))
def test_a_killed_rank_ends_the_others(failed: Path, name: str) -> None:
    victim = KILLS[name][1]
    assert not os.path.exists(failed / f"{name}-{victim}.json")
    for rank in {0, 1, 2} - {victim}:
        found = json.loads((failed / f"{name}-{rank}.json").read_text())
        assert found["exit_code"] == 5
        assert found["message"].startswith("another rank was lost during ")
        assert "imed out" not in json.dumps(found)  # it heard of it when the connection ended
