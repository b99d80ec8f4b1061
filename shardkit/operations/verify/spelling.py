"""Bytes of a record that neither a checksum covers nor a reader needs, held against what torch writes.

A zip repeats itself and pads; a reader passes over such bytes, so damage there goes unnoticed. Most records
of torch are spelled alike, and what stands around the data is known to the byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from shardkit.files import storage
from shardkit.formats.torchsave.archive import Entry
from shardkit.formats.torchsave.record import TensorRecord, read_entries
from shardkit.formats.torchsave.writer import RecordSkeleton, pickle_record, record_skeleton

_PICKLE, _SERIALIZATION_ID = "data.pkl", ".data/serialization_id"
_FREE = (_PICKLE, _SERIALIZATION_ID)
"""Entries that may differ where dtype and shape are equal (strides, a flag, an id); they have checksums."""
_DATA = "data/0"
_NOT_RECORDED = bytes(4)  # a CRC-32, as torch.serialization.set_crc32_options(False) leaves it
_DESCRIPTOR = b"PK\x07\x08"
_OBJECT_NAMES = {_PICKLE, ".format_version", ".storage_alignment", "byteorder", "version", _SERIALIZATION_ID}
_MAX_OBJECT_BYTES = 1 << 20


class Difference(NamedTuple):
    """The first byte of a record that is not as torch writes it."""

    start: int
    """In the file."""
    expected: int
    found: int


def spelling(fd: int, start: int, nbytes: int, record: TensorRecord) -> Difference | bool:
    """Compare a record with what torch writes for a contiguous tensor.

    Args:
        fd: the file.
        start, nbytes: of the record.
        record: as it was read.

    Returns:
        True where it is equal, the first difference otherwise; False where its parts have other lengths, so that
        it was written in another way.
    """
    skeleton = record_skeleton(record.dtype, record.shape)
    num_before, hole = len(skeleton.prefix), skeleton.data_nbytes
    if nbytes != skeleton.nbytes or record.data_start - start != num_before:
        return False
    head = storage.pread(fd, num_before, start)
    found = bytearray(head + storage.pread(fd, skeleton.suffix_nbytes, start + num_before + hole))
    expected = skeleton.prefix + skeleton.suffix(record.crc32 or 0)
    if len(found) != len(expected):
        return False  # the file became shorter
    for name, content, crcs in _entries(skeleton):
        recorded = {bytes(found[at : at + 4]) for at in crcs} - {_NOT_RECORDED}
        for at in crcs:
            if found[at : at + 4] == _NOT_RECORDED or (name == _DATA and record.crc32 is None):
                found[at : at + 4] = expected[at : at + 4]
        if name in _FREE and len(recorded) < 2:  # the content was compared with it when the record was read
            for place in (content, *(slice(at, at + 4) for at in crcs)):
                found[place] = expected[place]
    if found == expected:
        return True
    at = next(at for at, pair in enumerate(zip(expected, found, strict=True)) if pair[0] != pair[1])
    return Difference(start + at + (hole if at >= num_before else 0), expected[at], found[at])


def object_spelling(fd: int, start: int, nbytes: int, entries: Mapping[str, Entry]) -> Difference | bool:
    """Compare the record of an object with what torch writes for the same pickle.

    Args:
        fd: the file.
        start, nbytes: of the record.
        entries: of its zip, whose checksums are right; positions count from the record's first byte.

    Returns:
        As `spelling`; False too for an object that has tensors in it, or a very large one.
    """
    if entries.keys() != _OBJECT_NAMES or nbytes > _MAX_OBJECT_BYTES:
        return False
    found, pickle = bytearray(storage.pread(fd, nbytes, start)), entries[_PICKLE]
    expected = pickle_record(bytes(found[pickle.start : pickle.start + pickle.nbytes]))
    if len(found) != len(expected):
        return False
    for name, entry in entries.items():
        stop = entry.start + entry.nbytes
        described = (stop + len(_DESCRIPTOR),) if expected.startswith(_DESCRIPTOR, stop) else ()
        crcs = (*described, entry.crc_at)
        if name == _SERIALIZATION_ID and len({bytes(found[at : at + 4]) for at in crcs}) == 1:
            for place in (slice(entry.start, stop), *(slice(at, at + 4) for at in crcs)):
                found[place] = expected[place]
    if found == expected:
        return True
    at = next(at for at, pair in enumerate(zip(expected, found, strict=True)) if pair[0] != pair[1])
    return Difference(start + at, expected[at], found[at])


@lru_cache(maxsize=4096)
def _entries(skeleton: RecordSkeleton) -> tuple[tuple[str, slice, tuple[int, ...]], ...]:
    """Return (name, content, places of its CRC-32) of each entry, in the bytes around the data put together.

    The data's own content is empty there.
    """
    around, before, hole = skeleton.prefix + skeleton.suffix(0), len(skeleton.prefix), skeleton.data_nbytes

    def pread(start: int, nbytes: int) -> bytes:
        stop = start + nbytes
        data = bytes(max(min(stop, before + hole) - max(start, before), 0))
        tail = around[before:]
        return (
            around[:before][start:stop]
            + data
            + tail[max(start - before - hole, 0) : max(stop - before - hole, 0)]
        )

    def place(at: int) -> int:
        return at if at < before else at - hole

    _, entries = read_entries(pread, 0, skeleton.nbytes)
    places = []
    for name, entry in entries.items():
        start, stop = place(entry.start), place(entry.start + entry.nbytes)
        if name == _DATA:
            start = stop = before
        described = (stop + len(_DESCRIPTOR),) if around.startswith(_DESCRIPTOR, stop) else ()
        places.append((name, slice(start, stop), (*described, place(entry.crc_at))))
    return tuple(places)
