"""Files that are written into a store, behind the calls by which `storage` writes files.

    open -> write, front to back in several places at once -> settle -> sync, which makes the object

An open file has a number like a descriptor. Behind it is memory of the file's size without pages (`memfd_create`): only
what was written takes room. Whoever writes says what is settled, that is, neither written nor read any more. Each
part that is settled as a whole is sent, a few at a time, and its memory is given back. So a file of any size passes through a few
parts, and nothing lies on the local disk.

Files are written within a `Session`. One that is left before its end is sent anew by the next run.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from isal.isal_zlib import crc32, crc32_combine

from shardkit.core.text import MIB
from shardkit.core.threads import at_once
from shardkit.errors import ShardkitError
from shardkit.files.remote.contract import UploadedPart, WrittenObject
from shardkit.files.remote.writers import writer_of

FIRST_NUMBER = 1 << 40
"""Numbers of files that are written to a store begin here."""
PART_NBYTES = 8 * MIB
MAX_PARTS = 10_000  # Amazon S3: most parts of an object
NUM_SENDERS = 4
"""Parts on their way at a time."""
_PUNCH = 0x01 | 0x02  # linux/falloc.h: FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_PAGE = 4096


def part_nbytes(size: int) -> int:
    """Return the bytes of each part of a file but the last. It depends on the size alone, as the object's ETag does."""
    least = -(-size // MAX_PARTS)
    return max(PART_NBYTES, -(-least // MIB) * MIB)


class SentFile:
    """A file on its way into a store; several numbers may stand for it.

    Args:
        session: what it belongs to.
        path: of the object.
    """

    def __init__(self, session: Session, path: str) -> None:
        self.session, self.path, self._store = session, path, writer_of(path)
        self.lock = threading.Lock()
        self._fd, self._size, self._expected = -1, 0, 0
        self._settled: list[tuple[int, int]] = []
        self._taken = set[int]()
        self._parts: list[Future[UploadedPart]] = []
        self._upload: str | None = None

    # Memory of the file's size

    @property
    def size(self) -> int:
        return self._size

    @property
    def _step(self) -> int:
        return part_nbytes(self._expected or self._size)

    def expect(self, size: int) -> int:
        """Say how many bytes the file may get that grows while parts of it are sent; return the bytes of a part.

        Parts are settled whole, and only when more has been written behind them: the last one is not known before the end.
        """
        self._expected = max(size, 1)
        return self._step

    def truncate(self, size: int) -> None:
        self._size = size
        if self._fd >= 0:
            os.ftruncate(self._fd, size)

    def fd(self) -> int:
        with self.lock:
            if self._fd < 0:
                self._fd = os.memfd_create("shardkit", os.MFD_CLOEXEC)
                os.ftruncate(self._fd, self._size)
            return self._fd

    def write(self, data: Any, start: int) -> int:
        """Write into the file, as `os.pwrite`; raises what a part of it failed with."""
        self.raise_failure()
        count = os.pwrite(self.fd(), data, start)
        self._size = max(self._size, start + count)
        return count

    def read(self, nbytes: int, start: int) -> bytes:
        """Read what was written and is not settled."""
        return os.pread(self.fd(), nbytes, start)

    def read_into(self, buffers: Sequence[Any], start: int) -> int:
        """Read what was written and is not settled, as `os.preadv`."""
        return os.preadv(self.fd(), buffers, start)

    def close(self) -> None:
        """Give the memory back."""
        with self.lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def held_nbytes(self) -> int:
        with self.lock:
            return os.fstat(self._fd).st_blocks * 512 if self._fd >= 0 else 0

    # Parts

    def settle(self, start: int, stop: int) -> None:
        """Say that a range is neither written nor read any more: every part that is settled as a whole by now is sent.

        Waits while too many are on their way.

        Raises:
            ResourceError: a part could not be sent.
        """
        self.raise_failure()
        for number in self._take_settled(start, min(stop, self._size)):
            self._send(number)

    def _take_settled(self, start: int, stop: int) -> list[int]:
        """Add a range to what is settled, and return the parts that it completes; each is returned once."""
        step = self._step
        with self.lock:
            at = max(bisect_right(self._settled, (start, self._size + 1)) - 1, 0)
            first, last, end = start, stop, at
            if self._settled and self._settled[at][1] < start:
                at = end = at + 1
            while end < len(self._settled) and self._settled[end][0] <= last:
                first, last = min(first, self._settled[end][0]), max(last, self._settled[end][1])
                end += 1
            known = self._settled[at][1] if at < end and self._settled[at][0] <= start else start
            self._settled[at:end] = [(first, last)]
            found = [
                number
                for number in range(known // step, -(-stop // step) + 1)
                if number not in self._taken
                and first <= number * step
                and number * step < self._size
                and min((number + 1) * step, self._size) <= last
            ]
            self._taken.update(found)
            return found

    def _send(self, number: int) -> None:
        """Hand a part over to be sent, and give its memory back."""
        step = self._step
        start, stop = number * step, min((number + 1) * step, self._size)
        if self._size > step:
            self._begin()
        is_free = self.session.is_free
        is_free.acquire()
        try:
            data = _take(self.fd(), start, stop)
            sending = self.session.senders.submit(self._send_part, number, data)
        except BaseException:
            is_free.release()
            raise
        sending.add_done_callback(lambda _: is_free.release())
        self._parts.append(sending)

    def _begin(self) -> None:
        with self.lock:
            if self._upload is None:
                self._upload = self._store.begin(self.path)

    def _send_part(self, number: int, data: bytes) -> UploadedPart:
        crc = int(crc32(data))
        if self._upload is None:  # all of it is one part
            self.session.before_object()
            stored = self._store.put(self.path, data, crc)
            return UploadedPart(1, len(data), stored.etag, crc)
        return self._store.send_part(self.path, self._upload, number + 1, data, crc)

    def raise_failure(self) -> None:
        """Raise what a part failed with."""
        for part in self._parts:
            if part.done() and (failure := part.exception()) is not None:
                raise failure

    def finish(self) -> WrittenObject:
        """Send what is left, wait for all of it, and make the object."""
        if self._size == 0:
            self.session.before_object()
            return self._store.put(self.path, b"", 0)._replace(crc32=0)
        self.settle(0, self._size)
        parts = sorted(part.result() for part in self._parts)
        crc = 0
        for part in parts:
            crc = crc32_combine(crc, part.crc32, part.size)
        self.close()
        if self._upload is None:
            return WrittenObject(self._size, parts[0].etag, crc)
        self.session.before_object()
        return self._store.complete(self.path, self._upload, parts, crc)._replace(crc32=crc)

    def abort(self) -> None:
        """End the upload, if one was begun, as far as the store lets us."""
        self.close()
        if self._upload is not None:
            with contextlib.suppress(ShardkitError):
                self._store.abort(self.path, self._upload)


def _take(fd: int, start: int, stop: int) -> bytes:
    """Return a range of a file in memory, and give its pages back."""
    data = os.pread(fd, stop - start, start)
    while len(data) < stop - start:
        data += os.pread(fd, stop - start - len(data), start + len(data))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    length = -(-(stop - start) // _PAGE) * _PAGE
    if libc.fallocate(fd, _PUNCH, start, length) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return data


class Session:
    """Files that are written below one directory of a store. A context manager.

    Args:
        directory: of a store.
        before_object: called before each object is made, from any thread; raises if none may be made any more.
    """

    def __init__(self, directory: str, *, before_object: Callable[[], object] = lambda: None) -> None:
        self.directory, self.before_object = directory, before_object
        self.senders = ThreadPoolExecutor(NUM_SENDERS, thread_name_prefix="shardkit-upload")
        self.is_free = threading.Semaphore(NUM_SENDERS)
        """Whether one more part may go on its way."""
        self.stored: dict[str, WrittenObject] = {}
        """What was made of each file that was finished; by path, with the CRC-32 of what was sent."""
        self._files: dict[str, SentFile] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Session:
        with _lock:
            _sessions.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        with _lock:
            _sessions.remove(self)
            for number in [number for number, file in _open.items() if file.session is self]:
                del _open[number]
        self.senders.shutdown(cancel_futures=True)
        at_once(SentFile.abort, self._files.values())

    def file(self, path: str, flags: int) -> SentFile:
        """Return the file of a path, a new one if there is none under way."""
        with self._lock:
            if path not in self._files or flags & os.O_TRUNC:
                if not flags & os.O_CREAT:
                    raise FileNotFoundError(errno.ENOENT, "no such file is being written", path)
                self._files[path] = SentFile(self, path)
            return self._files[path]

    def finish(self, file: SentFile) -> WrittenObject:
        """Send what is left of a file, and make the object; return what it is. The store compares its CRC-32.

        Raises:
            ResourceError, IntegrityError, LostUpload: as `Writer.complete`.
        """
        stored = file.finish()
        with self._lock:
            self.stored[file.path] = stored
            self._files.pop(file.path, None)
        return stored

    def held_nbytes(self) -> int:
        """Return the bytes of memory that files under way take."""
        with self._lock:
            files = list(self._files.values())
        return sum(file.held_nbytes() for file in files)


_lock = threading.Lock()
_sessions: list[Session] = []
_open: dict[int, SentFile] = {}
_numbers = itertools.count(FIRST_NUMBER)


def open_number(path: str, flags: int) -> int:
    """Open a file of a store for writing, and return its number.

    Raises:
        OSError: no session is about it.
        FileNotFoundError: it is not under way, and not to be created.
    """
    with _lock:
        session = next((each for each in _sessions if path.startswith(each.directory + "/")), None)
    if session is None:
        raise OSError(errno.EROFS, "object stores are read only here", path)
    file = session.file(path, flags)
    with _lock:
        number = next(_numbers)
        _open[number] = file
    return number


def close_number(number: int) -> None:
    """Close a file. It stays under way until it is synced."""
    with _lock:
        _open.pop(number, None)


def opened(number: int) -> SentFile:
    """Return the file that a number stands for."""
    return _open[number]
