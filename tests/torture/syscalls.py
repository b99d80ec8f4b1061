"""The same faults at the system's own calls, by strace, in a process as a person starts it.

strace counts the calls of each thread by itself, so a fault comes in whichever thread reaches the number first.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.torture.harness import IS_WHOLE, ROOT, Answer, Place, Scenario, Server, check_message, restore

KILLED = "openat,pwrite64,write,fsync,ftruncate,rename,renameat2,mkdir,unlink,unlinkat,rmdir"
FAILED = "pwrite64,write,fsync,ftruncate,pread64,preadv,mkdir,rename,renameat2"
_ENVIRONMENT, _NOT_STARTED = 5, 127


@dataclass(frozen=True, slots=True)
class Point:
    """One attempt."""

    scenario: str
    overwrite: bool
    call: str
    at: int
    """Number of the call, of a thread."""
    error: str | None = None
    """Name of the error; None for SIGKILL."""


@cache
def is_permitted() -> bool:
    """True where strace exists and may trace."""
    if shutil.which("strace") is None:
        return False
    return (
        subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True, check=False).returncode
        == 0
    )


def plan(scenario: Scenario, path: Path, *, overwrite: bool, calls: str = KILLED) -> list[Point]:
    """Return an attempt for every call of an undisturbed run that has to do with its output."""
    place, log = Place(scenario, path), path.with_suffix(".strace")
    if overwrite:
        restore(place.out, scenario.old)
    traced = ["--seccomp-bpf", "-y", "-e", f"trace={calls}", "-o", str(log)]
    assert _run(scenario, place.out, traced, overwrite=overwrite).code == 0
    found, counts = set[Point](), dict[tuple[str, str], int]()
    for line in log.read_text(errors="replace").splitlines():
        match = re.match(r"(\d+) +(\w+)\(", line)
        if match is None:
            continue
        key = match[1], match[2]
        counts[key] = counts.get(key, 0) + 1
        if str(path) in line:
            found.add(Point(scenario.name, overwrite, match[2], counts[key]))
    log.unlink()
    place.remove()
    return sorted(found, key=lambda point: (point.call, point.at))


def attempt(point: Point, scenario: Scenario, server: Server, path: Path) -> bool:
    """Let the fault happen, look at what is left, and run again; return whether the run got as far as that.

    Raises:
        AssertionError: a promise was broken; `path` is left as it was found.
    """
    place = Place(scenario, path)
    before = scenario.old if point.overwrite else None
    if point.overwrite:
        restore(place.out, scenario.old)
    what = "signal=SIGKILL" if point.error is None else f"error={point.error}"
    fault = [
        "-e",
        f"trace={point.call}",
        "-e",
        f"inject={point.call}:{what}:when={point.at}",
        "-o",
        os.devnull,
    ]
    answer = _run(scenario, place.out, fault, overwrite=point.overwrite)
    place.check_source()
    place.check_beside()
    if answer.code == _NOT_STARTED:  # the loader's own read of a library had the number
        place.check_is(before)
        place.remove()
        return False
    if point.error is None:
        assert answer.code in (0, -9, 137), answer
        place.check_is(before, scenario.expected)
    elif point.error == "EINTR":  # the interpreter asks again
        assert answer.code == 0, answer
    else:
        if (
            point.call == "write"
        ):  # by which errors and results are told, too: it may be whole and nobody hears of it
            place.check_is(before, scenario.expected)
        else:
            check_message(answer)
            assert answer.code in (0, _ENVIRONMENT), answer
            is_there = answer.code == 0 or IS_WHOLE in answer.err
            place.check_is(scenario.expected if is_there else before)
    if answer.code == 0:
        place.check_is(scenario.expected)
    place.check_ends_well(server, overwrite=point.overwrite or place.out.exists())
    place.remove()
    return answer.code != 0 or point.error == "EINTR"


def _run(scenario: Scenario, out: Path, traced: Sequence[str], *, overwrite: bool) -> Answer:
    command = ["strace", "-f", "-qq", *traced, "--", sys.executable, "-m", "shardkit"]
    done = subprocess.run(
        [*command, *scenario.command(out, *(["--overwrite"] if overwrite else []))],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        check=False,
    )
    return Answer(done.returncode, done.stdout, done.stderr, None, ())
