"""Directories beside a destination that are named after the process that made them, and whose processes are over.

    .<name>.shardkit-<owner>/    a sibling of the destination
        owner.json               whose it is, for people
        data/                    what will lie in the shared directory
        work/<owner>/            what its process writes for itself

A run makes its shared directory (`files/shared`) in one, and removes it under the name of one. Host, boot, pid namespace,
pid, that process's start time and the run's number are in the name: who finds one knows whether its run is over. No locks:
on some network file systems every caller gets them.

An `Owner` is a run of a process, told apart from all others on this and other machines.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
import socket
import stat
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from shardkit.core.text import escape
from shardkit.errors import ResourceError
from shardkit.files import storage
from shardkit.files.digest import crc32

IS_THERE = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
"""What a rename onto something says."""
OWNER = "owner.json"
_ENDING = ".shardkit-"
_MAX_NAME_BYTES = 120  # of the destination's name in the staging directory's; a name has at most 255


KeptFiles = Callable[[str], Collection[str]]
"""Returns what stays of a staging directory, by its path: files of a person, relative to it."""


def nothing(path: str) -> Collection[str]:
    """Keep nothing: the directory lies in a place of shardkit's own."""
    return ()


class Staging:
    """A directory of this process beside a destination."""

    def __init__(self, destination: str, path: str, owner: Owner) -> None:
        self.destination, self.path, self._owner = destination, path, owner
        self.data = os.path.join(path, "data")

    @classmethod
    def create(cls, destination: str) -> Staging:
        """Make a fresh one beside `destination`.

        Raises:
            ResourceError: the parent does not exist or cannot be written.
        """
        staging = None
        try:
            owner = Owner.new_run()
            staging = cls(destination, _staging_path(destination, owner), owner)
            storage.mkdir(staging.path)
            storage.mkdir(staging.data)
            staging._write_owner()
        except OSError as error:
            if staging is not None:
                staging.discard()
            raise ResourceError(
                f"cannot write beside {escape(destination)}: {error.strerror}",
                hint=storage.WAYS_OUT.get(error.errno),
            ) from error
        return staging

    def _write_owner(self) -> None:
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "token": str(self._owner)}
        storage.write_file(os.path.join(self.path, OWNER), json.dumps(owner).encode())

    def scratch(self) -> str:
        """Make a directory in it for files that nobody needs once this process is over; return its path.

        Raises:
            ResourceError: the system refuses.
        """
        try:
            storage.make_folders(self.path, os.path.join("work", str(self._owner)))
        except OSError as error:
            raise ResourceError(
                f"cannot write beside {escape(self.destination)}: {error.strerror}"
            ) from error
        return os.path.join(self.path, "work", str(self._owner))

    def release(self) -> None:
        """Leave the directory to whoever comes next, or under another name."""
        self._owner.end()

    def discard(self) -> None:
        """Remove all of it, as far as the system lets us."""
        remove_but(self.path, ())
        self.release()


def remove_but(path: str, kept: Collection[str]) -> None:
    """Remove a directory, as far as the system lets us, but files that are kept, relative to it."""
    if not kept:
        # What says whose the files are goes once these are gone, also if the power fails meanwhile.
        with contextlib.suppress(OSError):
            for name in storage.listdir(path):
                if storage.isdir(os.path.join(path, name)) and not storage.islink(os.path.join(path, name)):
                    storage.remove_tree(os.path.join(path, name))
            storage.sync_directory(path)
        storage.remove_tree(path)
        return
    with contextlib.suppress(OSError):
        storage.remove_all_but(path, kept)


def _staging_path(destination: str, owner: Owner) -> str:
    parent, name = os.path.split(destination)
    return os.path.join(parent, prefix_of(name) + str(owner))


def prefix_of(name: str) -> str:
    """What the names of all staging directories of a destination begin with; short enough for any name."""
    data = os.fsencode(name)
    if len(data) > _MAX_NAME_BYTES:
        name = f"{os.fsdecode(data[: _MAX_NAME_BYTES - 9])}~{crc32(data):08x}"
    return f".{name}{_ENDING}"


def owned(destination: str) -> Iterator[tuple[str, Owner]]:
    """Yield every staging directory of `destination`, and whose it is."""
    parent, name = os.path.split(destination)
    prefix = prefix_of(name)
    try:
        entries = sorted(storage.listdir(parent))
    except OSError:
        return
    for entry in entries:
        owner = Owner.parse(entry.removeprefix(prefix)) if entry.startswith(prefix) else None
        if owner is not None:
            yield os.path.join(parent, entry), owner


def owner_of(path: str) -> Owner | None:
    """Return whose a staging directory is, by its name; None if it is none."""
    return Owner.parse(path.rpartition(_ENDING)[2])


def identity_of(path: str) -> tuple[int, int] | None:
    """Return an identity of a file or directory that survives moves.

    It is None if there is none, or an empty directory: made before a job, it is as good as none.

    Raises:
        OSError: the system cannot say whether there is one.
    """
    try:
        status = storage.lstat(path)
    except FileNotFoundError:
        return None
    try:
        if stat.S_ISDIR(status.st_mode) and not storage.listdir(path):
            return None
    except FileNotFoundError:
        return None
    except OSError:  # it is there, and nobody may look into it
        pass
    return status.st_dev, status.st_ino


