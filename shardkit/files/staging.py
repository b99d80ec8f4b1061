"""Nothing is visible before it is whole: write beside the destination, then rename once.

    .<name>.shardkit-<owner>/    the staging directory, a sibling of the destination
        owner.json               whose it is, for people
        data/                    becomes the destination
        data.old/                the old destination, moved aside where directories cannot be exchanged

A staging directory belongs to one run of one process: host, boot, pid namespace, pid, that process's start
time and the run's number are in its name, so that taking over a dead owner's directory is a single rename
and two runs cannot both win. No locks: on some network file systems every caller gets them.

Where directories cannot be exchanged, a kill between the two renames leaves no destination: `data` and
`data.old` both lie in the staging directory, and the next run puts the old one back before anything else.

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
from shardkit.errors import ResourceError, ShardkitError, UsageError
from shardkit.files import storage
from shardkit.files.digest import crc32

IS_THERE = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
"""What a rename onto something says."""
OWNER = "owner.json"
_ENDING = ".shardkit-"
_REPLACED = ("data", "data.old", "replaced")
_MAX_NAME_BYTES = 120  # of the destination's name in the staging directory's; a name has at most 255


Kept = Callable[[str], Collection[str]]
"""Returns what stays of a staging directory, by its path: files of a person, relative to it."""


def nothing(path: str) -> Collection[str]:
    """Keep nothing: the directory lies in a place of shardkit's own."""
    return ()


