"""A job that is divided ends with the bytes of one process, whoever is killed, runs twice, or commits at the same time."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit.files import storage
from tests.torture.divided import SCENARIOS, attempt, check_whole, committing, good, part, parts
from tests.torture.harness import CLAIM, Answer, Place, Scenarios, Server, content, restore

pytestmark = pytest.mark.prove

NUM_ATTEMPTS = 4


@pytest.fixture
def here(found: Scenarios, place: Path, request: pytest.FixtureRequest) -> Iterator[Place]:
    made = Place(found[getattr(request, "param", "preshard two jobs")], place)
    yield made
    shutil.rmtree(made.path, ignore_errors=True)


AT_COMMIT = {"of": ["rename"], "onto": CLAIM, "at": 1, "do": "kill"}


def die_at_commit(here: Place, server: Server, *extra: str, count: int = 2) -> None:
    """Let all parts finish, and the last one be killed before it commits."""
    *others, last = parts(here.scenario, here.out, count, *extra)
    good(server.together(others))
    answer = server.together([{**last, "fault": AT_COMMIT}])[0]
    assert answer.code == -9
    (left,) = here.staging()
    assert len([*(left / "done").iterdir()]) == len(json.loads((left / "job.json").read_text())["files"])


@pytest.mark.parametrize("here", SCENARIOS, indirect=True)
def test_several_at_once_write_what_one_writes(here: Place, server: Server) -> None:
    whole = good([here.scenario.run(server, here.path / "whole")])[0]
    shutil.rmtree(here.path / "whole")
    told = good(server.together(parts(here.scenario, here.out, 3)))
    assert sum(each["part"]["num_files"] for each in told) == whole["num_files"]
    assert sum(each["part"]["written_bytes"] for each in told) == whole["written_bytes"]
    last = [each for each in told if each["checked_bytes"] or each["part"]["is_committed"]]
    assert last, "the last to finish commits"
    assert max(each["checked_bytes"] for each in last) == whole["checked_bytes"]
    check_whole(here, server)


@pytest.mark.parametrize("name", SCENARIOS)
def test_killed_and_run_again(name: str, found: Scenarios, server: Server, place: Path) -> None:
    draw = random.Random(name)
    assert sum(attempt(found[name], server, place, draw) for _ in range(NUM_ATTEMPTS)) > NUM_ATTEMPTS // 2


def test_of_two_commits_one_wins_and_the_other_says_so(here: Place, server: Server) -> None:
    die_at_commit(here, server)
    told = good(server.together([committing(here.scenario, here.out)] * 3))
    assert sorted(each["by_another"] for each in told) == [False, True, True]
    check_whole(here, server)
    again = good(server.together([committing(here.scenario, here.out)]))[0]
    assert again["by_another"]
    check_whole(here, server)


def test_a_commit_that_was_killed_is_repeated(here: Place, server: Server) -> None:
    die_at_commit(here, server)
    request = committing(here.scenario, here.out)
    (left,) = here.staging()
    kept = here.path.parent / "kept-staging"
    shutil.copytree(left, kept)
    (whole,) = server.together([request])
    try:
        for at in random.Random(0).sample(range(1, len(whole.calls)), 8):
            shutil.rmtree(here.path)
            here.path.mkdir()
            shutil.copytree(kept, left)
            assert server.together([{**request, "fault": {"at": at, "do": "kill"}}])[0].code == -9
            here.check_is(None, here.scenario.expected)
            good(server.together([request]))
            check_whole(here, server)
    finally:
        shutil.rmtree(kept)


def test_a_commit_waits_for_parts_that_begin_later(here: Place, server: Server) -> None:
    """It is started with them; the last part dies before it could commit."""
    first, last = parts(here.scenario, here.out, 2)
    dies = {**last, "fault": AT_COMMIT}
    answers = server.together([committing(here.scenario, here.out, "--wait", "60"), first, dies])
    good(answers[:2])
    check_whole(here, server)


def test_a_commit_that_is_taken_for_dead_as_it_joins(
    here: Place, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is alone removes the scratch directories of others; one of them may be about to lock the job."""
    die_at_commit(here, server)
    mkdir, removed = storage.mkdir, list[str]()

    def made_and_removed(path: str) -> None:
        mkdir(path)
        if not removed and os.path.basename(os.path.dirname(path)) == "tmp":
            os.rmdir(path)
            removed.append(path)

    monkeypatch.setattr(storage, "mkdir", made_and_removed)
    assert not shardkit.commit(here.out).by_another
    assert removed
    check_whole(here, server)


