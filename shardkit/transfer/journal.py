"""The journal of an unfinished run: one line for each file, written once the file is on disk."""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict
from typing import NamedTuple

from shardkit.errors import ShardkitError
from shardkit.files import storage
from shardkit.files.staging import Staging, abandoned, journal_of
from shardkit.transfer.checks import SourceCheck
from shardkit.transfer.execute import FileDigest
from shardkit.transfer.stream import read_back

_FORMAT = 4
VERSIONS = "versions"
"""In lines of notes: the versions of packages under which what follows was written."""
_CHECK_BUFFER = 1 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_command = ContextVar("_command", default="")


@contextlib.contextmanager
def typed(command: str) -> Iterator[None]:
    """Let runs that are begun meanwhile say which command was typed, as the shell takes it."""
    token = _command.set(command)
    try:
        yield
    finally:
        _command.reset(token)


def as_typed() -> tuple[str, str]:
    """Return the command that was typed, as the shell takes it, and where it was; empty if none was."""
    command = _command.get()
    return command, os.getcwd() if command else ""


class JournalledJob(NamedTuple):
    """What a run is to write."""

    verb: str
    files: Sequence[tuple[str, int]]
    """Name and size of each file with tensors in it."""
    beside: Sequence[str]
    """Names of the files that lie beside these."""
    num_weights: int
    """Weights whose factors are computed before."""


class Journalled(NamedTuple):
    """What a journal says of its run."""

    plan_hash: str | None
    """None if it cannot be read."""
    directory: int | None
    """Inode number of the directory in which the files were written."""
    job: JournalledJob | None
    """None in the journal of an earlier version."""
    command: str
    """What was typed; empty if nothing was."""
    cwd: str
    """Where it was typed."""
    finished: Mapping[str, int]
    """Size of each finished file, by name."""


class Journal:
    """Appends finished files to a journal. Every line is on disk before the next file is begun.

    Args:
        path: path of the journal. A new one is begun unless it already has `plan_hash`.
        plan_hash: stands for inputs, options and version. Only an equal plan may resume.
        directory: where the files are. If it is not the directory in which the journal began, it holds none
            of the journal's files: once directories have been exchanged, the old output lies there.
        job: what is carried out, for people who find the journal.
        versions: by package, what decided the plan here; they may be others than those of the run that began.
    """

    def __init__(
        self,
        path: str,
        plan_hash: str,
        directory: str,
        job: JournalledJob | None = None,
        versions: Mapping[str, str] | None = None,
    ) -> None:
        begun, header = _read_header(path), _Header(plan_hash, storage.stat(directory).st_ino)
        self._lock = threading.Lock()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = storage.open_fd(path, flags | (os.O_TRUNC if begun != header else 0), 0o666)
        if begun != header:
            command, cwd = as_typed()
            said = {} if job is None else {"job": job._asdict(), "command": command, "cwd": cwd}
            plan = {"plan": header.plan, "directory": header.directory}
            self._write({"format": _FORMAT, **plan, **said, VERSIONS: versions})
            # Before any file of the run: without the journal nothing tells whose these are.
            storage.sync_directory(os.path.dirname(path))
        else:
            # A run that was killed in the middle of a line left half of it; that line is ignored.
            self._write({VERSIONS: versions})

    def add(self, digest: FileDigest, source: Mapping[str, object] | None) -> None:
        """Record a finished file. May be called from any thread.

        Args:
            digest: the file.
            source: what was read for it, from `SourceCheck.dump`; None if nothing was compared.
        """
        line = {"file": asdict(digest), "source": source}
        with self._lock:
            self._write(line)

    def _write(self, line: Mapping[str, object]) -> None:
        text = ("" if "format" in line else "\n") + json.dumps(line)
        storage.append(self._fd, text.encode())

    def close(self) -> None:
        """Close the file."""
        storage.close_fd(self._fd)


class _Header(NamedTuple):
    """The first line of a journal."""

    plan: str | None
    directory: int | None
    """Inode number."""


def _read_header(path: str) -> _Header:
    lines = _lines(path)
    first = lines[0] if lines and lines[0].get("format") == _FORMAT else {}
    plan, directory = first.get("plan"), first.get("directory")
    return _Header(plan if isinstance(plan, str) else None, directory if isinstance(directory, int) else None)


def read_journal(path: str) -> Journalled:
    """Return the content of a journal, whoever wrote it. The files that it lists may have changed since."""
    header, lines = _read_header(path), _lines(path)
    first = lines[0] if header.plan is not None else {}
    files = [
        digest
        for line in lines
        if isinstance(entry := line.get("file"), dict) and (digest := parse_digest(entry))
    ]
    command, cwd = first.get("command"), first.get("cwd")
    return Journalled(
        plan_hash=header.plan,
        directory=header.directory,
        job=_parse_job(first.get("job")),
        command=command if isinstance(command, str) else "",
        cwd=cwd if isinstance(cwd, str) else "",
        finished={digest.name: digest.size for digest in files},
    )


