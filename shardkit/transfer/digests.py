"""Digests of finished files, as plain data in notes."""

from __future__ import annotations

import re
from collections.abc import Mapping

from shardkit.transfer.execute import FileDigest

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
