"""All calls that find, read and change files.

Other modules use these (`storage.pwrite(...)`), never those of `os`. Patching this module therefore intercepts every
operation on files: tests kill the process at the n-th call, let a call fail, or record all calls and replay what a power
loss may leave. Paths such as `s3://bucket/key` are passed to `stores`, for reading only.

The first part consists of the system's calls, extended by paths of stores. The second has common operations. The third
tests whether files can share extents (as on XFS, Btrfs and some others).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import fcntl
import io
import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, BinaryIO, cast

from shardkit.core.catalog import Catalog, Computed
from shardkit.files import stores
from shardkit.files.remote import ranges
from shardkit.files.stores import FIRST_NUMBER, is_remote

BLOCK = 4096
# Plain calls of the system. Tests may replace each of them, so nothing below keeps its own reference.
write = os.write
mkdir = os.mkdir
rmdir = os.rmdir
rename = os.rename
hard_link = os.link
open_file = open
readlink = os.readlink
islink = os.path.islink
disk_usage = shutil.disk_usage

_FREE = "free some space or choose another file system"
_ELSEWHERE = "choose a destination in an existing directory that you may write to"
WAYS_OUT: dict[int | None, str] = {
    errno.ENOSPC: _FREE,
    errno.EDQUOT: _FREE,
    errno.ENOENT: _ELSEWHERE,
    errno.EACCES: _ELSEWHERE,
    errno.EPERM: _ELSEWHERE,
    errno.EROFS: _ELSEWHERE,
}
"""Error of writing -> hint."""

RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2
"""Flags of `renameat2`. Source: linux/fs.h."""

_AT_FDCWD = -100  # fcntl.h
_FICLONERANGE = 0x4020940D  # linux/fs.h: _IOW(0x94, 13, struct file_clone_range)
_NO_SUCH_CALL = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)
_NO_LINKS = (*_NO_SUCH_CALL, errno.EPERM, errno.EXDEV, errno.EMLINK)
_BUFFER_BYTES = _ASKED_BYTES = 1 << 20
_SCRATCH = f".shardkit-scratch-{socket.gethostname().partition('.')[0]}-"
"""Includes the host: if locks do not work across hosts, directories of other hosts would seem abandoned."""
_CONFIGS, _MAX_CONFIG = (".json", ".py"), 16 << 20
_copies: dict[tuple[str, frozenset[tuple[str, int]]], str] = {}

_Path = str | os.PathLike[str]

_listed: ContextVar[dict[str, list[str]] | None] = ContextVar("listed", default=None)


def open_fd(path: _Path, flags: int, mode: int = 0o777) -> int:
    """As `os.open`; objects of stores have separate numbers."""
    if not is_remote(path):
        return os.open(path, flags, mode)
    return stores.open_number(str(path), flags)


def close_fd(fd: int) -> None:
    """As `os.close`."""
    os.close(fd) if fd < FIRST_NUMBER else stores.close_number(fd)


def pread(fd: int, nbytes: int, start: int) -> bytes:
    """As `os.pread`."""
    return os.pread(fd, nbytes, start) if fd < FIRST_NUMBER else stores.read(fd, nbytes, start)


def preadv(fd: int, buffers: Sequence[Any], start: int) -> int:
    """As `os.preadv`."""
    return os.preadv(fd, buffers, start) if fd < FIRST_NUMBER else stores.read_into(fd, buffers, start)


def pwrite(fd: int, data: Any, start: int) -> int:
    """As `os.pwrite`."""
    return os.pwrite(fd, data, start)


def ftruncate(fd: int, size: int) -> None:
    """As `os.ftruncate`."""
    os.ftruncate(fd, size)


def fsync(fd: int) -> None:
    """As `os.fsync`."""
    os.fsync(fd)


def fstat(fd: int) -> os.stat_result:
    """As `os.fstat`."""
    return stores.status_of_number(fd) if fd >= FIRST_NUMBER else os.fstat(fd)


def stat(path: _Path) -> os.stat_result:
    """As `os.stat`."""
    return stores.status(str(path)) if is_remote(path) else os.stat(path)


def lstat(path: _Path) -> os.stat_result:
    """As `os.lstat`; stores have no links."""
    return stores.status(str(path)) if is_remote(path) else os.lstat(path)


def access(path: _Path, mode: int) -> bool:
    """As `os.access`; always true for stores, where reading reports missing permissions."""
    return stores.exists(str(path)) if is_remote(path) else os.access(path, mode)


def listdir(path: _Path) -> list[str]:
    """As `os.listdir`."""
    if is_remote(path):
        return stores.names(str(path))
    listings = _listed.get()
    if listings is None:
        return os.listdir(path)
    place = _place(path)
    if place not in listings:
        listings[place] = os.listdir(path)
    return list(listings[place])


@contextlib.contextmanager
def listed_once() -> Iterator[None]:
    """Cache listings of directories on disk; a context manager or decorator. Written files may not be noticed.

    Existence is then answered from listings: over a network each query is a wait. In nested contexts, listings are kept
    until the outermost one ends.
    """
    outer = _listed.get()
    token = _listed.set({} if outer is None else outer)
    try:
        yield
    finally:
        _listed.reset(token)


def list_again() -> None:
    """Drop the listings of `listed_once`, as something was written."""
    listings = _listed.get()
    if listings is not None:
        listings.clear()


def _place(path: _Path) -> str:
    path = os.fspath(path).rstrip("/")
    return path if os.path.isabs(path) else os.path.join(os.getcwd(), path).rstrip("/")


def scandir(path: str) -> Any:
    """As `os.scandir`."""
    return stores.scan(path) if is_remote(path) else os.scandir(path)


def unlink(path: _Path, *, dir_fd: int | None = None) -> None:
    """As `os.unlink`."""
    os.unlink(path, dir_fd=dir_fd)


def flock(fd: int, *, exclusive: bool, wait: bool) -> bool:
    """Lock an open file until it is closed or the process ends; False if another process has locked it.

    Raises:
        OSError: the file system does not support locks.
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def will_need(fd: int, start: int, nbytes: int) -> None:
    """Ask the system to prefetch a part of a file; no effect for stores.

    Per call, Linux fetches at most its read-ahead size, or one request: about 1 MiB with NFS and disks. It counts whole
    pages: the last one is omitted if the part is a multiple of that size but does not begin at a page.
    """
    if fd < FIRST_NUMBER and hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # reading reports the error
            for at in range(start, start + nbytes, _ASKED_BYTES):
                os.posix_fadvise(fd, at, min(_ASKED_BYTES, start + nbytes - at), os.POSIX_FADV_WILLNEED)


