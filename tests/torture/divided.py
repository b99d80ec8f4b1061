"""Parts and commits, several at once, some of them killed: what they leave, and how running again ends."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.torture.harness import Answer, Content, Place, Scenario, Server, restore

SCENARIOS = (
    "preshard two jobs",
    "preshard columns cast",
    "preshard no digests",
    "consolidate manifest",
    "consolidate",
    "reshard two jobs",
)
_MOST_PARTS, _MOST_CALLS = 4, 260


def part(scenario: Scenario, out: Path, of: str, *extra: str, **more: Any) -> dict[str, Any]:
    """Return the request that runs a part."""
    return {"args": scenario.command(out, "--part", of, *extra), "columns": scenario.columns, **more}


def parts(scenario: Scenario, out: Path, count: int, *extra: str, **more: Any) -> list[dict[str, Any]]:
    """Return the requests that run all parts."""
    return [part(scenario, out, f"{number}/{count}", *extra, **more) for number in range(1, count + 1)]


def committing(scenario: Scenario, out: Path, *extra: str, **more: Any) -> dict[str, Any]:
    """Return the request that commits; it plans as the parts did."""
    args = ["commit", str(out), *extra, "--json", "--no-progress"]
    return {"args": args, "columns": scenario.columns, **more}


def good(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Return what runs said that all ended well."""
    for answer in answers:
        assert answer.code == 0, (answer.code, answer.err)
    return [json.loads(answer.out) for answer in answers]


def check_whole(here: Place, server: Server) -> None:
    """The output is that of one process, and after a commit nothing is left beside it."""
    here.check_is(here.scenario.expected)
    assert good(server.together([committing(here.scenario, here.out)]))[0]["by_another"]
    here.check_is(here.scenario.expected)
    assert not here.staging(), [path.name for path in here.staging()]
    here.check_source()


def finish(here: Place, server: Server, *, overwrite: bool, exchange: bool) -> None:
    """Run parts and commits once more, undisturbed; all ends well, however often it was done before."""
    extra = ["--overwrite"] if overwrite else ["--exist-ok"]
    good(server.together(parts(here.scenario, here.out, 2, *extra, exchange=exchange)))
    if here.staging():  # a part that came late, and may overwrite, has begun anew
        good([here.scenario.run(server, here.out, overwrite=True, exchange=exchange)])
    good(server.together([committing(here.scenario, here.out, exchange=exchange)] * 2))
    assert not here.staging(), [path.name for path in here.staging()]
    check_whole(here, server)


def attempt(scenario: Scenario, server: Server, path: Path, draw: random.Random) -> int:
    """Let parts and commits run, kill some, look at what is there, and run all again; return how many were killed.

    Raises:
        AssertionError: a promise was broken; `path` is left as it was found.
    """
    here, exchange, overwrite = Place(scenario, path), draw.random() < 0.5, draw.random() < 0.3
    allowed: list[Content | None] = [None, scenario.expected]
    if overwrite:
        restore(here.out, scenario.old)
        allowed.append(scenario.old)
    extra, killed = ["--overwrite"] if overwrite else [], 0
    for _ in range(draw.randint(1, 3)):
        if here.out.exists() and not overwrite:
            break
        count = draw.randint(1, _MOST_PARTS)
        requests = parts(scenario, here.out, count, *extra, exchange=exchange)
        requests += draw.sample(requests, draw.randint(0, 1))  # a twin
        # A kill may have left a job that is not begun yet, which a commit rightly does not see.
        if any("-new-" not in leftover.name for leftover in here.staging()):
            requests += [committing(scenario, here.out, exchange=exchange)] * draw.randint(0, 2)
        for request in draw.sample(requests, draw.randint(1, min(3, len(requests)))):
            at = requests.index(request)
            requests[at] = {**request, "fault": {"at": draw.randint(1, _MOST_CALLS), "do": "kill"}}
        answers = server.together(requests)
        found = here.check_is(*allowed)
        for answer in answers:
            killed += answer.code == -9
            if answer.code == 0:
                told = json.loads(answer.out)
                # A commit that finds no job, as those who had begun it were killed, says that something is there.
                is_committed = told["part"]["is_committed"] if "part" in told else not told["by_another"]
                if is_committed:
                    here.check_is(scenario.expected)
            # 2: the output was there before this one began; 4: parts that a commit waits for were killed
            assert answer.code in (-9, 0, 2, 4), (answer.code, answer.err)
            assert answer.code == 0 or answer.hit or "exists" in answer.err or "missing" in answer.err, (
                answer.err
            )
        if overwrite and found == scenario.expected:
            break
    here.check_source()
    here.check_is(*allowed)
    finish(here, server, overwrite=overwrite, exchange=exchange)
    here.remove()
    return killed
