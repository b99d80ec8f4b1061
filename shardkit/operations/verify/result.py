"""What verify answers: the result, and the report that collects it on the way."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal

from shardkit.core.result import DrawnResult, Result
from shardkit.core.text import count, escape
from shardkit.core.threads import NoProgress, Progress, run_all
from shardkit.errors import ResourceError, ShardkitError
from shardkit.files import storage
from shardkit.files.digest import Stretch
from shardkit.files.home import path_in
from shardkit.files.remote.contract import OtherVersion
from shardkit.formats.contract import DamagedFiles
from shardkit.operations.holdings import Holdings

Level = Literal["structure", "full"]
SIZE = "size in bytes"
"""The message where a file has another size than is recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyProblem:
    """One thing that is not as it should be."""

    message: str
    """What is wrong, one line."""
    file: str | None = None
    """Relative to the checkpoint."""
    tensor: str | None = None
    region: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """Offsets and sizes of the chunk in the tensor, in elements."""
    start_byte: int | None = None
    """First byte in the file."""
    num_bytes: int | None = None
    """How many bytes, from there on; of a file that is missing all of them, where they are recorded."""
    expected: str | None = None
    found: str | None = None
    details: tuple[str, ...] = ()
    """One line for each instance, where opening found several at once."""
    is_missing: bool = False
    """There is no such file."""
    is_contradiction: bool = False
    """The file is as it was written, as far as is known: what is recorded of the checkpoint and what is there contradict
    each other, and the same file once more would change nothing."""
    is_unreadable: bool = False
    """The system could not read the file, so that nobody knows what is in it."""

    def line(self) -> str:
        """Return it as one line, safe to print."""
        parts = [escape(self.file)] if self.file is not None else []
        if parts and self.message.startswith((f"{parts[0]}:", f"{parts[0]} ")):
            parts = []  # the message begins with it
        if self.tensor is not None:
            box = f" {_box(self.region)}" if self.region is not None and self.region[0] else ""
            parts.append(f"{escape(self.tensor)}{box}")
        if self.start_byte is not None:
            stop = "" if self.num_bytes is None else f" to {self.start_byte + self.num_bytes}"
            parts.append(f"{'bytes' if stop else 'byte'} {self.start_byte}{stop}")
        text = ": ".join([*parts, self.message])
        return text if self.expected is None else f"{text}: expected {self.expected}, found {self.found}"


