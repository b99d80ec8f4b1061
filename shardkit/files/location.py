"""What can be done where a path leads, each under its own name: no room above asks whether that is a disk or a store.

Another kind of place is another row here.
"""

from __future__ import annotations

from typing import NamedTuple

from shardkit.files.remote.kinds import SCHEMES, WRITABLE
from shardkit.files.remote.ranges import MAX_CONNECTIONS


class Location(NamedTuple):
    """What can be done at a place. The defaults are a disk's."""

    renames: bool = True
    """An output appears by a rename. Elsewhere one small object makes it visible, and several may lie side by side."""
    has_directories: bool = True
    """A directory is there before anything lies in it."""
    is_for_all: bool = True
    """Libraries that open files by themselves can read it."""
    sends: bool = False
    """What is written is sent meanwhile, within an `uploads.Session`: each file front to back, and it takes no room here."""
    is_writable: bool = True
    has_owners: bool = True
    """It tells which user wrote a file."""
    vouches: bool = False
    """It says of a file what its size is, and maybe its CRC-32, without reading it."""
    has_versions: bool = False
    """The inode number of a status stands for path and version, and is the same on all machines."""
    plans_reads: bool = False
    """Reading takes requests, so whoever will read says what: `storage.will_read`."""
    num_ahead: int = 0
    """How many files are best opened before they are read."""
    connections: int = 8
    """How many files are best asked for at once. On a local disk one would do; over a network each is a wait."""
    is_listed_once: bool = False
    """Of the ranks of a job one lists it, and tells the others."""


_DISK = Location()
_STORE = Location(
    renames=False,
    has_directories=False,
    is_for_all=False,
    has_owners=False,
    sends=True,
    vouches=True,
    has_versions=True,
    plans_reads=True,
    num_ahead=8,
    connections=MAX_CONNECTIONS,
    is_listed_once=True,
)
_READ_ONLY = _STORE._replace(is_writable=False, vouches=False)


def location_of(path: object) -> Location:
    """Return what can be done where a path leads; of what is no path, what a disk can do."""
    if not isinstance(path, str) or not path.startswith(SCHEMES):
        return _DISK
    return _STORE if path.startswith(WRITABLE) else _READ_ONLY
