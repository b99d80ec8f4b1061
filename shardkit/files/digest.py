"""CRC-32, the only digest of tensors: of logical, contiguous, little-endian bytes.

Zip records of torch contain it, and CRC-32s of adjacent pieces can be combined, so that the digest of a tensor does not
depend on its layout. `isal` computes several GB/s, and releases the interpreter's lock.

A `FileBytes` is a file with its recorded checksums; a `ByteReader` reads a file front to back.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from isal.isal_zlib import crc32 as crc32
from isal.isal_zlib import crc32_combine as crc32_combine

from shardkit.core.catalog import SourceFile
from shardkit.core.regions import Region
from shardkit.core.text import escape
from shardkit.errors import ResourceError, SourceError
from shardkit.files import storage
from shardkit.files.strict_json import open_regular


def combine(pieces: Iterable[tuple[int, int]]) -> int:
    """Return the CRC-32 of a concatenation from (crc32, number of bytes) of each piece in order."""
    total = 0
    for crc, nbytes in pieces:
        total = crc32_combine(total, crc, nbytes)
    return total


def zeros(nbytes: int) -> int:
    """Return the CRC-32 of `nbytes` zero bytes, in O(log n)."""
    crc, power, length = 0, crc32(b"\0"), 1
    while nbytes:
        if nbytes & 1:
            crc = crc32_combine(crc, power, length)
        power, length, nbytes = crc32_combine(power, power, length), length * 2, nbytes >> 1
    return crc


_BLOCK_BYTES = 1 << 20


class Stretch(NamedTuple):
    """The bytes of one chunk, or of an entry of a `torch.save` file."""

    start: int
    nbytes: int
    tensor: str | None
    """The tensor, or the first of several that share the bytes; None for other data."""
    region: Region | None
    crc32: int | None
    """As recorded; None if not recorded."""
    what: str = ""
    """A further remark for messages."""


class Archive(NamedTuple):
    """A zip of `torch.save` in a file: a byte entry, or the whole file."""

    start: int
    nbytes: int
    name: str
    """Its content, for messages."""


@dataclass(slots=True, kw_only=True)
class FileBytes:
    """A file with its recorded checksums."""

    name: str
    """Name relative to the checkpoint."""
    path: str
    follow: bool = False
    """True if it may be a symbolic link, as in the Hub's cache."""
    size: int
    crc32: int | None = None
    """CRC-32 of the whole file."""
    sha256: str | None = None
    """SHA-256 of the whole file, in hex."""
    stretches: list[Stretch] = field(default_factory=list)
    archives: list[Archive] = field(default_factory=list)
    packed: list[tuple[Stretch, SourceFile]] = field(default_factory=list)
    """Chunks that have to be decoded, which verifies them."""
    is_damaged: bool = False
    """A record cannot be opened, or is of another save; the checksum of the file would only repeat this problem."""
    is_spelled_as_torch: bool = False
    """True if most tensor records are identical to those of torch 2.13, byte by byte."""

    @property
    def has_digest(self) -> bool:
        """True if a checksum of the whole file is recorded."""
        return self.crc32 is not None or self.sha256 is not None

    @property
    def read_bytes(self) -> int:
        """Bytes that a full check reads."""
        packed_bytes = sum(s.nbytes for s, _ in self.packed)
        if self.has_digest:
            return self.size + packed_bytes
        recorded = sum(s.nbytes for s in self.stretches if s.crc32 is not None)
        return recorded + sum(a.nbytes for a in self.archives) + packed_bytes


def place_of(path: str) -> str:
    """Return the path that is common to all names of a file; a link counts as a separate file."""
    folder, name = os.path.split(path)
    return os.path.join(storage.realpath(folder or os.curdir), name)


class Scan:
    """Digests from one pass over a whole file.

    Args:
        marks: positions in the file, sorted; the first is 0, the last the file's size.
        crcs: for each, the CRC-32 of all bytes before it.
        sha256: of the file, in hex; None if it was not computed.
    """

    __slots__ = ("_crcs", "_marks", "sha256")

    def __init__(self, marks: list[int], crcs: list[int], sha256: str | None) -> None:
        self._marks, self._crcs, self.sha256 = marks, crcs, sha256

    @property
    def crc32(self) -> int:
        """Of the file."""
        return self._crcs[-1]

    def crc(self, start: int, nbytes: int) -> int:
        """Return the CRC-32 of the bytes between two marks.

        The CRC-32 up to the second mark equals the CRC-32 up to the first, shifted by `nbytes`, xor the result.
        """
        before, upto = self._before(start), self._before(start + nbytes)
        return int(crc32_combine(before, 0, nbytes)) ^ upto if nbytes else 0

    def _before(self, mark: int) -> int:
        index = bisect_right(self._marks, mark) - 1
        assert self._marks[index] == mark
        return self._crcs[index]


