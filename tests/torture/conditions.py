"""The real things: a small disk, directories that may not be written, limits, another file system, signals, kills by the clock."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy
from safetensors.numpy import save_file

from tests.torture.faults import CHANGES
from tests.torture.harness import TWO_JOBS, Place, Scenario, Server, check_message, content

NOBODY, ENVIRONMENT = 65534, 5


def may_become_nobody() -> bool:
    """True where runs can be given to another user."""
    return os.geteuid() == 0


@contextmanager
def small_disk(path: Path, nbytes: int) -> Iterator[Path | None]:
    """Mount a small file system; gives None where that is not permitted."""
    path.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        yield None
        return
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def too_small(scenario: Scenario, server: Server, disk: Path) -> None:
    """A disk that is too small is refused before anything is written."""
    place = Place(scenario, disk / "place")
    answer = scenario.run(server, place.out)
    check_message(answer)
    assert answer.code == ENVIRONMENT, answer
    assert "No space left" in answer.err, answer.err
    assert not set(answer.calls) & set(CHANGES), "something was written before"
    place.remove()


def fills_up(scenario: Scenario, server: Server, disk: Path, at: int) -> str | None:
    """Somebody else fills the disk during the run."""
    place = Place(scenario, disk / "place")
    fault = {"at": at, "do": "change", "how": "fill", "path": str(disk)}
    answer = scenario.run(server, place.out, fault=fault)
    check_message(answer)
    if answer.code == 0:
        place.check_is(scenario.expected)
    else:
        assert answer.code == ENVIRONMENT, answer
        place.check_is(None)
        place.check_beside()
    (disk / "ballast").unlink(missing_ok=True)
    place.check_ends_well(server, overwrite=answer.code == 0)
    place.remove()
    return answer.hit


def read_only(scenario: Scenario, server: Server, path: Path) -> None:
    """A directory that this user may not write to."""
    place = Place(scenario, path)
    path.chmod(0o555)
    answer = scenario.run(server, place.out, uid=NOBODY)
    check_message(answer)
    assert answer.code == ENVIRONMENT, answer
    assert "cannot be written" in answer.err
    assert not list(path.iterdir())


def permission_lost(scenario: Scenario, server: Server, path: Path, at: int) -> str | None:
    """Half-way the directories are no longer to be written."""
    place = Place(scenario, path)
    os.chown(path, NOBODY, NOBODY)
    fault = {"at": at, "do": "change", "how": "forbid", "path": str(path)}
    answer = scenario.run(server, place.out, uid=NOBODY, fault=fault)
    check_message(answer)
    assert answer.code in (0, ENVIRONMENT), answer
    place.check_is(scenario.expected if answer.code == 0 else None)
    place.check_beside()
    for here, _, _ in os.walk(path):
        os.chmod(here, 0o755)
    place.check_ends_well(server, overwrite=answer.code == 0, uid=NOBODY)
    place.remove()
    return answer.hit


def limited(scenario: Scenario, server: Server, path: Path, kind: str, limit: int) -> int:
    """A limit on the process: the right bytes, or an error of ours; returns the exit code."""
    place = Place(scenario, path)
    answer = scenario.run(server, place.out, limits={kind: limit})
    check_message(answer)
    assert answer.code in (0, ENVIRONMENT), answer
    place.check_is(scenario.expected if answer.code == 0 else None)
    place.check_beside()
    place.check_ends_well(server, overwrite=answer.code == 0)
    place.remove()
    return answer.code


def make_large(home: Path, nbytes: int) -> Path:
    """Make a Hub model of about so many bytes in 16 matrices."""
    rows, generator = nbytes // 16 // 4096, numpy.random.default_rng(0)
    (home / "large").mkdir(parents=True)
    tensors = {f"layers.{n}.weight": generator.integers(0, 256, (rows, 4096), numpy.uint8) for n in range(16)}
    save_file(tensors, home / "large" / "model.safetensors", metadata={"format": "pt"})
    return home / "large"


def large(home: Path, server: Server, nbytes: int) -> tuple[Scenario, float]:
    """Return a scenario with a large model, and how long it takes, in seconds."""
    import time

    source = make_large(home, nbytes)
    args = ("preshard", str(source), "{out}", "--world-size", "8", "--wrap", "none", *TWO_JOBS)
    scenario = Scenario(name="preshard large", args=args, source=source)
    (home / "whole").mkdir()
    begun = time.monotonic()
    answer = scenario.run(server, home / "whole" / "out")
    elapsed_s = time.monotonic() - begun
    assert answer.code == 0, answer
    expected = content(home / "whole" / "out")
    shutil.rmtree(home / "whole")
    return Scenario(name=scenario.name, args=args, source=source, expected=expected), elapsed_s


def stopped_by_the_clock(
    scenario: Scenario, server: Server, path: Path, signum: int, after_s: float
) -> tuple[int, int]:
    """A signal at any moment; the run is repeated until it ends; returns (exit code, files resumed)."""
    place = Place(scenario, path)
    answer = scenario.run(server, place.out, after_s=after_s, signum=signum)
    if signum in (signal.SIGINT, signal.SIGTERM) and answer.code > 0:
        check_message(answer)
        assert answer.code == 128 + signum, answer
    else:
        assert answer.code in (0, -signum), answer
    place.check_beside()
    is_there = place.check_is(None, scenario.expected) is not None
    again = place.check_ends_well(server, overwrite=is_there)
    place.remove()
    return answer.code, again.resumed_files
