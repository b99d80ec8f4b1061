"""A note for each finished file of a divided job: found by the file's number, written once the file has its name.

Whoever finishes a file writes the note, whatever part it belongs to; so parts may run twice, and their number may change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardkit.transfer.checks import Readings, are_readings
from shardkit.transfer.digests import parse_digest
from shardkit.transfer.execute import FileDigest
from shardkit.transfer.fill import CrcPiece


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A finished file."""

    digest: FileDigest
    readings: Readings | None
    """What was read for it; None if nothing was compared."""
    scattered: Sequence[tuple[str, Sequence[CrcPiece] | None]]
    """Of each scattered tensor that it has a region of: its name in the source, and what was read of it; None if CRC-32s of
    what is read do not make up the tensor's."""

    def dump(self) -> dict[str, Any]:
        """Return the note as plain data."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return {**fields, "digest": asdict(self.digest)}


def load_note(content: Mapping[str, Any], name: str, size: int) -> Note | None:
    """Return a note that was read; None if it is damaged, or of another file.

    Args:
        content: what `Note.dump` has written.
        name: of the file.
        size: in bytes.
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
