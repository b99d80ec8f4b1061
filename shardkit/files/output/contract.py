"""The interface of an output: the directory, on a file system or in a bucket, that one job writes.

A *job* writes the files of one output. Its files are invisible to readers until the commit, so that an output is whole
or absent, and a replaced output is the old or the new one:

    begin(record)                          create the job, or join it
    scratch() -> add(scratch, 0, note)     store one finished file, then its note
    commit(scratch)                        give all files their final names in one step

A job is *under way* from `begin` until it is committed or aborted. *Durable* means that a power loss does not undo it. A
file's *number* is its position in the record.

A *note* records a finished file: its checksums, and what was read for it. Several processes, on several hosts, may work
on one job at the same time; each skips the files that have notes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

from shardkit.core.text import escape, escape_command, in_shell
from shardkit.errors import IncompleteError, SourceError, UsageError

FileNote = Mapping[str, Any]
"""The note of a finished file, as JSON data."""
_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """A file of the output that a job writes."""

    name: str
    """Path below the output, with "/"."""
    size: int
    """In bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """The description of a job that all its processes share. The first process stores it as `job.json`."""

    hash: str
    """Hash of all inputs and options that affect the output's bytes. Processes with equal hashes work on one job."""
    command: str
    """The shell command that began the job; empty for a call from Python."""
    directory: str
    """The working directory of that command; empty if unknown."""
    files: Sequence[JobFile]
    """A file's number is its position."""
    output: str = ""
    """The destination's own name. The name of the job's directory may contain only its beginning."""
    num_parts: int = 1
    """The N of `--part K/N` of the command that began the job; 1 without parts."""
    draft: Mapping[str, bytes] = field(default_factory=dict)
    """Files that only the job's processes need, by name, such as the call that `shardkit commit` repeats."""

    @property
    def folders(self) -> list[str]:
        """All folders of the files, parents before children."""
        pieces = [file.name.split("/") for file in self.files]
        return sorted({"/".join(each[:depth]) for each in pieces for depth in range(1, len(each))})

    def dump(self) -> bytes:
        """Return the content of `job.json`: all fields, but of the draft only the names."""
        fields = {
            "format": _FORMAT,
            "hash": self.hash,
            "command": self.command,
            "directory": self.directory,
            "output": self.output,
            "num_parts": self.num_parts,
            "draft": list(self.draft),
            "files": [[file.name, file.size] for file in self.files],
        }
        return json.dumps(fields, indent=1).encode()

    @classmethod
    def parse(cls, data: bytes, name: str) -> tuple[JobRecord, list[str]]:
        """Parse a `job.json`. Return the record with an empty draft, and the names of the draft's files.

        Args:
            data: the content of the file.
            name: the path of the file, for messages.

        Raises:
            SourceError: the file is damaged, or another version of shardkit wrote it.
        """
        hint = "shardkit abort OUTPUT removes the job"
        try:
            fields = json.loads(data)
            if fields["format"] != _FORMAT:
                raise SourceError(f"{escape(name)} was written by another version of shardkit", hint=hint)
            record = cls(
                hash=_text(fields["hash"]),
                command=_text(fields["command"]),
                directory=_text(fields["directory"]),
                output=_text(fields["output"]),
                num_parts=int(fields["num_parts"]),
                files=[_parse_file(*entry) for entry in fields["files"]],
            )
            return record, [_text(entry) for entry in fields["draft"]]
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
            raise SourceError(f"{escape(name)} is damaged", hint=hint) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """The progress of a job that is not committed yet."""

    record: JobRecord
    finished: set[int]
    """Numbers of the files that have notes."""
    is_committing: bool = False
    """A commit is in progress, or was interrupted."""


