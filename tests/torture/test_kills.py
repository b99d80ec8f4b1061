"""Killed anywhere, the destination is absent, the old or the new one, and running again ends with the same bytes."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from tests.cases import but_first
from tests.torture import kills, syscalls
from tests.torture.harness import ONE_JOB, Place, Scenarios, Server, content, restore

BASIC = ("preshard", "consolidate manifest", "reshard")
OTHERS = (
    *(
        "preshard two jobs",
        "preshard no digests",
        "preshard columns",
        "preshard cast",
        "preshard columns cast",
    ),
    *("consolidate", "consolidate no digests", "consolidate cast"),
    *("reshard two jobs", "reshard no digests", "reshard cast"),
)
NUM_POINTS = {"preshard columns": 4, "preshard columns cast": 4}


@pytest.mark.prove
def test_scenarios_are_what_they_are_called(found: Scenarios, server: Server, home: Path) -> None:
    assert {*BASIC, *OTHERS} == set(found)
    dtypes = {"preshard cast": "float16", "preshard columns cast": "bfloat16"}
    for name in ("preshard", "preshard cast", "preshard columns", "preshard columns cast"):
        described = json.loads(found[name].expected["shardkit.json"] or b"")["tensors"]["layers.3.weight"]
        assert described["dtype"] == dtypes.get(name, "float32")
        assert described["placements"] == ["S(1)" if "columns" in name else "S(0)"]
    for name, jobs in (("preshard", 1), ("preshard two jobs", 2)):
        place = Place(found[name], home / "jobs")
        assert found[name].run(server, place.out).num_writers == jobs
        place.remove()


@pytest.mark.prove
@pytest.mark.parametrize("name", OTHERS)
def test_killed_while_writing(name: str, found: Scenarios, server: Server, place: Path) -> None:
    scenario, number = found[name], NUM_POINTS.get(name, 2)
    draw = random.Random(name)
    for at in draw.sample(range(2, scenario.num_calls - 5), number):
        hit = kills.attempt(kills.Kill(name, kills.FRESH, True, at), scenario, server, place)
        assert hit, f"call {at} of {scenario.num_calls} was not reached"


@pytest.mark.parametrize("name", but_first(BASIC))
@pytest.mark.parametrize(
    ("mode", "exchange"),
    but_first(
        [
            (kills.FRESH, True),
            (kills.EMPTY, True),
            (kills.OVERWRITE, True),
            (kills.RESUME, True),
            (kills.EMPTY, False),
            (kills.OVERWRITE, False),
        ]
    ),
)
def test_killed_in_every_mode(
    name: str, mode: str, exchange: bool, found: Scenarios, server: Server, place: Path
) -> None:
    points = kills.plan(found[name], server, place, mode, exchange=exchange)
    draw = random.Random(f"{name} {mode} {exchange}")
    for point in (draw.choice(points[:-40]), draw.choice(points[-40:])):
        hit = kills.attempt(point, found[name], server, place)
        assert hit or mode == kills.RESUME  # how much had been finished before is not always the same


@pytest.mark.prove
@pytest.mark.parametrize("name", ["preshard", "consolidate manifest"])
def test_killed_while_it_becomes_complete(name: str, found: Scenarios, server: Server, place: Path) -> None:
    """Files are brought to the disk one after the other; before the last of them there is no output."""
    scenario = found[name]
    for call, first, last in (("fsync", 10, 3), ("write", 4, 0)):
        number = sum(each == call for each in scenario.calls)
        for at in range(number - first, number - last + 1):
            here = Place(scenario, place)
            assert scenario.run(server, here.out, fault={"of": [call], "at": at, "do": "kill"}).code == -9
            here.check_is(None)
            here.check_unfinished()


@pytest.mark.prove
@pytest.mark.parametrize("name", ["preshard two jobs", "preshard columns", "reshard two jobs"])
def test_killed_again_and_again(name: str, found: Scenarios, server: Server, place: Path) -> None:
    scenario, here = found[name], Place(found[name], place)
    num_killed, num_resumed = 0, 0
    for eighth in range(2, 8):
        fault = {"at": scenario.num_calls * eighth // 8, "do": "kill"}
        num_killed += scenario.run(server, here.out, fault=fault).code == -9
        here.check_source()
        here.check_beside()
        if here.check_is(None, scenario.expected) is not None:
            break
        here.check_unfinished()
    else:
        num_resumed = here.check_ends_well(server, overwrite=False).resumed_files
    assert num_killed >= 3
    assert num_resumed or here.out.exists()
    here.remove()


@pytest.mark.prove
@pytest.mark.parametrize("name", ["preshard no digests", "consolidate no digests", "reshard no digests"])
@pytest.mark.parametrize("exchange", [True, False])
def test_killed_before_the_old_one_was_removed(
    name: str, exchange: bool, found: Scenarios, server: Server, place: Path
) -> None:
    """What was replaced has files of the same names and sizes; without digests only their place tells."""
    scenario, here = found[name], Place(found[name], place)
    restore(here.out, scenario.old)
    calls = scenario.run(server, here.out, overwrite=True, exchange=exchange).calls
    swapped = max(number for number, name in enumerate(calls) if name == "rename")  # of what is then removed
    fault = {"of": ["unlink"], "at": calls[:swapped].count("unlink") + 1, "do": "kill"}
    restore(here.out, scenario.old)
    killed = scenario.run(server, here.out, overwrite=True, exchange=exchange, fault=fault)
    assert (killed.code, killed.hit) == (-9, "unlink")
    here.check_is(scenario.expected)
    (left,) = here.staging()
    assert content(left / "old") == scenario.old
    here.check_ends_well(server, overwrite=True, exchange=exchange)
    here.remove()


@pytest.mark.prove
@pytest.mark.parametrize("name", ["preshard", "consolidate manifest", "reshard"])
@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("of_parts", [False, True])
def test_killed_while_the_old_one_was_removed(
    of_parts: bool, name: str, exchange: bool, found: Scenarios, server: Server, place: Path
) -> None:
    """What is left of it has been looked through: without its manifest it is nobody's all the same."""
    scenario, here = found[name], Place(found[name], place)
    extra = ["--part", "1/1"] if of_parts else []
    restore(here.out, scenario.old)
    calls = scenario.run(server, here.out, overwrite=True, exchange=exchange, extra=extra).calls
    of_all, of_old = calls.count("unlink"), sum(data is not None for data in scenario.old.values())
    for before_end in range(4, of_old + 8, 3):
        shutil.rmtree(here.path)
        here = Place(scenario, place)
        restore(here.out, scenario.old)
        fault = {"of": ["unlink"], "at": of_all - before_end, "do": "kill"}
        killed = scenario.run(server, here.out, overwrite=True, exchange=exchange, fault=fault, extra=extra)
        assert killed.code == -9
        if here.check_is(scenario.expected, scenario.old) == scenario.expected:
            answer = scenario.run(server, here.out, overwrite=True, exchange=exchange, extra=extra)
            assert (answer.code, json.loads(answer.out)["warnings"]) == (0, []), answer
            assert here.staging() == []
    here.remove()


