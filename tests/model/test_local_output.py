"""Searches through what several processes, kills, faults and power failures can do to a `LocalOutput`.

`python -m tests.model` searches further, and prints what it has looked at.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.model.mutants import MUTANTS, Mutant
from tests.model.processes import standing_in
from tests.model.scenarios import Plan, plans
from tests.model.search import Bounds, Result, Search, story

TELLING = ("overwrite", "two, overwrite", "commit beside abort")
NAMES = [plan.scenario.name for plan in plans()]


@pytest.fixture(autouse=True)
def _in_model() -> Iterator[None]:
    """Nothing is collected meanwhile: there are millions of objects, and all stay."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()


def find(name: str) -> Plan:
    """Return a scenario, without what other searches have kept of it."""
    return next(plan for plan in plans() if plan.scenario.name == name)


def search(plan: Plan, bounds: Bounds) -> Result:
    """Search, and fail with the shortest trace of what is wrong."""
    result = Search(plan.scenario, bounds).run()
    for problem, trace in result.traces.items():
        calls = "\n".join(story(plan.scenario, trace))
        pytest.fail(f"{plan.scenario.name}, {bounds}: {problem}\n{calls}")
    assert result.num_states or result.num_runs
    return result


@pytest.mark.parametrize("name", TELLING)
def test_nothing_is_wrong_in_the_first_states(name: str) -> None:
    plan = find(name)
    with standing_in():
        for bounds in plan.searches:
            is_long = bounds.kills_after_power or (bounds.power_failures and len(plan.scenario.commands) > 1)
            if not is_long:
                few = replace(
                    bounds, max_states=150, max_runs=3, power_failures=min(bounds.power_failures, 2)
                )
                search(plan, few)


@pytest.mark.prove
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_wrong(name: str) -> None:
    plan = find(name)
    with standing_in():
        for bounds in plan.searches:
            many = replace(
                bounds,
                max_states=1000 if bounds.power_failures else 10_000,
                max_runs=60 if bounds.is_random else None,
                power_failures=min(bounds.power_failures, 24),
                kills_after_power=min(bounds.kills_after_power, 2),
            )
            search(plan, many)


@pytest.mark.prove
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_protocol_is_seen(mutant: Mutant) -> None:
    with mutant.applied(), standing_in():
        result = Search(
            find(mutant.scenario).scenario, replace(mutant.bounds, max_states=40_000, is_one_enough=True)
        ).run()
    assert result.violations


@pytest.mark.prove
def test_the_same_search_finds_the_same() -> None:
    results = list[Result]()
    for _ in range(2):
        with standing_in():
            results.append(search(find("two of a job"), Bounds(preemptions=1, kills=1, max_states=5000)))
    assert results[0] == results[1]