def will_read(
    fd: int, extents: Iterable[tuple[int, int]], *, num_places: int = 1, is_soon: bool = False
) -> None:
    """Announce the reads of an object of a store, so that few requests suffice; no effect for files on disk.

    Args:
        fd: its number.
        extents: (first byte, byte after the last) of all reads, in any order.
        num_places: number of places in all objects that are read in turn.
        is_soon: begin to fetch now.
    """
    if fd >= FIRST_NUMBER:
        stores.plan_reads(fd, extents, num_places, is_soon=is_soon)


def limit_fetched(nbytes: int) -> AbstractContextManager[None]:
    """Limit the memory for data of stores, including requests in progress, within this context."""
    return ranges.limited(nbytes)


def walk(
    path: str, topdown: bool = True, onerror: Callable[[OSError], object] | None = None
) -> Iterator[tuple[str, list[str], list[str]]]:
    """As `os.walk`."""
    return stores.walk(path, topdown) if is_remote(path) else os.walk(path, topdown, onerror)


def exists(path: _Path) -> bool:
    """As `os.path.exists`."""
    return stores.exists(str(path)) if is_remote(path) else os.path.exists(path)


def lexists(path: _Path) -> bool:
    """As `os.path.lexists`."""
    if is_remote(path):
        return stores.exists(str(path))
    listings, (above, name) = _listed.get(), os.path.split(path)
    names = listings.get(_place(above)) if listings and name not in ("", os.curdir, os.pardir) else None
    return os.path.lexists(path) if names is None else os.fspath(name) in names


def isdir(path: _Path) -> bool:
    """As `os.path.isdir`."""
    return stores.isdir(str(path)) if is_remote(path) else os.path.isdir(path)


def ismount(path: _Path) -> bool:
    """As `os.path.ismount`."""
    return os.path.ismount(path)


def isfile(path: _Path) -> bool:
    """As `os.path.isfile`."""
    return stores.isfile(str(path)) if is_remote(path) else os.path.isfile(path)


def getsize(path: _Path) -> int:
    """As `os.path.getsize`."""
    return stores.status(str(path)).st_size if is_remote(path) else os.path.getsize(path)


def realpath(path: str) -> str:
    """As `os.path.realpath`."""
    return stores.plain(path) if is_remote(path) else os.path.realpath(path)


