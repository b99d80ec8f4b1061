"""What the system refuses, and what others do meanwhile: an error of ours, or the right bytes; never anything between."""

from __future__ import annotations

import errno
import random
import shutil
from pathlib import Path

import pytest

from tests.torture import changes, conditions, errors, writers
from tests.torture.faults import READS
from tests.torture.harness import IS_WHOLE, Place, Scenarios, Server, check_message, content, restore

pytestmark = pytest.mark.prove

NAMES = ("preshard", "consolidate manifest", "reshard")


@pytest.mark.parametrize("kind", range(len(errors.KINDS)))
def test_a_call_fails(kind: int, found: Scenarios, server: Server, place: Path) -> None:
    draw, (do, number, of, stays) = random.Random(kind), errors.KINDS[kind]
    for mode in (errors.FRESH, errors.OVERWRITE):
        scenario = found[draw.choice(NAMES)]
        at = draw.randint(1, sum(name in of for name in scenario.calls))
        failure = errors.Failure(scenario.name, mode, do, number, of, at, stays, exchange=at % 2 == 0)
        errors.attempt(failure, scenario, server, place)


@pytest.mark.parametrize("exchange", [True, False])
def test_the_last_sync_fails(exchange: bool, found: Scenarios, server: Server, place: Path) -> None:
    """The rename may not be on the disk: the run says so, and the old one is kept until it is."""
    scenario = found["preshard"]
    here = Place(scenario, place)
    restore(here.out, scenario.old)
    calls = scenario.run(server, here.out, overwrite=True, exchange=exchange).calls
    at = calls.count("fsync") - 1  # the very last is that of removing what is left
    restore(here.out, scenario.old)
    fault = {"of": ["fsync"], "at": at, "do": "errno", "errno": errno.EIO}
    answer = scenario.run(server, here.out, overwrite=True, exchange=exchange, fault=fault)
    check_message(answer)
    assert (answer.code, IS_WHOLE in answer.err) == (errors.ENVIRONMENT, True), answer.err
    here.check_is(scenario.expected)
    (left,) = here.staging()
    assert content(left / "old") == scenario.old
    here.check_ends_well(server, overwrite=True, exchange=exchange)
    here.remove()


def test_no_sync_may_fail(found: Scenarios, server: Server, place: Path) -> None:
    scenario = found["preshard"]
    for at in range(1, sum(name == "fsync" for name in scenario.calls) - 1, 2):
        failure = errors.Failure(scenario.name, errors.FRESH, "errno", errno.EIO, ("fsync",), at)
        assert errors.attempt(failure, scenario, server, place) == "fsync"


def test_what_was_written_cannot_be_read_back(found: Scenarios, server: Server, place: Path) -> None:
    """The disk is to blame, not what is on it."""
    scenario = found["consolidate manifest"]
    at = sum(name in READS for name in scenario.calls)
    for of in (READS, (*READS, "open_fd")):
        failure = errors.Failure(scenario.name, errors.FRESH, "errno", errno.EIO, of, at)
        assert errors.attempt(failure, scenario, server, place)


@pytest.mark.parametrize("name", NAMES)
def test_the_source_changes(name: str, found: Scenarios, server: Server, place: Path) -> None:
    every = list(changes.plan(found[name]))
    for change in random.Random(name).sample(every, 3):
        changes.attempt(change, found[name], server, place)


def test_no_half_of_the_old_and_half_of_the_new(found: Scenarios, server: Server, place: Path) -> None:
    scenario = found["preshard"]
    num_reads = sum(name in READS for name in scenario.calls)
    for at in range(num_reads // 4, num_reads, num_reads // 4):
        change = changes.Change(scenario.name, "rewrite", "model.safetensors", at)
        assert changes.attempt(change, scenario, server, place)


def test_writers_into_one_destination(found: Scenarios, server: Server, place: Path) -> None:
    for one in writers.plan(["preshard two jobs", "preshard cast", "reshard"], 6, seed=1):
        writers.attempt(one, found, server, place)


def test_somebody_put_something_else_there_meanwhile(found: Scenarios, server: Server, place: Path) -> None:
    """`--overwrite` replaces an output of the same kind, and nothing that came in its place."""
    scenario, here = found["preshard"], Place(found["preshard"], place)
    at = scenario.num_calls // 2
    fault = {"at": at, "do": "change", "how": "occupy", "path": str(here.out)}
    answer = scenario.run(server, here.out, overwrite=True, fault=fault)
    check_message(answer)
    assert answer.code == 2, answer
    assert content(here.out) == {"notes.txt": b"somebody's"}
    assert len(here.staging()) == 1  # what was written is kept
    shutil.rmtree(here.out)
    assert scenario.run(server, here.out, overwrite=True).code == 0
    assert content(here.out) == scenario.expected
    assert not here.staging()
    here.remove()


def test_a_call_that_fails_once_the_output_is_there(found: Scenarios, server: Server, place: Path) -> None:
    """Nothing that comes then makes the output less whole, and an error would say that there is none."""
    scenario, of = found["preshard"], ("open_fd", "close_fd", "pread")
    swapped = [number for number, name in enumerate(scenario.calls) if name == "rename"][
        -2
    ]  # the last is of the rest
    num_before = sum(name in of for name in scenario.calls[:swapped])
    for at in range(num_before + 1, sum(name in of for name in scenario.calls) + 1):
        here = Place(scenario, place)
        answer = scenario.run(server, here.out, fault={"at": at, "do": "errno", "errno": errno.EIO, "of": of})
        assert answer.code == 0 or IS_WHOLE in answer.err, (at, answer)
        here.check_is(scenario.expected)
        here.check_ends_well(server, overwrite=False)
        here.remove()


@pytest.mark.root
def test_a_small_disk(found: Scenarios, server: Server, place: Path) -> None:
    with conditions.small_disk(place, 512 << 10) as disk:
        if disk is None:
            pytest.skip("needs root, and to mount")
        conditions.too_small(found["preshard"], server, disk)
    with conditions.small_disk(place, 16 << 20) as disk:
        assert disk is not None
        for at in (60, 110):
            assert conditions.fills_up(found["preshard"], server, disk, at)


@pytest.mark.skipif(not conditions.may_become_nobody(), reason="needs root, to become somebody else")
def test_permissions(found: Scenarios, server: Server, place: Path) -> None:
    conditions.read_only(found["preshard"], server, place)
    for at in (60, 110):
        assert conditions.permission_lost(found["preshard"], server, place, at)


def test_limits(found: Scenarios, server: Server, place: Path) -> None:
    scenario = found["preshard"]
    assert conditions.limited(scenario, server, place, "RLIMIT_FSIZE", 100 << 10) == 5
    assert conditions.limited(scenario, server, place, "RLIMIT_NOFILE", 8) == 5
    assert conditions.limited(scenario, server, place, "RLIMIT_NOFILE", 64) == 0


def test_another_file_system(found: Scenarios, server: Server, tmp_path: Path) -> None:
    """The destination's own is what counts, not the source's or the working directory's."""
    here = Place(found["preshard"], tmp_path / "here")
    here.check_ends_well(server, overwrite=False)
