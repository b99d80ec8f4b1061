"""`shardkit.json`: what was written, from what, and how to check it.

docs/format.md is the contract. The manifest carries the digest of `.metadata`, of every shard file and
its chunk list, of every tensor, and of itself: `crc32` is that of the manifest's own JSON without that
key, written with sorted keys and no blanks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from shardkit.core.text import escape
from shardkit.errors import IntegrityError, SourceError
from shardkit.transfer.digest import crc32

NAME = "shardkit.json"
FORMAT = 1
_MAX_BYTES = 1 << 30


def dump(content: Mapping[str, Any]) -> bytes:
    """Return a manifest as bytes, with its own digest in it."""
    body = {key: value for key, value in content.items() if key != "crc32"}
    return json.dumps({**body, "crc32": _digest(body)}, indent=1, ensure_ascii=True).encode() + b"\n"


def _digest(body: Mapping[str, Any]) -> int:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return int(crc32(canonical.encode()))


def read(directory: str) -> dict[str, Any] | None:
    """Return the manifest of a directory, checked against its own digest; None where there is none.

    Raises:
        SourceError: it is not a manifest, or of a version that this shardkit does not know.
        IntegrityError: it is not what was written.
    """
    path = os.path.join(directory, NAME)
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SourceError(f"cannot read {NAME}: {error.strerror}") from error
    if len(data) > _MAX_BYTES:
        raise SourceError(f"{NAME} is larger than {_MAX_BYTES} bytes")
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{NAME} is not JSON: {escape(str(error))}") from error
    if not isinstance(content, dict) or not isinstance(content.get("format"), int):
        raise SourceError(f"{NAME} is not a shardkit manifest")
    if content["format"] > FORMAT:
        raise SourceError(
            f"{NAME} has format {content['format']}, this shardkit knows up to {FORMAT}",
            hint="update shardkit",
        )
    body = {key: value for key, value in content.items() if key != "crc32"}
    if content.get("crc32") != _digest(body):
        raise IntegrityError(f"{NAME} has been changed: its own digest does not match")
    return content
