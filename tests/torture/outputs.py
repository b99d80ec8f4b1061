"""Processes that write an output into a store are killed at a request: `python -m tests.torture.outputs ROUNDS SERVER [SEED]`.

Each has a proxy of its own, which kills it at its n-th request: before that is carried out, or after. A reader looks all
the time: it finds the old output, the new one, or none. No process has state on a disk, so each is "another machine".
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from shardkit.errors import UsageError
from shardkit.files.output.bucket import BucketOutput, status
from shardkit.files.output.contract import JobEnded, OutputExists
from shardkit.files.remote import objects
from tests.files.outputs import conformance
from tests.files.outputs.conformance import ALL, MARKER, make_record
from tests.worlds import stores as servers

ROOT = Path(__file__).parents[2]
MADE, EXISTS, REFUSED = 0, 3, 5
"""Exit codes of a process: it, or a twin, has made the output; another output is there; another job is being committed."""

FAULTS = ("500", "503", "reset", "lost", "late 500")


def may_replace(address: str, *, overwrite: bool) -> None:
    """Refuse to replace an output without `overwrite`."""
    if not overwrite:
        raise OutputExists(f"{address} exists")


def output_at(address: str, *, overwrite: bool) -> BucketOutput:
    """Return an output as a process has it."""
    return BucketOutput(
        address,
        marker=MARKER,
        may_replace=lambda path: may_replace(path, overwrite=overwrite),
        overwrite=overwrite,
    )


def work(address: str, seed: str, part: tuple[int, int], overwrite: bool) -> int:
    """Do what a verb does: write the files of a part, and commit if all are finished; return the exit code."""
    try:
        with output_at(address, overwrite=overwrite) as output:
            output.begin(make_record(seed, part[1]))
            finished = output.notes(ALL)
            todo = [number for number in ALL if number % part[1] == part[0] and number not in finished]
            conformance.add(output, todo, seed)
            if len(output.notes(ALL)) == len(ALL):
                conformance.commit(output, seed)
    except JobEnded as ended:
        return MADE if ended.is_committed else 4
    except OutputExists:
        return EXISTS
    except UsageError:
        return REFUSED
    return MADE


_CHILD = """
import json, os, sys, traceback
import obstore
from shardkit.files.remote import contract, objects
from tests.torture import outputs
from tests.worlds import stores as servers
contract.FIRST_WAIT_S = objects.FIRST_PAUSE_S = 0.01
for line in sys.stdin:
    children = []
    for url, *args in json.loads(line):
        child = os.fork()
        if not child:
            os.environ.update(servers.environment(url) | servers.azure_environment(url))
            if args.pop():
                os.environ["STORAGE_EMULATOR_HOST"] = url
            code = 70
            try:
                code = outputs.work(*args)
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        children.append(child)
    print(json.dumps(children), flush=True)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]), flush=True)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a process does, and where it is killed, or met by a fault."""

    seed: str
    part: tuple[int, int] = (0, 1)
    overwrite: bool = False
    kill_at: int | None = None
    """Number of its request; None lets it end."""
    is_before: bool = False
    """The request is not carried out."""
    fault: str = ""
    """What happens to the request; if empty, the process is killed."""


@dataclass(slots=True)
class Reader:
    """A thread that reads the output again and again."""

    address: str
    seeds: tuple[str, ...]
    looks: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def look(self) -> str:
        """Return whose output is there, or "none". All that the marker names has to be there, byte for byte."""
        there = objects.Objects(self.address)
        marker = there.get(MARKER)
        if marker is None:
            return "none"
        names, seen = json.loads(marker.data), "none"
        for seed in self.seeds:
            files = conformance.expected(seed)
            if names == sorted(files):
                seen = seed
                for name in names:
                    found = there.get(name)
                    # What lies beside the data is replaced just before the marker is.
                    others = [conformance.expected(each).get(name) for each in self.seeds]
                    is_data = make_record(seed).hash[:8] in name
                    assert found is not None, f"{name} is missing"
                    assert found.data == files[name] or (not is_data and found.data in others), name
        assert seen != "none", "a marker of nobody"
        return seen

    def run(self) -> None:
        """Look until the block ends."""
        while not self._stop.wait(0.05):
            try:
                self.looks[self.look()] += 1
            except AssertionError as error:
                self.broken.append(str(error))

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Let the thread look meanwhile."""
        thread = threading.Thread(target=self.run)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()