class Staging:
    """The staging directory of one destination, owned by this process."""

    def __init__(self, destination: str, path: str, owner: Owner) -> None:
        self.destination, self.path, self._owner = destination, path, owner
        self.data = os.path.join(path, "data")
        self._aside = self.data + ".old"
        self._identity: tuple[int, int] | None = None
        self.look: Callable[[str], object] = lambda path: None
        """Given the path of the old content once it has lost its name, so that nobody adds anything to it. Whatever it
        raises is raised, and the old content is at the destination again."""
        self.kept: Kept = nothing
        """What stays of it when it is removed."""
        self.is_kept = False
        """It was not committed, and somebody may go on with it: an error does not remove it."""

    @property
    def is_committed(self) -> bool:
        """True once the destination is what was written here; known also when the rename was interrupted."""
        return self._identity is not None and identity_of(self.destination) == self._identity

    @classmethod
    def create(cls, destination: str) -> Staging:
        """Make a fresh staging directory beside `destination`.

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
                hint="choose a destination in an existing directory that you may write to",
            ) from error
        return staging

    @classmethod
    def _take(cls, destination: str, path: str) -> Staging | None:
        """Make a dead owner's directory ours, by renaming it."""
        try:
            owner = Owner.new_run()
        except OSError:
            return None
        staging = cls(destination, _staging_path(destination, owner), owner)
        try:
            storage.rename(path, staging.path)
            # Its run may have exchanged directories and died. Until the exchange is on the disk, a power loss would
            # bring back to the destination what is about to be removed here.
            storage.sync_directory(os.path.dirname(destination))
        except OSError:
            staging.release()
            return None
        return staging

    def _write_owner(self) -> None:
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "token": str(self._owner)}
        storage.write_file(os.path.join(self.path, OWNER), json.dumps(owner).encode())

    def release(self) -> None:
        """Leave the directory to whoever resumes."""
        self._owner.end()

    def commit(self, *, overwrite: bool) -> None:
        """Make `data` the destination, in one rename, and remove the rest.

        With `overwrite` an existing destination is exchanged and then removed: at every moment the name
        has the complete old content or the complete new one. Where the system cannot exchange, the old
        one is moved aside first, and is put back by this run or by the next.

        Raises:
            UsageError: the destination exists, or `look` refuses.
            ResourceError: the system cannot rename, or bring it to the disk; the destination is again what it was.
        """
        try:
            storage.sync_directories(self.data)
            self._identity = identity_of(self.data)
            if overwrite and storage.lexists(self.destination):
                self._exchange()
            else:
                place_directory(self.data, self.destination)
        except OSError as error:
            if error.errno in IS_THERE:
                raise self._appeared() from error
            raise ResourceError(f"cannot rename to {escape(self.destination)}: {error.strerror}") from error
        self.complete()

    def complete(self) -> None:
        """Bring the rename to the disk, and remove the rest.

        Raises:
            ResourceError: it cannot be brought there; the destination is again what it was, as far as the system
                lets us.
        """
        try:
            storage.sync_directory(os.path.dirname(self.destination))
        except OSError as error:
            self._undo()
            still = " (it is there, and whole)" if self.is_committed else ""
            raise ResourceError(
                f"cannot bring {escape(self.destination)} to the disk{still}: {error.strerror}"
            ) from error
        self.discard()

    def keep(self) -> str:
        """Give `data` a free name beside the destination, `last-new`, and remove the rest; return its path.

        Raises:
            OSError: the system refuses; `data` stays where it is.
        """
        storage.sync_directories(self.data)
        for number in itertools.count(1):
            path = f"{self.destination}-new{number if number > 1 else ''}"
            try:
                rename_noreplace(self.data, path)
            except FileExistsError:
                continue
            storage.sync_directory(os.path.dirname(path))
            self.discard()
            return path
        raise AssertionError("there is always another number")

    def _others(self) -> list[str]:
        """Return what is kept. What was exchanged has been looked through (`look`)."""
        return [
            name
            for name in self.kept(self.path)
            if not (self.is_committed and name.partition(os.sep)[0] in _REPLACED)
        ]

    def _appeared(self) -> UsageError:
        aside = [f"what was there before: {escape(self._aside)}"] if storage.lexists(self._aside) else []
        return UsageError(f"{escape(self.destination)} appeared while it was being written", problems=aside)

    def _exchange(self) -> None:
        """Swap `data` and the destination; where that is not possible, move the old one aside first."""
        if storage.renameat2(self.data, self.destination, storage.RENAME_EXCHANGE):
            try:
                self.look(self.data)
            except ShardkitError:
                storage.renameat2(self.data, self.destination, storage.RENAME_EXCHANGE)
                raise
            return
        # What is moved aside must not be in a directory whose own name a power loss takes away.
        storage.sync_directory(os.path.dirname(self.destination))
        storage.rename(self.destination, self._aside)
        try:
            self.look(self._aside)
            storage.rename(self.data, self.destination)
        except BaseException:  # Ctrl-C too
            if not self.is_committed:
                storage.rename(self._aside, self.destination)
            raise

    def _undo(self) -> None:
        """Let the destination be again what it was before `commit`, as far as the system lets us."""
        with contextlib.suppress(OSError):
            if storage.lexists(self.data):  # the old one
                storage.renameat2(self.data, self.destination, storage.RENAME_EXCHANGE)
                return
            storage.rename(self.destination, self.data)
            if storage.lexists(self._aside):
                storage.rename(self._aside, self.destination)

    def _put_back(self) -> None:
        """Make good a replacement that stopped half-way: afterwards `data.old` is not there any more.

        Raises:
            UsageError: the old one could not go back, because something else is there by now.
            OSError: the system refuses.
        """
        if not storage.lexists(self._aside):
            return
        if not storage.lexists(self.data):  # the new one is in place; what is left of the old one may go
            replaced = os.path.join(self.path, "replaced")
            storage.remove_tree(replaced)  # of a run that was resumed here after it had replaced something
            storage.rename(self._aside, replaced)
            return
        try:
            place_directory(self._aside, self.destination)
        except OSError as error:
            if error.errno not in IS_THERE:
                raise
            raise UsageError(
                f"{escape(self.destination)} was moved aside by a run that did not end, and something else is there",
                problems=[f"what was there before: {escape(self._aside)}"],
                hint="keep what you want of the two, and remove that directory",
            ) from error
        storage.sync_directory(os.path.dirname(self.destination))

    def discard(self) -> None:
        """Remove the staging directory and all in it but what is kept, once nothing in it has to go back."""
        try:
            self._put_back()
        except (OSError, UsageError):  # the only copy of what was at the destination
            pass
        else:
            with contextlib.suppress(OSError):
                remove_but(self.path, self._others())
        finally:
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


