"""Who owns a staging directory: a run of a process, told apart from all others on this and other machines."""

from __future__ import annotations

import itertools
import os
import re
import socket
from dataclasses import dataclass
from typing import NamedTuple

from shardkit.files.digest import crc32

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
        owner = cls(_host(), _boot(), _pid_namespace(), pid, status.started if status else 0, run)
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
        """True when the run was on this host and is over; False where that cannot be known."""
        try:
            if self.host != _host():
                return False
            boot = _boot()
            if boot != self.boot:
                return _UNKNOWN_BOOT not in (boot, self.boot)
            return self.namespace == _pid_namespace() and self._is_over() is True
        except OSError:
            return False

    def is_provably_alive(self) -> bool:
        """True when the run is under way on this host; False where that cannot be known."""
        try:
            here = (_host(), _boot(), _pid_namespace())
            return (self.host, self.boot, self.namespace) == here and self._is_over() is False
        except OSError:
            return False

    def _is_over(self) -> bool | None:
        """Tell whether a run of this boot and namespace is over; None where that cannot be known."""
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
    """It has ended, and nobody has asked how; a container's first process may never do so."""


def _host() -> str:
    """Machines may have one name, and copies of one disk; hardly ever both."""
    machine = _content("/etc/machine-id") or ""
    return f"{crc32(f'{socket.gethostname()}:{machine}'.encode()):08x}"


def _boot() -> str:
    return (_content("/proc/sys/kernel/random/boot_id") or _UNKNOWN_BOOT)[:8]


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except _NOT_THERE:
        return 0


def _status(pid: int) -> _Status | None:
    content = _content(f"/proc/{pid}/stat")
    try:
        # man 5 proc: fields 3 and 22, counted after the command, which may hold blanks and brackets
        fields = content.rpartition(")")[2].split() if content else []
        is_zombie = (
            fields[0] in "ZX" and len(os.listdir(f"/proc/{pid}/task")) <= 1
        )  # else its threads live on
        return _Status(int(fields[19]), is_zombie)
    except (IndexError, ValueError, *_NOT_THERE):
        return None


def _content(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except _NOT_THERE:
        return None


def _is_gone(pid: int) -> bool:
    """True when there is no such process; other users' may be hidden from /proc (its option hidepid)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        pass
    return False
