"""A small cache of expensive results: files of one user, which may be deleted at any time.

    directory/<key>    {"format": 1, "key": ..., "sha256": of the rest}
                       the content, any bytes

An entry is created by one rename and never changed. Damaged or oversized entries, and those of other users, count as
missing. Errors are never raised: results that cannot be read or written are simply not cached.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import stat
from dataclasses import dataclass
from typing import NamedTuple

from shardkit.files import storage

VARIABLE = "SHARDKIT_CACHE"
"""Environment variable: another directory, or "off"."""
OFF = "off"
MAX_ENTRIES, MAX_BYTES = 128, 64 << 20
"""Limits; the oldest entries are removed first."""
MAX_ENTRY_BYTES = 16 << 20

_FORMAT = 1
_KEY = re.compile(r"[0-9a-f]{64}")
_ENTRY = re.compile(r"[0-9a-f]{64}(?:\.[0-9a-f]{16})?")  # the second form is an entry being written
_PIECE_BYTES = 1 << 20


def home() -> str | None:
    """Return the directory of shardkit's caches, which need not exist; None if caching is disabled."""
    named = os.environ.get(VARIABLE)
    if named:
        return None if named == OFF else os.path.abspath(named)
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # XDG specification: relative paths must be ignored
        base = os.path.expanduser(os.path.join("~", ".cache"))
    return os.path.join(base, "shardkit") if os.path.isabs(base) else None


class _CachedFile(NamedTuple):
    path: str
    nbytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Cache:
    """Entries of one kind, by keys of 64 hexadecimal digits."""

    directory: str
    """Created with the first entry, accessible to the user only."""

    def find(self, key: str) -> bytes | None:
        """Return the content for a key; None if this user has no such entry, or it is damaged."""
        try:
            if not self._is_own():
                return None
            data = _read(self._path(key))
        except OSError:
            return None
        head, _, content = data.partition(b"\n")
        return content if head == _head(key, content) else None

    def keep(self, key: str, content: bytes) -> None:
        """Store content under a key, if possible; old entries are removed if there are too many."""
        data = b"\n".join((_head(key, content), content))
        if len(data) > MAX_ENTRY_BYTES:
            return
        with contextlib.suppress(OSError):
            storage.make_directories(os.path.dirname(self.directory))
            with contextlib.suppress(FileExistsError):
                storage.mkdir(self.directory, 0o700)
            if self._is_own():
                self._write(self._path(key), data)
                self._limit()

    def _path(self, key: str) -> str:
        assert _KEY.fullmatch(key)
        return os.path.join(self.directory, key)

    def _is_own(self) -> bool:
        return storage.lstat(self.directory).st_uid == os.geteuid()

    def _write(self, path: str, data: bytes) -> None:
        """Create an entry's file under another name first, so that no process reads half of it."""
        # No sync: an entry that a power loss damages is recomputed.
        written = f"{path}.{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = storage.open_fd(written, flags, 0o600)
        try:
            try:
                view = memoryview(data)
                while view:
                    view = view[storage.write(fd, view) :]
            finally:
                storage.close_fd(fd)
            storage.rename(written, path)
        except BaseException:
            with contextlib.suppress(OSError):
                storage.unlink(written)
            raise

    def _limit(self) -> None:
        """Remove the oldest entries that exceed the limits."""
        left_bytes = MAX_BYTES
        newest = sorted(self._entries(), key=lambda entry: -entry.mtime_ns)
        for index, entry in enumerate(newest):
            left_bytes -= entry.nbytes
            if index >= MAX_ENTRIES or left_bytes < 0:
                for old in newest[index:]:
                    with contextlib.suppress(OSError):  # another process may have been faster
                        storage.unlink(old.path)
                return

    def _entries(self) -> list[_CachedFile]:
        """Return the entries in the directory; empty if it cannot be listed."""
        entries = []
        with contextlib.suppress(OSError):
            for name in storage.listdir(self.directory):
                path = os.path.join(self.directory, name)
                status = storage.lstat(path) if _ENTRY.fullmatch(name) else None
                if status is not None and stat.S_ISREG(status.st_mode):
                    entries.append(_CachedFile(path, status.st_size, status.st_mtime_ns))
        return entries


def _head(key: str, content: bytes) -> bytes:
    digest = hashlib.sha256(content).hexdigest()
    return json.dumps({"format": _FORMAT, "key": key, "sha256": digest}).encode()


def _read(path: str) -> bytes:
    """Return the bytes of an entry; empty if it is not a file of this user, or too large.

    Raises:
        OSError: the entry does not exist, or cannot be read.
    """
    # O_NONBLOCK: opening a FIFO for reading would otherwise wait for a writer.
    fd = storage.open_fd(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = storage.fstat(fd)
        is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        if not is_own or status.st_size > MAX_ENTRY_BYTES:
            return b""
        pieces, start = [], 0
        while start < status.st_size and (piece := storage.pread(fd, _PIECE_BYTES, start)):
            pieces.append(piece)
            start += len(piece)
        return b"".join(pieces)
    finally:
        storage.close_fd(fd)
