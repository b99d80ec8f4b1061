"""Digests of finished files, as plain data in notes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from shardkit.errors import ShardkitError
from shardkit.files import storage
from shardkit.transfer.execute import FileDigest
from shardkit.transfer.stream import read_back

_CHECK_BUFFER = 1 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


def parse_digest(entry: Mapping[str, object]) -> FileDigest | None:
    """Return a digest from plain data; None if the data are damaged."""
    name, size, crc, data = (entry.get(key) for key in ("name", "size", "crc32", "data_crcs"))
    if not (isinstance(name, str) and isinstance(size, int) and isinstance(data, list)):
        return None
    if not (crc is None or isinstance(crc, int)) or not all(isinstance(c, int) for c in data):
        return None
    sha256 = entry.get("sha256")
    if not (sha256 is None or (isinstance(sha256, str) and _SHA256.fullmatch(sha256))):
        return None
    return FileDigest(name=name, size=size, crc32=crc, data_crcs=tuple(data), sha256=sha256)


def is_intact(digest: FileDigest, directory: str) -> bool:
    """True if a file has the size, and the CRC-32 if there is one, of its digest."""
    try:
        fd = storage.open_fd(os.path.join(directory, digest.name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if storage.fstat(fd).st_size != digest.size:
            return False
        if digest.crc32 is None:
            return True
        return read_back(fd, 0, digest.size, bytearray(_CHECK_BUFFER)) == digest.crc32
    except (OSError, ShardkitError):
        return False
    finally:
        os.close(fd)
