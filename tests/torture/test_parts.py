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

from tests.torture.divided import SCENARIOS, attempt, check_whole, committing, good, part, parts
from tests.torture.harness import Answer, Place, Scenarios, Server, content, restore

pytestmark = pytest.mark.prove

NUM_ATTEMPTS = 4


@pytest.fixture
def here(found: Scenarios, place: Path, request: pytest.FixtureRequest) -> Iterator[Place]:
    made = Place(found[getattr(request, "param", "preshard two jobs")], place)
    yield made
    shutil.rmtree(made.path, ignore_errors=True)


def die_at_commit(here: Place, server: Server, *extra: str, count: int = 2) -> None:
    """Let all parts finish, and the last one be killed before it commits."""
    *others, last = parts(here.scenario, here.out, count, *extra)
    good(server.together(others))
    answer = server.together([{**last, "fault": {"of": ["hard_link"], "at": 1, "do": "kill"}}])[0]
    assert answer.code == -9
    (left,) = here.staging()
    assert (
        len(list((left / "done").iterdir()))
        == json.loads((left / "plan.json").read_text())["files"].__len__()
    )


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
    dies = {**last, "fault": {"of": ["hard_link"], "at": 1, "do": "kill"}}
    answers = server.together([committing(here.scenario, here.out, "--wait", "60"), first, dies])
    good(answers[:2])
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
    told = good([server.together([each])[0] for each in parts(here.scenario, here.out, 4)])
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
    answers = server.together(twice)
    good(answers)
    late = good(server.together(parts(here.scenario, here.out, 2)))
    assert all(each["part"]["is_committed"] for each in late)
    check_whole(here, server)


def test_parts_of_another_plan_are_refused(here: Place, server: Server, found: Scenarios) -> None:
    good(server.together(parts(here.scenario, here.out, 2)[:1]))
    (left,) = here.staging()
    for scenario, said in (
        (found["preshard cast"], "dtype: 'keep' there, 'fp16' here"),
        (found["consolidate"], "preshard there, consolidate here"),
    ):
        answer = server.together([part(scenario, here.out, "2/2")])[0]
        assert answer.code == 2
        assert "parts of another plan are under way" in answer.err
        assert said in json.dumps(json.loads(answer.out)["problems"])
        assert here.staging() == [left]
    good(server.together(parts(here.scenario, here.out, 2)[1:]))
    check_whole(here, server)


def test_another_source_is_another_plan(here: Place, server: Server) -> None:
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
    assert "1 file of the source: model.safetensors" in part_here.err
    assert commit_here.code == 4  # what is missing comes first
    die_at_commit(here, server)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000))
    try:
        commit_here = server.together([committing(here.scenario, here.out)])[0]
    finally:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert commit_here.code == 2
    assert "the plan is another one by now" in commit_here.err
    good(server.together([committing(here.scenario, here.out)]))
    check_whole(here, server)


def test_an_ordinary_run_beside_leaves_the_parts_alone(here: Place, server: Server) -> None:
    die_at_commit(here, server)
    (left,) = here.staging()
    ordinary = here.scenario.run(server, here.out, extra=["--dtype", "fp16"])
    assert good([ordinary])[0]["resumed_files"] == 0
    assert here.staging() == [left]
    mark = here.out.stat().st_ino
    for request in (committing(here.scenario, here.out), *parts(here.scenario, here.out, 2)):
        answer = server.together([request])[0]
        assert answer.code == 2
        assert "exists" in answer.err
        assert here.out.stat().st_ino == mark
    told = good(server.together([committing(here.scenario, here.out, "--overwrite")]))[0]
    assert not told["by_another"]
    assert here.out.stat().st_ino != mark
    check_whole(here, server)