def test_what_is_missing_is_named_with_what_to_type(here: Place, server: Server) -> None:
    good(server.together(parts(here.scenario, here.out, 3)[:2]))
    answer = server.together([committing(here.scenario, here.out, "--wait", "0.1")])[0]
    assert answer.code == 4
    (problem,) = json.loads(answer.out)["problems"]
    assert problem.startswith("part 3/3: ")
    assert problem.endswith(" --part 3/3")
    assert str(here.out) in problem
    here.check_is(None)


def test_a_part_again_and_another_number_of_parts(here: Place, server: Server) -> None:
    first = good(server.together([part(here.scenario, here.out, "1/2")]))[0]
    again = good(server.together([part(here.scenario, here.out, "1/2")]))[0]
    assert again["resumed_files"] == first["part"]["num_files"] > 0
    requests = parts(here.scenario, here.out, 4, "--exist-ok")
    told = good([server.together([each])[0] for each in requests])
    by_commit = [each["part"]["is_committed"] for each in told]
    assert by_commit == sorted(by_commit), "parts that come late see that all is done"
    assert by_commit[-1]
    late = sum(each["part"]["num_files"] for each in told if each["part"]["is_committed"])
    assert (
        again["resumed_files"] <= sum(each["resumed_files"] for each in told) <= again["resumed_files"] + late
    )
    check_whole(here, server)


def test_a_twin_writes_the_same_files(here: Place, server: Server) -> None:
    twice = [*parts(here.scenario, here.out, 2), *parts(here.scenario, here.out, 2)]
    for answer in server.together(twice):
        assert answer.code == 0 or "exists" in answer.err, answer.err  # it began when all was committed
    assert [answer.code for answer in server.together(parts(here.scenario, here.out, 2))] == [2, 2]
    late = good(server.together(parts(here.scenario, here.out, 2, "--exist-ok")))
    assert all(each["part"]["is_committed"] for each in late)
    check_whole(here, server)


def test_parts_of_another_job_are_refused(here: Place, server: Server, found: Scenarios) -> None:
    good(server.together(parts(here.scenario, here.out, 2)[:1]))
    (left,) = here.staging()
    for scenario in (found["preshard cast"], found["consolidate"]):
        answer = server.together([part(scenario, here.out, "2/2")])[0]
        assert answer.code == 2
        assert "another job is under way" in answer.err
        (problem,) = json.loads(answer.out)["problems"]
        assert f"preshard {here.scenario.source}" in problem
        assert here.staging() == [left]
    good(server.together(parts(here.scenario, here.out, 2)[1:]))
    check_whole(here, server)


def test_another_source_is_another_job(here: Place, server: Server) -> None:
    good(server.together(parts(here.scenario, here.out, 2)[:1]))
    path = here.scenario.source / "model.safetensors"
    before = path.stat()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000))
    try:
        part_here = server.together(parts(here.scenario, here.out, 2)[1:])[0]
        commit_here = server.together([committing(here.scenario, here.out)])[0]
    finally:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert part_here.code == 2
    assert "another job is under way" in part_here.err
    assert commit_here.code == 4  # what is missing comes first
    die_at_commit(here, server)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000))
    try:
        commit_here = server.together([committing(here.scenario, here.out)])[0]
    finally:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert commit_here.code == 2
    assert "the plan is another one by now" in commit_here.err
    assert "1 file of the source: model.safetensors" in commit_here.err
    good(server.together([committing(here.scenario, here.out)]))
    check_whole(here, server)


@pytest.mark.parametrize("exchange", [True, False])
def test_late_parts_see_what_is_no_longer_theirs(exchange: bool, here: Place, server: Server) -> None:
    """What parts made was replaced: it is not taken for theirs, and replaced only if that is asked for."""
    good(server.together(parts(here.scenario, here.out, 2)))
    restore(here.out, here.scenario.old)
    late = parts(here.scenario, here.out, 2)[0]
    assert server.together([late])[0].code == 2
    here.check_is(here.scenario.old)
    good(server.together(parts(here.scenario, here.out, 2, "--overwrite", exchange=exchange)))
    check_whole(here, server)


