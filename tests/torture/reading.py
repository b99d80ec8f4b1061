"""`verify` and `inspect`: what they read fails, and whoever writes the page is killed."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.torture.faults import READS
from tests.torture.harness import Scenario, Server, check_message, restore, stamps

_NO, _SOURCE, _ENVIRONMENT = 1, 3, 5
_UNFINISHED = re.compile(r"\.[0-9a-f]{16}\.out\.part")
"""A page that a kill left under its temporary name: nothing removes it (docs/reliability.md)."""
_OPENED = (*READS, "open_fd")
_EARLIER = (
    b'<!doctype html><meta name="generator" content="shardkit'  # begins as a page does, so it may be replaced
)
KINDS = (
    ("errno", errno.EIO, _OPENED),
    ("errno", errno.EINTR, _OPENED),
    ("errno", errno.EMFILE, ("open_fd",)),
    ("short", 0, READS),
    ("kill", 0, None),
)


@dataclass(frozen=True, slots=True)
class Reading:
    """One attempt."""

    scenario: str
    """Whose output is read."""
    command: str
    """"verify" or "inspect"."""
    do: str
    number: int
    of: tuple[str, ...] | None
    at: int

    @property
    def label(self) -> str:
        """What goes wrong, for a table."""
        return f"{self.command}, {errno.errorcode[self.number] if self.do == 'errno' else self.do}"


def _args(command: str, path: Path) -> list[str]:
    target = str(path / "checkpoint")
    more = ["--full"] if command == "verify" else ["--html", str(path / "out")]
    return [command, target, *more, "--json", "--no-progress"]


def plan(scenario: Scenario, server: Server, path: Path) -> Iterator[Reading]:
    """Yield an attempt for every call and kind."""
    for command in ("verify", "inspect"):
        restore(path / "checkpoint", scenario.expected)
        whole = server(_args(command, path))
        assert whole.code == 0, whole.err
        shutil.rmtree(path)
        for do, number, of in KINDS:
            if do == "kill" and command == "verify":
                continue  # it changes nothing
            for at in range(1, sum(of is None or name in of for name in whole.calls) + 1):
                yield Reading(scenario.name, command, do, number, of, at)


def attempt(one: Reading, scenario: Scenario, server: Server, path: Path) -> str | None:
    """Let a run fail or die, and run again; return the name of the call, None where the run made fewer.

    Raises:
        AssertionError: a promise was broken; `path` is left as it was found.
    """
    restore(path / "checkpoint", scenario.expected)
    (path / "out").write_bytes(_EARLIER)
    before, args = stamps(path / "checkpoint"), _args(one.command, path)
    fault: dict[str, Any] = {"at": one.at, "do": one.do, "errno": one.number}
    answer = server(args, fault=fault if one.of is None else {**fault, "of": one.of})
    assert stamps(path / "checkpoint") == before, "what is read was touched"
    found = (path / "out").read_bytes()
    if one.do == "kill":
        assert answer.code == (-9 if answer.hit else 0), answer
    else:
        assert "Traceback" not in answer.err, answer.err
        _check_code(one, answer.code, answer.hit)
    rest = {beside.name for beside in path.iterdir()} - {"out", "checkpoint"}
    assert not rest or (one.do == "kill" and len(rest) == 1 and _UNFINISHED.fullmatch(*rest)), rest
    again = server(args)
    check_message(again)
    assert again.code == 0, again
    if one.command == "inspect":
        assert found in (_EARLIER, (path / "out").read_bytes()), "half a page"
    assert {beside.name for beside in path.iterdir()} == {"out", "checkpoint", *rest}
    shutil.rmtree(path)
    return answer.hit


def _check_code(one: Reading, code: int, hit: str | None) -> None:
    allowed = {0}  # a record's frame is asked for again
    if one.do == "errno" and hit is not None:
        allowed |= {_SOURCE, _ENVIRONMENT}
        if one.command == "verify":
            allowed.add(_NO)  # what cannot be read is a problem that is listed
        if hit == "preadv":  # data, which is asked for once
            allowed.remove(0)
    assert code in allowed, f"exit code {code} after {one.label} at {hit}"
