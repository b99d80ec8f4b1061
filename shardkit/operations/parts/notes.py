"""The content of notes: one for each finished file, found by the file's number.

Notes belong to files, not to parts. So parts may run twice, and a rerun may have another number of parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardkit.transfer.checks import Readings, are_readings, as_json
from shardkit.transfer.digests import parse_digest
from shardkit.transfer.execute import FileDigest
from shardkit.transfer.fill import CrcPiece


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """The note of a finished file."""

    digest: FileDigest
    readings: Readings | None
    """CRC-32s of the source bytes that were read for it; None if they were not taken."""
    scattered: Sequence[tuple[str, Sequence[CrcPiece] | None]]
    """For each scattered tensor with a region in the file: its name in the source, and the CRC-32s of its pieces; None if
    the tensor's own CRC-32 cannot be combined from them."""

    def dump(self) -> dict[str, Any]:
        """Return the note as plain data."""
        readings = None if self.readings is None else as_json(self.readings)
        return {"digest": asdict(self.digest), "readings": readings, "scattered": self.scattered}


def load_note(content: Mapping[str, Any], name: str, size: int) -> Note | None:
    """Parse a note. Return None if it is damaged, or belongs to another file.

    Args:
        content: as of `Note.dump`.
        name: of the file.
        size: of the file, in bytes.
    """
    entry, readings, scattered = content.get("digest"), content.get("readings"), content.get("scattered")
    digest = parse_digest(entry) if isinstance(entry, dict) else None
    if digest is None or (digest.name, digest.size) != (name, size) or not isinstance(scattered, list):
        return None
    if not (readings is None or are_readings(readings)) or not all(map(_is_tensor, scattered)):
        return None
    return Note(
        digest=digest,
        readings=readings,
        scattered=[_load(*entry) for entry in scattered],
    )


def _is_tensor(entry: object) -> bool:
    if not isinstance(entry, list) or len(entry) != 2:
        return False
    fqn, pieces = entry
    return isinstance(fqn, str) and (
        pieces is None or (isinstance(pieces, list) and all(map(_is_piece, pieces)))
    )


def _is_piece(entry: object) -> bool:
    return isinstance(entry, list) and len(entry) == 3 and all(type(number) is int for number in entry)


def _load(fqn: str, pieces: list[list[int]] | None) -> tuple[str, list[CrcPiece] | None]:
    return fqn, None if pieces is None else [CrcPiece(*piece) for piece in pieces]
