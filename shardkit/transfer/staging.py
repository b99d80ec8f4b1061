"""Nothing is visible before it is whole: write beside the destination, then rename once.

    .<name>.shardkit-<owner>/    the staging directory, a sibling of the destination
        owner.json               whose it is, for people
        journal.jsonl            what is finished, for resuming
        data/                    becomes the destination

A staging directory belongs to one process: host, boot, pid and that process's start time are in its
name, so that taking over a dead owner's directory is a single rename and two processes cannot both win.
No locks: on some network file systems every caller gets them.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import shutil
import socket
from dataclasses import dataclass

from shardkit.core.text import escape
from shardkit.errors import ResourceError, UsageError
from shardkit.transfer.digest import crc32

_AT_FDCWD = -100  # fcntl.h
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2  # linux/fs.h
_NO_SUCH_CALL = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)
_TOKEN = re.compile(r"([0-9a-f]{8})-([0-9a-f]{8})-(\d{1,10})-(\d{1,20})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Owner:
    """A process, told apart from every other one on this and other machines."""

    host: str
    """CRC-32 of the host name, as hex."""
    boot: str
    """Start of the kernel's boot id, as hex."""
    pid: int
    started: int
    """Start time in clock ticks since boot; tells apart processes that had the same pid."""

    @classmethod
    def current(cls) -> Owner:
        """Return this process."""
        pid = os.getpid()
        return cls(_host(), _boot(), pid, _start_time(pid) or 0)

    @classmethod
    def parse(cls, token: str) -> Owner | None:
        """Return the owner that `str()` wrote, or None."""
        match = _TOKEN.fullmatch(token)
        return cls(match[1], match[2], int(match[3]), int(match[4])) if match else None

    def __str__(self) -> str:
        return f"{self.host}-{self.boot}-{self.pid}-{self.started}"

    def is_provably_dead(self) -> bool:
        """True when the process ran on this host and runs no more; False where that cannot be known."""
        if self.host != _host():
            return False
        return self.boot != _boot() or _start_time(self.pid) != self.started


def _host() -> str:
    return f"{crc32(socket.gethostname().encode()):08x}"


def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read(8)
    except OSError:
        return "00000000"


def _start_time(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # man 5 proc: field 22, counted after the command, which may hold blanks and brackets
            return int(file.read().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


class Staging:
    """The staging directory of one destination, owned by this process."""

    def __init__(self, destination: str, path: str) -> None:
        self.destination, self.path = destination, path
        self.data = os.path.join(path, "data")
        self.journal = os.path.join(path, "journal.jsonl")
        self.is_committed = False

    @classmethod
    def create(cls, destination: str) -> Staging:
        """Make a fresh staging directory beside `destination`.

        Raises:
            ResourceError: the parent does not exist or cannot be written.
        """
        staging = cls(destination, _staging_path(destination, Owner.current()))
        try:
            if os.path.lexists(staging.path):  # an earlier run of this very process
                shutil.rmtree(staging.path)
            os.mkdir(staging.path)
            os.mkdir(staging.data)
            staging._write_owner()
        except OSError as error:
            raise ResourceError(
                f"cannot write beside {escape(destination)}: {error.strerror}",
                hint="choose a destination in an existing directory that you may write to",
            ) from error
        return staging

    @classmethod
    def adopt(cls, destination: str, path: str) -> Staging | None:
        """Take over a dead owner's directory by renaming it; None when another process was faster."""
        staging = cls(destination, _staging_path(destination, Owner.current()))
        try:
            os.rename(path, staging.path)
            os.makedirs(staging.data, exist_ok=True)
            staging._write_owner()
        except OSError:
            return None
        return staging

    def _write_owner(self) -> None:
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "token": str(Owner.current())}
        with open(os.path.join(self.path, "owner.json"), "w", encoding="utf-8") as file:
            json.dump(owner, file)

    def commit(self, *, overwrite: bool) -> None:
        """Make `data` the destination, in one rename, and remove the rest.

        With `overwrite` an existing destination is exchanged and then removed: at every moment the name
        has the complete old content or the complete new one.

        Raises:
            UsageError: the destination exists.
            ResourceError: the system cannot rename.
        """
        parent = os.path.dirname(self.destination)
        sync_directory(self.data)
        try:
            if overwrite and os.path.lexists(self.destination):
                _exchange(self.data, self.destination)
            else:
                _rename_noreplace(self.data, self.destination)
            self.is_committed = True
        except FileExistsError as error:
            raise UsageError(f"{escape(self.destination)} appeared while it was being written") from error
        except OSError as error:
            raise ResourceError(f"cannot rename to {escape(self.destination)}: {error.strerror}") from error
        sync_directory(parent)
        self.discard()

    def discard(self) -> None:
        """Remove the staging directory and all in it."""
        shutil.rmtree(self.path, ignore_errors=True)


def _staging_path(destination: str, owner: Owner) -> str:
    parent, name = os.path.split(destination)
    return os.path.join(parent, f".{name}.shardkit-{owner}")


def abandoned(destination: str) -> list[str]:
    """Return the staging directories of `destination` whose owners are provably dead."""
    parent, name = os.path.split(destination)
    prefix, found = f".{name}.shardkit-", []
    try:
        entries = sorted(os.listdir(parent))
    except OSError:
        return []
    for entry in entries:
        owner = Owner.parse(entry.removeprefix(prefix)) if entry.startswith(prefix) else None
        if owner is not None and owner.is_provably_dead():
            found.append(os.path.join(parent, entry))
    return found


def sync_directory(path: str) -> None:
    """Bring a directory's entries to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_SUCH_CALL:  # some file systems have no such thing for directories
            raise
    finally:
        os.close(fd)


def _renameat2(source: str, target: str, flags: int) -> bool:
    """Call renameat2; False where kernel or file system has no such flag."""
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


def _rename_noreplace(source: str, target: str) -> None:
    if _renameat2(source, target, _RENAME_NOREPLACE):
        return
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
    os.rename(source, target)


def _exchange(source: str, target: str) -> None:
    """Swap two directories; where that is not possible, move the old one aside first."""
    if _renameat2(source, target, _RENAME_EXCHANGE):
        return
    aside = source + ".old"
    os.rename(target, aside)
    try:
        os.rename(source, target)
    except OSError:
        os.rename(aside, target)
        raise