def place_directory(source: str, target: str) -> None:
    """Rename a directory, unless something else than an empty directory has the name already.

    Raises:
        OSError: something has (`IS_THERE`), or the system refuses.

    Source: man 2 rename: a directory takes the place of an empty directory, in one step, and of nothing else.
    """
    try:
        rename_noreplace(source, target)
    except FileExistsError:
        storage.rename(source, target)


def rename_noreplace(source: str, target: str) -> None:
    """Rename, unless something has the name already.

    Raises:
        FileExistsError: it has.
        OSError: the system refuses.
    """
    if storage.renameat2(source, target, storage.RENAME_NOREPLACE):
        return
    if storage.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
    storage.rename(source, target)


_TOKEN = re.compile(r"([0-9a-f]{8})-([0-9a-f]{8})-(\d{1,20})-(\d{1,10})-(\d{1,20})-(\d{1,10})", re.ASCII)
_UNKNOWN_BOOT = "00000000"
_NOT_THERE = (FileNotFoundError, NotADirectoryError, PermissionError, ProcessLookupError)  # /proc may be shut

_run_numbers = itertools.count(1)
_live_runs: set[int] = set()
"""Numbers of this process's runs that are under way."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A run of a process, told apart from every other one on this and other machines."""

    host: str
    """CRC-32 of the names of host and machine, as hex."""
    boot: str
    """Start of the kernel's boot id, as hex."""
    namespace: int
    """Inode of the pid namespace: the same pid in another container is another process."""
    pid: int
    started: int
    """Start time in clock ticks since boot; tells apart processes that had the same pid. 0 where unknown."""
    run: int
    """Number of the run within the process."""

    @classmethod
    def new_run(cls) -> Owner:
        """Return a new run of this process; it lives until `end`.

        Raises:
            OSError: what tells it from others cannot be read, for want of descriptors, say.
        """
        run, pid = next(_run_numbers), os.getpid()
        status = _status(pid)
        owner = cls(this_host(), _boot(), _pid_namespace(), pid, status.started if status else 0, run)
        _live_runs.add(run)
        return owner

    @classmethod
    def parse(cls, token: str) -> Owner | None:
        """Return the owner that `str()` wrote, or None."""
        match = _TOKEN.fullmatch(token)
        return cls(match[1], match[2], *(int(match[at]) for at in (3, 4, 5, 6))) if match else None

    def __str__(self) -> str:
        return f"{self.host}-{self.boot}-{self.namespace}-{self.pid}-{self.started}-{self.run}"

    def end(self) -> None:
        """This run is over; what it left may be taken."""
        _live_runs.discard(self.run)

    def is_provably_dead(self) -> bool:
        """True if the run was on this host and is over; False if that cannot be known."""
        try:
            if self.host != this_host():
                return False
            boot = _boot()
            if boot != self.boot:
                return _UNKNOWN_BOOT not in (boot, self.boot)
            return self.namespace == _pid_namespace() and self._is_over() is True
        except OSError:
            return False

    def is_provably_alive(self) -> bool:
        """True if the run is under way on this host; False if that cannot be known."""
        try:
            here = (this_host(), _boot(), _pid_namespace())
            return (self.host, self.boot, self.namespace) == here and self._is_over() is False
        except OSError:
            return False

    def _is_over(self) -> bool | None:
        """Tell whether a run of this boot and namespace is over; None if that cannot be known."""
        status = _status(self.pid)
        if status is None:
            return True if _is_gone(self.pid) else None
        if not self.started:
            return None
        is_same = status.started == self.started and not status.is_zombie
        return not (is_same and (self.pid != os.getpid() or self.run in _live_runs))


class _ProcessStatus(NamedTuple):
    started: int
    is_zombie: bool
    """It has ended, but its parent has not asked how; the first process of a container may never ask."""


def this_host() -> str:
    """Return an identity of this machine: machines may share a name, or the id of a copied disk, hardly ever both."""
    machine = _content("/etc/machine-id") or ""
    return f"{crc32(f'{socket.gethostname()}:{machine}'.encode()):08x}"


def _boot() -> str:
    return (_content("/proc/sys/kernel/random/boot_id") or _UNKNOWN_BOOT)[:8]


def _pid_namespace() -> int:
    try:
        return storage.stat("/proc/self/ns/pid").st_ino
    except _NOT_THERE:
        return 0


def _status(pid: int) -> _ProcessStatus | None:
    content = _content(f"/proc/{pid}/stat")
    try:
        # man 5 proc: fields 3 and 22, counted after the command, which may hold blanks and brackets
        fields = content.rpartition(")")[2].split() if content else []
        # The first thread of a process may have ended while others live on.
        is_zombie = fields[0] in "ZX" and len(storage.listdir(f"/proc/{pid}/task")) <= 1
        return _ProcessStatus(int(fields[19]), is_zombie)
    except (IndexError, ValueError, *_NOT_THERE):
        return None


def _content(path: str) -> str | None:
    try:
        with storage.open_file(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except _NOT_THERE:
        return None


def _is_gone(pid: int) -> bool:
    """True if there is no such process; other users' may be hidden from /proc (its option hidepid)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        pass
    return False