@pytest.mark.parametrize("exchange", [True, False])
def test_overwrite(exchange: bool, here: Place, server: Server) -> None:
    restore(here.out, here.scenario.old)
    refused = server.together(parts(here.scenario, here.out, 2))
    assert [answer.code for answer in refused] == [2, 2]
    assert not here.staging()
    good(server.together(parts(here.scenario, here.out, 2, "--overwrite", exchange=exchange)))
    check_whole(here, server)


def test_what_is_no_checkpoint_is_not_replaced(here: Place, server: Server) -> None:
    die_at_commit(here, server)
    here.out.mkdir()
    (here.out / "notes.txt").write_text("mine")
    answer = server.together([committing(here.scenario, here.out, "--overwrite")])[0]
    assert answer.code == 2
    assert "is not a sharded checkpoint" in answer.err
    assert (here.out / "notes.txt").read_text() == "mine"
    shutil.rmtree(here.out)
    good(server.together([committing(here.scenario, here.out)]))
    check_whole(here, server)


def test_a_commit_killed_with_the_old_output_aside(here: Place, server: Server) -> None:
    restore(here.out, here.scenario.old)
    die_at_commit(here, server, "--overwrite")
    aside = {"of": ["rename"], "onto": r"/out$", "at": 1, "do": "kill"}
    request = committing(here.scenario, here.out, exchange=False, fault=aside)
    assert server.together([request])[0].code == -9
    assert not here.out.exists()
    assert good(server.together([{"args": ["abort", str(here.out), "--json"]}]))[0]["is_there"]
    here.check_is(here.scenario.expected)
    assert not here.staging()


@pytest.fixture(scope="module")
def other() -> Iterator[Server]:
    with Server() as process:
        yield process


NEW, TRASH = r"\.shardkit-new-[^/]*$", r"\.shardkit-trash-[^/]*$"
STOPS = {
    "before it is claimed": (["rename"], CLAIM),
    "before its witness": (["hard_link"], r"/witness\.new$"),
    "before it is exchanged": (["renameat2"], r"/out 2$"),
    "before the old one is in its place": (["rename"], r"/old$"),
    "with the old one aside": (["rename"], r"/out$"),
    "before the rest is removed": (["rename"], TRASH),
}


@contextlib.contextmanager
def stopped(
    here: Place, other: Server, request: dict[str, Any], where: tuple[list[str], str], at: int = 1
) -> Iterator[Callable[[], Answer]]:
    """Stop a run before one of its renames; it goes on afterwards, or when its answer is asked for."""
    stop = here.path.parent / f"stop{id(request)}"
    fault = {"of": where[0], "onto": where[1], "at": at, "do": "wait", "path": str(stop)}
    with ThreadPoolExecutor(1) as thread:
        slow = thread.submit(other.together, [{**request, "fault": fault}])
        while not stop.exists():
            assert not slow.done(), slow.result()
            time.sleep(0.01)

        def answer() -> Answer:
            stop.unlink(missing_ok=True)
            return slow.result()[0]

        try:
            yield answer
        finally:
            answer()


def stopped_commit(
    here: Place, other: Server, stop: str, *, exchange: bool
) -> contextlib.AbstractContextManager[Callable[[], Answer]]:
    """Stop a commit that replaces an output, where no lock lets others wait for it."""
    request = committing(here.scenario, here.out, "--overwrite", exchange=exchange, locks=False)
    return stopped(here, other, request, STOPS[stop])


@pytest.fixture
def finished(here: Place, server: Server) -> Iterator[Path]:
    """All parts have finished, nobody has committed, and there is an old output; yields a copy of their directory."""
    restore(here.out, here.scenario.old)
    die_at_commit(here, server, "--overwrite")
    (left,) = here.staging()
    kept = here.path.parent / "kept-staging"
    shutil.copytree(left, kept)
    yield kept
    shutil.rmtree(kept)


