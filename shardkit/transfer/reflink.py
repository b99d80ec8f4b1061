"""Sharing extents between files, where the file system can: XFS, Btrfs, and some others.

Whether it can is found out by trying; a person is never asked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct

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

    Tries it with the first block of each file on a file without a name, so that nothing is left behind.
    """
    files = [file for file in catalog.files if file.size >= BLOCK]
    if not files or any(file.decode for file in files):
        return False
    devices = {os.stat(file.path).st_dev for file in files}
    if devices != {os.stat(directory).st_dev}:
        return False
    try:
        probe = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except (OSError, AttributeError):  # no unnamed files here, or not Linux
        return False
    try:
        source = os.open(files[0].path, os.O_RDONLY | os.O_CLOEXEC)
        with contextlib.closing(os.fdopen(source, "rb")):
            clone_range(source, 0, probe, 0, BLOCK)
        return True
    except OSError:
        return False
    finally:
        os.close(probe)


def shared_part(start: int, nbytes: int) -> tuple[int, int]:
    """Return (bytes before the first whole block, bytes in whole blocks) of a range at offset `start`."""
    head = -start % BLOCK
    return (head, (nbytes - head) // BLOCK * BLOCK) if nbytes >= head else (nbytes, 0)
