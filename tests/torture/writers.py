"""Several runs into one destination at the same moment: one job wins, no mixture, nothing left beside."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.torture.harness import Content, Place, Scenario, Server, check_message, content, restore

USAGE = 2


@dataclass(frozen=True, slots=True)
class Round:
    """One attempt."""

    writers: tuple[str, ...]
    """Scenarios; one may be there more than once."""
    overwrite: bool
    exchange: bool
    resume: bool
    """A run of the first one was killed before."""


def plan(names: Sequence[str], rounds: int, seed: int) -> list[Round]:
    """Draw rounds of two to four writers."""
    draw = random.Random(seed)
    return [
        Round(
            writers=tuple(draw.choices(names, k=draw.randint(2, 4))),
            overwrite=n % 2 == 1,
            exchange=n % 4 < 2 or n % 2 == 1,
            resume=draw.random() < 0.5,
        )
        for n in range(rounds)
    ]


def attempt(one: Round, found: Mapping[str, Scenario], server: Server, path: Path) -> int:
    """Let all write; return how many succeeded.

    Raises:
        AssertionError: a promise was broken; `path` is left as it was found.
    """
    first = found[one.writers[0]]
    place = Place(replace(first, expected={}), path)
    if one.overwrite:
        restore(place.out, first.old)
    if one.resume:
        fault = {"at": first.num_calls * 6 // 10, "do": "kill"}
        assert first.run(server, place.out, overwrite=one.overwrite, fault=fault).code == -9
    extra = ["--overwrite"] if one.overwrite else []
    runs = [
        {
            "args": found[name].command(place.out, *extra),
            "columns": found[name].columns,
            "exchange": one.exchange,
        }
        for name in one.writers
    ]
    answers = server.together(runs)
    for answer in answers:
        check_message(answer)
        assert answer.code in (0, USAGE), (answer.code, answer.err)
    won: list[Content] = [
        found[name].expected for name, answer in zip(one.writers, answers, strict=True) if answer.code == 0
    ]
    assert won, [answer.err for answer in answers]
    # A twin that works on the job finds that its output is there; another job replaces it only if it may.
    assert one.overwrite or won.count(won[0]) == len(won), "two jobs have made one output"
    assert content(place.out) in won, "a mixture, or what a loser wrote"
    place.check_source()
    assert not place.staging(), f"left: {[path.name for path in place.staging()]}"
    place.remove()
    return len(won)