@pytest.mark.parametrize("here", ["preshard two jobs", "consolidate", "reshard two jobs"], indirect=True)
def test_a_commit_after_an_ordinary_run_of_the_same_plan(here: Place, server: Server) -> None:
    die_at_commit(here, server)
    good([here.scenario.run(server, here.out)])
    mark = here.out.stat().st_ino
    (answer,) = server.together([committing(here.scenario, here.out)])
    assert (answer.code, "exists" in answer.err) == (2, True)
    assert server(["abort", str(here.out), "--json"]).code == 0
    assert here.out.stat().st_ino == mark
    assert not here.staging()
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
    request = committing(here.scenario, here.out, exchange=False)
    (left,) = here.staging()
    kept = here.path.parent / "kept-staging"
    shutil.copytree(left, kept)
    try:
        for at in range(1, 40):  # the rename after the one that moves the old output aside
            answer = server.together([{**request, "fault": {"of": ["rename"], "at": at, "do": "kill"}}])[0]
            assert answer.code == -9
            if not here.out.exists():
                break
            shutil.rmtree(left)
            shutil.copytree(kept, left)
    finally:
        shutil.rmtree(kept)
    status = server.together([{"args": ["abort", str(here.out), "--json"]}])
    assert good(status)[0]["aborted"]
    here.check_is(here.scenario.old)
    assert not left.exists()


@pytest.fixture(scope="module")
def other() -> Iterator[Server]:
    with Server() as process:
        yield process


