"""Writing a stretch of a file front to back through one buffer.

Small records are combined into large writes, and large data are read from the source directly into the buffer. Files of
ranks are thus always written sequentially.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from shardkit.core.dtypes import DType
from shardkit.core.text import escape
from shardkit.errors import ResourceError
from shardkit.files import storage
from shardkit.files.digest import crc32
from shardkit.transfer.images import Frame

_FREE = "free some space or choose another destination, then run the same command again"
WRITTEN_GAP = 4096
"""Gaps up to this size are written as zeros, which is cheaper than another system call."""

Segment = tuple[int, int, int]
"""(first byte, bytes, CRC-32) of a part of a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Controls:
    """Options and callbacks that are shared by all threads that fill holes."""

    digests: bool
    """Compute CRC-32s; otherwise records contain "not recorded"."""
    check: Callable[[], None]
    """Called between reads; raises to stop."""
    advance: Callable[[int], None]
    """Called with the number of bytes that filled holes."""
    infinite: Callable[[str, DType], None]
    """Called with a tensor, and the dtype in which finite values became infinite; possibly more than once."""
    cloning: threading.Lock = field(default_factory=threading.Lock)
    """Held while cloning: a clone locks its source, so concurrent clones would block each other anyway."""


class Stream:
    """A buffered sequential writer with gaps.

    Args:
        fd: descriptor, open for writing.
        name: name of the file, for messages.
        start: first byte to write.
        buffer: buffer that the streams of one thread share.
    """

    def __init__(self, fd: int, name: str, start: int, buffer: bytearray) -> None:
        self._fd, self._name = fd, name
        self.fqn = ""  # the tensor being written, for messages
        self._view, self._size = memoryview(buffer), len(buffer)
        self._at, self._used = start, 0

    @property
    def position(self) -> int:
        """File position of the next byte."""
        return self._at + self._used

    def room(self, max_bytes: int) -> memoryview:
        """Return a part of the buffer, at most `max_bytes`, for the caller to fill; empty until a full buffer is flushed.

        It counts as written and is flushed with the rest.
        """
        part = self._view[self._used : self._used + max_bytes]
        self._used += len(part)
        return part

    def whole_room(self, nbytes: int) -> memoryview:
        """Return exactly `nbytes` of the buffer, at most its size, for the caller to fill."""
        if self._size - self._used < nbytes:
            self.flush()
        part = self._view[self._used : self._used + nbytes]
        self._used += nbytes
        return part

    def put(self, data: bytes) -> None:
        """Append literal bytes."""
        used = self._used
        stop = used + len(data)
        if stop <= self._size:  # nearly always, as literals are small
            self._view[used:stop] = data
            self._used = stop
            return
        done = 0
        while done < len(data):
            part = self.room(len(data) - done)
            if not part:
                self.flush()
            part[:] = data[done : done + len(part)]
            done += len(part)

    def write(self, data: memoryview) -> None:
        """Write the content of the buffer, and then `data` without a copy."""
        self.flush()
        self._write(data)

    def put_at(self, position: int, data: bytes) -> None:
        """Append literal bytes at or after the current position, preceded by zeros.

        Long gaps are skipped, as a new file is all zeros; short ones are written.
        """
        gap = position - self._at - self._used
        if 0 < gap <= WRITTEN_GAP:
            data = bytes(gap) + data
        elif gap:
            self.step_over(gap)
        self.put(data)

    def step_over(self, nbytes: int) -> None:
        """Skip `nbytes`, which are filled otherwise, or remain zeros of a new file."""
        self.flush()
        self._at += nbytes

    def flush(self) -> None:
        """Write the content of the buffer."""
        if self._used:
            self._write(self._view[: self._used])
            self._used = 0

    def _write(self, data: memoryview) -> None:
        write_all(self._fd, data, self._at, self._name, self.fqn)
        self._at += len(data)


def write_all(fd: int, data: memoryview, start: int, name: str, fqn: str, *, hint: str = _FREE) -> None:
    """Write all of `data` at byte `start`.

    Raises:
        ResourceError: names the file and the offset, and has the hint.
    """
    done = 0
    while done < len(data):
        try:
            done += storage.pwrite(fd, data[done:] if done else data, start + done)
        except OSError as error:
            raise ResourceError(
                f"cannot write {escape(name)} at byte {start + done} ({escape(fqn)}): {error.strerror}",
                hint=hint,
            ) from error


def read_back(fd: int, start: int, nbytes: int, buffer: bytearray) -> int:
    """Return the CRC-32 of a range of a file; `buffer` is overwritten.

    Raises:
        ResourceError: reading failed, or the file is too short.
    """
    crc, done, view = 0, 0, memoryview(buffer)
    while done < nbytes:
        part = view[: nbytes - done]
        try:
            count = storage.preadv(fd, [part], start + done)
        except OSError as error:
            raise ResourceError(f"cannot read back at byte {start + done}: {error.strerror}") from error
        if count == 0:
            raise ResourceError(f"a file ends at byte {start + done} while it is checked")
        crc = crc32(part[:count], crc)
        done += count
    return crc


def segments_of(start: int, frame: Frame, nbytes: int, crc: int, suffix: bytes) -> tuple[Segment, ...]:
    """Return the three parts of a piece at byte `start`: the prefix, the hole and the suffix."""
    data = start + len(frame.prefix)
    return (
        (start, len(frame.prefix), frame.prefix_crc),
        (data, nbytes, crc),
        (data + nbytes, len(suffix), crc32(suffix)),
    )
