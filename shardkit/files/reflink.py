"""Sharing extents between files, where the file system can: XFS, Btrfs, and some others.

Whether it can is found out by trying; a person is never asked.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from shardkit.core.catalog import Catalog
from shardkit.files import storage

BLOCK = 4096


def can_share_extents(catalog: Catalog, directory: str) -> bool:
    """True when every source file can share extents with files in `directory`.

    Tries it, with the first block of one file of each device and files without a name, so that nothing is
    left behind. Equal device numbers are no condition: each subvolume of Btrfs has its own, and shares.
    """
    files = [file for file in catalog.files if file.size >= BLOCK]
    if not files or any(file.decode for file in files):
        return False
    try:
        with _nameless(directory) as probe:
            tried = set[int]()
            for file in files:
                device = os.stat(nearest_existing(file.path)).st_dev
                if device not in tried:
                    tried.add(device)
                    with _source(file.path) as source:
                        storage.clone_range(source, 0, probe, 0, BLOCK)
    except (OSError, AttributeError):  # AttributeError: no O_TMPFILE, this is not Linux
        return False
    return True


@contextlib.contextmanager
def _nameless(directory: str) -> Iterator[int]:
    """Give the descriptor of a file without a name."""
    fd = storage.open_fd(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _source(path: str) -> Iterator[int]:
    """Give the descriptor of a source file; for one that is yet to be downloaded, of a block where it will lie."""
    if not os.path.lexists(path):
        with _nameless(nearest_existing(path)) as fd:
            storage.pwrite(fd, bytes(BLOCK), 0)
            yield fd
        return
    fd = storage.open_fd(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def nearest_existing(path: str) -> str:
    """Return a path, or the directory above it that exists."""
    while not os.path.lexists(path):
        path = os.path.dirname(path) or os.curdir
    return path


def shared_part(start: int, nbytes: int) -> tuple[int, int]:
    """Return (bytes before the first whole block, bytes in whole blocks) of a range at offset `start`."""
    head = -start % BLOCK
    return (head, (nbytes - head) // BLOCK * BLOCK) if nbytes >= head else (nbytes, 0)
