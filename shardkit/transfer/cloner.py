"""Sharing extents in a process of its own, beside the threads that write what cannot be shared.

A file system makes its clones one after the other, about 20 microseconds each. A thread that asks for one
every few microseconds fights the other threads for the interpreter's lock. A process does not.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shardkit.files import storage
from shardkit.transfer import clone_child
from shardkit.transfer.sources import MAX_BORROWED

# Most sources of one batch: fewer than a reader keeps open, so that all are still lent when they are sent.
_MAX_SOURCES = MAX_BORROWED - 4
_MAX_PENDING = 32  # batches without an answer; each takes room in the socket, and descriptors


class CloneRange(NamedTuple):
    """Whole blocks of a source file for a place in an image to share, in bytes."""

    file: int
    """Index into the source catalog's files."""
    start: int
    nbytes: int
    target_start: int
    fqn: str
    """The tensor that the bytes belong to, for messages."""


class Cloner:
    """Shares ranges in batches. A context manager; leaving it abandons unfinished batches."""

    def __init__(self) -> None:
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._connection: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pending: list[tuple[int, Sequence[CloneRange]]] = []
        self._failed: dict[int, list[CloneRange]] = {}
        self._num_submitted = 0

    def __enter__(self) -> Cloner:
        return self

    def __exit__(self, *_: object) -> None:
        if self._connection is not None:
            # Closing is not enough: a process that another thread forked in the meantime has it open too.
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            self._connection.close()
        if self._process is not None:
            self._process.wait()

    def submit(self, target: int, ranges: Sequence[CloneRange], descriptor: Callable[[int], int]) -> int:
        """Begin to share ranges with a file and return a ticket for `wait`.

        Args:
            target: descriptor of the image, open for writing. It may be closed once this returns.
            ranges: what to share.
            descriptor: gives an open descriptor of a source file.
        """
        with self._sending:
            ticket = self._num_submitted
            self._num_submitted += 1
            if ticket == 0:
                self._start()
            # Back to front, because a clone locks its source and the threads read the same files front to
            # back.
            ranges = ranges[::-1]
            self._drain(_MAX_PENDING - 1)
            if self._send(target, ranges, descriptor):
                self._pending.append((ticket, ranges))
            else:
                self._failed[ticket] = [r for r in ranges if not clone(target, r, descriptor(r.file))]
            return ticket

    def _send(self, target: int, ranges: Sequence[CloneRange], descriptor: Callable[[int], int]) -> bool:
        """Send a batch to the process; False where the process did not get it and will not answer."""
        sources = sorted({piece.file for piece in ranges})
        if self._connection is None or len(sources) > _MAX_SOURCES:
            return False
        place = {file: index + 1 for index, file in enumerate(sources)}
        columns = [(place[r.file], r.start, r.nbytes, r.target_start) for r in ranges]
        data = struct.pack("=I", len(ranges)) + b"".join(struct.pack("=QQQQ", *c) for c in columns)
        try:
            sent = socket.send_fds(self._connection, [data], [target, *map(descriptor, sources)])
        except OSError:  # it is gone; or ETOOMANYREFS, for too many descriptors in flight
            return False
        # If the process is gone, `wait` notices too and reports that all ranges failed.
        with contextlib.suppress(OSError):
            self._connection.sendall(data[sent:])
        return True

    def _drain(self, most: int) -> None:
        """Take answers until at most so many batches wait for theirs.

        Answers that nobody takes would fill the socket, and then neither side could send.
        """
        with self._receiving:
            while len(self._pending) > most:
                self._receive_next()

    def _receive_next(self) -> None:
        number, ranges = self._pending.pop(0)
        errors = self._receive(len(ranges))
        self._failed[number] = [r for r, error in zip(ranges, errors, strict=True) if error]

    def wait(self, ticket: int) -> list[CloneRange]:
        """Wait for a batch; return its ranges that could not be shared."""
        with self._receiving:
            while ticket not in self._failed:
                self._receive_next()
            return self._failed.pop(ticket)

    def _start(self) -> None:
        """Start the process. Where that is not possible, the calling thread shares ranges."""
        if not sys.executable:
            return
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", clone_child.__file__],
                stdin=theirs.fileno(),
                start_new_session=True,
            )
            self._connection = ours
        except OSError:
            ours.close()
        finally:
            theirs.close()

    def _receive(self, count: int) -> array[int]:
        errors, parts = array("i"), bytearray()
        assert self._connection is not None
        while len(parts) < count * errors.itemsize:
            try:
                data = self._connection.recv(count * errors.itemsize - len(parts))
            except OSError:
                data = b""
            if not data:
                return array("i", [1]) * count
            parts += data
        errors.frombytes(bytes(parts))
        return errors


def clone(target: int, piece: CloneRange, source: int) -> bool:
    """Share a range in the calling thread; False where that is not possible."""
    try:
        storage.clone_range(source, piece.start, target, piece.target_start, piece.nbytes)
    except OSError:
        return False
    return True
