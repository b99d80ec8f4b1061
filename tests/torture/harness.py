"""What all of it shares: the process that forks runs, what is converted, and what must hold after a run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import shardkit
from shardkit.errors import ShardkitError
from shardkit.files import manifest
from tests.torture.sources import Sources

ROOT = Path(__file__).parents[2]
STAGING = re.compile(r"\.out\.shardkit(-(new|commit|trash)-[^/]+)?")
CLAIM = r"/\.out\.shardkit-commit-[^/]*$"
"""Onto this the first rename of a commit goes."""
IS_WHOLE = "it is there, and whole"
"""What the error says of an output whose rename was done, and whose directory could not be synced."""
_OF_A_LARGER = {
    "preshard": "__9_0.distcp",
    "consolidate": "model-00099-of-00099.safetensors",
    "reshard": "logs/older.json",
}
"""A file that an old output has, and the new one has not."""
TWO_JOBS = ("--jobs", "2", "--max-memory", "2MiB")  # buffers that hold a part of a file, bands of a tensor
ONE_JOB = ("--jobs", "1", "--max-memory", "2MiB")


@dataclass(frozen=True, slots=True)
class Answer:
    """How a run ended."""

    code: int
    """Exit code, or minus the signal."""
    out: str
    err: str
    hit: str | None
    """The call at which the fault was; None where the run made fewer."""
    calls: Sequence[str] = ()
    """All calls of a run that ended by itself."""
    num_writers: int = 0
    """Threads that wrote data in it."""

    @property
    def resumed_files(self) -> int:
        """Files that an interrupted run had finished."""
        return int(json.loads(self.out)["resumed_files"])


class Server:
    """The process of `server.py`; each run is a fork of it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.torture.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
                "SHARDKIT_DEBUG": "",
            },
        )

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def together(self, runs: Sequence[Mapping[str, Any]]) -> list[Answer]:
        """Let several runs begin at the same moment, and wait for all."""
        assert self._process.stdin
        assert self._process.stdout
        print(json.dumps({"runs": runs}), file=self._process.stdin, flush=True)
        return [Answer(**answer) for answer in json.loads(self._process.stdout.readline())]

    def __call__(self, args: Iterable[str], **more: Any) -> Answer:
        """Run once; see `server` for what else may be said."""
        return self.together([{"args": list(args), **more}])[0]


Content = dict[str, bytes | None]
"""Files by their paths; None for a directory."""


def content(directory: Path) -> Content:
    """Return everything in a directory."""
    return {
        str(path.relative_to(directory)): None if path.is_dir() else path.read_bytes()
        for path in directory.rglob("*")
    }


def restore(directory: Path, wanted: Content) -> None:
    """Let a directory hold exactly this."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    for name, data in sorted(wanted.items()):
        if data is None:
            (directory / name).mkdir(exist_ok=True)
        else:
            (directory / name).parent.mkdir(exist_ok=True, parents=True)
            (directory / name).write_bytes(data)


def stamps(directory: Path) -> list[tuple[str, int, int, int]]:
    """Return what would tell that somebody wrote into a directory."""
    found = []
    for path in sorted(directory.rglob("*")):
        status = path.lstat()
        found.append((str(path), status.st_size, status.st_mtime_ns, status.st_ino))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One command, what it makes, and what it may find at the destination."""

    name: str
    args: tuple[str, ...]
    """Of the command, `{out}` standing for the output."""
    source: Path
    columns: bool = False
    marker: str | None = None
    """The file that makes the output complete, written last."""
    expected: Content = field(default_factory=dict)
    old: Content = field(default_factory=dict)
    """A complete output of the same files and sizes with other values, and one file more."""
    num_calls: int = 0
    calls: tuple[str, ...] = ()
    """Of an undisturbed run with one job."""

    def command(self, out: Path, *extra: str) -> list[str]:
        """Return what is to be typed."""
        return [*(arg.format(out=out) for arg in self.args), *extra, "--json", "--no-progress"]

    def run(
        self, server: Server, out: Path, *, overwrite: bool = False, extra: Sequence[str] = (), **more: Any
    ) -> Answer:
        """Run the command."""
        args = self.command(out, *(["--overwrite"] if overwrite else []), *extra)
        return server(args, columns=self.columns, **more)


