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
    has_versions: bool = False
    """The inode number of a status stands for path and version, and is the same on all machines."""
    of_shared_records: str = ""
    """What the store's own reader for `dcp.load` needs where names share one record; empty if it needs nothing."""
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
    has_versions=True,
    plans_reads=True,
    num_ahead=8,
    connections=MAX_CONNECTIONS,
    is_listed_once=True,
)
_S3 = _STORE._replace(
    of_shared_records="AWS's S3StorageReader (s3torchconnector) refuses that in dcp.load, but not with "
    "reader_constructor=S3ReaderConstructor.range_based()"
)
_READ_ONLY = _STORE._replace(is_writable=False)


def location_of(path: object) -> Location:
    """Return what can be done where a path leads; of what is no path, what a disk can do."""
    if not isinstance(path, str) or not path.startswith(SCHEMES):
        return _DISK
    if not path.startswith(WRITABLE):
        return _READ_ONLY
    return _S3 if path.startswith("s3://") else _STORE
