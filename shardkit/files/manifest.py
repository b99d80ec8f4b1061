"""`shardkit.json`: what was written, from what, and how to check it.

docs/format.md is the contract. The manifest carries the digest of `.metadata`, of every shard file and
its chunk list, of every tensor, and of itself: `crc32` is that of the manifest's own JSON without that
key, written with sorted keys and no blanks.

One that lies beside a directory, not in it, has the directory's name and `.shardkit.json`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

from shardkit.core.text import escape
from shardkit.errors import IntegrityError, SourceError
from shardkit.files.digest import crc32
from shardkit.files.links import locate
from shardkit.files.strict_json import parse_integer, read_small

NAME = "shardkit.json"
FORMAT = 1
KIND_FILES = "files"
"""`kind` of a manifest that lists files and says nothing of how they were made."""
MAX_BYTES = 1 << 30
_SIDECAR_ENDING = ".shardkit.json"


def sidecar_of(path: str) -> str:
    """Return where the manifest of a checkpoint lies that is beside it: `run/last.ckpt.shardkit.json`."""
    return os.path.abspath(path) + _SIDECAR_ENDING


def dump(content: Mapping[str, Any]) -> bytes:
    """Return a manifest as bytes, with its own digest in it."""
    body = {key: value for key, value in content.items() if key != "crc32"}
    return json.dumps({**body, "crc32": _digest(body)}, indent=1, ensure_ascii=True).encode() + b"\n"


def _digest(body: Mapping[str, Any]) -> int:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return int(crc32(canonical.encode()))


def file_entry(name: str, size: int, crc: int | None, sha256: str | None = None) -> dict[str, Any]:
    """Return what a manifest says of a file.

    Args:
        name: relative to the directory.
        size: bytes.
        crc: CRC-32 of the file; None where it was not taken.
        sha256: in hex; None where it was not asked for.
    """
    entry: dict[str, Any] = {"name": name, "size": size, "crc32": crc}
    return entry if sha256 is None else {**entry, "sha256": sha256}


def entry_of(name: str, data: bytes, *, digest: bool, sha256: bool) -> dict[str, Any]:
    """Return what a manifest says of a file whose content is at hand; arguments as for `file_entry`."""
    crc = int(crc32(data)) if digest else None
    return file_entry(name, len(data), crc, hashlib.sha256(data).hexdigest() if sha256 else None)


def read(directory: str) -> dict[str, Any] | None:
    """Return the manifest of a directory, checked against its own digest; None where there is none.

    Raises:
        SourceError: it is not a manifest, not a regular file, or of a version that this shardkit does not know.
        IntegrityError: it is not what was written.
        ResourceError: it may not be read.
    """
    if not os.path.lexists(os.path.join(directory, NAME)):
        return None
    return parse(read_bytes(directory), NAME)


def read_bytes(directory: str) -> bytes:
    """Return the manifest of a directory as it lies there; a link must not lead out of the directory.

    Raises:
        SourceError: there is none, or it is no regular file.
        ResourceError: it may not be read.
    """
    return read_small(locate(directory, NAME), NAME, MAX_BYTES)


def parse(data: bytes, name: str) -> dict[str, Any]:
    """Return a manifest from its bytes, checked against its own digest.

    Args:
        data: all of the file.
        name: how to call it in messages.

    Raises:
        SourceError, IntegrityError: as `read`.
    """
    shown = escape(name)
    try:
        content = json.loads(data, parse_int=parse_integer)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{shown} is not JSON: {escape(str(error))}") from error
    if not isinstance(content, dict) or type(content.get("format")) is not int:
        raise SourceError(f"{shown} is not a shardkit manifest")
    if content["format"] > FORMAT:
        raise SourceError(
            f"{shown} has format {content['format']}, this shardkit knows up to {FORMAT}",
            hint="update shardkit",
        )
    body = {key: value for key, value in content.items() if key != "crc32"}
    try:
        digest = _digest(body)
    except RecursionError:
        raise IntegrityError(f"{shown} is nested too deeply for a manifest") from None
    if content.get("crc32") != digest:
        raise IntegrityError(f"{shown} has been changed: its own digest does not match")
    return content
