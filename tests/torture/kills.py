"""SIGKILL at a storage call: the destination is absent, the old one or the new one, and running again ends well."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.torture.harness import Place, Scenario, Server, restore

FRESH, EMPTY, OVERWRITE, RESUME = "fresh", "empty", "overwrite", "resume"
MODES = (FRESH, EMPTY, OVERWRITE, RESUME)


@dataclass(frozen=True, slots=True)
class Kill:
    """One attempt."""

    scenario: str
    mode: str
    exchange: bool
    """The system can exchange two directories."""
    at: int
    """Number of the call."""


def plan(scenario: Scenario, server: Server, scratch: Path, mode: str, *, exchange: bool) -> list[Kill]:
    """Return an attempt for every call that a run in this mode makes, when nothing disturbs it."""
    place = Place(scenario, scratch)
    _prepare(place, server, mode, exchange=exchange)
    whole = scenario.run(server, place.out, overwrite=mode == OVERWRITE, exchange=exchange)
    assert whole.code == 0, whole.err
    place.remove()
    return [Kill(scenario.name, mode, exchange, at) for at in range(1, len(whole.calls) + 1)]


def attempt(kill: Kill, scenario: Scenario, server: Server, path: Path) -> str | None:
    """Kill a run and look at what it left; return the name of the call, None where the run was over before.

    Raises:
        AssertionError: a promise was broken; `path` is left as it was found.
    """
    place, overwrite = Place(scenario, path), kill.mode == OVERWRITE
    _prepare(place, server, kill.mode, exchange=kill.exchange)
    fault = {"at": kill.at, "do": "kill"}
    answer = scenario.run(server, place.out, overwrite=overwrite, exchange=kill.exchange, fault=fault)
    assert answer.code == (-9 if answer.hit else 0), answer
    place.check_source()
    place.check_beside()
    if not overwrite:
        place.check_is({} if kill.mode == EMPTY else None, scenario.expected)
        place.check_unfinished()
    elif kill.exchange:
        place.check_is(scenario.old, scenario.expected)
    elif place.check_is(None, scenario.old, scenario.expected) is None:
        place.check_is_ended(server)
    place.check_ends_well(server, overwrite=overwrite, exchange=kill.exchange)
    place.remove()
    return answer.hit


def _prepare(place: Place, server: Server, mode: str, *, exchange: bool) -> None:
    """Let the destination and what lies beside it be as the mode says."""
    scenario = place.scenario
    if mode == OVERWRITE:
        restore(place.out, scenario.old)
    elif mode == EMPTY:
        place.out.mkdir()
    elif mode == RESUME:
        fault = {"at": scenario.num_calls * 7 // 10, "do": "kill"}
        before = scenario.run(server, place.out, exchange=exchange, fault=fault)
        assert before.code == -9
        assert not place.out.exists()


def all_kills(found: dict[str, Scenario], server: Server, scratch: Path) -> Iterator[Kill]:
    """Yield an attempt for every call of every scenario in every mode."""
    for scenario in found.values():
        for mode in MODES:
            yield from plan(scenario, server, scratch, mode, exchange=True)
        yield from plan(scenario, server, scratch, OVERWRITE, exchange=False)
