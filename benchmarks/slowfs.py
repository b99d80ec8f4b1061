"""A read-only view of a directory, by FUSE, that writes down every request and can be as slow as a network; as root, on Linux.

    python benchmarks/slowfs.py SOURCE LOG MOUNT ... [--delay-ms 20] [--mb-per-s 500]

Each MOUNT is a file system of its own, with a page cache of its own, as on a node of its own. When standard input ends, all are
unmounted, and LOG gets one JSON list for each request: number of the mount, what ("read", "open", "lookup", ...), file, first byte,
bytes, seconds from the start to the request, and to its answer. A read that no request was needed for is not there.

--delay-ms is what each request takes, before its answer; many may be under way. --mb-per-s is for the answers to reads of all mounts
together. Requests have at most 1 MiB (`max_read`), read-ahead is 1 MiB, as NFS and Lustre have it or more; up to 64 requests of
read-ahead are under way (the kernel's own number is 12). Looked-up names and attributes are kept for an hour.

The kernel's protocol is spoken here, so nothing need be installed: include/uapi/linux/fuse.h, version 7.31.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import heapq
import json
import os
import select
import signal
import stat
import struct
import sys
import time
from contextlib import suppress
from itertools import count
from pathlib import Path

MAX_READ = READ_AHEAD = 1 << 20
MAX_BACKGROUND = 64
_VALID_S = 3600
_BUFFER_BYTES = 1 << 17  # of one request; none of those that are answered is larger

LOOKUP, FORGET, GETATTR, OPEN, READ, STATFS, RELEASE = 1, 2, 3, 14, 15, 17, 18
INIT, OPENDIR, READDIR, RELEASEDIR, INTERRUPT, DESTROY, BATCH_FORGET = 26, 27, 28, 29, 36, 38, 42
NAMES = {
    LOOKUP: "lookup",
    GETATTR: "getattr",
    OPEN: "open",
    READ: "read",
    OPENDIR: "opendir",
    READDIR: "readdir",
}
"""Requests that take a network's time; they are written down."""
SILENT = {FORGET, BATCH_FORGET, INTERRUPT, DESTROY}
_ASYNC_READ, _PARALLEL, _MAX_PAGES = 1, 1 << 18, 1 << 22
_READ_ONLY, _NOSUID, _NODEV, _DETACH = 1, 2, 4, 2

_libc = ctypes.CDLL(None, use_errno=True)


def mount(target: str, fd: int) -> None:
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other,max_read={MAX_READ}"
    flags = _READ_ONLY | _NOSUID | _NODEV
    if _libc.mount(b"slowfs", target.encode(), b"fuse.slowfs", flags, options.encode()):
        number = ctypes.get_errno()
        sys.exit(f"cannot mount {target}: {os.strerror(number)}; it takes root and /dev/fuse")


class View:
    """One mount of the source."""

    def __init__(self, source: str, target: str) -> None:
        self.target, self._source = target, source
        self.fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        self._paths = {1: source}
        self._nodes = {source: 1}
        self._files: dict[str, int] = {}
        mount(target, self.fd)

    def name(self, node: int) -> str:
        return os.path.relpath(self._paths[node], self._source)

    def size(self, node: int) -> int:
        return os.stat(self._paths[node]).st_size

    def read_ahead(self) -> None:
        """Set what is read ahead; the kernel takes no more than 128 KiB from a file system's own answer."""
        with open("/proc/self/mountinfo") as file:
            device = next(row[2] for row in map(str.split, file) if row[4] == self.target)
        Path(f"/sys/class/bdi/{device}/read_ahead_kb").write_text(str(READ_AHEAD >> 10))

    def answer(self, opcode: int, node: int, body: bytes) -> bytes | int:
        """Return what to answer; a number is an error."""
        try:
            return self._answer(opcode, node, body)
        except OSError as error:
            return error.errno or errno.EIO

    def _answer(self, opcode: int, node: int, body: bytes) -> bytes | int:
        if opcode == INIT:
            flags = _ASYNC_READ | _PARALLEL | _MAX_PAGES
            head = struct.pack(
                "=IIIIHHIIHH",
                7,
                31,
                READ_AHEAD,
                flags,
                MAX_BACKGROUND,
                MAX_BACKGROUND,
                4096,
                1,
                MAX_READ >> 12,
                0,
            )
            return head + bytes(64 - len(head))
        if opcode == LOOKUP:
            path = os.path.join(self._paths[node], os.fsdecode(body.rstrip(b"\0")))
            attributes = _attributes(path)
            number = self._nodes.setdefault(path, len(self._nodes) + 1)
            self._paths[number] = path
            return struct.pack("=QQQQII", number, 0, _VALID_S, _VALID_S, 0, 0) + attributes
        if opcode == GETATTR:
            return struct.pack("=QII", _VALID_S, 0, 0) + _attributes(self._paths[node])
        if opcode in (OPEN, OPENDIR):
            return struct.pack("=QII", 0, 0, 0)
        if opcode == READ:
            start, size = struct.unpack_from("=QI", body, 8)
            return os.pread(self._file(self._paths[node]), size, start)
        if opcode == READDIR:
            start, size = struct.unpack_from("=QI", body, 8)
            return _listing(self._paths[node], start, size)
        if opcode == STATFS:
            return struct.pack("=QQQQQIII", 0, 0, 0, 0, 0, 4096, 255, 4096) + bytes(28)
        return b"" if opcode in (RELEASE, RELEASEDIR) else errno.ENOSYS

    def _file(self, path: str) -> int:
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._files[path]

    def close(self) -> None:
        _libc.umount2(self.target.encode(), _DETACH)
        for fd in (self.fd, *self._files.values()):
            os.close(fd)


