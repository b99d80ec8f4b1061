"""The system refuses a call: an error of ours with the right exit code, or the right bytes; never anything between."""

from __future__ import annotations

import errno
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.torture.faults import CALLS, CHANGES, READS, SPACE, WRITES
from tests.torture.harness import IS_WHOLE, Answer, Place, Scenario, Server, check_message, restore

ENVIRONMENT = 5
FRESH, OVERWRITE, RESUME = "fresh", "overwrite", "resume"


@dataclass(frozen=True, slots=True)
class Failure:
    """One attempt."""

    scenario: str
    mode: str
    do: str
    """"errno", "short" or "signal"."""
    number: int
    """Of the error or the signal."""
    of: tuple[str, ...]
    """The calls that are counted and may fail."""
    at: int
    stays: bool = False
    """All later calls fail too: a disk that is full, or gone."""
    exchange: bool = True

    @property
    def label(self) -> str:
        """What goes wrong, for a table."""
        table = {"errno": errno.errorcode, "signal": {s: s.name for s in signal.Signals}}
        name = table[self.do][self.number] if self.do in table else self.do
        return f"{name} and ever after" if self.stays else name

    @property
    def fault(self) -> dict[str, Any]:
        """As the server takes it."""
        return {
            "at": self.at,
            "of": self.of,
            "do": self.do,
            "errno": self.number,
            "signum": self.number,
            "stays": self.stays,
        }


KINDS: tuple[tuple[str, int, tuple[str, ...], bool], ...] = (
    ("errno", errno.EIO, CALLS, False),
    ("errno", errno.EIO, (*CHANGES, "open_fd"), True),
    ("errno", errno.ENOSPC, (*SPACE, "open_fd", "rename", "renameat2"), False),
    ("errno", errno.ENOSPC, (*SPACE, "open_fd"), True),
    ("errno", errno.EDQUOT, (*SPACE, "open_fd", "close_fd"), False),
    ("errno", errno.EINTR, (*READS, *WRITES, "fsync", "open_fd", "close_fd"), False),
    ("errno", errno.EACCES, ("open_fd", "mkdir", "rename", "renameat2", "unlink", "rmdir"), True),
    ("short", 0, READS, False),
    ("short", 0, READS, True),
    ("short", 0, WRITES, False),
    ("short", 0, WRITES, True),
    ("signal", signal.SIGINT, CALLS, False),
    ("signal", signal.SIGTERM, CALLS, False),
    ("signal", signal.SIGHUP, CALLS, False),
)


def plan(scenario: Scenario, mode: str, *, exchange: bool = True) -> Iterator[Failure]:
    """Yield an attempt for every call that can fail in each way."""
    for do, number, of, stays in KINDS:
        for at in range(1, sum(name in of for name in scenario.calls) + 1):
            yield Failure(scenario.name, mode, do, number, of, at, stays, exchange)


def attempt(failure: Failure, scenario: Scenario, server: Server, path: Path) -> str | None:
    """Let a run fail, look at what it left, and run again; return the name of the call, None where none was reached.

    Raises:
        AssertionError: a promise was broken; `path` is left as it was found.
    """
    place, overwrite = Place(scenario, path), failure.mode == OVERWRITE
    before = scenario.old if overwrite else None
    if overwrite:
        restore(place.out, scenario.old)
    elif failure.mode == RESUME:
        fault = {"at": scenario.num_calls * 7 // 10, "do": "kill"}
        assert scenario.run(server, place.out, fault=fault).code == -9
    answer = scenario.run(
        server, place.out, overwrite=overwrite, exchange=failure.exchange, fault=failure.fault
    )
    place.check_source()
    place.check_beside()
    if answer.code == 0:
        _check_may_succeed(failure, answer)
        place.check_is(scenario.expected)
    else:
        _check_code(failure, answer.code)
        if answer.code > 0:
            check_message(answer)
        may_be = [before]
        if failure.do == "signal":
            may_be.append(scenario.expected)  # between the rename and the end
        elif failure.stays or IS_WHOLE in answer.err:
            may_be.append(scenario.expected)  # the rename was done, and its sync failed
        may_be_aside = overwrite and not failure.exchange and place.staging()
        if place.check_is(*may_be, *([None] if may_be_aside else [])) is None and may_be_aside:
            place.check_is_ended(server)
    place.check_ends_well(server, overwrite=overwrite or place.out.exists(), exchange=failure.exchange)
    place.remove()
    return answer.hit


def _check_may_succeed(failure: Failure, answer: Answer) -> None:
    """What must not be passed over: bytes that may not be on the disk. The last sync is that of removing what is left."""
    if failure.do == "errno" and answer.hit == "fsync" and failure.mode != RESUME:
        places = [place for place, name in enumerate(answer.calls) if name in failure.of]
        if "fsync" not in answer.calls[places[failure.at - 1] + 1 :]:
            return
        raise AssertionError(f"{failure.label} of fsync was passed over")


def _check_code(failure: Failure, code: int) -> None:
    if failure.do == "signal":
        allowed = {-failure.number, 128 + failure.number}
    elif failure.do == "short":
        allowed = set()
    else:
        allowed = {ENVIRONMENT}
    assert code in allowed, f"exit code {code} after {failure.label}"
