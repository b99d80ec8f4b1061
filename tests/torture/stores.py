"""Writers into a store are killed at a request: before it is carried out, or after. Some write alone, others a part each.

What is visible is the old output, the new one, or none, and the next run ends with the same bytes.
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import shardkit
from shardkit.files.remote import kinds
from shardkit.files.remote.objects import Objects
from tests.worlds import stores as servers

ROOT = Path(__file__).parents[2]
VERBS = ("preshard", "consolidate", "reshard")
MARKERS = {"consolidate": "model.safetensors.index.json"}
_CHILD = """
import gc, json, os, signal, sys
from shardkit.cli import main
import obstore
from shardkit.files.remote import objects
import torch
from tests.worlds import s3_models
from tests.worlds.processes import import_all
torch.set_num_threads(1)
import_all()
gc.freeze()
objects.PART_NBYTES = int(sys.argv[1])
for line in sys.stdin:
    children = []
    for args in json.loads(line):
        child = os.fork()
        if not child:
            os.dup2(os.open(os.environ.get("TORTURE_LOG", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
            os.dup2(1, 2)
            try:
                main.main(args=args, prog_name="shardkit")
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
            except BaseException:
                code = 70
            os._exit(code)
        children.append(child)
    print(json.dumps(children), flush=True)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]), flush=True)
