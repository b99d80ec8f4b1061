"""Faults on the way into a store: `python -m tests.torture.stores_writing [FAULTS [SERVER]]`; exits with 1 where a promise was broken.

A command that writes ends with exit code 0 and the bytes that it writes without faults, or with another code, a clear
error, and the old output or none. The same command without faults then ends well.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from click.testing import CliRunner

import shardkit
from shardkit.cli import main as cli
from shardkit.errors import ShardkitError
from shardkit.files import stores as files
from shardkit.files.remote import contract
from shardkit.files.remote import objects as remote_objects
from tests.torture import stores
from tests.worlds import stores as servers

SEED = 7
NUM_FAULTS = 2000
SAVE = "save"
_FAULTS_OF_A_SERVER = 250
KINDS = (
    *("500", "503", "429", "403", "404", "reset", "late reset", "short", "wrong", "expired", "slow"),
    *("lost", "gone", "garbled"),
)
_MAX_FAULTS, _CODES = 8, (2, 3, 4, 5)
_MAY_PASS = {"500", "503", "429", "reset", "late reset", "lost", "garbled", "slow"}
"""One of these alone is nothing that anybody hears of."""


class Model(torch.nn.Module):
    """13 MiB, of a seed: `save` sends it as one file, in three parts."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(512, 512) for _ in range(13))

    def equals(self, other: Model) -> bool:
        """True if all values are the same."""
        return all(map(torch.equal, self.state_dict().values(), other.state_dict().values()))


class Attempt(NamedTuple):
    """A command, and what happens to its requests, from the last one that anything happens to back to the first."""

    number: int
    verb: str
    replaces: bool
    faults: list[str]


