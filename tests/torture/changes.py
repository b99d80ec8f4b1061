"""A source that changes while it is read: an error that says so, or an output of what the source was at one time."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tests.torture.faults import READS
from tests.torture.harness import Place, Scenario, Server, check_message, content

SOURCE, ENVIRONMENT = 3, 5
HOWS = ("shrink", "rewrite", "replace", "remove")


@dataclass(frozen=True, slots=True)
class Change:
    """One attempt."""

    scenario: str
    how: str
    file: str
    """Relative to the source."""
    at: int
    """Number of the read before which it happens."""


def plan(scenario: Scenario) -> Iterator[Change]:
    """Yield an attempt for every read, way and file that holds weights or says where they are."""
    num_reads = sum(name in READS for name in scenario.calls)
    for path in sorted(scenario.source.rglob("*")):
        if path.is_file():
            for how in HOWS:
                for at in range(1, num_reads + 1):
                    yield Change(scenario.name, how, str(path.relative_to(scenario.source)), at)


def attempt(change: Change, scenario: Scenario, server: Server, path: Path) -> str | None:
    """Change a file during a run; return the name of the call, None where the run read less.

    Raises:
        AssertionError: a promise was broken; `path` is left as it was found.
    """
    shutil.rmtree(path, ignore_errors=True)
    copy = path / "source" / scenario.source.name
    shutil.copytree(scenario.source, copy)
    args = tuple(arg.replace(str(scenario.source), str(copy)) for arg in scenario.args)
    scenario = replace(scenario, args=args, source=copy)
    place = Place(scenario, path / "place")
    fault = {"at": change.at, "of": READS, "do": "change", "how": change.how, "path": str(copy / change.file)}
    answer = scenario.run(server, place.out, fault=fault)
    if answer.code == 0:
        found = content(place.out)
        if found != scenario.expected:
            again = Place(scenario, path / "again")
            assert scenario.run(server, again.out).code == 0, "made of a source that is refused"
            again.check_is(found)
    else:
        assert answer.code in (SOURCE, ENVIRONMENT), answer
        check_message(answer)
        place.check_is(None)
        place.check_beside()
        assert server(["abort", str(place.out)]).code == 0
        assert not place.staging(), f"left: {place.staging()}"
    shutil.rmtree(path)
    return answer.hit