class ByteReader:
    """An open file, read front to back in blocks.

    Args:
        fd: the file.
        name: for messages.
        size: bytes.
        on_read: called with the number of bytes of each read.
        ahead: read whole blocks, in anticipation of later reads.
    """

    def __init__(self, fd: int, name: str, size: int, on_read: Callable[[int], None], *, ahead: bool) -> None:
        self._fd, self._name, self.size, self._on_read, self._ahead = fd, name, size, on_read, ahead
        self._buffer = memoryview(bytearray(_BLOCK_BYTES))
        self._offset, self._buffered_bytes = 0, 0
        if ahead:
            storage.will_read(fd, [(0, size)], is_soon=True)

    def crc(self, start: int, nbytes: int) -> int:
        """Return the CRC-32 of a range.

        Raises:
            SourceError: the file is too short.
            ResourceError: reading failed.
        """
        crc = 0
        while nbytes:
            part = self._part(start, nbytes)
            crc = crc32(part, crc)
            start, nbytes = start + len(part), nbytes - len(part)
        return crc

    def scan(self, marks: Iterable[int], *, sha256: bool) -> Scan:
        """Read all of the file once.

        Args:
            marks: positions between which CRC-32s will be needed; those outside the file are ignored.
            sha256: compute the SHA-256 too.

        Raises:
            SourceError, ResourceError: as `crc`.
        """
        places = sorted({0, self.size, *(mark for mark in marks if 0 <= mark <= self.size)})
        crcs, crc, offset = [0], 0, 0
        hashed = hashlib.sha256() if sha256 else None
        for place in places[1:]:
            while offset < place:
                part = self._part(offset, place - offset)
                crc = crc32(part, crc)
                if hashed is not None:
                    hashed.update(part)
                offset += len(part)
            crcs.append(crc)
        return Scan(places, crcs, hashed.hexdigest() if hashed is not None else None)

    def update(self, *hashes: hashlib._Hash) -> None:
        """Update hashes of hashlib with the whole file.

        Raises:
            SourceError, ResourceError: as `crc`.
        """
        offset = 0
        while offset < self.size:
            part = self._part(offset, self.size - offset)
            for digest in hashes:
                digest.update(part)
            offset += len(part)

    def _part(self, start: int, nbytes: int) -> memoryview:
        """Return some bytes from `start` on, at most `nbytes`; valid until the next call."""
        skip = start - self._offset
        if not 0 <= skip < self._buffered_bytes:
            self._fill(start, _BLOCK_BYTES if self._ahead else min(nbytes, _BLOCK_BYTES))
            skip = 0
        part = self._buffer[skip : min(self._buffered_bytes, skip + nbytes)]
        self._on_read(len(part))
        return part

    def _fill(self, start: int, nbytes: int) -> None:
        """Read a block of the file at byte `start` into the buffer, which may get fewer bytes than `nbytes`."""
        try:
            self._buffered_bytes = storage.preadv(self._fd, [self._buffer[:nbytes]], start)
        except OSError as error:
            raise ResourceError(
                f"{escape(self._name)}: reading at byte {start}: {error.strerror}",
                hint="the disk may be failing: copy what can be read, and use another copy of the rest",
            ) from error
        self._offset = start
        if not self._buffered_bytes:
            raise SourceError(f"it ended at byte {start} while it was read")


def sha256_of(path: str, name: str) -> str:
    """Return the sha256 of a file in hex, read in blocks.

    Args:
        path: a regular file, no link.
        name: for messages.

    Raises:
        SourceError: the path is not a regular file.
        ResourceError: reading failed.
    """
    hashed = hashlib.sha256()
    with open_regular(path, name, follow=False) as (fd, size):
        ByteReader(fd, name, size, lambda _: None, ahead=True).update(hashed)
    return hashed.hexdigest()