class Scenarios(Mapping[str, Scenario]):
    """All of them; each is run undisturbed when it is first asked for.

    Args:
        sources: what is converted.
        server: where it runs.
        scratch: a directory to do so in.
    """

    def __init__(self, sources: Sources, server: Server, scratch: Path) -> None:
        self._sources, self._server, self._scratch = sources, server, scratch
        self._planned = {scenario.name: scenario for scenario in _scenarios(sources)}
        self._completed = dict[str, Scenario]()

    def __getitem__(self, name: str) -> Scenario:
        if name not in self._completed:
            scratch = self._scratch / name.replace(" ", "-")
            self._completed[name] = _completed(self._planned[name], self._sources, self._server, scratch)
        return self._completed[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._planned)

    def __len__(self) -> int:
        return len(self._planned)


def _scenarios(sources: Sources) -> Iterator[Scenario]:
    preshard = ("preshard", str(sources.hub), "{out}", "--world-size", "5", "--wrap", "none")
    consolidate = ("consolidate", str(sources.trained), "{out}", "--base", str(sources.base))
    consolidate += ("--max-shard-size", "90000")
    reshard = ("reshard", str(sources.folders), "{out}", "--world-size", "3")
    index, none = "model.safetensors.index.json", ("--digest", "none")
    for name, args, source, columns, marker in (
        ("preshard", (*preshard, *ONE_JOB), sources.hub, False, ".metadata"),
        ("preshard two jobs", (*preshard, *TWO_JOBS), sources.hub, False, ".metadata"),
        ("preshard no digests", (*preshard, *TWO_JOBS, *none), sources.hub, False, ".metadata"),
        ("preshard columns", (*preshard, *TWO_JOBS), sources.hub, True, ".metadata"),
        ("preshard cast", (*preshard, *TWO_JOBS, "--dtype", "fp16"), sources.hub, False, ".metadata"),
        ("preshard columns cast", (*preshard, *TWO_JOBS, "--dtype", "bf16"), sources.hub, True, ".metadata"),
        ("consolidate", (*consolidate, *ONE_JOB), sources.trained, False, index),
        ("consolidate manifest", (*consolidate, *TWO_JOBS, "--manifest"), sources.trained, False, index),
        ("consolidate no digests", (*consolidate, *TWO_JOBS, *none), sources.trained, False, index),
        ("consolidate cast", (*consolidate, *TWO_JOBS, "--dtype", "bf16"), sources.trained, False, index),
        ("reshard", (*reshard, *ONE_JOB), sources.folders, False, None),
        ("reshard two jobs", (*reshard, *TWO_JOBS), sources.folders, False, None),
        ("reshard no digests", (*reshard, *TWO_JOBS, *none), sources.folders, False, None),
        ("reshard cast", (*reshard, *TWO_JOBS, "--optimizer-dtype", "bf16"), sources.folders, False, None),
    ):
        yield Scenario(name=name, args=args, source=source, columns=columns, marker=marker)


def _completed(scenario: Scenario, sources: Sources, server: Server, scratch: Path) -> Scenario:
    """Run a scenario undisturbed, over its source and over one with other values."""
    (scratch / "old").mkdir(parents=True)
    whole = scenario.run(server, scratch / "out")
    assert whole.code == 0, whole.err
    other = replace(scenario, args=tuple(sources.other(arg) for arg in scenario.args))
    before = other.run(server, scratch / "old" / "out")
    assert before.code == 0, before.err
    expected, old = content(scratch / "out"), content(scratch / "old" / "out")
    assert expected.keys() == old.keys()
    assert expected != old
    _enlarge(old, _OF_A_LARGER[scenario.args[0]])
    shutil.rmtree(scratch)
    return replace(scenario, expected=expected, old=old, num_calls=len(whole.calls), calls=tuple(whole.calls))


