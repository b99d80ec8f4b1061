"""Reading the descriptions of many `torch.save` records, most of which are spelled alike.

A checkpoint of 1,024 ranks has hundreds of thousands of records. Of those with one dtype, shape and length
all bytes around the data are the same but for the CRC-32 of the data and an id made from it. So one of them
is read entry by entry (`torch_record`), and the others are compared with it; whatever is spelled otherwise
is read entry by entry too.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import NamedTuple

from shardkit.files import storage
from shardkit.files.digest import crc32
from shardkit.formats.torchsave.archive import Entry
from shardkit.formats.torchsave.record import TensorRecord, read_entries

_DATA, _ID = "data/0", ".data/serialization_id"
_DESCRIPTOR = b"PK\x07\x08"
_NOT_RECORDED = bytes(4)  # a CRC-32
_WINDOW = 4096  # bytes read at once: the end of a record and the beginning of the next


class Spelling(NamedTuple):
    """The bytes around the data of a record, as they are in all that are spelled alike."""

    head: bytes
    """From the record's first byte to the data's."""
    tail_at: int
    """First byte after the data, counted from the record's first; so are the places below."""
    fixed: tuple[tuple[int, bytes], ...]
    """What the tail holds, but for the places below."""
    crcs: tuple[int, ...]
    """Where the CRC-32 of the data stands: behind it and in the directory."""
    id_range: tuple[int, int]
    """First byte and length of the id; the length is 0 where there is none."""
    id_crcs: tuple[int, ...]
    record: TensorRecord
    """With `data_start` counted from the record's first byte."""

    @property
    def tail_nbytes(self) -> int:
        """Bytes after the data."""
        at, text = self.fixed[-1]
        return at + len(text)


class RecordScanner:
    """Reads records; those of one file are best asked for in the order of their bytes."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Spelling] = {}
        self._fd, self._at, self._window = -1, 0, b""

    def open(self, fd: int) -> None:
        """Turn to another file."""
        self._fd, self._at, self._window = fd, 0, b""

    def known(self, kind: Hashable, length: int) -> Spelling | None:
        """Return how the records of a kind and length are spelled, None where none has been read yet."""
        return self._known.get((kind, length))

    def read(self, kind: Hashable, offset: int, length: int, *, where: str) -> TensorRecord:
        """Read the description of the record at a byte range of the open file, as `read_record` does.

        Args:
            kind: dtype and shape that are expected; a record of the same kind and length is tried as alike.
            offset: the record's first byte.
            length: its bytes.
            where: what to call the file in messages, escaped.

        Raises:
            SourceError, IntegrityError, ResourceError: as `read_record`.
        """
        spelling = self._known.get((kind, length))
        if spelling is not None:
            record = self._compare(spelling, offset, length)
            if record is not None:
                return record
        record, entries = read_entries(self._pread, offset, length, where=where)
        learned = self._learn(record, entries, offset, length)
        if learned is not None:
            self._known[kind, length] = learned
        return record

    def _compare(self, known: Spelling, offset: int, length: int) -> TensorRecord | None:
        """Return the record, or None where it is not spelled like the known one."""
        if self._bytes(offset, len(known.head)) != known.head:
            return None
        tail = self._bytes(offset + known.tail_at, length - known.tail_at)
        for at, text in known.fixed:
            if not tail.startswith(text, at):
                return None
        crc = tail[known.crcs[0] : known.crcs[0] + 4]
        for at in known.crcs[1:]:
            if tail[at : at + 4] != crc:
                return None
        if known.id_crcs:
            at, nbytes = known.id_range
            id_crc = crc32(tail[at : at + nbytes]).to_bytes(4, "little")
            for at in known.id_crcs:
                if tail[at : at + 4] not in (id_crc, _NOT_RECORDED):
                    return None
        return _moved(known.record, offset, int.from_bytes(crc, "little"))

    def _learn(
        self, record: TensorRecord, entries: Mapping[str, Entry], offset: int, length: int
    ) -> Spelling | None:
        data, ident = entries[_DATA], entries.get(_ID)
        tail_at = data.start + data.nbytes
        if data.start > _WINDOW or length - tail_at > _WINDOW or (ident and ident.start < tail_at):
            return None
        tail = self._bytes(offset + tail_at, length - tail_at)
        crcs = _crc_places(data, tail, tail_at)
        id_crcs = _crc_places(ident, tail, tail_at) if ident else ()
        id_range = (ident.start - tail_at, ident.nbytes) if ident else (0, 0)
        fixed, done = [], 0
        for start, nbytes in sorted([*((at, 4) for at in (*crcs, *id_crcs)), id_range]):
            fixed.append((done, tail[done:start]))
            done = start + nbytes
        return Spelling(
            head=self._bytes(offset, data.start),
            tail_at=tail_at,
            fixed=(*fixed, (done, tail[done:])),
            crcs=crcs,
            id_range=id_range,
            id_crcs=id_crcs,
            record=replace(record, data_start=data.start),
        )

    def _pread(self, start: int, nbytes: int) -> bytes:
        return storage.pread(self._fd, nbytes, start)

    def _bytes(self, start: int, nbytes: int) -> bytes:
        """Return bytes of the file, fewer where it ends or fails; they are wanted front to back."""
        at = start - self._at
        if at < 0 or at + nbytes > len(self._window):
            try:
                self._window = storage.pread(self._fd, max(nbytes, _WINDOW), start)
            except OSError:  # the record is then read entry by entry, which says what is wrong
                self._window = b""
            self._at, at = start, 0
        return self._window[at : at + nbytes]


def _moved(record: TensorRecord, offset: int, crc: int) -> TensorRecord:
    """Return a record that lies `offset` bytes further on (`dataclasses.replace` takes three times as long)."""
    return TensorRecord(
        dtype=record.dtype,
        shape=record.shape,
        stride=record.stride,
        storage_offset=record.storage_offset,
        data_start=record.data_start + offset,
        data_nbytes=record.data_nbytes,
        crc32=crc if crc or not record.data_nbytes else None,
    )


def _crc_places(entry: Entry, tail: bytes, tail_at: int) -> tuple[int, ...]:
    """Return where an entry's CRC-32 stands in the tail: behind its content, and in the directory."""
    behind = entry.start + entry.nbytes - tail_at
    described = tail.startswith(_DESCRIPTOR, behind)
    return (*([behind + len(_DESCRIPTOR)] if described else []), entry.crc_at - tail_at)