@dataclass(slots=True)
class Tally:
    """What was done and found."""

    right: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    struck: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Count what another one has counted, too."""
        self.right += other.right
        self.refused += other.refused
        self.struck += other.struck
        self.broken += other.broken


class Torture:
    """Commands that write into a store through a proxy.

    Args:
        home: an empty directory.
        proxy: in front of the server; the environment leads to it.
        root: the bucket.
    """

    def __init__(self, home: Path, proxy: servers.Proxy, root: str = servers.ROOTS["any"]) -> None:
        self._proxy, self._root, self.tally = proxy, root, Tally()
        self.store = stores.Store(home, None, {}, {}, {})  # type: ignore[arg-type]
        for place, seed in ((home, 0), (home / "other", 1)):
            stores.make(place, seed)
        for verb in (*stores.VERBS, SAVE):
            for found, other in ((self.store.expected, False), (self.store.others, True)):
                out = f"{self._root}/whole/{verb}-{other}"
                proxy.reset()
                code, said = self._run(verb, out, other=other)
                assert code == 0, said
                self.store.num_requests[verb] = len(proxy.seen)
                found[verb] = stores.objects(out)

    def _run(self, verb: str, out: str, **options: bool) -> tuple[int, str]:
        """Return the exit code of a command, and what it prints."""
        files.forget()
        if verb == SAVE:
            return _save(out, **options)
        result = CliRunner().invoke(cli, self.store.command(verb, out, **options))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            return 70, repr(result.exception)
        return result.exit_code, result.output

    def attempts(self, draw: random.Random) -> Iterator[Attempt]:
        """Yield attempts without end."""
        number = 0
        while True:
            number += 1
            verb = draw.choice((*stores.VERBS, SAVE))
            faults = [""] * (self.store.num_requests[verb] + 4)
            for _ in range(draw.randrange(1, _MAX_FAULTS + 1)):
                faults[draw.randrange(len(faults))] = draw.choice(KINDS)
            if draw.random() < 0.2:  # one fault that lasts for longer than anybody tries
                at = draw.randrange(len(faults))
                faults[at:at] = [draw.choice(("500", "503", "reset", "lost", "garbled"))] * 8
            yield Attempt(number, verb, draw.random() < 0.5, faults)

    def attempt(self, one: Attempt) -> None:
        """Make one attempt, look, and run again without faults."""
        proxy, tally, verb = self._proxy, self.tally, one.verb
        out = f"{self._root}/writing/{one.number}"
        proxy.reset()
        if one.replaces:
            code, said = self._run(verb, out, other=True)
            assert code == 0, said
        proxy.strikes, proxy.faults[:] = (lambda seen: True), one.faults
        code, said = self._run(verb, out, overwrite=one.replaces)
        struck = list(proxy.struck)
        proxy.reset()
        tally.struck.update(struck)
        try:
            (tally.refused if code else tally.right)[verb] += 1
            assert code in (0, *_CODES), f"exit code {code}"
            assert code == 0 or "error:" in said, "no error is shown"
            assert servers.SECRET not in said, "a secret is shown"
            assert code == 0 or set(struck) - {"slow"}, "it fails without a fault"
            assert code == 0 or len(struck) > 1 or not set(struck) <= _MAY_PASS, (
                "it fails for a moment's fault"
            )
            seen = self._visible(one, out)
            assert seen == "new" or code != 0, "a command said that it was done"
            if seen != "new":
                code, said = self._run(verb, out, overwrite=one.replaces)
                assert code == 0, f"it does not go on: {said}"
                seen = self._visible(one, out)
                assert seen == "new", f"{seen} after the next run"
        except AssertionError as error:
            tally.broken.append(f"{one.number} {verb} {json.dumps(struck)}: {error}: {said}")

    def _visible(self, one: Attempt, out: str) -> str:
        """Return which output is visible: "old", "new" or "none"; all of it has to be there."""
        if one.verb != SAVE:
            marker = stores.MARKERS.get(one.verb, ".metadata")
            return stores.visible(self.store, one.verb, out, marker, replaces=one.replaces)
        if ".metadata" not in stores.objects(out):
            assert not one.replaces, "nothing is visible any more"
            return "none"
        files.forget()
        found = Model(2)
        shardkit.load_into(found, out)
        if found.equals(Model(0)):
            return "new"
        assert one.replaces, "something else is visible"
        assert found.equals(Model(1)), "something else is visible"
        return "old"

    def run(self, num_faults: int, seed: int = SEED) -> Tally:
        """Make attempts until so many faults have happened."""
        for one in self.attempts(random.Random(seed)):
            if self.tally.struck.total() >= num_faults:
                return self.tally
            self.attempt(one)
        raise AssertionError


def _save(out: str, *, other: bool = False, overwrite: bool = False) -> tuple[int, str]:
    """Save a model; return what a command would exit with and print."""
    try:
        shardkit.save(Model(int(other)), out, overwrite=overwrite)
    except ShardkitError as error:
        return error.exit_code, f"error: {error}\n{error.hint}"
    except Exception as error:
        return 70, repr(error)
    return 0, ""


@contextmanager
def small_and_impatient(home: Path) -> Iterator[None]:
    """Let parts be small, and waits before another try short: thousands of faults would take hours."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote_objects, "PART_NBYTES", 5 << 20)  # the least that stores take
        patch.setattr(contract, "FIRST_WAIT_S", 0.001)
        patch.setenv("SHARDKIT_CACHE", str(home / "cache"))
        yield


def main() -> int:
    """Run it against a server; return the exit code."""
    num_faults, begun = int(sys.argv[1]) if len(sys.argv) > 1 else NUM_FAULTS, time.monotonic()
    kind = sys.argv[2] if len(sys.argv) > 2 else "any"
    with tempfile.TemporaryDirectory() as name, small_and_impatient(Path(name)):
        tally, turn = Tally(), 0
        while tally.struck.total() < num_faults:  # a server is full after some thousand files
            turn += 1
            home, some = Path(name) / str(turn), min(_FAULTS_OF_A_SERVER, num_faults - tally.struck.total())
            try:
                with servers.reached(kind, home) as proxy:
                    tally.add(Torture(home / "home", proxy, servers.ROOTS[kind]).run(some, SEED + turn))
            except pytest.skip.Exception as missing:
                print(missing, file=sys.stderr)
                return 2
            shutil.rmtree(home)
            print(tally.struck.total(), len(tally.broken), flush=True)
    print(f"{tally.struck.total()} faults in {time.monotonic() - begun:.0f} s: {dict(tally.struck)}")
    for verb in (*stores.VERBS, SAVE):
        print(f"    {verb:24} right {tally.right[verb]:5}   refused {tally.refused[verb]:5}")
    for text in tally.broken:
        print(f"  BROKEN {text}")
    return 1 if tally.broken else 0


if __name__ == "__main__":
    sys.exit(main())