OWN = r"\.shardkit-[0-9a-f]{8}-[^/]*$"
"""What is named after a process: who removes a directory gives it such a name first."""
STOPS = {
    "before it begins": (["rename"], r"/new-[^/]*$"),
    "before it takes the data": (["rename"], r"/new-[^/]*/data$"),
    "before its note": (["rename"], r"/committed\.json$"),
    "before it is exchanged": (["renameat2"], r"/out 2$"),
    "before the old one goes aside": (["rename"], r"/new-[^/]*/old$"),
    "before the name is tried": (["renameat2"], r"/out 1$"),
    "with the old one aside": (["rename"], r"/out$"),
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
    """Stop a commit that replaces an output; without an exchange it tries the name once before the old one is aside."""
    request = committing(here.scenario, here.out, "--overwrite", exchange=exchange)
    return stopped(here, other, request, STOPS[stop], 2 if stop == "with the old one aside" else 1)


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
    shutil.copytree(
        kept, here.path / f".out.shardkit-parts-{json.loads((kept / 'plan.json').read_text())['plan'][:16]}"
    )


BY_WAY = [
    (stop, exchange)
    for exchange in (True, False)
    for stop in STOPS
    if exchange or stop != "before it is exchanged"
    if not exchange or stop != "with the old one aside"
]


@pytest.mark.parametrize(("stop", "exchange"), BY_WAY)
def test_a_slow_commit_does_not_take_away_what_a_faster_one_has_made(
    here: Place, server: Server, other: Server, finished: Path, stop: str, exchange: bool
) -> None:
    """The faster one, maybe of a host that can exchange, is killed while it removes what it has replaced."""
    for faster, kill in ((True, 16), (False, 24)):
        begin_again(here, finished)
        request = part(here.scenario, here.out, "2/2", "--overwrite", exchange=faster)
        with stopped_commit(here, other, stop, exchange=exchange) as slow:
            answer = server.together([{**request, "fault": {"of": ["unlink"], "at": kill, "do": "kill"}}])[0]
            assert answer.code == -9
            here.check_is(here.scenario.expected)
            good([slow()])
        here.check_is(here.scenario.expected)
    check_whole(here, server)


@pytest.mark.parametrize(("stop", "exchange"), BY_WAY)
def test_a_slow_commit_leaves_alone_what_others_have_begun_since(
    here: Place, server: Server, other: Server, finished: Path, stop: str, exchange: bool
) -> None:
    """All was committed and removed, and a part has begun anew under the same name: its data is no output."""
    again = part(here.scenario, here.out, "1/1", "--overwrite", exchange=exchange)
    with stopped_commit(here, other, stop, exchange=exchange) as slow:
        for _ in range(2):
            good(server.together([committing(here.scenario, here.out, exchange=exchange)]))
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
def test_a_slow_commit_after_all_was_given_up(
    here: Place, server: Server, other: Server, finished: Path, stop: str, exchange: bool
) -> None:
    abort = {"args": ["abort", str(here.out), "--json"]}
    with stopped_commit(here, other, stop, exchange=exchange) as slow:
        good(server.together([abort]))
        here.check_is(here.scenario.old)
        assert not here.staging()
        assert slow().code == 4
    here.check_is(here.scenario.old)
    assert not here.staging()


@pytest.mark.parametrize(
    "stop", ["before it takes the data", "with the old one aside", "before it is exchanged"]
)
def test_given_up_while_another_commits(
    here: Place, server: Server, other: Server, finished: Path, stop: str
) -> None:
    """What that one moves aside, after it was looked whether anything is aside, goes back."""
    exchange = stop == "before it is exchanged"
    abort = {"args": ["abort", str(here.out), "--json"]}
    with stopped(here, other, abort, (["rename"], OWN)) as slow:
        with stopped_commit(here, server, stop, exchange=exchange) as commits:
            good([slow()])
            here.check_is(here.scenario.old)
            assert commits().code == 4
    here.check_is(here.scenario.old)
    assert not here.staging()


@pytest.mark.parametrize("onto", [OWN, r"\.done$"])
def test_who_cleans_up_late_leaves_alone_what_others_have_begun_since(
    here: Place, server: Server, other: Server, finished: Path, onto: str
) -> None:
    keeps_mark = onto != OWN
    request = (
        part(here.scenario, here.out, "2/2", "--overwrite")
        if keeps_mark
        else committing(here.scenario, here.out, "--overwrite")
    )
    with stopped(here, other, request, (["rename"], onto)) as slow:
        here.check_is(here.scenario.expected)
        good(server.together([{"args": ["abort", str(here.out), "--json"]}]))
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


def test_a_part_that_is_late_begins_nothing_that_others_would_join(
    here: Place, server: Server, other: Server
) -> None:
    """It would remove that again, and who had joined it meanwhile would say that all was given up."""
    restore(here.out, here.scenario.old)
    late = part(here.scenario, here.out, "1/2", "--overwrite")
    with stopped(here, other, late, (["mkdir"], OWN)) as slow:
        good([server.together([part(here.scenario, here.out, f"{k}/2", "--overwrite")])[0] for k in (1, 2)])
        good(server.together([committing(here.scenario, here.out)]))
        here.check_is(here.scenario.expected)
        answer = slow()
    assert answer.code == 2
    assert "another process has made it while this part began" in answer.err
    assert not {"rename", "renameat2"} & {*answer.calls}
    check_whole(here, server)


def test_an_interrupted_part_is_resumed(here: Place, server: Server) -> None:
    request = part(here.scenario, here.out, "1/1")
    whole = server.together([request])[0]
    shutil.rmtree(here.out)
    at = len(whole.calls) * 2 // 5
    answer = server.together([{**request, "fault": {"at": at, "do": "signal", "signum": 2}}])[0]
    assert answer.code == 130
    assert json.loads(answer.out)["resume_command"].endswith("--part 1/1 --json --no-progress")
    (left,) = here.staging()
    assert not list((left / "work").iterdir())
    here.check_is(None)
    assert good(server.together([request]))[0]["resumed_files"] > 0
    check_whole(here, server)


def test_status_and_giving_up(here: Place, server: Server) -> None:
    number = good(server.together(parts(here.scenario, here.out, 2)[:1]))[0]["part"]["num_files"]
    asked = {"args": ["status", str(here.out), "--json"]}
    (plan,) = good(server.together([asked]))[0]["plans"]
    assert (plan["num_files"], plan["finished_files"], plan["num_parts"]) == (5, number, 2)
    assert [(each["part"], each["is_done"]) for each in plan["parts"]] == [("1/2", True)]
    assert [each[:2] for each in plan["missing"]] == [["2/2", 5 - number]]
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
    good(server.together([each])[0] for each in parts(here.scenario, here.out, 3))
    here.check_is(here.scenario.expected)
    here.remove()
