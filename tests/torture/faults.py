"""Faults at the storage interface: what happens at the n-th call that a run makes."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from shardkit.files import storage

READS = ("pread", "preadv")
WRITES = ("pwrite", "write")
CHANGES = (*WRITES, "ftruncate", "fsync", "mkdir", "rmdir", "unlink", "rename", "renameat2", "hard_link")
CALLS = ("open_fd", "close_fd", *READS, *CHANGES)
SPACE = (*WRITES, "ftruncate", "fsync", "mkdir")
"""Calls that a full disk refuses; and `open_fd` where it makes a file."""
_LONGEST_DEAF_S = 20.0


class Faults:
    """Counts the calls of all threads, and acts at the chosen one.

    A fault is {"at": n, counted over the calls in "of" (default: all) in whose last argument "onto" is found, an expression
    (of renameat2: the target and the flags, after a blank), "do": ..., "stays": all later ones too}:

        kill                    SIGKILL; of a write, half of the bytes are on their way
        errno, "errno": n       the call fails; a descriptor is closed nevertheless
        short                   half of the bytes are read or written
        signal, "signum": n     a signal, then the call once the signal was heard
        change, "how", "path"   something is done to a file, then the call
        wait, "path"            a file appears there; once somebody has removed it, the call

    Args:
        fault: None to count only.
        report: descriptor to which the name of the call and the list of all calls are written.
    """

    def __init__(self, fault: dict[str, Any] | None, report: int) -> None:
        self._fault, self._report = fault or {}, report
        self._of, self._onto = (
            frozenset(self._fault.get("of", CALLS)),
            re.compile(self._fault.get("onto", "")),
        )
        self._calls, self._count, self._lock = list[str](), 0, threading.Lock()
        self._writers = set[int]()
        self._heard = threading.Event()

    def install(self, *, exchange: bool, locks: bool = True) -> None:
        """Stand in front of the storage interface."""
        if not exchange:
            storage.renameat2 = lambda *arguments: False
        if not locks:
            storage.flock = _no_lock
        set_handler = signal.signal
        signal.signal = lambda signum, handler: set_handler(signum, self._hearing(handler))
        for name in CALLS:
            setattr(storage, name, self._counted(name, getattr(storage, name)))

    def _hearing(self, handler: Any) -> Any:
        """Return a handler that also tells that the main thread has come to it."""
        if not callable(handler):
            return handler

        def hear(*args: Any) -> Any:
            self._heard.set()
            return handler(*args)

        return hear

    def report_calls(self) -> None:
        """Tell the names of all calls that were made, and how many threads wrote."""
        report = {"calls": self._calls, "num_writers": len(self._writers)}
        os.write(self._report, (json.dumps(report) + "\n").encode())

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self._calls.append(name)
                if name == "pwrite":
                    self._writers.add(threading.get_ident())
                last = " ".join(map(str, args[1 if name == "renameat2" else -1 :]))
                is_of = name in self._of and self._onto.search(last) is not None
                self._count += is_of
                at = self._fault.get("at")
                is_first = is_of and self._count == at
                is_hit = is_first or (bool(self._fault.get("stays")) and is_of and self._count >= (at or 0))
            if is_first:
                os.write(self._report, (json.dumps({"hit": name}) + "\n").encode())
            return self._act(name, call, args, kwargs) if is_hit else call(*args, **kwargs)

        return wrapper

    def _act(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        match self._fault["do"]:
            case "kill":
                if name in WRITES:
                    _half(name, call, args)
                os.kill(os.getpid(), signal.SIGKILL)
            case "errno":
                return _fail(name, call, args, kwargs, self._fault["errno"])
            case "short":
                return _half(name, call, args) if name in READS + WRITES else call(*args, **kwargs)
            case "signal":
                is_handled = callable(signal.getsignal(self._fault["signum"]))
                os.kill(os.getpid(), self._fault["signum"])
                if is_handled:  # by the main thread, which may be long in coming: the run must not end before
                    # One that comes when the main thread is just about to wait is heard at the end of that wait, which
                    # may be for this thread.
                    self._heard.wait(_LONGEST_DEAF_S)
            case "wait":
                with open(self._fault["path"], "x"):
                    pass
                while os.path.exists(self._fault["path"]):
                    time.sleep(0.01)
            case "change":
                change(self._fault["how"], self._fault["path"])
        return call(*args, **kwargs)


def _no_lock(fd: int, *, exclusive: bool, wait: bool = True) -> bool:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def _fail(
    name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], number: int
) -> Any:
    if number in (errno.ENOSPC, errno.EDQUOT) and name == "open_fd" and not args[1] & os.O_CREAT:
        return call(*args, **kwargs)  # what makes nothing needs no space
    if name == "close_fd":
        call(*args, **kwargs)
    raise OSError(number, os.strerror(number))


def _half(name: str, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Read or write half of what was asked for, one byte at least."""
    fd, what, *where = args
    if name == "pread":
        return call(fd, max(what // 2, 1), *where)
    if name == "preadv":
        return call(fd, [what[0][: max(len(what[0]) // 2, 1)]], *where)
    return call(fd, memoryview(what).cast("B")[: max(len(what) // 2, 1)], *where)


def change(how: str, path: str) -> None:
    """Do to a file or a directory what somebody else might do to it during a run."""
    match how:
        case "shrink":
            os.truncate(path, os.path.getsize(path) // 2)
        case "rewrite":
            with open(path, "r+b") as file:
                for tenth in (
                    1,
                    3,
                    7,
                    9,
                ):  # in rows of several ranks: some of the old and some of the new are neither
                    file.seek(os.path.getsize(path) * tenth // 10)
                    file.write(b"\xa5" * 64)
            os.utime(path, ns=(0, os.stat(path).st_mtime_ns + 1))  # a clock of jiffies may stand still
        case "replace":
            with open(path, "rb") as file:
                data = file.read()
            with open(f"{path}.new", "wb") as file:
                file.write(data)
            os.rename(f"{path}.new", path)
        case "remove":
            os.unlink(path)
        case "fill":
            _fill(path)
        case "occupy":
            os.mkdir(path)
            with open(os.path.join(path, "notes.txt"), "w") as file:
                file.write("somebody's")
        case "forbid":
            for here, _, _ in os.walk(path):
                os.chmod(here, 0o555)


def _fill(directory: str) -> None:
    fd = os.open(os.path.join(directory, "ballast"), os.O_WRONLY | os.O_CREAT)
    for nbytes in (1 << 20, 1 << 12):
        try:
            while os.write(fd, bytes(nbytes)):
                pass
        except OSError:
            pass
    os.close(fd)
