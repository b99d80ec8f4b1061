"""Where the files of one job go: a directory on a file system, or a place in a bucket.

An output is whole or absent, and an output that is replaced is the old one or the new one:

    begin(record)                          create the job, or join it
    scratch() -> add(scratch, 0, note)     one finished file, then its note
    commit(scratch)                        everything gets its name at one moment

Several processes may work on a job at once, on several hosts. What one has finished counts for all.
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
"""What is recorded of a finished file, as plain data."""
_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """A file that a job writes."""

    name: str
    """Below the output, with "/"."""
    size: int
    """In bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """What all processes of a job agree on. It is recorded when the job begins."""

    hash: str
    """Of everything that decides about the bytes. Two jobs with the same hash are one."""
    command: str
    """The command that began the job, as the shell takes it; empty for a call from Python."""
    directory: str
    """In which the command was typed; empty where it is not known."""
    files: Sequence[JobFile]
    """A file's number is its position."""
    output: str = ""
    """Name of the destination: that of the job's directory may be shorter."""
    num_parts: int = 1
    """Processes that the work was divided over by the one that began."""
    draft: Mapping[str, bytes] = field(default_factory=dict)
    """What describes the output, by name, without what the notes of its files add."""

    @property
    def folders(self) -> list[str]:
        """All folders that the files lie in, outer ones first."""
        return sorted({parent for file in self.files for parent in _parents(file.name)})

    def dump(self) -> bytes:
        """Return the content of `job.json`, which has everything but the contents of the draft."""
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
        """Return the record in a `job.json`, without its draft, and the names in the draft.

        Args:
            data: its content.
            name: of the file, for messages.

        Raises:
            SourceError: another version of shardkit has written it, or it is damaged.
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
    """How far a job is that is not committed."""

    record: JobRecord
    finished: set[int]
    """Numbers of the files that have notes."""
    is_committing: bool = False
    """Its output is being made, or a commit was interrupted."""


class JobOutput(Protocol):
    """Where the files of one job go. A context manager: leaving it leaves the job as it is."""

    path: str
    """The destination, absolute."""
    replaced: tuple[str, ...]
    """How the paths begin of data in a store that the commit has replaced. The data stays, since readers may need it."""

    @property
    def warnings(self) -> Sequence[str]:
        """What a person should know of the jobs that this process has ended."""

    def __enter__(self) -> JobOutput: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    @property
    def is_committed(self) -> bool:
        """True once this process has made the output; what is left of the job may not be removed yet."""

    def is_made(self) -> bool:
        """True if the destination is the output of the job that this process has joined; maybe not after a power loss.

        Raises:
            ResourceError: the store does not answer.
        """

    def begin(self, record: JobRecord) -> None:
        """Create the job, or join it. The job is durable when this returns.

        Raises:
            OutputExists: something at the destination may not be replaced.
            UsageError: another job is under way there.
            JobEnded: this call has ended a commit of the job that was interrupted.
            ResourceError: the system or the store refuses.
        """

    def join(self) -> JobRecord | None:
        """Join the job that is under way and return its record, without the draft; None if there is none.

        Raises:
            JobEnded: as `begin`.
            UsageError: there are several, or the job belongs to another user.
            SourceError: its record is damaged.
            ResourceError: as `begin`.
        """

    def notes(self, numbers: Collection[int]) -> dict[int, FileNote]:
        """Return the notes of those of these files that are finished, by number.

        Raises:
            JobEnded: another process has committed or aborted the job. So do all methods below.
            ResourceError: as `begin`. So do all methods below.
        """

    def scratch(self) -> AbstractContextManager[str]:
        """Give a directory of this process with the folders of all files. It is removed at the end."""

    def add(self, scratch: str, number: int, note: FileNote) -> None:
        """Move a finished file out of `scratch`, and record its note.

        Both are durable when this returns, the file first. May be called from any thread.
        """

    def forget(self, numbers: Iterable[int]) -> None:
        """Remove notes, so that their files are written again. Durable when this returns."""

    def commit(self, scratch: str) -> None:
        """Give the finished files, and those in the directory `scratch`, their names. Durable when this returns.

        Raises:
            IncompleteError: files are missing.
            OutputExists: something at the destination may not be replaced. The job stays.
            UsageError: another job is being committed. This one stays, too.
        """

    def abort(self) -> bool:
        """Remove every job of this destination that is not committed. A commit that has begun is ended instead.

        Returns:
            True if there was something to remove or to end.
        """


class OutputExists(UsageError):
    """Something at the destination may not be replaced."""


class JobEnded(IncompleteError):
    """Another process has ended the job: it is committed, or aborted."""

    def __init__(self, path: str, *, is_committed: bool) -> None:
        if is_committed:
            super().__init__(f"{escape(path)} was made by another process")
        else:
            super().__init__(
                f"{escape(path)}: the job was aborted by another process",
                hint="run the command again to begin anew",
            )
        self.is_committed = is_committed


def other_job(path: str, record: JobRecord, new: JobRecord) -> UsageError:
    """Return the error of a process with a new job that finds another one under way for its destination."""
    is_same = (record.command, record.directory) == (new.command, new.directory)
    is_changed = is_same and new.files  # two saves are two jobs
    changed = ", this command: since then the source, or what reads it, has changed" if is_changed else ""
    return UsageError(
        f"another job is under way for {escape(path)}",
        problems=[f"it was begun by `{escape_command(record.command)}`{changed}"] if record.command else [],
        hint=f"let it finish, or remove it: `shardkit abort {in_shell(path)}`",
    )


def check_complete(path: str, record: JobRecord, finished: Collection[int]) -> None:
    """Refuse a commit that lacks files. Raises IncompleteError, which names them."""
    missing = [escape(file.name) for number, file in enumerate(record.files) if number not in finished]
    IncompleteError.raise_for(
        missing,
        f"{escape(path)}: {len(missing)} of {len(record.files)} files are not finished",
        hint=f"`shardkit status {in_shell(path)}` lists the parts that are missing",
    )


def _parents(name: str) -> list[str]:
    """Return the folders above a file's name, outermost first."""
    pieces = name.split("/")[:-1]
    return ["/".join(pieces[: depth + 1]) for depth in range(len(pieces))]


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
