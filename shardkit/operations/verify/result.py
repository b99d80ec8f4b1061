"""The result of verify, and the report that collects it.

A *problem* makes verify fail; a *warning* is a harmless irregularity. A *doubt* is a warning that something seems to be
missing, though no byte is damaged.
"""

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
"""Message of the problem that a file's size differs from the recorded one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyProblem:
    """One problem that verify found."""

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
    """Number of bytes from `start_byte`; for a missing file, its recorded size."""
    expected: str | None = None
    found: str | None = None
    details: tuple[str, ...] = ()
    """A line for each instance, if opening the checkpoint found several at once."""
    is_missing: bool = False
    """The file does not exist."""
    is_contradiction: bool = False
    """The file contradicts the checkpoint's records, but is not known to be damaged: copying the same file again would
    change nothing."""
    is_unreadable: bool = False
    """The system could not read the file, so its content is unknown."""

    def line(self) -> str:
        """Return the problem as one line, safe to print."""
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
    """Return a region as slices: offsets (0, 4), sizes (2, 4) -> "[0:2, 4:8]"."""
    ranges = (f"{offset}:{offset + size}" for offset, size in zip(*region, strict=True))
    return f"[{', '.join(ranges)}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyResult(DrawnResult):
    """What was checked, and every problem that was found."""

    path: str
    """The argument `path`."""
    resolved: str
    """The checkpoint that was checked: the newest one of a run directory, else `path`."""
    level: Level
    format: str | None
    """Such as "dcp", "lightning" or "hub"; None if the checkpoint could not be opened."""
    writer: str | None
    """The program that wrote it, as text for people; None if the checkpoint could not be opened."""
    manifests: tuple[str, ...]
    """Manifests that it was compared with: names relative to the checkpoint, or the path of one elsewhere."""
    repo: str | None
    """The Hub repo that its files were compared with."""
    commit: str | None
    """Commit of that repo."""
    num_files: int
    """Number of files with tensors."""
    num_tensors: int
    num_chunks: int
    """Number of pieces of tensors; pieces that tied names share count once."""
    tensor_bytes: int
    """Bytes of these chunks."""
    num_checked_chunks: int
    """Chunks whose bytes were read and compared with a recorded checksum."""
    num_unrecorded_chunks: int
    """Chunks without a recorded checksum."""
    num_unrecorded_tensors: int
    """Tensors with such a chunk."""
    num_checked_files: int
    """Files that were read as a whole and compared with a recorded checksum."""
    read_bytes: int
    """Bytes that were compared with a checksum, without headers, metadata and manifests."""
    problems: tuple[VerifyProblem, ...]
    warnings: tuple[str, ...]
    """Harmless irregularities, such as stale files, and the `doubts`."""
    doubts: tuple[str, ...]
    """Those of `warnings` according to which something seems to be missing, though no byte is damaged."""
    notes: tuple[str, ...]
    """What could not be checked, and other information."""
    holdings: Holdings | None = None
    """Which file holds which bytes, damaged or not; None without the option `holdings`. It has its own `to_json`."""

    @property
    def ok(self) -> bool:
        """True if no problem was found."""
        return not self.problems

    @property
    def is_only_unreadable(self) -> bool:
        """True if the only problems are files that the system could not read."""
        return not self.ok and all(problem.is_unreadable for problem in self.problems)

    @property
    def bring_again(self) -> tuple[str, ...]:
        """The files to copy again: missing or damaged ones, relative to the checkpoint."""
        wrong = (
            problem for problem in self.problems if not (problem.is_contradiction or problem.is_unreadable)
        )
        return tuple(dict.fromkeys(problem.file for problem in wrong if problem.file is not None))

    def headline(self) -> str:
        """Return the verdict as one line."""
        return f"{escape(self.path)}: {self._verdict()}"

    def _verdict(self) -> str:
        """Return the verdict in words, such as "no problem found"."""
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
"""Fields that are counted while bytes are read, in several threads."""


@dataclass(slots=True, kw_only=True)
class Report:
    """Collects problems, warnings, notes and counts while a checkpoint is checked."""

    progress: Progress = field(default_factory=NoProgress)
    stop: threading.Event = field(default_factory=threading.Event)
    """Set to make threads stop reading."""
    problems: list[VerifyProblem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    """As in `VerifyResult`."""
    notes: list[str] = field(default_factory=list)
    manifests: list[str] = field(default_factory=list)
    """As in `VerifyResult`."""
    files: set[str] = field(default_factory=set)
    """Names of the files with tensors."""
    unrecorded: set[tuple[str, str]] = field(default_factory=set)
    """(folder, tensor) of each tensor with a chunk that has no recorded checksum."""
    num_tensors: int = 0
    num_chunks: int = 0
    tensor_bytes: int = 0
    num_unrecorded_chunks: int = 0
    num_checked_chunks: int = 0
    num_checked_files: int = 0
    read_bytes: int = 0

    def collected(self) -> dict[str, Any]:
        """Return the fields of `VerifyResult` that are collected here, each problem and line once.

        An unreadable file fails twice, when it is opened and when its bytes are read. This is one problem.
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
            stretch: the bytes with the problem, and their tensor.
            fields: further fields of `VerifyProblem`; they override those from `stretch`.
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
        if (name := fields.get("file")) is not None:  # `line` puts it before the message
            for prefix in (escape(name), escape(os.path.basename(name))):
                message = message.removeprefix(f"{prefix}: ").removeprefix(f"{prefix}, ")
        self.problems.append(VerifyProblem(message=message, **fields))

    def add_doubts(self, lines: Iterable[str]) -> None:
        """Add warnings that something seems to be missing, though no byte is damaged."""
        lines = list(lines)
        self.warnings += lines
        self.doubts += lines

    def error(self, error: ShardkitError, **fields: Any) -> None:
        """Add an error as a problem, with the lines that it lists."""
        self.problem(error.message, details=error.problems, **fields)

    def unreadable(self, error: ResourceError, **fields: Any) -> None:
        """Add a file that the system could not read; the hint what to do becomes a note, once for all files."""
        self.problem(error.message, details=error.problems, is_unreadable=True, **fields)
        self.add_notes([error.hint] if error.hint else [])

    @contextmanager
    def collect_errors(self, file: str) -> Iterator[None]:
        """Turn errors about a file into problems instead of raising them."""
        try:
            yield
        except OtherVersion:  # the object in the bucket was replaced while it was read
            raise
        except ResourceError as error:
            self.unreadable(error, file=file)
        except ShardkitError as error:
            self.error(error, file=file)

    def add(self, part: Report) -> None:
        """Add the report of one task that read bytes."""
        self.problems += part.problems
        self.warnings += part.warnings
        self.add_notes(part.notes)
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(part, name))

    def add_notes(self, notes: Iterable[str]) -> None:
        """Add notes that are neither notes nor warnings yet."""
        self.notes += [note for note in notes if note not in (*self.notes, *self.warnings)]

    def chunk(self, nbytes: int) -> None:
        """Count a chunk."""
        self.num_chunks += 1
        self.tensor_bytes += nbytes

    def read(self, nbytes: int) -> None:
        """Count bytes that were read for a comparison.

        Raises:
            CancelledError: another thread failed, or the user interrupted.
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
    """Report every damaged file because of which a checkpoint cannot be opened.

    Args:
        error: lists the files.
        directory: their names are relative to this directory.
        report: gets a problem for each file.
        folder: the same directory, relative to the checkpoint.
        is_known: True for a file whose problem was already reported, by comparison with a manifest.
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
    """Run tasks in threads. The report is the same for any number of threads.

    Args:
        report: gets the reports of all tasks, in the order of `tasks`; its `progress` shows the bytes.
        tasks: each is called with its own report, and calls `Report.read` as it reads bytes.
        jobs: number of threads.
        label: label of the progress bar.
        total_bytes: bytes that the tasks will read in total.

    Raises:
        BaseException: the first exception of a task, or Ctrl-C; raised when all tasks have stopped.
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