def _parse_job(entry: object) -> JournalledJob | None:
    """Return a job from its plain data; None if there is none, or it is damaged."""
    try:
        assert isinstance(entry, dict)
        files = [(str(name), int(size)) for name, size in entry["files"]]
        return JournalledJob(
            str(entry["verb"]), files, [*map(str, entry["beside"])], int(entry["num_weights"])
        )
    except (AssertionError, KeyError, TypeError, ValueError):
        return None


def read_plan_hash(path: str) -> str | None:
    """Return the plan hash of a journal; None if there is no readable journal."""
    return _read_header(path).plan


def adopted(destination: str, plan_hash: str) -> Staging | None:
    """Take over a dead run's staging directory if it was carrying out this very plan."""
    for leftover in abandoned(destination):
        if read_plan_hash(journal_of(leftover)) == plan_hash:
            staging = Staging.adopt(destination, leftover)
            if staging is not None:
                return staging
    return None


def read_finished(
    path: str, directory: str, sizes: Mapping[str, int], check: SourceCheck | None = None
) -> dict[str, FileDigest]:
    """Return the files that a journal lists and that are still as it says.

    Args:
        path: path of the journal.
        directory: where the files are.
        sizes: bytes of each file in the present plan, by name.
        check: gets what was read for them. A file of a run that compared nothing then counts as unfinished.
    """
    finished: dict[str, FileDigest] = {}
    if _read_header(path).directory != storage.stat(directory).st_ino:
        return finished
    for line in _lines(path):
        entry = line.get("file")
        digest = parse_digest(entry) if isinstance(entry, dict) else None
        if not digest or sizes.get(digest.name) != digest.size or not is_intact(digest, directory):
            continue
        if check is None or check.load(line.get("source")):
            finished[digest.name] = digest
    return finished


def is_journal_of(path: str, plan_hash: str, directory: str) -> bool:
    """True if a journal is about the files of a plan in a directory."""
    return _read_header(path) == _Header(plan_hash, storage.stat(directory).st_ino)


def read_versions(path: str, directory: str) -> list[dict[str, str]]:
    """Return the versions of packages, as `Journal` has them, under which anything that a journal lists was written.

    Nothing is known of what an early version of shardkit wrote.
    """
    found, here = list[dict[str, str]](), dict[str, str]()
    if _read_header(path).directory != storage.stat(directory).st_ino:
        return found
    for line in _lines(path):
        here = parse_versions(line.get(VERSIONS)) if VERSIONS in line else here
        if here and here not in found and "file" in line:
            found.append(here)
    return found


def parse_versions(entry: object) -> dict[str, str]:
    """Return versions by package from their plain data; nothing if there are none, or they are damaged."""
    if not isinstance(entry, dict):
        return {}
    return {name: version for name, version in entry.items() if isinstance(version, str)}


def _lines(path: str) -> list[dict[str, object]]:
    try:
        with storage.open_file(path, encoding="utf-8", errors="replace") as file:
            texts = file.read().splitlines()
    except OSError:
        return []
    found = []
    for text in texts:
        try:
            line = json.loads(text)
        except ValueError:  # cut by a kill
            continue
        if isinstance(line, dict):
            found.append(line)
    return found


def parse_digest(entry: Mapping[str, object]) -> FileDigest | None:
    """Return a digest from its plain data; None if that is damaged."""
    name, size, crc, data = (entry.get(key) for key in ("name", "size", "crc32", "data_crcs"))
    if not (isinstance(name, str) and isinstance(size, int) and isinstance(data, list)):
        return None
    if not (crc is None or isinstance(crc, int)) or not all(isinstance(c, int) for c in data):
        return None
    sha256 = entry.get("sha256")
    if not (sha256 is None or (isinstance(sha256, str) and _SHA256.fullmatch(sha256))):
        return None
    return FileDigest(name=name, size=size, crc32=crc, data_crcs=tuple(data), sha256=sha256)


def is_intact(digest: FileDigest, directory: str) -> bool:
    """True if a file has the size and the CRC-32 of its digest; with no CRC-32, the size."""
    try:
        fd = storage.open_fd(os.path.join(directory, digest.name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if storage.fstat(fd).st_size != digest.size:
            return False
        if digest.crc32 is None:
            return True
        return read_back(fd, 0, digest.size, bytearray(_CHECK_BUFFER)) == digest.crc32
    except (OSError, ShardkitError):
        return False
    finally:
        os.close(fd)