"""


class Runs:
    """A process that forks the command line, which talks to a store through a proxy.

    Args:
        proxy: in front of the store.
        home: where it may write.
        part_nbytes: of a part of a file; by default the least that Amazon takes, so that small files have several.
    """

    def __init__(self, proxy: servers.Proxy, home: Path, *, part_nbytes: int = 5 << 20) -> None:
        self.proxy = proxy
        self.children: list[int] = []
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(part_nbytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={
                **os.environ,
                **servers.environment(proxy.url),
                "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
                "SHARDKIT_CACHE": str(home / "cache"),
            },
        )

    def begin(self, runs: list[list[str]]) -> None:
        """Let commands begin together."""
        print(json.dumps(runs), file=self._process.stdin, flush=True)
        self.children = json.loads(self._line())

    def end(self) -> list[int]:
        """Wait for all of them; return their exit codes, a signal as its negative number."""
        codes: list[int] = json.loads(self._line())
        return codes

    def run(self, commands: list[list[str]]) -> None:
        """Run commands at the same time, all of which have to end well."""
        self.begin(commands)
        codes = self.end()
        assert not any(codes), f"exit codes {codes} of {[command[:1] + command[3:] for command in commands]}"

    def _line(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline()

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


@dataclass(frozen=True, slots=True)
class Store:
    """A store, sources, and what each verb makes of them."""

    home: Path
    runs: Runs
    expected: dict[str, dict[str, bytes]]
    """By verb: everything in the output, by name."""
    others: dict[str, dict[str, bytes]]
    """The same of another source."""
    num_requests: dict[str, int]

    def command(self, verb: str, out: str, *, other: bool = False, overwrite: bool = False) -> list[str]:
        """Return what is typed."""
        home = self.home / "other" if other else self.home
        options = {
            "preshard": [f"{home}/hub", out, "--world-size", "2", "--wrap", "none", "--layout", "declared"],
            "consolidate": [f"{home}/dcp", out, "--manifest", "--max-shard-size", "7MB"],
            "reshard": [f"{home}/dcp", out, "--world-size", "3"],
        }
        return [
            verb,
            *options[verb],
            "--no-progress",
            *(["--overwrite"] if overwrite else []),
        ]


@contextlib.contextmanager
def serving(kind: str, home: Path) -> Iterator[Store | None]:
    """Give a store that is ready for attempts; None if the server is not installed."""
    with servers.serving(kind, home / "server") as port, pytest.MonkeyPatch.context() as patch:
        if port is None:
            yield None
            return
        proxy = servers.Proxy(port)
        for name, value in servers.environment(f"http://127.0.0.1:{port}").items():
            patch.setenv(name, value)
        kinds.forget_stores()
        for place, seed in ((home, 0), (home / "other", 1)):
            make(place, seed)
        runs = Runs(proxy, home)
        try:
            store = Store(home, runs, {}, {}, {})
            for verb in VERBS:
                for found, other in ((store.expected, False), (store.others, True)):
                    proxy.reset()
                    out = f"s3://{servers.BUCKET}/whole/{verb}-{other}"
                    runs.run([store.command(verb, out, other=other)])
                    found[verb] = objects(out)
                store.num_requests[verb] = len(proxy.seen)
            yield store
        finally:
            runs.close()
            proxy.close()
            kinds.forget_stores()


def make(home: Path, seed: int) -> None:
    """Make a Hub model of 13 MiB, and the same for two ranks."""
    torch.manual_seed(seed)
    (home / "hub").mkdir(parents=True)
    weights = {f"layers.{number}.weight": torch.randn(512, 512) for number in range(13)}
    save_file(weights, home / "hub/model.safetensors", {"format": "pt"})
    shardkit.preshard(home / "hub", home / "dcp", world_size=2, wrap="none", layout="declared")


def objects(out: str) -> dict[str, bytes]:
    """Return everything below a place in the store."""
    place = Objects(out)
    stored = ((name, place.get(name)) for name in place.sizes())
    return {name: each.data for name, each in stored if each is not None}


def attempt(store: Store, number: int, seed: int = 0) -> str:
    """Kill one run, or one of two, at a request, look, and run again.

    Returns:
        What was visible: "none", "old" or "new".
    """
    choose, runs = random.Random(f"{seed} {number}"), store.runs
    verb, replaces = choose.choice(VERBS), choose.random() < 0.5
    out, marker = f"s3://{servers.BUCKET}/kills-{seed}/{number}", MARKERS.get(verb, ".metadata")
    runs.proxy.reset()
    if replaces:
        runs.run([store.command(verb, out, other=True)])
    is_two = choose.random() < 0.25
    command = store.command(verb, out, overwrite=replaces)
    kill_at(runs, choose.randrange(store.num_requests[verb]), is_before=choose.random() < 0.5)
    runs.begin([command] * (2 if is_two else 1))
    codes = runs.end()
    runs.proxy.reset()
    assert all(code in (0, -signal.SIGKILL) for code in codes), codes  # whose twin was faster ends well
    seen = visible(store, verb, out, marker, replaces=replaces)
    assert seen == "new" or 0 not in codes, "a run said that it was done"
    if seen != "new":
        runs.run([command])
        assert visible(store, verb, out, marker, replaces=replaces) == "new", "the next run wrote nothing new"
    return seen


def attempt_parts(store: Store, number: int, seed: int = 0) -> str:
    """Let parts, twins and commits write at the same time, kill one or two of them, look, and run all again.

    Returns:
        What was visible: "none", "old" or "new".
    """
    choose, runs = random.Random(f"parts {seed} {number}"), store.runs
    verb, replaces = choose.choice(VERBS), choose.random() < 0.5
    out, marker = f"s3://{servers.BUCKET}/parts-{seed}/{number}", MARKERS.get(verb, ".metadata")
    runs.proxy.reset()
    if replaces:
        runs.run([store.command(verb, out, other=True)])
    command, seen = store.command(verb, out, overwrite=replaces), "old" if replaces else "none"

    def parts(count: int) -> list[list[str]]:
        return [[*command, f"--part={each}/{count}"] for each in range(1, count + 1)]

    for turn in range(choose.randint(1, 2)):
        commands = parts(choose.randint(1, 3))
        commands += choose.sample(commands, choose.randint(0, 1))
        num_parts = len(commands)
        commands += [["commit", out]] * (turn * choose.randint(0, 2))
        for victim in choose.sample(range(len(commands)), choose.randint(1, min(2, len(commands)))):
            kill_at(
                runs,
                choose.randrange(25 * len(commands)),
                is_before=choose.random() < 0.5,
                victim=victim,
            )
        runs.begin(commands)
        codes = runs.end()
        runs.proxy.reset()
        assert all(code in (0, -signal.SIGKILL) for code in codes[:num_parts]), codes
        # 2: a commit came before any part; 4: parts that it waits for were killed
        assert all(code in (0, 2, 4, -signal.SIGKILL) for code in codes), codes
        was, seen = seen, visible(store, verb, out, marker, replaces=replaces)
        assert was != "new" or seen == "new", "the new output is gone"
        assert seen == "new" or any(codes), "all said that they were done"
    runs.run(parts(2))
    runs.run([["commit", out]] * 2)
    assert visible(store, verb, out, marker, replaces=replaces) == "new", "the next run wrote nothing new"
    rest = (
        objects(out).keys() - store.expected[verb].keys() - (store.others[verb].keys() if replaces else set())
    )
    assert not rest, f"left behind: {sorted(rest)}"
    return seen


def kill_at(runs: Runs, at: int, *, is_before: bool, victim: int = 0) -> None:
    """Kill a run at the n-th request of all, which is carried out or not; others may be killed at others."""
    count, lock, others = 0, threading.Lock(), runs.proxy.strikes

    def strikes(seen: Any) -> bool:
        nonlocal count
        also = others(seen)
        with lock:
            count += 1
            if count != at + 1 or len(runs.children) <= victim:
                return also
        with contextlib.suppress(ProcessLookupError):
            os.kill(runs.children[victim], signal.SIGKILL)
        return is_before or also

    runs.proxy.strikes = strikes
    runs.proxy.faults.append("reset")
    runs.children = []


def visible(store: Store, verb: str, out: str, marker: str, *, replaces: bool) -> str:
    """Return which output is visible; all that it names has to be there, byte for byte."""
    found = objects(out)
    sides = {"new": store.expected[verb], **({"old": store.others[verb]} if replaces else {})}
    if marker not in found:
        assert not replaces, "nothing is visible any more"
        return "none"
    which = [name for name, side in sides.items() if side[marker] == found[marker]]
    assert len(which) == 1, "something else is visible"
    side, flat = sides[which[0]], marker != ".metadata"
    for name, data in side.items():
        # What lies flat beside a Hub model's weights is replaced before the index.
        if found.get(name) != data:
            assert flat, f"{name} is not what is named"
            assert not name.endswith(".safetensors"), f"{name} is not what is named"
            assert any(found.get(name) == each.get(name) for each in sides.values()), name
    return which[0]


def main(num_rounds: int, kind: str, seed: int) -> int:
    """Run many attempts; return the exit code."""
    with tempfile.TemporaryDirectory() as name, serving(kind, Path(name)) as store:
        if store is None:
            print(f"{kind} is not installed")
            return 1
        counts, broken = dict[str, int](), 0
        for number in range(num_rounds):
            try:
                seen = (attempt_parts if number % 2 else attempt)(store, number, seed)
            except AssertionError as error:
                broken += 1
                print(f"BROKEN {number}: {error}", flush=True)
                seen = "broken"
            counts[seen] = counts.get(seen, 0) + 1
            if number % 50 == 49:
                print(number + 1, counts, flush=True)
        print(f"{kind}: {num_rounds} rounds, visible after the kill: {counts}; {broken} promises broken")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 0))