class JobOutput(Protocol):
    """The output of one job, as one process sees it. A context manager; the job remains when a process leaves it."""

    path: str
    """The destination, absolute."""
    replaced: tuple[str, ...]
    """Prefixes of the data in a store that the commit has replaced. The data stays, since readers may need it."""

    @property
    def warnings(self) -> Sequence[str]:
        """What the user should know about jobs that this process has ended."""

    def __enter__(self) -> JobOutput: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    @property
    def is_committed(self) -> bool:
        """True once this process has committed, although some files of the job may still have to be removed."""

    def is_made(self) -> bool:
        """True if the destination is now the output of the job that this process has joined. It may not be durable yet.

        Raises:
            ResourceError: the store does not answer.
        """

    def begin(self, record: JobRecord) -> None:
        """Create the job, or join it. The job is durable when this returns.

        Raises:
            OutputExists: something at the destination may not be replaced.
            UsageError: another job is under way there.
            JobEnded: the job is committed: by another process, or by this call, which has completed an interrupted commit.
            ResourceError: the system or the store refuses.
        """

    def join(self) -> JobRecord | None:
        """Join the job that is under way, and return its record without the draft; None without a job.

        Raises:
            JobEnded: as `begin`.
            UsageError: several jobs are under way, or the job belongs to another user.
            SourceError: the record of the job is damaged.
            ResourceError: as `begin`.
        """

    def notes(self, numbers: Collection[int]) -> dict[int, FileNote]:
        """Return the notes of the finished files among these, by number.

        Raises:
            JobEnded: another process has committed or aborted the job. So do all methods below.
            ResourceError: as `begin`. So do all methods below.
        """

    def scratch(self) -> AbstractContextManager[str]:
        """Make a directory for unfinished files of this process, with the folders of all files; remove it at the end."""

    def add(self, scratch: str, number: int, note: FileNote) -> None:
        """Move a finished file from `scratch` into the job, then store its note.

        Both are durable when this returns, the file before the note. May be called from any thread.
        """

    def forget(self, numbers: Iterable[int]) -> None:
        """Remove notes, durably, so that these files are written again."""

    def commit(self, scratch: str) -> None:
        """Publish the finished files, and all files in the directory `scratch`. Durable when this returns.

        Raises:
            IncompleteError: files are missing.
            OutputExists: something at the destination may not be replaced. The job stays.
            UsageError: another job is being committed. This job stays, too.
        """

    def abort(self) -> bool:
        """Remove every uncommitted job of this destination.

        A job whose commit has already changed the destination is completed instead. If a live process is executing a commit
        on a disk, wait for it.

        Returns:
            True if there was something to remove or to complete.
        """


class OutputExists(UsageError):
    """The destination holds something that may not be replaced."""


class JobEnded(IncompleteError):
    """The job is over: another process has committed or aborted it, or this one has completed an interrupted commit."""

    def __init__(self, path: str, *, is_committed: bool) -> None:
        if is_committed:
            super().__init__(f"{escape(path)} was made by another process")
        else:
            super().__init__(
                f"{escape(path)}: the job was aborted by another process",
                hint="run the command again to begin anew",
            )
        self.is_committed = is_committed


def other_job_error(path: str, record: JobRecord, new: JobRecord) -> UsageError:
    """Return the error for a job that cannot begin because another one is under way at its destination.

    Args:
        path: the destination.
        record: of the job that is under way.
        new: of the job that cannot begin.
    """
    is_same = (record.command, record.directory) == (new.command, new.directory)
    # A save of a training job lists no files in its record, and each save is a job of its own: nothing need have changed.
    is_changed = is_same and new.files
    changed = ", this command: since then the source, or what reads it, has changed" if is_changed else ""
    return UsageError(
        f"another job is under way for {escape(path)}",
        problems=[f"it was begun by `{escape_command(record.command)}`{changed}"] if record.command else [],
        hint=f"let it finish, or remove it: `shardkit abort {in_shell(path)}`",
    )


def check_complete(path: str, record: JobRecord, finished: Collection[int]) -> None:
    """Raise IncompleteError, which names the missing files, unless all files are finished."""
    missing = [escape(file.name) for number, file in enumerate(record.files) if number not in finished]
    IncompleteError.raise_for(
        missing,
        f"{escape(path)}: {len(missing)} of {len(record.files)} files are not finished",
        hint=f"`shardkit status {in_shell(path)}` lists the parts that are missing",
    )


def _parse_file(name: object, size: object) -> JobFile:
    if not isinstance(size, int) or size < 0:
        raise ValueError(size)
    file = JobFile(name=_text(name), size=size)
    # other users may write beside the destination
    if os.path.isabs(file.name) or not {"", ".", ".."}.isdisjoint(file.name.split("/")):
        raise ValueError(name)
    return file


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value