def current_directory() -> str:
    """Return the current directory; empty if it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def absolute(path: str) -> str:
    """As `os.path.abspath`."""
    return stores.plain(path) if is_remote(path) else os.path.abspath(path)


def renameat2(source: str, target: str, flags: int) -> bool:
    """Rename with a flag; False if the kernel or the file system does not support it.

    Raises:
        OSError: renaming failed.

    Source: man 2 rename.
    """
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    if call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_SUCH_CALL:
        return False
    raise OSError(code, os.strerror(code), target)


def rename_noreplace(source: str, target: str) -> None:
    """Rename without replacing anything.

    Raises:
        FileExistsError: the name exists.
        OSError: renaming failed.
    """
    if renameat2(source, target, RENAME_NOREPLACE):
        return
    if lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
    rename(source, target)


def clone_range(source_fd: int, source_start: int, target_fd: int, target_start: int, nbytes: int) -> None:
    """Make `nbytes` of the target share blocks with the source; all numbers are multiples of the block size.

    Raises:
        OSError: this pair of files cannot share extents.

    Source: man 2 ioctl_ficlonerange.
    """
    argument = struct.pack("qQQQ", source_fd, source_start, nbytes, target_start)
    fcntl.ioctl(target_fd, _FICLONERANGE, argument)


class _FileStream(io.RawIOBase):
    """An open file as a byte stream; `fd` is -1 after the last allowed write."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return write(self.fd, data)


