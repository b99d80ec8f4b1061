"""Stands in front of `files.storage` and writes down all that is done to files below one directory."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable
from typing import Any

from shardkit.files import storage
from tests.powerloss.log import ROOT, Change, Entries, Log, Resize, Sync, Write, apply

CHANGING = (
    *("open_fd", "close_fd", "pwrite", "write", "ftruncate", "fsync", "mkdir", "rmdir", "unlink"),
    *("rename", "renameat2", "hard_link", "clone_range"),
)
READING = (
    *("pread", "preadv"),
    *("access", "fstat", "listdir", "lstat", "readlink", "scandir", "stat", "walk"),
)


class Recorder:
    """Makes each call and records it, one thread at a time, so that the log has the order in which they took effect.

    Args:
        root: the directory in which everything is to happen; a change outside is an error.
        log: continued; its names are what lies in `root` now.
        fatal: the process ends in place of this call, counted from 1, as if it were killed.
        at_end: called before.
    """

    def __init__(
        self, root: str, log: Log, *, fatal: int = 0, at_end: Callable[[], None] | None = None
    ) -> None:
        self._root, self.log = os.path.realpath(root), log
        self._names, self._nodes = log.names(), dict[int, int | None]()
        self._lock = threading.Lock()
        self.num_calls, self.num_clones, self.last_rename = 0, 0, 0  # a rename that an output got its name by
        self._fatal, self._at_end = fatal, at_end
        self._calls = {name: getattr(storage, name) for name in CHANGING}

    def install(self) -> None:
        """Put this in front of the names of `storage`."""
        for name in CHANGING:
            setattr(storage, name, self._recorded(getattr(self, f"_{name}")))

    def _recorded(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self.num_calls += 1
                if self.num_calls == self._fatal:
                    if self._at_end is not None:
                        self._at_end()
                    os._exit(9)
                return method(*args, **kwargs)

        return call

    # Names.

    def _place(self, path: str, dir_fd: int | None = None) -> tuple[int, str]:
        """Return (directory's node, name) of a path."""
        if dir_fd is not None:
            path = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), path)
        parent, name = os.path.split(os.path.abspath(path))
        parts = os.path.relpath(os.path.realpath(parent), self._root).split(os.sep)
        assert parts[0] != os.pardir, f"{path} is changed, and lies outside"
        node = ROOT
        for part in parts:
            node = node if part == os.curdir else self._names[node, part]
        return node, name

    def _node(self, path: str) -> int | None:
        """Return what a path stands for; None for what lies outside or is not there."""
        path = os.path.realpath(path)
        if path == self._root:
            return ROOT
        if not path.startswith(self._root + os.sep):
            return None
        try:
            return self._names.get(self._place(path))
        except KeyError:  # nor is the directory above it
            return None

    def _change(self, *changes: Change) -> None:
        op = Entries(changes)
        apply(op, self._names)
        self.log.ops.append(op)

    def _open_fd(self, path: str, flags: int, mode: int = 0o777, **kwargs: Any) -> int:
        known, is_nameless = self._node(path), flags & os.O_TMPFILE == os.O_TMPFILE
        fd = int(self._calls["open_fd"](path, flags, mode, **kwargs))
        if flags & os.O_CREAT and known is None:
            known = self.log.add_node(path, is_directory=False)
            self._change(Change(*self._place(path), known))
        elif flags & os.O_TRUNC and not is_nameless:
            assert known is not None, f"{path} is emptied, and lies outside"
            self.log.ops.append(Resize(known, 0))
        self._nodes[fd] = None if is_nameless else known
        return fd

    def _close_fd(self, fd: int) -> None:
        self._nodes.pop(fd, None)
        self._calls["close_fd"](fd)

    def _mkdir(self, path: str, *args: Any) -> None:
        self._calls["mkdir"](path, *args)
        self._change(Change(*self._place(path), self.log.add_node(path, is_directory=True)))

    def _rmdir(self, path: str, *, dir_fd: int | None = None) -> None:
        place = self._place(path, dir_fd)
        self._calls["rmdir"](path, dir_fd=dir_fd)
        self._change(Change(*place, None))

    def _unlink(self, path: str, *, dir_fd: int | None = None) -> None:
        place = self._place(path, dir_fd)
        self._calls["unlink"](path, dir_fd=dir_fd)
        self._change(Change(*place, None))

    def _rename(self, source: str, target: str) -> None:
        self._calls["rename"](source, target)
        self._moved(source, target)

    def _hard_link(self, source: str, target: str) -> None:
        self._calls["hard_link"](source, target)
        self._change(Change(*self._place(target), self._names[self._place(source)]))

    def _renameat2(self, source: str, target: str, flags: int) -> bool:
        if not self._calls["renameat2"](source, target, flags):
            return False
        if flags == storage.RENAME_EXCHANGE:
            one, other = self._place(source), self._place(target)
            self._note_rename(other)
            self._change(Change(*one, self._names[other]), Change(*other, self._names[one]))
        else:
            self._moved(source, target)
        return True

    def _moved(self, source: str, target: str) -> None:
        one, other = self._place(source), self._place(target)
        self._note_rename(other)
        self._change(Change(*one, None), Change(*other, self._names[one]))

    def _note_rename(self, target: tuple[int, str]) -> None:
        directory, name = target
        if directory == ROOT and not name.startswith("."):
            self.last_rename = self.num_calls

    # Bytes.

    def _written(self, fd: int, at: int, data: bytes) -> None:
        node = self._nodes[fd]
        if node is not None:
            self.log.ops.append(Write(node, at, data))

    def _pwrite(self, fd: int, data: Any, at: int) -> int:
        count = int(self._calls["pwrite"](fd, data, at))
        self._written(fd, at, bytes(memoryview(data)[:count]))
        return count

    def _write(self, fd: int, data: Any) -> int:
        does_append = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND
        at = os.fstat(fd).st_size if does_append else os.lseek(fd, 0, os.SEEK_CUR)
        count = int(self._calls["write"](fd, data))
        self._written(fd, at, bytes(memoryview(data)[:count]))
        return count

    def _clone_range(self, source: int, source_at: int, target: int, at: int, nbytes: int) -> None:
        """Share blocks as a file system does that can; the one that the tests run on need not."""
        self.num_clones += 1
        data = os.pread(source, nbytes, source_at)
        os.pwrite(target, data, at)
        self._written(target, at, data)

    def _ftruncate(self, fd: int, size: int) -> None:
        self._calls["ftruncate"](fd, size)
        node = self._nodes[fd]
        assert node is not None
        self.log.ops.append(Resize(node, size))

    def _fsync(self, fd: int) -> None:
        self._calls["fsync"](fd)
        node = self._nodes[fd]
        if node is not None:
            self.log.ops.append(Sync(node))
