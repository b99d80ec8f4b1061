"""Properties of places, disks or stores, each named after a need, so that no other room asks for the kind of path.

A new kind of place is a new row here.
"""

from __future__ import annotations

from typing import NamedTuple

from shardkit.files.remote.kinds import SCHEMES, WRITABLE
from shardkit.files.remote.ranges import MAX_CONNECTIONS


class Location(NamedTuple):
    """Properties of a place. The defaults are those of a disk."""

    renames: bool = True
    """Outputs appear by a rename. Otherwise one small object makes an output visible, and several may coexist."""
    has_directories: bool = True
    """Directories exist independently of files in them."""
    is_for_all: bool = True
    """Libraries that open files themselves can read it."""
    sends: bool = False
    """Files are sent while they are written, front to back, and take no space on the local disk."""
    is_writable: bool = True
    has_owners: bool = True
    """Files have an owner."""
    has_versions: bool = False
    """The inode number of a status identifies path and version, and is the same on all machines."""
    of_shared_records: str = ""
    """Advice for the store's own reader in `dcp.load` if names share records; empty if none is needed."""
    plans_reads: bool = False
    """Reads are requests, so they should be announced: `storage.will_read`."""
    num_ahead: int = 0
    """Number of files to open ahead of reading."""
    connections: int = 8
    """Number of files to query concurrently. One suffices for a local disk; over a network each query is a wait."""
    is_listed_once: bool = False
    """One rank of a job lists directories, and sends the listings to the others."""


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
    """Return the properties of the place of a path; those of a disk for anything else."""
    if not isinstance(path, str) or not path.startswith(SCHEMES):
        return _DISK
    if not path.startswith(WRITABLE):
        return _READ_ONLY
    return _S3 if path.startswith("s3://") else _STORE
