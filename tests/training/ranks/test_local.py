"""What a rank holds of a model, however it is wrapped: told by four real ranks."""

import json
from pathlib import Path

import pytest

from tests.training.local_world import SIZE, WAYS
from tests.worlds.processes import run_script

pytestmark = pytest.mark.dist
NAMES = [way.__name__ for way in WAYS]


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What went wrong on each rank, by scenario."""
    out = tmp_path_factory.mktemp("local")
    run_script("training/local_world.py", str(out))
    return [json.loads(Path(out, f"{rank}.json").read_text()) for rank in range(SIZE)]


def hold(wrong: list[dict[str, str]], scenario: str) -> None:
    assert [each[scenario] for each in wrong] == [""] * SIZE


@pytest.mark.parametrize("way", NAMES)
def test_a_region_is_what_the_rank_has(wrong: list[dict[str, str]], way: str) -> None:
    hold(wrong, f"wrapped-{way}")


@pytest.mark.parametrize("way", NAMES)
def test_a_model_on_meta_is_given_memory_and_trains(wrong: list[dict[str, str]], way: str) -> None:
    hold(wrong, f"meta-{way}")


def test_padded_memory_is_allocated_once(wrong: list[dict[str, str]]) -> None:
    hold(wrong, "padding")


def test_what_is_not_understood_is_refused(wrong: list[dict[str, str]]) -> None:
    hold(wrong, "refused")