def _enlarge(old: Content, name: str) -> None:
    """Put a file more into an output, and let its manifest list it, if it has one."""
    old[name] = data = b"of a larger one"
    if manifest.NAME in old:
        listed = manifest.load(old[manifest.NAME] or b"", manifest.NAME)
        files = listed["files"] if "folders" in listed else listed.setdefault("others", [])
        files.append({"name": name, "size": len(data), "crc32": None})
        old[manifest.NAME] = manifest.sign(listed)


class Place:
    """A directory for one attempt, and what must hold in it."""

    def __init__(self, scenario: Scenario, path: Path) -> None:
        self.scenario, self.path, self.out = scenario, path, path / "out"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        self._source = stamps(scenario.source)

    def staging(self) -> list[Path]:
        """Return what lies beside the destination."""
        return [path for path in self.path.iterdir() if path.name != "out"]

    def check_beside(self) -> None:
        """What is left beside are directories of jobs and nothing else."""
        for path in self.staging():
            assert STAGING.fullmatch(path.name), f"litter: {path.name}"

    def check_source(self) -> None:
        """Nobody wrote to the source."""
        assert stamps(self.scenario.source) == self._source, "the source was touched"

    def check_is(self, *allowed: Content | None) -> Content | None:
        """The destination is one of these, None standing for its absence; returns which."""
        found = content(self.out) if self.out.exists() else None
        assert found in allowed, f"the destination is {describe(found, allowed)}"
        return found

    def check_is_ended(self, server: Server) -> None:
        """The old output was moved aside; the next run ends the commit, even if it may replace nothing."""
        answer = self.scenario.run(server, self.out, exchange=False)
        assert answer.code == 0, answer
        self.check_is(self.scenario.expected)
        assert not self.staging(), f"left: {[path.name for path in self.staging()]}"

    def check_unfinished(self) -> None:
        """Nothing takes what lies in a job's directory for an output."""
        for path in self.staging():
            data = path / "data"
            if self.scenario.marker and data.exists():
                assert complaints(data), "an unfinished directory opens without a complaint"

    def check_ends_well(self, server: Server, *, overwrite: bool, **more: Any) -> Answer:
        """Running again ends with the right bytes and nothing else."""
        extra = () if overwrite else ("--exist-ok",)
        answer = self.scenario.run(server, self.out, overwrite=overwrite, extra=extra, **more)
        assert answer.code == 0, f"running again: {answer.code} {answer.err}"
        self.check_is(self.scenario.expected)
        assert not self.staging(), f"left after running again: {[path.name for path in self.staging()]}"
        self.check_source()
        return answer

    def remove(self) -> None:
        """Remove the directory: all was well."""
        shutil.rmtree(self.path)


def complaints(directory: Path) -> Sequence[str]:
    """Return what inspect has to say against a directory."""
    try:
        return shardkit.inspect(str(directory)).warnings
    except ShardkitError as error:
        return [error.message]


def describe(found: Content | None, allowed: Sequence[Content | None]) -> str:
    """Say how a directory differs from what it may be."""
    if found is None:
        return "absent"
    texts = []
    for other in allowed:
        if other is None:
            texts.append("there")
            continue
        missing, more = sorted(other.keys() - found.keys()), sorted(found.keys() - other.keys())
        changed = sorted(name for name in found.keys() & other.keys() if found[name] != other[name])
        texts.append(f"missing {missing[:5]}, not expected {more[:5]}, otherwise {changed[:5]}")
    return "; or ".join(texts)


def check_message(answer: Answer) -> None:
    """An error is ours: said in words, with one of our exit codes, and no traceback."""
    assert "Traceback" not in answer.err, answer.err
    assert "internal error" not in answer.err, answer.err
    assert answer.code not in (1, 70), (answer.code, answer.err)
    lines = [line for line in answer.err.splitlines() if not line.startswith("warning: ")]
    assert answer.code == 0 or lines[0].startswith(("error:", "interrupted:")), answer.err