def begin_again(here: Place, kept: Path) -> None:
    for path in here.staging():
        shutil.rmtree(path)
    restore(here.out, here.scenario.old)
    shutil.copytree(kept, here.path / ".out.shardkit")


BY_WAY = [
    (stop, exchange)
    for exchange in (True, False)
    for stop in STOPS
    if exchange or stop != "before it is exchanged"
    if not exchange or stop != "with the old one aside"
]


def is_made(stop: str, *, exchange: bool) -> bool:
    """True if a commit that stopped there is ended, not given up: the old output has lost its name."""
    return stop in ("with the old one aside", "before the rest is removed") or (
        exchange and stop == "before the old one is in its place"
    )


@pytest.mark.parametrize(("stop", "exchange"), BY_WAY)
def test_a_slow_commit_does_not_take_away_what_a_faster_one_has_made(
    here: Place, server: Server, other: Server, finished: Path, stop: str, exchange: bool
) -> None:
    """The faster one, maybe of a host that can exchange, is killed before it removes what it has replaced."""
    for faster in (True, False):
        begin_again(here, finished)
        request = part(here.scenario, here.out, "2/2", "--overwrite", exchange=faster, locks=False)
        fault = {"of": ["rename"], "onto": TRASH, "at": 1, "do": "kill"}
        with stopped_commit(here, other, stop, exchange=exchange) as slow:
            assert server.together([{**request, "fault": fault}])[0].code == -9
            here.check_is(here.scenario.expected)
            good([slow()])
        here.check_is(here.scenario.expected)
    check_whole(here, server)


@pytest.mark.parametrize(("stop", "exchange"), [way for way in BY_WAY if way[0] != "before it is claimed"])
def test_a_slow_commit_leaves_alone_what_others_have_begun_since(
    here: Place, server: Server, other: Server, finished: Path, stop: str, exchange: bool
) -> None:
    """All was committed and removed, and a part has begun anew: its data is no output."""
    again = part(here.scenario, here.out, "1/1", "--overwrite", exchange=exchange)
    with stopped_commit(here, other, stop, exchange=exchange) as slow:
        for _ in range(2):
            good(server.together([committing(here.scenario, here.out, exchange=exchange, locks=False)]))
        assert not here.staging()
        assert server.together([{**again, "fault": {"at": 100, "do": "kill"}}])[0].code == -9
        (begun,) = here.staging()
        there = content(begun)
        good([slow()])
    here.check_is(here.scenario.expected)
    assert here.staging() == [begun]
    assert content(begun) == there
    good(server.together([again]))
    check_whole(here, server)


@pytest.mark.parametrize(("stop", "exchange"), BY_WAY)
def test_a_slow_commit_beside_abort(
    here: Place, server: Server, other: Server, finished: Path, stop: str, exchange: bool
) -> None:
    abort, is_new = (
        {"args": ["abort", str(here.out), "--json"], "locks": False},
        is_made(stop, exchange=exchange),
    )
    with stopped_commit(here, other, stop, exchange=exchange) as slow:
        good(server.together([abort]))
        here.check_is(here.scenario.expected if is_new else here.scenario.old)
        assert not here.staging()
        assert slow().code == (0 if is_new else 4)
    here.check_is(here.scenario.expected if is_new else here.scenario.old)
    assert not here.staging()


@pytest.mark.parametrize(("stop", "exchange"), [way for way in BY_WAY if way[0] != "before it is claimed"])
def test_a_slow_abort_beside_a_commit(
    here: Place, server: Server, other: Server, finished: Path, stop: str, exchange: bool
) -> None:
    """The job was committed after abort had looked for it."""
    abort = {"args": ["abort", str(here.out), "--json"], "locks": False}
    is_new = is_made(stop, exchange=exchange)
    with stopped(here, other, abort, (["rename"], TRASH)) as slow:
        with stopped_commit(here, server, stop, exchange=exchange) as commits:
            good([slow()])
            here.check_is(here.scenario.expected if is_new else here.scenario.old)
            assert commits().code == (0 if is_new else 4)
    here.check_is(here.scenario.expected if is_new else here.scenario.old)
    assert not here.staging()


