"""A note for each finished file of a divided job: found by the file's number, written once the file has its name.

Whoever finishes a file writes the note, whatever part it belongs to; so parts may run twice, and their number may change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardkit.files.typed_json import record_of
from shardkit.transfer.execute import FileDigest

Pieces = Sequence[tuple[int, int, int]]
"""What was read of a tensor: `CrcPiece`s, or such from JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A finished file."""

    digest: FileDigest
    source: Mapping[str, Any] | None
    """What was read for it, from `SourceCheck.dump`; None if nothing was compared."""
    scattered: Sequence[tuple[str, Pieces | None]]
    """Of each scattered tensor that it has a region of: its name in the source, and what was read of it; None if CRC-32s of
    what is read do not make up the tensor's."""
    factors: str | None = None
    """Digest of all factors, of which some are in it; None where there are none."""
    versions: Mapping[str, str] | None = None
    """Of packages that decided the plan, where it was written; None if none had a say."""

    def dump(self) -> dict[str, Any]:
        """Return the note as plain data."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return {**fields, "digest": asdict(self.digest)}


def load_note(content: Mapping[str, Any], name: str, size: int) -> Note | None:
    """Return a note that was read; None if it is damaged, or of another file.

    Args:
        content: what `Note.dump` has written; it is used up.
        name: of the file.
        size: in bytes.
    """
    note = record_of(Note, content)
    return note if note is not None and (note.digest.name, note.digest.size) == (name, size) else None
