"""All of it: `python -m tests.torture [PART ...]`; prints what was done and found, exits with 1 where a promise was broken."""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.torture import changes, conditions, divided, errors, kills, reading, syscalls, writers
from tests.torture.harness import Scenario, Scenarios, Server
from tests.torture.sources import make_sources

SEED = 5
LARGE_BYTES = 256 << 20
BASIC = ("preshard", "consolidate manifest", "reshard")
WORKERS = 2
_SHOWN = 20


@dataclass(slots=True)
class Tally:
    """What was done in one part."""

    title: str
    done: Counter[str] = field(default_factory=Counter)
    not_reached: int = 0
    """Attempts in which the run had ended before the fault."""
    broken: list[str] = field(default_factory=list)
    elapsed_s: float = 0.0


class Torture:
    """Everything that the parts need, and the parts.

    Args:
        home: a directory that everybody may read.
        share: which attempts of each part are made: (1, 4) is the first quarter of them.
    """

    def __init__(self, home: Path, servers: list[Server], share: tuple[int, int]) -> None:
        self._home, self._servers, self._share = home, servers, share
        self._found = Scenarios(make_sources(home / "sources"), servers[0], home / "whole")
        for name in self._found:
            self._found[name]  # now, with a server that nobody else talks to
        self.tallies = list[Tally]()

    def _chosen(self, attempts: Iterable[Any], at_most: int | None = None) -> list[Any]:
        every = list(attempts)
        random.Random(SEED).shuffle(every)
        part, parts = self._share
        return every[:at_most][part - 1 :: parts]

    def _all(
        self,
        title: str,
        attempts: Iterable[Any],
        attempt: Callable[[Any, Server, Path], object],
        label: Callable[[Any], str],
    ) -> None:
        """Make all attempts, a worker for each server."""
        tally, begun, lock = Tally(title), time.monotonic(), threading.Lock()
        waiting = iter(list(attempts))

        def work(number: int) -> None:
            while True:
                with lock:
                    one = next(waiting, None)
                    count = sum(tally.done.values())
                if one is None:
                    return
                path = self._home / f"worker{number}" / str(count)
                try:
                    reached = attempt(one, self._servers[number], path)
                except Exception as error:
                    with lock:
                        tally.broken.append(f"{one}: {type(error).__name__}: {error}")
                    reached = True
                with lock:
                    tally.done[label(one)] += 1
                    tally.not_reached += not reached
                shutil.rmtree(path, ignore_errors=True)

        with ThreadPoolExecutor(len(self._servers)) as pool:
            for worker in [pool.submit(work, number) for number in range(len(self._servers))]:
                worker.result()
        tally.elapsed_s = time.monotonic() - begun
        self.tallies.append(tally)
        show(tally)

    def kills(self) -> None:
        """Every call of the basic scenarios, every sixteenth of the others."""
        server, scratch, found = self._servers[0], self._home / "plan", list[kills.Kill]()
        for scenario in self._found.values():
            step = 1 if scenario.name in BASIC else 16
            for mode in kills.MODES:
                found += kills.plan(scenario, server, scratch, mode, exchange=True)[::step]
            found += kills.plan(scenario, server, scratch, kills.OVERWRITE, exchange=False)[::step]
        self._all(
            "SIGKILL at a storage call",
            self._chosen(found),
            lambda one, server, path: kills.attempt(one, self._found[one.scenario], server, path),
            lambda one: f"{one.scenario.split()[0]}, {one.mode}" + ("" if one.exchange else ", no exchange"),
        )

    def errors(self) -> None:
        """Every way to fail, at calls drawn from all."""
        found = list[errors.Failure]()
        for scenario in self._found.values():
            for mode in (errors.FRESH, errors.OVERWRITE, errors.RESUME):
                found += errors.plan(scenario, mode)
            found += errors.plan(scenario, errors.OVERWRITE, exchange=False)
        random.Random(SEED).shuffle(found)
        each = Counter[str]()
        chosen = list[errors.Failure]()
        for one in found:  # as many of each way
            each[one.label] += 1
            if each[one.label] <= 100:
                chosen.append(one)
        self._all(
            "a storage call fails",
            self._chosen(chosen),
            lambda one, server, path: errors.attempt(one, self._found[one.scenario], server, path),
            lambda one: one.label,
        )

    def reading(self) -> None:
        """What `verify` and `inspect` read fails; `inspect` is killed while it writes a page."""
        found = list[reading.Reading]()
        for name in BASIC:
            found += reading.plan(self._found[name], self._servers[0], self._home / "plan")
        self._all(
            "verify and inspect",
            self._chosen(found, 500),
            lambda one, server, path: reading.attempt(one, self._found[one.scenario], server, path),
            lambda one: one.label,
        )

    def changes(self) -> None:
        """A source that changes, at reads drawn from all."""
        found = [change for name in BASIC for change in changes.plan(self._found[name])]
        self._all(
            "the source changes before a read",
            self._chosen(found, 400),
            lambda one, server, path: changes.attempt(one, self._found[one.scenario], server, path),
            lambda one: one.how,
        )

    def writers(self) -> None:
        """200 rounds."""
        sharded = ["preshard two jobs", "preshard cast", "preshard no digests", "reshard", "preshard columns"]
        hub = ["consolidate", "consolidate cast", "consolidate no digests"]
        found = [*writers.plan(sharded, 120, SEED), *writers.plan(hub, 80, SEED)]
        self._all(
            "two to four writers",
            self._chosen(found),
            lambda one, server, path: writers.attempt(one, self._found, server, path),
            lambda one: "all replace" if one.overwrite else "one may",
        )

    def divided(self) -> None:
        """Parts and commits, several at once, some of them killed: 700 rounds."""

        def attempt(one: tuple[str, int], server: Server, path: Path) -> int:
            return divided.attempt(self._found[one[0]], server, path, random.Random(f"{SEED} {one}"))

        found = [(name, number) for name in divided.SCENARIOS for number in range(100)]
        self._all("parts, and commits", self._chosen(found), attempt, lambda one: one[0])

    def system_calls(self) -> None:
        """At least 200 kills and 100 errors in processes as a person starts them."""
        if not syscalls.is_permitted():
            print("system calls: strace is not there or may not trace: left out")
            return
        killed, failed = list[Any](), list[Any]()
        for name, share in (("consolidate", 100), ("preshard", 30), ("reshard", 30)):
            for overwrite in (False, True):
                points = syscalls.plan(self._found[name], self._home / "traced", overwrite=overwrite)
                killed += self._chosen(points, share)
        for name, share in (("consolidate", 30), ("preshard", 6), ("reshard", 6)):
            points = syscalls.plan(
                self._found[name], self._home / "traced", overwrite=False, calls=syscalls.FAILED
            )
            for error in ("EINTR", "EIO", "ENOSPC"):
                failed += [
                    syscalls.Point(p.scenario, p.overwrite, p.call, p.at, error)
                    for p in random.Random(SEED).sample(points, min(share, len(points)))
                    if error != "EINTR" or p.call not in ("mkdir", "rename", "renameat2")
                ]
        failed = self._chosen(failed)
        for title, points in (("SIGKILL at a system call", killed), ("a system call fails", failed)):
            self._all(
                title,
                points,
                lambda one, server, path: syscalls.attempt(one, self._found[one.scenario], server, path),
                lambda one: one.call if one.error is None else one.error,
            )

    def clock(self) -> None:
        """Signals at random moments of a run with a large model."""
        scenario, elapsed_s = conditions.large(self._home / "big", self._servers[0], LARGE_BYTES)
        draw, found = random.Random(SEED), list[tuple[int, float]]()
        for signum, number in (
            (signal.SIGKILL, 100),
            (signal.SIGTERM, 20),
            (signal.SIGINT, 20),
            (signal.SIGHUP, 10),
        ):
            found += [(int(signum), draw.uniform(0.05, 1.1 * elapsed_s)) for _ in range(number)]
        self._all(
            f"a signal by the clock, {LARGE_BYTES >> 20} MiB",
            self._chosen(found),
            lambda one, server, path: conditions.stopped_by_the_clock(scenario, server, path, *one)[0] != 0,
            lambda one: signal.Signals(one[0]).name,
        )
        shutil.rmtree(self._home / "big")

    def conditions(self) -> None:
        """A small disk, lost permissions, limits."""
        attempts = list[tuple[str, Callable[[Server, Path], object]]]()
        for name in BASIC:
            scenario = self._found[name]
            attempts += _conditions(scenario)
        self._all(
            "the real things",
            self._chosen(attempts),
            lambda one, server, path: one[1](server, path),
            lambda one: one[0],
        )


