"""The harness of real ranks tells on which of them a body failed, and whether the one that had to die has died."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.worlds.ranks import Ranks, on_all, same_error


def make(out: Path) -> None:
    (out / "made").write_text("once")


two = Ranks(__name__, 2, first=make)


@two.test
def test_a_body_runs_on_all_ranks_and_finds_what_was_made_first(out: Path) -> None:
    assert on_all((out / "made").read_text()) == ["once", "once"]
    assert on_all(dist.get_rank()) == [0, 1]


@two.test_each({"one": 1, "two": 2})
def test_a_case_is_what_its_name_stands_for(number: int) -> None:
    assert number in (1, 2)


@two.test_killing(1)
def test_the_others_go_on_when_a_rank_is_killed() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def check_rank_0() -> None:
    assert dist.get_rank() == 0, "this is another rank"


def raise_nothing_in_common() -> None:
    same_error(lambda: None)


def live_on() -> None:
    """Nobody is killed."""


# Not tests themselves: their names begin otherwise.
fails_on_one = two.test(check_rank_0)
fails_on_all = two.test(raise_nothing_in_common)
kills_nobody = two.test_killing(1)(live_on)


@pytest.mark.dist
def test_a_failure_on_one_rank_is_one_of_the_test(tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(pytest.fail.Exception) as caught:
        fails_on_one(tmp_path_factory)
    assert str(caught.value).startswith("on ranks [1]; rank 1:\nTraceback")
    assert "AssertionError: this is another rank" in str(caught.value)


@pytest.mark.dist
def test_an_error_that_no_rank_raises_is_a_failure_on_all(tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"on ranks \[0, 1\]"):
        fails_on_all(tmp_path_factory)


@pytest.mark.dist
def test_a_rank_that_was_to_be_killed_and_lives_is_a_failure(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"on ranks \[1\]; rank 1:\nit was not killed"):
        kills_nobody(tmp_path_factory)
