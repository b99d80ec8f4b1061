"""Every rank hears of every other's trouble."""

import os
import signal
import traceback

import pytest
import torch.distributed as dist

from shardkit.errors import IntegrityError, LayoutError, ResourceError, ShardkitError, SourceError
from shardkit.training.ranks.agree import agree, agreed, gather_json, gather_masks
from tests.worlds.ranks import Ranks, same_error

four = Ranks(__name__, 4)
DAMAGED = IntegrityError("a file is damaged", problems=["a.distcp", "b.distcp"], hint="copy it again")


def only(rank: int, error: BaseException) -> BaseException | None:
    """The error, on one rank."""
    return error if dist.get_rank() == rank else None


@four.test
def test_values_of_all_ranks_in_order() -> None:
    rank = dist.get_rank()
    found = gather_json({"rank": rank, "text": "ä" * rank})
    assert found == [{"rank": rank, "text": "ä" * rank} for rank in range(4)]


@four.test
def test_masks_of_all_ranks_and_whose_order_is_another() -> None:
    rank = dist.get_rank()
    held: list[set[str]] = [set(), {"b"}, {"a", "c"}, {"b"}]
    found = gather_masks(held[rank], ["b"] if rank == 3 else ["a", "b", "c"], phase="comparing")
    if rank < 3:
        assert [mask.bits for mask in found[:3]] == ["000", "010", "101"]
    assert found[0].order == found[1].order == found[2].order != found[3].order


@four.test
def test_without_an_error_nobody_raises() -> None:
    agree(None, phase="reading")


@four.test
def test_what_a_phase_exchanges_arrives_once_all_have_ended_it_well() -> None:
    rank = dist.get_rank()
    with agreed("reading") as exchanged:
        exchanged.mine = [rank]
    assert exchanged.of_all == [[0], [1], [2], [3]]

    def fail() -> None:
        with agreed("reading") as exchanged:
            exchanged.mine = rank
            if rank == 2:
                raise DAMAGED

    assert same_error(fail)["problems"] == ["rank 2: a.distcp", "rank 2: b.distcp"]


@four.test
def test_the_error_of_one_rank_is_raised_on_all_and_names_it() -> None:
    error = same_error(lambda: agree(only(2, DAMAGED), phase="reading"))
    assert (error["error"], error["message"]) == ("IntegrityError", "a file is damaged")
    assert error["problems"] == ["rank 2: a.distcp", "rank 2: b.distcp"]
    assert error["hint"] == "copy it again"


def shown(error: BaseException | None) -> str:
    """The traceback that this rank prints if nobody catches the error of all ranks."""
    with pytest.raises(ShardkitError) as caught:
        agree(error, phase="reading")
    return "".join(traceback.format_exception(caught.value))


def chained(error: BaseException) -> BaseException:
    """The error, as it is raised while the network's own errors are handled."""
    try:
        try:
            raise OSError("no address")
        except OSError as first:
            raise ResourceError("no network") from first
    except ResourceError:
        try:
            raise error
        except type(error) as raised:
            return raised


@four.test
def test_the_lowest_rank_that_failed_shows_all_of_the_text_and_others_one_line() -> None:
    rank = dist.get_rank()
    text = shown(chained(DAMAGED) if rank in (1, 3) else None)
    assert text.count("Traceback") == 1
    last = text[text.index("shardkit.errors.IntegrityError: ") :]
    if rank == 1:
        assert last.endswith("  ranks 1, 3: a.distcp\n  ranks 1, 3: b.distcp\nhint: copy it again\n")
    else:
        assert last == "shardkit.errors.IntegrityError: a file is damaged (see rank 1)\n"