@pytest.mark.prove
@pytest.mark.parametrize("how", ["may replace nothing", "the same", "abort", "another job"])
def test_killed_with_the_old_one_aside(how: str, found: Scenarios, server: Server, place: Path) -> None:
    """Directories cannot be exchanged, and the run died between its two renames: the next command ends its commit."""
    scenario, here = found["preshard"], Place(found["preshard"], place)
    restore(here.out, scenario.old)
    fault = {"of": ["rename"], "onto": r"/out$", "at": 1, "do": "kill"}
    killed = scenario.run(server, here.out, overwrite=True, exchange=False, fault=fault)
    assert (killed.code, killed.hit) == (-9, "rename")
    here.check_is(None)
    (left,) = here.staging()
    assert content(left / "old") == scenario.old
    if how == "may replace nothing":
        here.check_is_ended(server)
    elif how == "abort":
        assert server(["abort", str(here.out)]).code == 0
        here.check_is(scenario.expected)
        assert here.staging() == []
    elif how == "another job":
        other = [*scenario.command(here.out, "--overwrite"), "--world-size", "3"]
        fault = {"of": ["ftruncate"], "at": 1, "do": "kill"}
        assert server(other, exchange=False, fault=fault).code == -9
        here.check_is(scenario.expected)
        assert server(["abort", str(here.out)]).code == 0
    here.check_ends_well(server, overwrite=True, exchange=False)
    here.remove()


@pytest.mark.prove
@pytest.mark.parametrize("overwrite", [False, True])
def test_killed_at_a_system_call(overwrite: bool, found: Scenarios, server: Server, place: Path) -> None:
    if not syscalls.is_permitted():
        pytest.skip("needs strace, and the right to trace")
    points = syscalls.plan(found["consolidate"], place, overwrite=overwrite)
    assert {point.call for point in points} >= {"openat", "pwrite64", "write", "fsync", "ftruncate"}
    assert "--jobs" in found["consolidate"].args
    assert ONE_JOB[1] in found["consolidate"].args
    for point in random.Random(overwrite).sample(points, 2):
        assert syscalls.attempt(point, found["consolidate"], server, place)