def abandoned(destination: str) -> list[str]:
    """Return the staging directories of `destination` whose owners are provably dead."""
    return [path for path, owner in owned(destination) if owner.is_provably_dead()]


def owner_of(path: str) -> Owner | None:
    """Return whose a staging directory is, by its name; None if it is none."""
    return Owner.parse(path.rpartition(_ENDING)[2])


def destination_of(path: str) -> str | None:
    """Return the destination of a staging directory, given its absolute path; None if it is no such directory.

    A long name is cut in the name of its staging directory, and so it is here.
    """
    parent, name = os.path.split(path)
    found = name.rpartition(_ENDING)[0]
    if len(found) < 2 or not found.startswith(".") or owner_of(path) is None or not storage.isdir(path):
        return None
    return os.path.join(parent, found[1:])


def has_aside(path: str) -> bool:
    """True if a staging directory has what was at its destination."""
    return storage.lexists(os.path.join(path, "data.old"))


def give_up(destination: str, path: str, kept: Kept) -> bool:
    """Remove a staging directory, whoever owned it; first what it has moved aside goes back.

    Args:
        destination: absolute.
        path: of the staging directory.
        kept: what stays.

    Returns:
        False if more stays: another process has taken it, what was moved aside cannot go back, or the system refuses.
    """
    staging = Staging._take(destination, path)
    if staging is None:
        return False
    try:
        staging._put_back()
        others = kept(staging.path)
        if others:
            storage.remove_all_but(staging.path, others)
            storage.rename(staging.path, path)
            return True
        storage.remove_tree(staging.path)
    except (OSError, UsageError):  # the only copy of what was at the destination, perhaps
        with contextlib.suppress(OSError):
            storage.rename(staging.path, path)
        return False
    finally:
        staging.release()
    return not storage.lexists(staging.path)


def remove_abandoned(destination: str, kept: Kept) -> None:
    """Remove what dead runs left beside `destination`; taken over first, so that nobody else can meanwhile.

    Args:
        destination: absolute.
        kept: what stays.
    """
    for path in abandoned(destination):
        give_up(destination, path, kept)


def recover(destination: str) -> None:
    """Put back what dead runs moved aside and did not replace.

    Raises:
        UsageError: something else has its name by now.
        ResourceError: the system refuses.
    """
    for path in abandoned(destination):
        if not has_aside(path):
            continue
        staging = Staging._take(destination, path)
        if staging is None:
            continue
        try:
            staging._put_back()
        except OSError as error:
            place = escape(os.path.join(staging.path, "data.old"))
            raise ResourceError(f"cannot move {place} back to its place: {error.strerror}") from error
        finally:
            staging.release()


def identity_of(path: str) -> tuple[int, int] | None:
    """Return an identity of a file or directory that survives moves.

    It is None if there is none, or an empty directory: made before a job, it is as good as none.
    """
    try:
        status = storage.lstat(path)
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


class _Status(NamedTuple):
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


def _status(pid: int) -> _Status | None:
    content = _content(f"/proc/{pid}/stat")
    try:
        # man 5 proc: fields 3 and 22, counted after the command, which may hold blanks and brackets
        fields = content.rpartition(")")[2].split() if content else []
        # The first thread of a process may have ended while others live on.
        is_zombie = fields[0] in "ZX" and len(storage.listdir(f"/proc/{pid}/task")) <= 1
        return _Status(int(fields[19]), is_zombie)
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