@four.test
def test_an_exception_of_other_code_is_shown_above_by_the_first_rank_that_has_it() -> None:
    rank = dist.get_rank()
    mine = [None, ZeroDivisionError("here"), ZeroDivisionError("here"), KeyError("there")][rank]
    text = shown(mine)

    def build() -> BaseException:
        try:
            raise LayoutError("the function that builds the model failed") from ZeroDivisionError("mine")
        except LayoutError as raised:
            return raised

    text_of_ours = shown(build())  # no rank fails before the last of these, for which the others wait
    above = text[: text.index("Traceback")]
    assert ("ZeroDivisionError: here\n" in above, "KeyError: 'there'\n" in above) == (rank == 1, rank == 3)
    assert ("(see rank 1)" in text) == (rank != 1)
    assert ("ZeroDivisionError: mine" in text_of_ours) == (rank == 0)


@four.test
def test_a_rank_that_shows_its_interruption_shows_nothing_else() -> None:
    rank = dist.get_rank()
    mine = [KeyboardInterrupt(), None, DAMAGED, None][rank]
    if rank == 0:
        with pytest.raises(KeyboardInterrupt):
            agree(mine, phase="reading")
    else:
        assert ("(see rank 2)" in shown(mine)) == (rank != 2)


@four.test
def test_equal_errors_are_folded() -> None:
    error = same_error(lambda: agree(DAMAGED if dist.get_rank() != 1 else None, phase="reading"))
    assert error["problems"] == ["ranks 0, 2-3: a.distcp", "ranks 0, 2-3: b.distcp"]


@four.test
def test_different_errors_have_the_class_that_they_share() -> None:
    mine = [LayoutError("names differ"), None, DAMAGED, None][dist.get_rank()]
    assert same_error(lambda: agree(mine, phase="reading"))["error"] == SourceError.__name__


@four.test
def test_errors_that_share_no_class_are_all_told() -> None:
    mine = [LayoutError("names differ"), None, DAMAGED, OSError(28, "No space left")][dist.get_rank()]
    error = same_error(lambda: agree(mine, phase="reading"))
    assert (error["error"], error["message"]) == ("ShardkitError", "3 of 4 ranks failed")
    assert error["problems"] == [
        "rank 0: names differ",
        "rank 2: a file is damaged",
        "rank 2: a.distcp",
        "rank 2: b.distcp",
        "rank 3: OSError: [Errno 28] No space left",
    ]


@four.test
def test_an_exception_that_is_not_ours_is_told_with_its_type() -> None:
    error = same_error(lambda: agree(only(3, ZeroDivisionError()), phase="reading"))
    assert error["problems"] == ["rank 3: ZeroDivisionError"]


@four.test
def test_a_rank_that_is_interrupted_raises_its_own_and_the_others_hear_of_it() -> None:
    interrupted = only(0, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt if interrupted else ShardkitError) as caught:
        agree(interrupted, phase="reading")
    if not interrupted:
        assert caught.value.problems == ("rank 0: KeyboardInterrupt",)


@four.test
def test_a_group_names_global_ranks() -> None:
    narrow = dist.new_group([1, 3])
    if dist.get_rank() in (1, 3):
        with pytest.raises(ResourceError) as caught:
            agree(only(3, ResourceError("disk full")), narrow, phase="reading")
        assert caught.value.problems == ("rank 3: disk full",)


@four.test_killing(3)
def test_a_killed_rank_ends_the_others_with_the_phase() -> None:
    if dist.get_rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(ResourceError) as caught:
        agree(None, phase="reading")
    assert caught.value.exit_code == ResourceError.exit_code
    assert caught.value.message == "another rank was lost during reading"


def test_alone_without_a_process_group() -> None:
    assert gather_json({"a": (1, 2)}) == [{"a": [1, 2]}]
    assert agree(None, phase="reading", value={1: (2,)}) == [{"1": [2]}]
    error = IntegrityError("damaged")
    with pytest.raises(IntegrityError) as caught:
        agree(error, phase="reading")
    assert caught.value is error
    with pytest.raises(ShardkitError, match="damaged"):
        agree(error, phase="reading")
