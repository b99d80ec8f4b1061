"""Nothing is visible before it is whole: write beside the destination, then rename once.

    .<name>.shardkit-<owner>/    the staging directory, a sibling of the destination
        owner.json               whose it is, for people
        journal.jsonl            what is finished, for resuming
        data/                    becomes the destination

A staging directory belongs to one run of one process: host, boot, pid namespace, pid, that process's start
time and the run's number are in its name, so that taking over a dead owner's directory is a single rename
and two runs cannot both win. No locks: on some network file systems every caller gets them.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
import socket
from dataclasses import dataclass

from shardkit.core.text import escape
from shardkit.errors import ResourceError, UsageError
from shardkit.transfer import storage
from shardkit.transfer.digest import crc32

_TOKEN = re.compile(r"([0-9a-f]{8})-([0-9a-f]{8})-(\d{1,20})-(\d{1,10})-(\d{1,20})-(\d{1,10})", re.ASCII)
_MAX_NAME_BYTES = 120  # of the destination's name in the staging directory's; a name has at most 255

_run_numbers = itertools.count(1)
_live_runs: set[int] = set()
"""Numbers of this process's runs that are under way."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A run of a process, told apart from every other one on this and other machines."""

    host: str
    """CRC-32 of the host name, as hex."""
    boot: str
    """Start of the kernel's boot id, as hex."""
    namespace: int
    """Inode of the pid namespace: the same pid in another container is another process."""
    pid: int
    started: int
    """Start time in clock ticks since boot; tells apart processes that had the same pid."""
    run: int
    """Number of the run within the process."""

    @classmethod
    def new_run(cls) -> Owner:
        """Return a new run of this process; it lives until `end`."""
        run, pid = next(_run_numbers), os.getpid()
        _live_runs.add(run)
        return cls(_host(), _boot(), _pid_namespace(), pid, _start_time(pid) or 0, run)

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
        """True when the run was on this host and is over; False where that cannot be known."""
        if self.host != _host():
            return False
        if self.boot != _boot():
            return True
        if self.namespace != _pid_namespace():
            return False
        if self.pid == os.getpid() and self.started == _start_time(self.pid):
            return self.run not in _live_runs
        return _start_time(self.pid) != self.started


def _host() -> str:
    return f"{crc32(socket.gethostname().encode()):08x}"


def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read(8)
    except OSError:
        return "00000000"


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _start_time(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # man 5 proc: field 22, counted after the command, which may hold blanks and brackets
            return int(file.read().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


class Staging:
    """The staging directory of one destination, owned by this process."""

    def __init__(self, destination: str, path: str, owner: Owner) -> None:
        self.destination, self.path, self._owner = destination, path, owner
        self.data = os.path.join(path, "data")
        self.journal = journal_of(path)
        self.is_committed = False

    @classmethod
    def create(cls, destination: str) -> Staging:
        """Make a fresh staging directory beside `destination`.

        Raises:
            ResourceError: the parent does not exist or cannot be written.
        """
        owner = Owner.new_run()
        staging = cls(destination, _staging_path(destination, owner), owner)
        try:
            storage.mkdir(staging.path)
            storage.mkdir(staging.data)
            staging._write_owner()
        except OSError as error:
            staging.discard()
            raise ResourceError(
                f"cannot write beside {escape(destination)}: {error.strerror}",
                hint="choose a destination in an existing directory that you may write to",
            ) from error
        return staging

    @classmethod
    def adopt(cls, destination: str, path: str) -> Staging | None:
        """Take over a dead owner's directory by renaming it; None when another run was faster."""
        owner = Owner.new_run()
        staging = cls(destination, _staging_path(destination, owner), owner)
        try:
            storage.rename(path, staging.path)
            storage.make_directories(staging.data)
            staging._write_owner()
        except OSError:
            staging.release()
            return None
        return staging

    def _write_owner(self) -> None:
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "token": str(self._owner)}
        storage.write_file(os.path.join(self.path, "owner.json"), json.dumps(owner).encode())

    def release(self) -> None:
        """Leave the directory to whoever resumes."""
        self._owner.end()

    def commit(self, *, overwrite: bool) -> None:
        """Make `data` the destination, in one rename, and remove the rest.

        With `overwrite` an existing destination is exchanged and then removed: at every moment the name
        has the complete old content or the complete new one.

        Raises:
            UsageError: the destination exists.
            ResourceError: the system cannot rename.
        """
        parent = os.path.dirname(self.destination)
        storage.sync_directories(self.data)
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
        storage.sync_directory(parent)
        self.discard()

    def discard(self) -> None:
        """Remove the staging directory and all in it."""
        storage.remove_tree(self.path)
        self.release()


def journal_of(path: str) -> str:
    """Return the journal of a staging directory."""
    return os.path.join(path, "journal.jsonl")


def _staging_path(destination: str, owner: Owner) -> str:
    parent, name = os.path.split(destination)
    return os.path.join(parent, _prefix(name) + str(owner))


def _prefix(name: str) -> str:
    """What the names of all staging directories of a destination begin with; short enough for any name."""
    data = os.fsencode(name)
    if len(data) > _MAX_NAME_BYTES:
        name = f"{os.fsdecode(data[: _MAX_NAME_BYTES - 9])}~{crc32(data):08x}"
    return f".{name}.shardkit-"


def abandoned(destination: str) -> list[str]:
    """Return the staging directories of `destination` whose owners are provably dead."""
    parent, name = os.path.split(destination)
    prefix, found = _prefix(name), []
    try:
        entries = sorted(os.listdir(parent))
    except OSError:
        return []
    for entry in entries:
        owner = Owner.parse(entry.removeprefix(prefix)) if entry.startswith(prefix) else None
        if owner is not None and owner.is_provably_dead():
            found.append(os.path.join(parent, entry))
    return found


def remove_abandoned(destination: str) -> None:
    """Remove what dead runs left beside `destination`; taken over first, so that nobody else can meanwhile."""
    for path in abandoned(destination):
        staging = Staging.adopt(destination, path)
        if staging is not None:
            staging.discard()


def reclaimable_bytes(destination: str) -> int:
    """Return the disk that the files of dead runs take: a new run resumes from them or removes them."""
    total = 0
    for path in abandoned(destination):
        for directory, _, names in os.walk(path):
            for name in names:
                with contextlib.suppress(OSError):
                    total += os.lstat(os.path.join(directory, name)).st_blocks * 512
    return total


def _rename_noreplace(source: str, target: str) -> None:
    if storage.renameat2(source, target, storage.RENAME_NOREPLACE):
        return
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
    storage.rename(source, target)


def _exchange(source: str, target: str) -> None:
    """Swap two directories; where that is not possible, move the old one aside first."""
    if storage.renameat2(source, target, storage.RENAME_EXCHANGE):
        return
    aside = source + ".old"
    storage.rename(target, aside)
    try:
        storage.rename(source, target)
    except OSError:
        storage.rename(aside, target)
        raise
