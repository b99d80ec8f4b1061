"""Sharing extents between files, where the file system can: XFS, Btrfs, and some others.

Whether it can is found out by trying; a person is never asked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Iterator

from shardkit.core.catalog import Catalog

BLOCK = 4096
_FICLONERANGE = 0x4020940D  # linux/fs.h: _IOW(0x94, 13, struct file_clone_range)


def clone_range(source_fd: int, source_start: int, target_fd: int, target_start: int, nbytes: int) -> None:
    """Let `nbytes` of the target share the source's blocks; all three are multiples of BLOCK.

    Raises:
        OSError: this pair of files cannot share extents.

    Source: man 2 ioctl_ficlonerange.
    """
    argument = struct.pack("qQQQ", source_fd, source_start, nbytes, target_start)
    fcntl.ioctl(target_fd, _FICLONERANGE, argument)


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
                        clone_range(source, 0, probe, 0, BLOCK)
    except (OSError, AttributeError):  # AttributeError: no O_TMPFILE, this is not Linux
        return False
    return True


@contextlib.contextmanager
def _nameless(directory: str) -> Iterator[int]:
    """Give the descriptor of a file without a name."""
    fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _source(path: str) -> Iterator[int]:
    """Give the descriptor of a source file; for one that is yet to be downloaded, of a block where it will lie."""
    if not os.path.lexists(path):
        with _nameless(nearest_existing(path)) as fd:
            os.pwrite(fd, bytes(BLOCK), 0)
            yield fd
        return
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
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
