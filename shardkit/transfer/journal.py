"""What an interrupted run had finished: one line for each file, written after the file is on disk."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict

from shardkit.errors import ShardkitError
from shardkit.files import storage
from shardkit.transfer.checks import SourceCheck
from shardkit.transfer.execute import FileDigest
from shardkit.transfer.stream import read_back

_FORMAT = 4
_CHECK_BUFFER = 1 << 20


class Journal:
    """Appends finished files to a journal; every line is on disk before the next file is begun.

    Args:
        path: of the journal; a new one is begun unless it already has `plan_hash`.
        plan_hash: stands for inputs, options and version; only an equal plan may resume.
        directory: where the files are. Another one than at the journal's beginning has none of its files:
            once directories have been exchanged, what lies there is the old output.
    """

    def __init__(self, path: str, plan_hash: str, directory: str) -> None:
        number = os.stat(directory).st_ino
        is_new = read_plan_hash(path) != plan_hash or _directory_number(path) != number
        self._lock = threading.Lock()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = storage.open_fd(path, flags | (os.O_TRUNC if is_new else 0), 0o666)
        # A run that was killed in the middle of a line left half of it; that line is ignored.
        self._write({"format": _FORMAT, "plan": plan_hash, "directory": number} if is_new else {})

    def add(self, digest: FileDigest, source: Mapping[str, object] | None) -> None:
        """Record a finished file; may be called from any thread.

        Args:
            digest: what it is.
            source: what was read for it, from `SourceCheck.dump`; None where nothing was compared.
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


def read_plan_hash(path: str) -> str | None:
    """Return the plan hash of a journal, or None where there is no readable one."""
    plan = _header(path).get("plan")
    return plan if isinstance(plan, str) else None


def _directory_number(path: str) -> int | None:
    number = _header(path).get("directory")
    return number if isinstance(number, int) else None


def _header(path: str) -> Mapping[str, object]:
    lines = _lines(path)
    return lines[0] if lines and lines[0].get("format") == _FORMAT else {}


def read_finished(
    path: str, directory: str, sizes: Mapping[str, int], check: SourceCheck | None = None
) -> dict[str, FileDigest]:
    """Return the files that a journal lists and that are still what it says.

    Args:
        path: of the journal.
        directory: where the files are.
        sizes: bytes of each file in the present plan, by name.
        check: gets what was read for them; a file of a run that compared nothing is then not finished.
    """
    finished: dict[str, FileDigest] = {}
    if _directory_number(path) != os.stat(directory).st_ino:
        return finished
    for line in _lines(path):
        entry = line.get("file")
        digest = _parse(entry) if isinstance(entry, dict) else None
        if not digest or sizes.get(digest.name) != digest.size or not _is_intact(digest, directory):
            continue
        if check is None or check.load(line.get("source")):
            finished[digest.name] = digest
    return finished


def _lines(path: str) -> list[dict[str, object]]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
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


def _parse(entry: Mapping[str, object]) -> FileDigest | None:
    name, size, crc, data = (entry.get(key) for key in ("name", "size", "crc32", "data_crcs"))
    if not (isinstance(name, str) and isinstance(size, int) and isinstance(data, list)):
        return None
    if not (crc is None or isinstance(crc, int)) or not all(isinstance(c, int) for c in data):
        return None
    return FileDigest(name=name, size=size, crc32=crc, data_crcs=tuple(data))


def _is_intact(digest: FileDigest, directory: str) -> bool:
    try:
        fd = storage.open_fd(os.path.join(directory, digest.name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if os.fstat(fd).st_size != digest.size:
            return False
        if digest.crc32 is None:
            return True
        return read_back(fd, 0, digest.size, bytearray(_CHECK_BUFFER)) == digest.crc32
    except (OSError, ShardkitError):
        return False
    finally:
        os.close(fd)
