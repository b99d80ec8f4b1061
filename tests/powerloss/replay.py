"""Records runs, lets the power fail at every moment of them, and looks at what is left.

    python -m tests.powerloss.replay [--random 12] [--again 60] [--seed 0] [SCENARIO ...]

prints a line for each scenario; `make powerloss` runs all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardkit.errors import ShardkitError
from shardkit.files.output.contract import JobRecord
from shardkit.files.strict_json import parse_object
from shardkit.operations.parts.notes import load_note
from tests.powerloss.disk import Disk, State, Tree
from tests.powerloss.log import Log
from tests.powerloss.scenarios import SCENARIOS, Scenario, make_sources

NAME = "out"
REPOSITORY = Path(__file__).parents[2]
SCRATCH = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""In memory, where there is such a place: thousands of small files are written."""


class Worker:
    """The process of worker.py."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.powerloss.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, sys.path)])},
        )

    def __call__(self, **request: Any) -> dict[str, Any]:
        """Run once, in a fork."""
        assert self._process.stdin
        assert self._process.stdout
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        self._process.communicate()


@dataclass(slots=True, kw_only=True)
class Findings:
    """What the states of one scenario showed, or of all."""

    num_ops: int = 0
    num_states: int = 0
    """Different ones."""
    num_absent: int = 0
    num_old: int = 0
    num_new: int = 0
    num_resumable: int = 0
    """States in which a note let a run trust at least one file."""
    num_on_disk: int = 0
    """States that were written into a directory."""
    num_again: int = 0
    """Runs over states."""
    wrong: list[str] = field(default_factory=list)

    def add(self, other: Findings) -> None:
        """Count what another scenario showed."""
        for column in _COLUMNS:
            name = f"num_{column}"
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.wrong += other.wrong


_COLUMNS = ("ops", "states", "absent", "old", "new", "on_disk", "resumable", "again")


def tree_of(path: str | os.PathLike[str]) -> Tree | None:
    """Return the files and folders of a directory, or a file under the name ""; None where there is nothing."""
    if os.path.isfile(path):
        return {"": Path(path).read_bytes()}
    if not os.path.isdir(path):
        return None
    tree = Tree()
    for here, folders, names in os.walk(path):
        prefix = os.path.relpath(here, path)
        for name in folders:
            tree[os.path.normpath(os.path.join(prefix, name))] = None
        for name in names:
            tree[os.path.normpath(os.path.join(prefix, name))] = Path(here, name).read_bytes()
    return tree


class Replay:
    """One scenario, recorded.

    Args:
        scenario: what to record.
        worker: runs it.
        sources: of `make_sources`.
        place: an empty directory of its own.
        mutation: a name in `mutations`.
    """

    def __init__(
        self,
        scenario: Scenario,
        worker: Worker,
        sources: Mapping[str, Path],
        place: Path,
        mutation: str | None = None,
    ) -> None:
        self._scenario, self._worker, self._place = scenario, worker, place
        self._request = {
            "verb": scenario.verb,
            "source": str(sources[scenario.source]),
            "clones": scenario.clones,
            "can_exchange": scenario.can_exchange,
            "steps": scenario.steps,
        }
        self._replaces = scenario.replaces is not None
        self._root, self._scratch = place / "root", place / "scratch"
        self._root.mkdir()
        self._number = 0
        self.new = self._undisturbed(self._request["source"])
        self.old = self._undisturbed(str(sources[scenario.replaces])) if scenario.replaces else None
        self._killed_source = str(sources[scenario.killed_source or scenario.source])
        is_other = self._killed_source != self._request["source"]
        self._between = self._undisturbed(self._killed_source) if is_other else self.new
        self.log = self._record(mutation)

    def _run(self, output: Path, **more: Any) -> dict[str, Any]:
        options = {**self._scenario.options, "overwrite": self._replaces}
        if self._scenario.verb != "page":
            options["exist_ok"] = not self._replaces
        return self._worker(**{**self._request, "output": str(output), "options": options, **more})

    def _undisturbed(self, source: str) -> Tree:
        target = self._place / "whole" / NAME
        target.parent.mkdir()
        answer = self._run(target, source=source)
        tree = tree_of(target)
        assert answer["code"] == 0
        assert tree
        shutil.rmtree(target.parent)
        return tree

    def _record(self, mutation: str | None) -> Log:
        """Carry out the scenario's runs, and return all that they did."""
        log, output = self._place / "log", self._root / NAME
        if self.old is not None:
            write_tree(self.old, output)
        kwargs = {"root": str(self._root), "log": str(log), "mutation": mutation}
        for share in self._scenario.killed:
            killed = {**kwargs, "source": self._killed_source}
            assert self._run(output, **killed, fatal=self._fatal(share, killed))["code"] == 9
        answer = self._run(output, **kwargs)
        assert answer["code"] == 0
        assert (answer["clones"] > 1) == self._scenario.clones  # one is only tried
        found = pickle.loads(log.read_bytes())
        assert isinstance(found, Log)
        assert mutation or tree_of(output) == self.new
        return found

    def _fatal(self, share: float, kwargs: Mapping[str, Any]) -> int:
        """Return which call is to be the last, by a run on a copy of what is there."""
        trial = self._place / "trial"
        shutil.copytree(self._root, trial / "root")
        own = {"root": str(trial / "root"), "log": str(trial / "log")}
        answer = self._run(trial / "root" / NAME, **{**kwargs, **own})
        shutil.rmtree(trial)
        assert answer["code"] == 0
        return answer["last_rename"] + 1 if share == 1.0 else max(int(answer["calls"] * share), 1)

    def states(self, pick: random.Random, num_random: int) -> Iterator[State]:
        """Yield different states, moment after moment."""
        seen = set[int]()
        for stop in range(len(self.log.ops) + 1):
            for state in Disk(self.log, stop).states(pick, num_random):
                key = hash(frozenset(state.tree.items()))
                if key not in seen:
                    seen.add(key)
                    yield state

    def check(
        self, states: Sequence[State], pick: random.Random, *, num_on_disk: int, num_again: int
    ) -> Findings:
        """Hold every state against what it may be.

        Args:
            states: of `states`.
            pick: chooses.
            num_on_disk: states that are written into a directory, where shardkit looks at them.
            num_again: of those, how many it runs over again; what has something to resume from comes first.
        """
        found = Findings(num_ops=len(self.log.ops), num_states=len(states))
        for state in states:
            self._hold(state.tree, state, found)
        resumable, others = list[State](), list[State]()
        for state in pick.sample(states, min(len(states), num_on_disk)):
            (resumable if self._look(state, found) else others).append(state)
        found.num_resumable = len(resumable)
        chosen = pick.sample(resumable, min(len(resumable), num_again * 3 // 4))
        chosen += pick.sample(others, min(len(others), num_again - len(chosen)))
        for state in chosen:
            self.run_again(state, found)
        return found

    def _hold(self, tree: Tree, state: State, found: Findings) -> None:
        """Hold the destination against what it may be."""
        out = _below(tree, NAME)
        if out is None and (self.old is None or self._is_aside(tree)):
            found.num_absent += 1
        elif out is not None and out == self.old:
            found.num_old += 1
        elif out in (self.new, self._between):
            found.num_new += 1
        else:
            found.wrong.append(f"{NAME} is neither: {self._difference(out)}; {state.story}")

    def _look(self, state: State, found: Findings) -> bool:
        """Let shardkit say which notes it would believe, and compare the files that these vouch for."""
        is_resumable = False
        with self._on_disk(state) as place:
            found.num_on_disk += 1
            assert tree_of(place / NAME) == _below(state.tree, NAME)
            for directory, name in noted_files(str(place / NAME)):
                is_resumable = True
                if Path(directory, name).read_bytes() not in (self.new[name], self._between[name]):
                    found.wrong.append(f"a note vouches for {name}, which is damaged; {state.story}")
        return is_resumable

    def _is_aside(self, tree: Tree) -> bool:
        """True where the old output lies complete in a job's directory, whose commit the next run ends."""
        places = [name for name in tree if name.count("/") == 1 and name.endswith("/old")]
        return not self._scenario.can_exchange and self.old in [_below(tree, place) for place in places]

    def run_again(self, state: State, found: Findings) -> None:
        """Run over what a state left; it ends with the same bytes and nothing beside them."""
        found.num_again += 1
        with self._on_disk(state) as place:
            # A part that comes late and may overwrite would begin anew.
            answer = self._run(place / NAME, **({"steps": ()} if self._replaces else {}))
            if answer["code"] != 0 or tree_of(place / NAME) != self.new:
                found.wrong.append(
                    f"running again: code {answer['code']}, {self._difference(tree_of(place / NAME))}; {state.story}"
                )
            elif [name for name in os.listdir(place) if not self._is_of_a_page(name)] != [NAME]:
                found.wrong.append(f"litter: {sorted(os.listdir(place))}; {state.story}")

    def _is_of_a_page(self, name: str) -> bool:
        """True for a page that a process did not finish: it has a name of its own, and stays."""
        return self._scenario.verb == "page" and name.endswith(f".{NAME}.part")

    def _difference(self, tree: Tree | None) -> str:
        if tree is None:
            return "absent"
        names = sorted(self.new.keys() ^ tree.keys())
        return (
            f"other names {names}" if names else f"other bytes {[n for n in tree if tree[n] != self.new[n]]}"
        )

    @contextlib.contextmanager
    def _on_disk(self, state: State) -> Iterator[Path]:
        """Write a state into a directory."""
        self._number += 1
        place = self._scratch / str(self._number)
        write_tree(state.tree, place)
        _link_again(state, place)
        for name in state.tree:
            if (written := self.log.times.get(state.nodes[name])) is not None:
                os.utime(place / name, ns=(written, written))
        try:
            yield place
        finally:
            shutil.rmtree(place)


def noted_files(destination: str) -> list[tuple[str, str]]:
    """Return (directory, name) of the files under way that have a note, which another process would believe."""
    parent, name = os.path.split(destination)
    work = Path(parent, f".{name}.shardkit")
    try:
        record, _ = JobRecord.parse((work / "job.json").read_bytes(), "job.json")
    except FileNotFoundError:
        return []
    return [
        (str(work / "data"), file.name)
        for number, file in enumerate(record.files)
        if _is_noted(work, number, file.name, file.size)
    ]


def _is_noted(work: Path, number: int, name: str, size: int) -> bool:
    """True if a file has its size, and a note that is whole."""
    try:
        note = load_note(parse_object((work / "done" / f"{number}.json").read_bytes(), name), name, size)
        return note is not None and (work / "data" / name).stat().st_size == size
    except (KeyError, OSError, ShardkitError):
        return False


def _below(tree: Tree, place: str) -> Tree | None:
    """Return what `tree_of` gives of a place in a tree."""
    if place not in tree:
        return None
    if tree[place] is not None:
        return {"": tree[place]}
    return {name[len(place) + 1 :]: tree[name] for name in tree if name.startswith(f"{place}/")}


def write_tree(tree: Tree, path: Path) -> None:
    """Make a directory and what is in it, or the file that `tree_of` gave."""
    if "" in tree:
        path.write_bytes(tree[""] or b"")
        return
    path.mkdir(parents=True)
    for name in sorted(tree):
        content = tree[name]
        if content is None:
            (path / name).mkdir(exist_ok=True)
        else:
            (path / name).write_bytes(content)


def _link_again(state: State, place: Path) -> None:
    """Let names that stand for one file do so."""
    first = dict[int, str]()
    for name, content in state.tree.items():
        if content is not None and (known := first.setdefault(state.nodes[name], name)) != name:
            (place / name).unlink()
            (place / name).hardlink_to(place / known)


@contextlib.contextmanager
def recorded(
    names: Sequence[str], worker: Worker, mutation: str | None = None
) -> Iterator[Iterator[tuple[str, Replay]]]:
    """Give scenarios with their recordings; all is removed afterwards."""
    with tempfile.TemporaryDirectory(dir=SCRATCH, prefix="shardkit-powerloss-") as directory:
        place = Path(directory)
        (place / "sources").mkdir()
        sources = make_sources(place / "sources")

        def each() -> Iterator[tuple[str, Replay]]:
            for name in names:
                (place / name).mkdir()
                yield name, Replay(SCENARIOS[name], worker, sources, place / name, mutation)

        yield each()


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay scenarios and print what was found; 1 where something is wrong."""
    os.environ["SHARDKIT_CACHE"] = "off"  # what this user has cached is nobody's in a test
    parser = argparse.ArgumentParser(
        description="Replay what a power loss may leave of every operation that writes."
    )
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", default=list(SCENARIOS))
    parser.add_argument("--random", type=int, default=12, help="drawn states at each moment (12)")
    parser.add_argument(
        "--again", type=int, default=60, help="states of each scenario to run again over (60)"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    total = Findings()
    print("".join([f"{'scenario':<30}", *(f"{name:>10}" for name in (*_COLUMNS, "wrong", "seconds"))]))
    worker = Worker()
    with recorded(options.scenarios, worker) as replays:
        for name, replay in replays:
            begun, pick = time.monotonic(), random.Random(f"{name} {options.seed}")
            states = list(replay.states(pick, options.random))
            found = replay.check(states, pick, num_on_disk=len(states), num_again=options.again)
            elapsed_s = round(time.monotonic() - begun)
            _print_line(name, found, elapsed_s)
            for line in found.wrong[:5]:
                print(f"    {line}")
            total.add(found)
    worker.close()
    _print_line("all", total, 0)
    return 1 if total.wrong else 0


def _print_line(name: str, found: Findings, elapsed_s: int) -> None:
    counts = (*(getattr(found, f"num_{column}") for column in _COLUMNS), len(found.wrong), elapsed_s)
    print("".join([f"{name:<30}", *(f"{count:>10}" for count in counts)]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