class Torture:
    """Rounds of kills in one store.

    Args:
        port: of the server.
        root: the bucket.
        seed: of all rounds.
        home: where processes write files before they send them.
    """

    def __init__(self, port: int, root: str, seed: int, home: Path) -> None:
        self._root, self._seed, self.kills = root, seed, 0
        self.looks, self.broken = Counter[str](), list[str]()
        self._proxies = [servers.Proxy(port) for _ in range(3)]
        for proxy in self._proxies:
            proxy.speaks_google = root.startswith("gs://")
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
                "SHARDKIT_CACHE": str(home / "cache"),
            },
        )

    def close(self) -> None:
        """End the process and the proxies."""
        self._process.communicate()
        for proxy in self._proxies:
            proxy.close()

    def run(self, address: str, tasks: list[Task]) -> list[int]:
        """Let processes work together; return their exit codes, a signal as its negative number."""
        pids, known = [], threading.Event()
        for number, (proxy, task) in enumerate(zip(self._proxies, tasks, strict=False)):
            proxy.reset()
            proxy.faults[:] = [task.fault or "reset"]
            proxy.strikes = self._killer(number, task, pids, known)
        lines = [
            [proxy.url, address, task.seed, task.part, task.overwrite, proxy.speaks_google]
            for proxy, task in zip(self._proxies, tasks, strict=False)
        ]
        print(json.dumps(lines), file=self._process.stdin, flush=True)
        assert self._process.stdout
        pids += json.loads(self._process.stdout.readline())
        known.set()
        codes: list[int] = json.loads(self._process.stdout.readline())
        return codes

    def _killer(
        self, number: int, task: Task, pids: list[int], known: threading.Event
    ) -> Callable[[servers.Seen], bool]:
        count = 0

        def strikes(seen: servers.Seen) -> bool:
            nonlocal count
            count += 1
            if task.kill_at is None or count != task.kill_at + 1:
                return False
            if task.fault:
                return True
            known.wait()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[number], signal.SIGKILL)
            self.kills += 1
            return task.is_before

        return strikes

    def round(self, number: int) -> None:
        """Make one round, and note what is wrong."""
        choose = random.Random(f"{self._seed} {number}")
        address = f"{self._root}/kills-{self._seed}/{number}"
        replaces, scenario = choose.random() < 0.5, choose.choice(("alone", "twins", "parts", "rivals"))
        reader = Reader(address, ("old", "new", "rival"))
        try:
            if replaces:
                assert self.run(address, [Task(seed="old")]) == [MADE]
            with reader.reading():
                for _ in range(choose.randint(1, 2)):
                    tasks = self._tasks(choose, scenario, replaces=replaces)
                    codes = self.run(address, tasks)
                    assert all(code in (MADE, EXISTS, REFUSED, -signal.SIGKILL) for code in codes), codes
                    assert scenario == "rivals" or not {EXISTS, REFUSED} & {*codes}, codes
                    if scenario == "rivals" and not replaces:
                        assert codes.count(MADE) <= 1, "two were made"
                seen = reader.look()
                assert seen != "none" or not replaces, "the old output is gone"
                (code,) = self.run(address, [Task(seed="new", overwrite=replaces)])
                if code == REFUSED:  # the other job was killed while it was being committed
                    assert scenario == "rivals"
                    output_at(address, overwrite=False).abort()
                    (code,) = self.run(address, [Task(seed="new", overwrite=replaces)])
                assert code == MADE or (code == EXISTS and reader.look() == "rival"), code
            assert replaces or len(reader.looks.keys() - {"none"}) <= 1, "an output was replaced"
            self._check_end(address, reader)
        except AssertionError as error:
            self.broken.append(f"{number} {scenario}: {error}")
        self.looks += reader.looks
        self.broken += [f"{number} {scenario}: reader: {each}" for each in reader.broken]

    def _tasks(self, choose: random.Random, scenario: str, *, replaces: bool) -> list[Task]:
        def task(seed: str = "new", part: tuple[int, int] = (0, 1), *, is_killed: bool = True) -> Task:
            at = choose.randrange(45 // part[1]) if is_killed else None
            is_before, fault = choose.random() < 0.5, choose.choice((*[""] * len(FAULTS), *FAULTS))
            return Task(
                seed=seed, part=part, overwrite=replaces, kill_at=at, is_before=is_before, fault=fault
            )

        if scenario == "alone":
            return [task()]
        if scenario == "twins":
            return [task(), task(is_killed=choose.random() < 0.5)]
        if scenario == "parts":
            count = choose.randint(2, 3)
            return [task(part=(part, count)) for part in range(count)]
        return [task(seed, is_killed=choose.random() < 0.3) for seed in ("new", "rival")]

    def _check_end(self, address: str, reader: Reader) -> None:
        """Look at what is there once all have ended well."""
        seen = reader.look()
        assert seen in ("new", "rival"), seen
        under_way = [job.record.command for job in status(address)]
        assert make_record(seen).command not in under_way
        output_at(address, overwrite=False).abort()
        assert status(address) == []
        assert reader.look() == seen
        named = {MARKER, *conformance.expected(seen), *conformance.expected("old")}
        if seen == "rival":
            named |= {name for name in conformance.expected("new") if "/" not in name}
        if seen == "new":  # a rival may have been made and replaced
            named |= conformance.expected("rival").keys()
        left = [name for name in objects.Objects(address).sizes() if name not in named]
        assert not left, f"left behind: {left}"


@contextlib.contextmanager
def serving(kind: str, home: Path, seed: int = 0) -> Iterator[Torture]:
    """Give the torture in a server; skips the test where it is not installed."""
    with servers.reached(kind, home) as proxy:
        torture = Torture(proxy.target, servers.ROOTS[kind], seed, home)
        try:
            yield torture
        finally:
            torture.close()


def main() -> int:
    """Run many rounds; return the exit code."""
    num_rounds, kind = int(sys.argv[1]), sys.argv[2]
    with tempfile.TemporaryDirectory() as name:
        with serving(kind, Path(name), int(sys.argv[3]) if len(sys.argv) > 3 else 0) as torture:
            for number in range(num_rounds):
                torture.round(number)
                if number % 10 == 9:
                    print(number + 1, torture.kills, dict(torture.looks), torture.broken, flush=True)
    print(f"{kind}: {num_rounds} rounds, {torture.kills} kills, seen: {dict(torture.looks)}")
    for text in torture.broken:
        print(f"  BROKEN {text}")
    return 1 if torture.broken else 0


if __name__ == "__main__":
    sys.exit(main())
