"""Run fuzz targets: `python -m tests.fuzz.run TARGET --count N --seed S`.

Inputs are numbered. Number i of a target is made from the seed and the block of a thousand that i is in, so
that a run can be cut into parts (`--first`), and any part repeated. A child process does the work; it writes
down each input before it looks at it, so that one that kills or hangs it is known. Whatever breaks a promise is
kept under `tests/fuzz/found/`; a test replays what lies there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import re
import resource
import signal
import struct
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.target import Refusals, Target
from tests.fuzz.targets import TARGETS, load

FOUND = Path(__file__).parent / "found"
_BLOCK = 1000
_MAX_INPUT = 1 << 24
_MAX_SECONDS = 1.0  # of CPU: other processes may be at work too
_MAX_GROWTH = 256 << 20  # bytes
_HANG_SECONDS = 10.0  # of CPU, for one input
_STUCK_SECONDS = 600.0  # for one input that takes no CPU, however busy the machine is
_MAX_FAILURES = 20
_SHOWN_MESSAGES = 40
_VARYING = re.compile(r"'[^']*'|\[[^\]]*\]|\b[0-9a-f]{8}\b|-?\d+")
_HEAD = struct.Struct("<QQQ")  # inputs done, bytes of the present one, 1 when finished


def save_input(target: str, data: bytes) -> Path:
    """Keep an input that broke a promise."""
    FOUND.mkdir(exist_ok=True)
    path = FOUND / f"{target}-{hashlib.sha256(data).hexdigest()[:16]}"
    path.write_bytes(data)
    return path


class Run:
    """What came of a part of a target's inputs."""

    def __init__(self, name: str, seed: int, first: int) -> None:
        self.name, self.seed, self.first = name, seed, first
        self.count = self.num_accepted = 0
        self.slowest_s = 0.0
        self.messages: Counter[str] = Counter()
        self.failures: dict[str, str] = {}

    def refused(self) -> None:
        """Count a refusal by its message without what varies."""
        message = _VARYING.sub("N", Refusals.latest)[:120]
        if message in self.messages or len(self.messages) < 1000:
            self.messages[message] += 1
        else:
            self.messages["(others)"] += 1

    def failed(self, data: bytes, kind: str, detail: str) -> None:
        """Keep the first input of each kind of failure."""
        if kind not in self.failures:
            path = save_input(self.name, data)
            self.failures[kind] = str(path)
            print(f"{self.name}: {kind}: {path}\n{detail}", file=sys.stderr, flush=True)

    def to_json(self) -> dict[str, Any]:
        """Return the outcome as plain data."""
        return {
            "target": self.name,
            "engine": "random",
            "seed": self.seed,
            "first": self.first,
            "inputs": self.count,
            "accepted": self.num_accepted,
            "slowest_cpu_s": round(self.slowest_s, 4),
            "failures": self.failures,
            "messages": dict(self.messages.most_common(_SHOWN_MESSAGES)),
            "num_messages": len(self.messages),
        }


def work(run: Run, target: Target, stop: int, deadline: float, shared: mmap.mmap) -> None:
    """Try inputs until `stop` or the deadline, whole blocks only; an input that takes too long ends the process."""
    seeds = target.seeds()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    at = run.first
    while at < stop and time.monotonic() < deadline and len(run.failures) < _MAX_FAILURES:
        rng = Random(f"{run.name} {run.seed} {at // _BLOCK}")
        for _ in range(min(_BLOCK, stop - at)):
            data = target.mutate(rng, seeds)
            shared[_HEAD.size : _HEAD.size + len(data)] = data
            _HEAD.pack_into(shared, 0, run.count + 1, len(data), 0)
            signal.setitimer(signal.ITIMER_PROF, _HANG_SECONDS)  # what is not caught ends the process
            signal.setitimer(signal.ITIMER_REAL, _STUCK_SECONDS)
            started = time.process_time()
            try:
                if target.check(data):
                    run.num_accepted += 1
                else:
                    run.refused()
            except Exception as error:
                run.failed(data, _kind_of(error), traceback.format_exc())
            elapsed = time.process_time() - started
            run.count += 1
            run.slowest_s = max(run.slowest_s, elapsed)
            if elapsed > _MAX_SECONDS:
                run.failed(data, f"slow {elapsed:.0f} s", "")
            now = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            if (now - peak) << 10 > _MAX_GROWTH:
                run.failed(data, "memory", f"{now - peak} KiB")
            peak = now
        at += _BLOCK


def _kind_of(error: Exception) -> str:
    """Tell failures apart by the place where they were raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {os.path.basename(frame.filename)}:{frame.lineno}"


def run_target(name: str, *, seed: int, first: int, count: int, seconds: float) -> dict[str, Any]:
    """Fuzz one target in a child process; return what came of it."""
    # A fork of a process in which torch has run threads of OpenMP may wait for them for ever.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    target = load(name)
    target.seeds()  # made once, here; also what they import counts as this process's memory
    shared = mmap.mmap(-1, _HEAD.size + _MAX_INPUT)
    started = time.monotonic()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            _limit_memory()
            before = _high_water()
            run = Run(name, seed, first)
            work(run, target, first + count, started + seconds, shared)
            outcome = {**run.to_json(), "growth_bytes": _high_water() - before}
            _HEAD.pack_into(shared, 0, run.count, 0, 1)
            with os.fdopen(writer, "w") as pipe:
                json.dump(outcome, pipe)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            target.clean()
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    done, nbytes, is_finished = _HEAD.unpack_from(shared)
    if is_finished and text:
        outcome = json.loads(text)
    else:
        path = save_input(name, shared[_HEAD.size : _HEAD.size + nbytes])
        outcome = {"target": name, "engine": "random", "seed": seed, "first": first, "inputs": done}
        outcome["failures"] = {"crash or hang": str(path)}
    return {**outcome, "elapsed_s": round(time.monotonic() - started, 1)}


def _limit_memory() -> None:
    """Let a runaway end as a MemoryError, not as the machine's."""
    text = Path("/proc/self/status").read_text()
    size = int(re.search(r"VmSize:\s+(\d+)", text)[1]) << 10  # type: ignore[index]
    resource.setrlimit(resource.RLIMIT_AS, (size + (2 << 30), size + (2 << 30)))
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark counts from here


def _high_water() -> int:
    """Return the most memory that this process ever held, in bytes."""
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10  # type: ignore[index]


def main() -> int:
    """Parse the command line, run, print one line of JSON for each target."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; default all")
    parser.add_argument("--count", type=int, default=10_000, help="inputs of each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first input, a multiple of 1000")
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="stop a target after the block that is then done"
    )
    options = parser.parse_args()
    failed = False
    for name in options.targets or TARGETS:
        outcome = run_target(
            name, seed=options.seed, first=options.first, count=options.count, seconds=options.seconds
        )
        failed |= bool(outcome["failures"])
        print(json.dumps(outcome), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
