"""What another host's run left: nobody touches it, until somebody names it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.torture.harness import Answer, Place, Scenario, Scenarios, Server, check_message

USAGE = 2


@pytest.fixture(params=["preshard", "consolidate manifest", "reshard"])
def scenario(request: pytest.FixtureRequest, found: Scenarios) -> Scenario:
    return found[request.param]


@pytest.fixture
def elsewhere(scenario: Scenario, server: Server, home: Path) -> Callable[[], tuple[Place, Path]]:
    """Return a function that kills a run, and makes what it left another host's."""

    def kill() -> tuple[Place, Path]:
        place = Place(scenario, home / "elsewhere")
        fault = {"at": scenario.num_calls * 3 // 4, "do": "kill"}
        assert scenario.run(server, place.out, fault=fault).code == -9
        (left,) = place.staging()
        own = left.name.removeprefix(".out.shardkit-")[:8]
        return place, left.rename(left.with_name(left.name.replace(own, "00000000", 1)))

    return kill


def refused(answer: Answer, why: str) -> None:
    check_message(answer)
    assert answer.code == USAGE, answer
    assert why in answer.err, answer.err


def test_it_is_left_alone_until_it_is_named(
    elsewhere: Callable[[], tuple[Place, Path]], scenario: Scenario, server: Server
) -> None:
    place, left = elsewhere()
    answer = scenario.run(server, place.out)
    assert answer.code == 0
    assert answer.resumed_files == 0
    assert place.staging() == [left]
    answer = scenario.run(server, place.out, overwrite=True, extra=["--resume-from", str(left)])
    assert answer.code == 0, answer.err
    assert answer.resumed_files > 0
    place.check_is(scenario.expected)
    assert not place.staging()
    place.remove()


def test_it_is_of_the_same_job_or_refused(
    elsewhere: Callable[[], tuple[Place, Path]], scenario: Scenario, server: Server
) -> None:
    place, left = elsewhere()
    named = ["--resume-from", str(left)]
    for extra in ([*named, "--dtype", "bf16"], [*named, "--dtype", "bf16", "--dry-run"]):
        refused(scenario.run(server, place.out, extra=extra), "was left by another job")
    refused(scenario.run(server, place.out, extra=[*named, "--no-resume"]), "exclude each other")
    refused(scenario.run(server, place.path / "other", extra=named), "is not what an interrupted run left")
    assert place.staging() == [left]
    assert scenario.run(server, place.out, extra=[*named, "--dry-run"]).code == 0
    assert place.staging() == [left]
    place.remove()


def test_interrupted_again_the_same_command_without_it_goes_on(
    elsewhere: Callable[[], tuple[Place, Path]], scenario: Scenario, server: Server
) -> None:
    place, left = elsewhere()
    fault = {"of": ["ftruncate", "fsync"], "at": 2, "do": "signal", "signum": 2}
    answer = scenario.run(server, place.out, extra=["--resume-from", str(left)], fault=fault)
    assert answer.code == 130, answer
    assert "--resume-from" not in answer.err
    assert str(left) not in answer.err
    assert place.check_ends_well(server, overwrite=False).resumed_files > 0
    place.remove()