def test_who_cleans_up_late_leaves_alone_what_others_have_begun_since(
    here: Place, server: Server, other: Server, finished: Path
) -> None:
    request = committing(here.scenario, here.out, "--overwrite", locks=False)
    with stopped(here, other, request, (["rename"], TRASH)) as slow:
        here.check_is(here.scenario.expected)
        good(server.together([{"args": ["abort", str(here.out), "--json"], "locks": False}]))
        assert not here.staging()
        again = part(here.scenario, here.out, "1/1", "--overwrite")
        assert server.together([{**again, "fault": {"at": 100, "do": "kill"}}])[0].code == -9
        (begun,) = here.staging()
        there = content(begun)
        good([slow()])
    assert here.staging() == [begun]
    assert content(begun) == there
    good(server.together([again]))
    check_whole(here, server)


def test_a_part_that_is_late_begins_nothing(here: Place, server: Server, other: Server) -> None:
    late = part(here.scenario, here.out, "1/2")
    with stopped(here, other, late, (["mkdir"], NEW)) as slow:
        good([server.together([part(here.scenario, here.out, f"{k}/2")])[0] for k in (1, 2)])
        here.check_is(here.scenario.expected)
        answer = slow()
    assert answer.code == 2
    assert "exists" in answer.err
    check_whole(here, server)


def test_processes_at_work_end_when_their_job_is_aborted(here: Place, server: Server, other: Server) -> None:
    with stopped(
        here, other, part(here.scenario, here.out, "1/1"), (["rename"], r"/done/\d+\.json$")
    ) as slow:
        good(server.together([{"args": ["abort", str(here.out), "--json"]}]))
        assert not here.staging()
        answer = slow()
    assert (answer.code, "the job was aborted by another process" in answer.err) == (4, True), answer.err
    here.check_is(None)
    assert not here.staging()


def test_an_interrupted_part_is_resumed(here: Place, server: Server) -> None:
    request = part(here.scenario, here.out, "1/1")
    whole = server.together([request])[0]
    shutil.rmtree(here.out)
    at = len(whole.calls) * 2 // 5
    answer = server.together([{**request, "fault": {"at": at, "do": "signal", "signum": 2}}])[0]
    assert answer.code == 130
    assert json.loads(answer.out)["resume_command"].endswith("--part 1/1 --json --no-progress")
    (left,) = here.staging()
    assert not list((left / "tmp").iterdir())
    here.check_is(None)
    assert good(server.together([request]))[0]["resumed_files"] > 0
    check_whole(here, server)


def test_status_and_giving_up(here: Place, server: Server) -> None:
    number = good(server.together(parts(here.scenario, here.out, 2)[:1]))[0]["part"]["num_files"]
    asked = {"args": ["status", str(here.out), "--json"]}
    (job,) = good(server.together([asked]))[0]["jobs"]
    assert (job["num_files"], job["finished_files"], job["num_parts"]) == (5, number, 2)
    assert [each[:2] for each in job["missing"]] == [["2/2", 5 - number]]
    text = server.together([{"args": ["status", str(here.out)]}])[0].out
    assert f"{number} of 5 files" in text
    assert f"part 2/2: {5 - number} file" in text
    assert good(server.together([{"args": ["abort", str(here.out), "--json"]}]))[0]["aborted"]
    assert not here.staging()
    assert server.together([committing(here.scenario, here.out)])[0].code == 2


def test_a_damaged_source_is_refused_and_nothing_vouches_for_it(
    found: Scenarios, place: Path, server: Server
) -> None:
    here = Place(found["reshard two jobs"], place)
    shard = next(here.scenario.source.rglob("*.distcp"))
    good_bytes, stamp = shard.read_bytes(), shard.stat()
    at = len(good_bytes) // 2
    shard.write_bytes(good_bytes[:at] + bytes([good_bytes[at] ^ 1]) + good_bytes[at + 1 :])
    os.utime(shard, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    try:
        codes = [server.together([each])[0].code for each in parts(here.scenario, here.out, 3)]
    finally:
        shard.write_bytes(good_bytes)
        os.utime(shard, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert 3 in codes
    here.check_is(None)
    good(server.together([each])[0] for each in parts(here.scenario, here.out, 3, "--exist-ok"))
    here.check_is(here.scenario.expected)
    here.remove()