def _attributes(path: str) -> bytes:
    found = os.stat(path)
    times = (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)
    return struct.pack(
        "=QQQQQQIIIIIIIIII",
        *(found.st_ino, found.st_size, found.st_blocks, *(each // 10**9 for each in times)),
        *(each % 10**9 for each in times),
        *(found.st_mode, found.st_nlink, found.st_uid, found.st_gid, 0, 1 << 20, 0),
    )


def _listing(path: str, start: int, size: int) -> bytes:
    content = b""
    for number, name in enumerate(sorted(os.listdir(path))[start:], start + 1):
        found = os.stat(os.path.join(path, name))
        encoded = os.fsencode(name)
        row = (
            struct.pack("=QQII", found.st_ino, number, len(encoded), stat.S_IFMT(found.st_mode) >> 12)
            + encoded
        )
        row += bytes(-len(row) % 8)
        if len(content) + len(row) > size:
            break
        content += row
    return content


class Server:
    """Answers the requests of all mounts, in one thread, when they are due."""

    def __init__(self, views: list[View], delay_s: float, bytes_per_s: float) -> None:
        self._views, self._delay_s, self._bytes_per_s = views, delay_s, bytes_per_s
        self.log: list[tuple[int, str, str, int, int, float, float]] = []
        self._due: list[tuple[float, int, View, int, int, int, bytes]] = []
        self._order, self._begun, self._free_at = count(), time.monotonic(), 0.0
        self._num_begun = 0

    def run(self, ends: int) -> None:
        """Serve until a descriptor can be read."""
        poll = select.poll()
        poll.register(ends, select.POLLIN | select.POLLHUP)
        by_fd = {view.fd: number for number, view in enumerate(self._views)}
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        while True:
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                _, _, view, unique, opcode, node, body = heapq.heappop(self._due)
                reply(view, unique, view.answer(opcode, node, body))
                if opcode == INIT:
                    view.read_ahead()
                    self._num_begun += 1
                    if self._num_begun == len(self._views):
                        print("mounted", flush=True)
            wait_ms = max(self._due[0][0] - now, 0) * 1000 if self._due else 1000
            for fd, _ in poll.poll(wait_ms):
                if fd == ends:
                    return
                self._take(by_fd[fd])

    def _take(self, number: int) -> None:
        view = self._views[number]
        try:
            request = os.read(view.fd, _BUFFER_BYTES)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EAGAIN, errno.EINTR):  # it was interrupted
                return
            raise
        _, opcode, unique, node, *_ = struct.unpack_from("=IIQQ", request)
        body = request[40:]
        if opcode in SILENT:
            return
        due = now = time.monotonic()
        if opcode in NAMES:
            file, start, size = view.name(node), 0, 0
            if opcode == READ:
                start, size = struct.unpack_from("=QI", body, 8)
                size = max(min(size, view.size(node) - start), 0)
            if opcode == LOOKUP:
                file = os.path.normpath(os.path.join(file, os.fsdecode(body.rstrip(b"\0"))))
            if size and self._bytes_per_s:
                self._free_at = due = max(now, self._free_at) + size / self._bytes_per_s
            due += self._delay_s
            times = (round(now - self._begun, 6), round(due - self._begun, 6))
            self.log.append((number, NAMES[opcode], file, start, size, *times))
        heapq.heappush(self._due, (due, next(self._order), view, unique, opcode, node, body))


def reply(view: View, unique: int, answer: bytes | int) -> None:
    error, content = (-answer, b"") if isinstance(answer, int) else (0, answer)
    with suppress(FileNotFoundError):  # whoever asked has been killed
        os.writev(view.fd, [struct.pack("=IiQ", 16 + len(content), error, unique), content])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("log", type=Path)
    parser.add_argument("mounts", type=Path, nargs="+", metavar="MOUNT")
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--mb-per-s", type=float, default=0.0)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # what is mounted is unmounted
    views: list[View] = []
    try:
        for target in args.mounts:
            views.append(View(str(args.source.resolve()), str(target.resolve())))
        server = Server(views, args.delay_ms / 1000, args.mb_per_s * 1e6)
        server.run(sys.stdin.fileno())
        args.log.write_text("".join(f"{json.dumps(row)}\n" for row in server.log))
    finally:
        for view in views:
            view.close()


if __name__ == "__main__":
    main()