def _conditions(scenario: Scenario) -> Iterable[tuple[str, Callable[[Server, Path], object]]]:
    def limit(kind: str, value: int) -> Callable[[Server, Path], object]:
        return lambda server, path: conditions.limited(scenario, server, path, kind, value) >= 0

    for nbytes in (4 << 10, 100 << 10, 400 << 10):
        yield "RLIMIT_FSIZE", limit("RLIMIT_FSIZE", nbytes)
    for number in (8, 12, 16, 24, 32, 64):
        yield "RLIMIT_NOFILE", limit("RLIMIT_NOFILE", number)

    def small(server: Server, path: Path) -> bool:
        with conditions.small_disk(path, 512 << 10) as disk:
            if disk is not None:
                conditions.too_small(scenario, server, disk)
        return disk is not None

    def filled(at: int) -> Callable[[Server, Path], object]:
        def attempt(server: Server, path: Path) -> object:
            with conditions.small_disk(path, 16 << 20) as disk:
                return disk is not None and conditions.fills_up(scenario, server, disk, at)

        return attempt

    def lost(at: int) -> Callable[[Server, Path], object]:
        return lambda server, path: conditions.permission_lost(scenario, server, path, at)

    def closed(server: Server, path: Path) -> bool:
        conditions.read_only(scenario, server, path)
        return True

    yield "a disk too small", small
    for at in range(1, scenario.num_calls, max(scenario.num_calls // 20, 1)):
        yield "a disk that others fill", filled(at)
    if conditions.may_become_nobody():
        yield "a read-only directory", closed
        for at in range(1, scenario.num_calls, max(scenario.num_calls // 20, 1)):
            yield "permission lost", lost(at)


def show(tally: Tally) -> None:
    """Print a part's lines of the table."""
    number = sum(tally.done.values())
    print(f"{tally.title}: {number} in {tally.elapsed_s:.0f} s, {len(tally.broken)} broken")
    for name, count in sorted(tally.done.items()):
        print(f"    {name:40} {count:6}")
    if tally.not_reached:
        print(f"    {'(over before the fault)':40} {tally.not_reached:6}")
    for text in tally.broken[:_SHOWN]:
        print(f"  BROKEN {text[:1000]}")
    if len(tally.broken) > _SHOWN:
        print(f"  BROKEN ... {len(tally.broken) - _SHOWN} more")
    sys.stdout.flush()


def main() -> int:
    """Run the chosen parts; return the exit code."""
    os.environ["SHARDKIT_CACHE"] = "off"  # what this user has cached is nobody's in a test
    parts = [
        "kills",
        "errors",
        "reading",
        "changes",
        "writers",
        "divided",
        "system_calls",
        "clock",
        "conditions",
    ]
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*parts, []], metavar="PART", help=", ".join(parts))
    parser.add_argument("--share", default="1/1", metavar="N/M", help="the N-th of M shares of all attempts")
    chosen = parser.parse_args()
    memory = Path("/dev/shm")
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        Path(name).chmod(0o755)
        servers = [Server() for _ in range(WORKERS)]
        part, _, parts_in_all = chosen.share.partition("/")
        torture = Torture(Path(name), servers, (int(part), int(parts_in_all)))
        for part in chosen.parts or parts:
            getattr(torture, part)()
        for server in servers:
            server.close()
    done = sum(sum(tally.done.values()) for tally in torture.tallies)
    broken = sum(len(tally.broken) for tally in torture.tallies)
    print(f"{done} attempts in {time.monotonic() - begun:.0f} s, {broken} promises broken")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