def _box(region: tuple[tuple[int, ...], tuple[int, ...]]) -> str:
    ranges = (f"{offset}:{offset + size}" for offset, size in zip(*region, strict=True))
    return f"[{', '.join(ranges)}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyResult(DrawnResult):
    """What was checked, and every problem that was found."""

    path: str
    """As it was given."""
    resolved: str
    """What was looked at: the newest checkpoint of a run's directory, else the path as it was given."""
    level: Level
    format: str | None
    """Such as "dcp", "lightning" or "hub"; None if it could not be opened."""
    writer: str | None
    """Who wrote it, for people; None if it could not be opened."""
    manifests: tuple[str, ...]
    """Those that it was compared with: names relative to the checkpoint, and the path of one that lies elsewhere."""
    repo: str | None
    """The Hub's repo that its files were compared with."""
    commit: str | None
    """Of that repo."""
    num_files: int
    """Files that hold tensors."""
    num_tensors: int
    num_chunks: int
    """Pieces of tensors, each in one place; those of tied names count once."""
    tensor_bytes: int
    """Of those chunks."""
    num_checked_chunks: int
    """Chunks whose bytes were read and compared with a recorded checksum."""
    num_unrecorded_chunks: int
    """Chunks without a recorded checksum."""
    num_unrecorded_tensors: int
    """Tensors with such a chunk."""
    num_checked_files: int
    """Files that were read whole and compared with a recorded checksum."""
    read_bytes: int
    """Bytes that were compared with a checksum; headers, metadata and manifests not counted."""
    problems: tuple[VerifyProblem, ...]
    warnings: tuple[str, ...]
    """What does no harm but does not belong here, such as stale files."""
    doubts: tuple[str, ...]
    """Those of `warnings` that say that something seems to be missing, though no byte is damaged."""
    notes: tuple[str, ...]
    """What could not be checked, and what a person should be told."""
    holdings: Holdings | None = None
    """Which file holds which bytes, damaged or not; None unless it was asked for. Its `to_json` is its own."""

    @property
    def ok(self) -> bool:
        """True if no problem was found."""
        return not self.problems

    @property
    def is_only_unreadable(self) -> bool:
        """True if nothing is known to be wrong, but what some files hold could not be told."""
        return not self.ok and all(problem.is_unreadable for problem in self.problems)

    @property
    def bring_again(self) -> tuple[str, ...]:
        """The files that are missing or whose bytes are damaged, relative to the checkpoint."""
        wrong = (
            problem for problem in self.problems if not (problem.is_contradiction or problem.is_unreadable)
        )
        return tuple(dict.fromkeys(problem.file for problem in wrong if problem.file is not None))

    def headline(self) -> str:
        """Return whether anything is wrong."""
        return f"{escape(self.path)}: {self._verdict()}"

    def _verdict(self) -> str:
        if not self.ok:
            return f"{count(len(self.problems), 'problem')} found"
        if self.doubts:
            return "no byte is damaged, but it does not look whole"
        is_compared = self.num_checked_chunks or self.num_checked_files or self.repo
        if self.level == "full" and self.num_tensors and not is_compared:
            return "its structure is whole; no byte could be compared, because no checksum is recorded"
        return "no problem found"

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain data, without `holdings`."""
        return {"ok": self.ok, "bring_again": list(self.bring_again), **Result.to_json(self)}


_COUNTS = ("num_checked_chunks", "num_checked_files", "read_bytes")
"""What is counted while bytes are read."""


@dataclass(slots=True, kw_only=True)
class Report:
    """Collects what is found."""

    progress: Progress = field(default_factory=NoProgress)
    stop: threading.Event = field(default_factory=threading.Event)
    """Once it is set, whoever reads bytes stops."""
    problems: list[VerifyProblem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    """As in `VerifyResult`."""
    notes: list[str] = field(default_factory=list)
    manifests: list[str] = field(default_factory=list)
    """As in `VerifyResult`."""
    files: set[str] = field(default_factory=set)
    """Names of the files that hold tensors."""
    unrecorded: set[tuple[str, str]] = field(default_factory=set)
    """(folder, tensor) of each tensor with a chunk of which nothing is recorded."""
    num_tensors: int = 0
    num_chunks: int = 0
    tensor_bytes: int = 0
    num_unrecorded_chunks: int = 0
    num_checked_chunks: int = 0
    num_checked_files: int = 0
    read_bytes: int = 0

    def collected(self) -> dict[str, Any]:
        """Return the fields of `VerifyResult` that are collected here.

        A file that cannot be read fails when it is opened, and again when its bytes are read: that is one problem.
        """
        shared = {item.name for item in fields(self)} & {item.name for item in fields(VerifyResult)}
        collected = {name: getattr(self, name) for name in shared}
        return {
            **{name: tuple(dict.fromkeys(v)) if isinstance(v, list) else v for name, v in collected.items()},
            "num_files": len(self.files),
            "num_unrecorded_tensors": len(self.unrecorded),
        }

    def problem(self, message: str, *, stretch: Stretch | None = None, **fields: Any) -> None:
        """Add a problem.

        Args:
            message: what is wrong, one line.
            stretch: the bytes that it is about, and whose they are.
            fields: of `VerifyProblem`; they come before what `stretch` says.
        """
        if stretch is not None:
            region = stretch.region and (tuple(stretch.region.offsets), tuple(stretch.region.sizes))
            place = {
                "tensor": stretch.tensor,
                "region": region,
                "start_byte": stretch.start,
                "num_bytes": stretch.nbytes,
            }
            fields = {**place, **fields}
        if (name := fields.get("file")) is not None:  # it stands before the message
            for prefix in (escape(name), escape(os.path.basename(name))):
                message = message.removeprefix(f"{prefix}: ").removeprefix(f"{prefix}, ")
        self.problems.append(VerifyProblem(message=message, **fields))

    def doubt(self, lines: Iterable[str]) -> None:
        """Add warnings that say what seems to be missing, though no byte is damaged."""
        lines = list(lines)
        self.warnings += lines
        self.doubts += lines

    def error(self, error: ShardkitError, **fields: Any) -> None:
        """Add what kept something from being opened, with all that it lists."""
        self.problem(error.message, details=error.problems, **fields)

    def unreadable(self, error: ResourceError, **fields: Any) -> None:
        """Add a file that the system could not read, and what to do, once for all files."""
        self.problem(error.message, details=error.problems, is_unreadable=True, **fields)
        self.add_notes([error.hint] if error.hint else [])

    @contextmanager
    def failing(self, file: str) -> Iterator[None]:
        """Add what keeps a file from being read or understood, instead of raising it."""
        try:
            yield
        except OtherVersion:  # what was read of it is no state of it
            raise
        except ResourceError as error:
            self.unreadable(error, file=file)
        except ShardkitError as error:
            self.error(error, file=file)

    def add(self, part: Report) -> None:
        """Add what was found while bytes were read."""
        self.problems += part.problems
        self.warnings += part.warnings
        self.add_notes(part.notes)
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(part, name))

    def add_notes(self, notes: Iterable[str]) -> None:
        """Add notes, each once; none that is a warning."""
        self.notes += [note for note in notes if note not in (*self.notes, *self.warnings)]

    def chunk(self, nbytes: int) -> None:
        """Count a chunk."""
        self.num_chunks += 1
        self.tensor_bytes += nbytes

    def read(self, nbytes: int) -> None:
        """Count bytes that were read to be compared.

        Raises:
            CancelledError: another thread failed, or a person wants to stop.
        """
        if self.stop.is_set():
            raise CancelledError
        self.read_bytes += nbytes
        self.progress.advance(nbytes)


def report_damaged(
    error: DamagedFiles,
    directory: str,
    report: Report,
    *,
    folder: str = "",
    is_known: Callable[[str], bool] = lambda _: False,
) -> None:
    """Report every file that kept a checkpoint from being opened.

    Args:
        error: names them.
        directory: that their names are relative to.
        report: gets them.
        folder: the same directory, relative to the checkpoint.
        is_known: True for a file of which a manifest has said the same.
    """
    for name, reason in error.files.items():
        if not is_known(name):
            report.problem(
                reason or "there is no such file",
                file=os.path.join(folder, name),
                is_missing=not storage.lexists(path_in(directory, name)),
            )


VerifyTask = Callable[[Report], None]


def in_threads(
    report: Report, tasks: Sequence[VerifyTask], jobs: int, *, label: str, total_bytes: int
) -> None:
    """Carry out tasks, `jobs` at a time; what is found is the same for any number of threads.

    Args:
        report: gets what all of them find, in their order; its `progress` is told of the bytes.
        tasks: each takes a report of its own, and tells it of every part that it reads.
        jobs: threads.
        label: what the progress is called.
        total_bytes: that the tasks are going to read.

    Raises:
        BaseException: the first that a task raises, or Ctrl-C, once no task runs any more.
    """
    stop, progress = threading.Event(), report.progress
    parts = [Report(progress=progress, stop=stop) for _ in tasks]
    calls = [partial(task, part) for task, part in zip(tasks, parts, strict=True)]
    progress.start(total_bytes, label)
    try:
        run_all(calls, jobs, stop, name="shardkit-read")
    finally:
        progress.finish()
    for part in parts:
        report.add(part)
