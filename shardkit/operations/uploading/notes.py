"""Notes of a run that writes into a store: which files are there, and which uploads are under way.

They lie in the directory of shardkit's caches, on the machine that runs. Without them a run begins anew. A line that says that a file is
finished counts only if the store still has that very object.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from shardkit.files import cache, storage
from shardkit.files.uploads import Begun
from shardkit.transfer.digests import VERSIONS, parse_digest, parse_versions
from shardkit.transfer.execute import FileDigest

_FORMAT = 1
_FOLDER = "uploads"
_MAX_AT_ONCE = 4  # runs of one plan on one machine that have notes; the others do without


class Noted(NamedTuple):
    """A file that an earlier run finished."""

    digest: FileDigest
    etag: str
    source: object
    """What was read for it, from `SourceCheck.dump`."""
    versions: Mapping[str, str]
    """Of packages, as `Notes` has them."""


class Notes:
    """Notes of one run, which takes over those of a dead one. They are dropped in silence where there is no cache.

    Args:
        output: the destination.
        plan_hash: stands for inputs, options and version.
        resume: take over what an earlier run noted.
        versions: by package, what decided the plan here.
    """

    def __init__(
        self, output: str, plan_hash: str, *, resume: bool, versions: Mapping[str, str] | None = None
    ) -> None:
        self.files: dict[str, Noted] = {}
        """By name."""
        self.begun: dict[str, Begun] = {}
        """Uploads, by path."""
        self._lock, self._fd, self._path = threading.Lock(), -1, ""
        self._versions = dict[str, str]()
        with contextlib.suppress(OSError):
            self._open(hashlib.sha256(f"{output}\n{plan_hash}".encode()).hexdigest())
        if self._fd >= 0:
            self._read()
            if not resume:
                self.files.clear()
                storage.ftruncate(self._fd, 0)
            self._add({"format": _FORMAT, "output": output, "plan": plan_hash, VERSIONS: versions})

    def _open(self, key: str) -> None:
        """Open the first file of this run's key that no other process holds."""
        home = cache.home()
        if home is None:
            return
        directory = os.path.join(home, _FOLDER)
        storage.make_directories(directory)
        for number in range(_MAX_AT_ONCE):
            path = os.path.join(directory, f"{key}.{number}")
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = storage.open_fd(path, flags, 0o600)
            if storage.lock(fd):
                self._fd, self._path = fd, path
                return
            storage.close_fd(fd)

    def _read(self) -> None:
        data = storage.pread(self._fd, storage.fstat(self._fd).st_size, 0)
        for text in data.decode(errors="replace").splitlines():
            try:
                line = json.loads(text)
            except ValueError:  # cut by a kill
                continue
            if isinstance(line, dict):
                self._take(line)

    def _take(self, line: Mapping[str, Any]) -> None:
        entry, upload = line.get("file"), line.get("upload")
        if VERSIONS in line:
            self._versions = parse_versions(line[VERSIONS])
        digest = parse_digest(entry) if isinstance(entry, dict) else None
        if digest is not None and isinstance(line.get("etag"), str):
            self.files[digest.name] = Noted(digest, line["etag"], line.get("source"), self._versions)
        elif isinstance(upload, list) and len(upload) == 3:
            path, name, size = upload
            if isinstance(path, str) and isinstance(name, str) and isinstance(size, int):
                self.begun[path] = Begun(name, size)

    def add_file(self, digest: FileDigest, etag: str, source: object) -> None:
        """Note that a file is in the store. May be called from any thread."""
        self._add({"file": asdict(digest), "etag": etag, "source": source})

    def add_upload(self, path: str, begun: Begun) -> None:
        """Note that an upload was begun. May be called from any thread."""
        self._add({"upload": [path, begun.upload, begun.part_nbytes]})

    def _add(self, line: Mapping[str, object]) -> None:
        with self._lock, contextlib.suppress(OSError):  # a full disk costs a later run time, and nothing else
            if self._fd >= 0:
                storage.append(self._fd, b"\n" + json.dumps(line).encode())

    def close(self) -> None:
        """Leave the notes to the next run."""
        with self._lock:
            if self._fd >= 0:
                storage.close_fd(self._fd)
            self._fd = -1

    def remove(self) -> None:
        """Remove the notes: the output is there, or was given up."""
        if self._path:
            with contextlib.suppress(OSError):
                storage.unlink(self._path)
        self.close()
