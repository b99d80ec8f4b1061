"""Notes of files that are on their way into a store: which uploads this machine has begun, so that they can go on.

They lie in the directory of shardkit's caches. Without them a file that is not finished is sent anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Callable

from shardkit.files import cache, storage
from shardkit.files.uploads import Begun, Session

_FOLDER = "uploads"
_MAX_AT_ONCE = 4  # processes of one plan on one machine that have notes; the others do without


class UploadNotes:
    """Notes of one process, which takes over those of a dead one. They are dropped in silence where there is no cache.

    Args:
        output: the destination.
        plan: stands for the plan, and for the part of it.
        resume: take over what an earlier process noted.
    """

    def __init__(self, output: str, plan: str, *, resume: bool = True) -> None:
        self.begun: dict[str, Begun] = {}
        """Uploads, by path."""
        self._lock, self._fd, self._path = threading.Lock(), -1, ""
        with contextlib.suppress(OSError):
            self._open(hashlib.sha256(f"{output}\n{plan}".encode()).hexdigest())
        if self._fd >= 0 and resume:
            self._read()
        elif self._fd >= 0:
            storage.ftruncate(self._fd, 0)

    def _open(self, key: str) -> None:
        """Open the first file of this plan's key that no other process holds."""
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
            upload = line.get("upload") if isinstance(line, dict) else None
            if isinstance(upload, list) and len(upload) == 3:
                path, name, size = upload
                if isinstance(path, str) and isinstance(name, str) and isinstance(size, int):
                    self.begun[path] = Begun(name, size)

    def add_upload(self, path: str, begun: Begun) -> None:
        """Note that an upload was begun. May be called from any thread."""
        line = json.dumps({"upload": [path, begun.upload, begun.part_nbytes]})
        with self._lock, contextlib.suppress(OSError):  # a full disk costs a later run time, and nothing else
            if self._fd >= 0:
                storage.append(self._fd, b"\n" + line.encode())

    def session(self, directory: str, before_object: Callable[[], object]) -> Session:
        """Return a session that goes on with these uploads, and notes those that it begins; arguments as `Session`."""
        return Session(directory, known=self.begun, on_begin=self.add_upload, before_object=before_object)

    def close(self) -> None:
        """Leave the notes to the next process."""
        with self._lock:
            if self._fd >= 0:
                storage.close_fd(self._fd)
            self._fd = -1

    def remove(self) -> None:
        """Remove the notes: the files are there, or were given up."""
        if self._path:
            with contextlib.suppress(OSError):
                storage.unlink(self._path)
        self.close()