@contextlib.contextmanager
def writing(path: str, *, is_synced: bool = True) -> Iterator[tuple[int, BinaryIO]]:
    """Yield (descriptor for reading and writing, buffered stream) of a new or truncated file; synced at the end unless
    disabled.

    Raises:
        OSError: writing failed.
    """
    fd = open_fd(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    writer = _FileStream(fd)
    try:
        stream = io.BufferedWriter(writer, _BUFFER_BYTES)
        yield fd, cast(BinaryIO, stream)
        stream.flush()
        if is_synced:
            fsync(fd)
    finally:
        writer.fd = -1  # after an error the stream would write its buffer when it is garbage collected
        close_fd(fd)


def write_file(path: str, data: bytes, *, is_synced: bool = True) -> None:
    """Write a small file, and sync it to disk unless disabled.

    Raises:
        OSError: writing failed.
    """
    with writing(path, is_synced=is_synced) as (_, stream):
        stream.write(data)


def read_file(path: str) -> bytes:
    """Return the content of a small file of shardkit; links are not followed.

    Raises:
        OSError: reading failed.
    """
    fd = open_fd(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        pieces = list[bytes]()
        while piece := pread(fd, _BUFFER_BYTES, sum(map(len, pieces))):
            pieces.append(piece)
        return b"".join(pieces)
    finally:
        close_fd(fd)


def local_config(directory: str) -> str:
    """Return a local directory for libraries that open files themselves; configs and code in a store are copied.

    Copies are removed when the process ends. Other directories are returned unchanged.

    Raises:
        OSError, ShardkitError: reading from the store or writing to disk failed.
    """
    if not is_remote(directory) or not isdir(directory):
        return directory
    paths = {name: os.path.join(directory, name) for name in listdir(directory) if name.endswith(_CONFIGS)}
    statuses = {name: (path, stat(path)) for name, path in paths.items() if isfile(path)}
    small = {name: (path, is_at) for name, (path, is_at) in statuses.items() if is_at.st_size <= _MAX_CONFIG}
    state = (stores.plain(directory), frozenset((name, is_at.st_ino) for name, (_, is_at) in small.items()))
    if state not in _copies:
        copy = tempfile.mkdtemp(prefix="shardkit-")
        atexit.register(remove_tree, copy)
        for name, (path, is_at) in small.items():
            fd = open_fd(path, os.O_RDONLY)
            try:
                write_file(os.path.join(copy, name), pread(fd, is_at.st_size, 0))
            finally:
                close_fd(fd)
        _copies[state] = copy
    return _copies[state]


@contextlib.contextmanager
def scratch_directory(above: str) -> Iterator[str]:
    """Yield a new directory below another one, which is created if needed. It is removed at the end.

    Directories of killed processes are removed first, except on file systems without locks.

    Raises:
        OSError: creating it failed.
    """
    make_directories(above)
    for name in listdir(above):
        if name.startswith(_SCRATCH):
            with contextlib.suppress(OSError), _locked(os.path.join(above, name)) as is_dead:
                if is_dead:
                    remove_tree(os.path.join(above, name))
    new = tempfile.mkdtemp(dir=above)
    path = os.path.join(above, _SCRATCH + os.path.basename(new))
    with _locked(new):  # locked before it gets a name that other processes look for
        rename(new, path)
        try:
            yield path
        finally:
            remove_tree(path)


@contextlib.contextmanager
def _locked(directory: str) -> Iterator[bool]:
    """Lock a directory; yield False if another process has locked it, or the file system has no locks."""
    fd = open_fd(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    is_locked = False
    try:
        with contextlib.suppress(OSError):
            is_locked = flock(fd, exclusive=True, wait=False)
        yield is_locked
    finally:
        close_fd(fd)


def make_directories(path: str) -> None:
    """Create a directory and its missing parents.

    Raises:
        OSError: creating failed, or the name exists and is not a directory.
    """
    if isdir(path):
        return
    parent = os.path.dirname(path)
    if parent and parent != path:
        make_directories(parent)
    with contextlib.suppress(FileExistsError):
        mkdir(path)
    if not isdir(path):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)


def make_folders(directory: str, folder: str) -> None:
    """Create a folder and its missing parents inside a directory, but never the directory itself.

    Another process may have renamed or removed the directory; a new one would never be cleaned up.

    Args:
        directory: an existing directory.
        folder: relative to it; empty for the directory itself.

    Raises:
        OSError: creating failed, the name exists and is not a directory, or the directory was removed.
    """
    path = directory
    for name in filter(None, folder.split(os.sep)):
        path = os.path.join(path, name)
        with contextlib.suppress(FileExistsError):
            mkdir(path)
    if not isdir(path):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)


def remove_tree(path: str) -> bool:
    """Remove a directory and its content, as far as permitted; links are removed, never followed.

    Returns:
        True if everything was removed.
    """
    with contextlib.suppress(OSError):
        for _, folders, names, fd in os.fwalk(path, topdown=False):
            for name in names:
                with contextlib.suppress(OSError):
                    unlink(name, dir_fd=fd)
            for name in folders:  # includes links to directories
                with contextlib.suppress(OSError):
                    rmdir(name, dir_fd=fd)
                with contextlib.suppress(OSError):
                    unlink(name, dir_fd=fd)
        rmdir(path)
    return not lexists(path)


def sync_file(path: str) -> None:
    """Sync a file to disk that was written through another descriptor.

    Raises:
        OSError: syncing failed.
    """
    fd = open_fd(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fsync(fd)
    finally:
        close_fd(fd)


def sync_directory(path: str) -> None:
    """Sync a directory's entries to disk.

    Raises:
        OSError: syncing failed.
    """
    fd = open_fd(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fsync(fd)
    except OSError as error:
        if error.errno not in _NO_SUCH_CALL:  # some file systems do not support this for directories
            raise
    finally:
        close_fd(fd)


def sync_directories(path: str) -> None:
    """Sync the entries of a directory and of all subdirectories to disk, innermost first.

    Raises:
        OSError: syncing failed.
    """
    for here, _, _ in walk(path, topdown=False):
        sync_directory(here)


def can_share_extents(catalog: Catalog, directory: str) -> bool:
    """True if all source files can share extents with files in `directory`.

    Tested with the first block of one file per device, and files without a name, so that nothing is left behind. Device
    numbers need not be equal: subvolumes of Btrfs have different ones, and can share extents.
    """
    files = [
        file
        for file in catalog.files
        if file.size >= BLOCK and file.path and not isinstance(file.derivation, Computed)
    ]
    if is_remote(directory) or not files or any(not file.is_raw or is_remote(file.path) for file in files):
        return False
    try:
        with _nameless(directory) as probe:
            tried = set[int]()
            for file in files:
                device = stat(nearest_existing(file.path)).st_dev
                if device not in tried:
                    tried.add(device)
                    with _clone_source(file.path) as source:
                        clone_range(source, 0, probe, 0, BLOCK)
    except (OSError, AttributeError):  # AttributeError: no O_TMPFILE, this is not Linux
        return False
    return True


@contextlib.contextmanager
def _nameless(directory: str) -> Iterator[int]:
    """Yield the descriptor of a file without a name."""
    fd = open_fd(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    finally:
        close_fd(fd)


@contextlib.contextmanager
def _clone_source(path: str) -> Iterator[int]:
    """Yield the descriptor of a file from which a block can be cloned on trial.

    It is the file at `path`, or, if it is not downloaded yet, a nameless file of one block in the closest existing
    directory above, which is on the same file system.
    """
    if not lexists(path):
        with _nameless(nearest_existing(path)) as fd:
            pwrite(fd, bytes(BLOCK), 0)
            yield fd
        return
    fd = open_fd(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        close_fd(fd)


def is_in_memory(path: str) -> bool:
    """True if an existing path is on a file system in memory. Source: proc_pid_mountinfo(5)."""
    device = stat(path).st_dev
    with contextlib.suppress(OSError), open_file("/proc/self/mountinfo", "rb") as mounts:
        for line in mounts:
            fields, _, described = line.partition(b" - ")
            if fields.split()[2] == b"%d:%d" % (os.major(device), os.minor(device)):
                return described.split()[0] in (b"tmpfs", b"ramfs")
    return False


def nearest_existing(path: str) -> str:
    """Return a path, or its closest existing parent."""
    while not lexists(path):
        path = os.path.dirname(path) or os.curdir
    return path


def shared_part(start: int, nbytes: int) -> tuple[int, int]:
    """Return (bytes before the first whole block, bytes in whole blocks) for a range at offset `start`."""
    head = -start % BLOCK
    return (head, (nbytes - head) // BLOCK * BLOCK) if nbytes >= head else (nbytes, 0)
