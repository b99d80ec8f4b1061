"""Find the entries of a zip that `torch.save` wrote, and read the small ones.

All entries must be stored without compression, so that their bytes are in the file; any other zip is refused. Only the
directory and the headers are read: two `pread` calls for a zip of a single tensor.

Source: torch 2.2 and 2.13, caffe2/serialize/inline_container.cc; APPNOTE.TXT 6.3.9.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, NoReturn

from shardkit.core.text import escape
from shardkit.errors import IntegrityError, ResourceError, SourceError
from shardkit.files import storage
from shardkit.files.digest import crc32
from shardkit.files.strict_json import DOWNLOAD_AGAIN, read_exactly

_WINDOW = 4096  # bytes read at each end: the directory and the small entries of a usual record
_MAX_DIRECTORY = 1 << 26  # bytes; an entry takes 130, unless its name is long
_MAX_ENTRIES = 1 << 20
_MAX_SMALL = 1 << 16  # bytes of any entry of a record except the data
_READ_BYTES = 1 << 20
# The end of a zip's directory, its zip64 form and locator; an entry of the directory, and an entry's header.
END, END64, LOCATOR = struct.Struct("<IHHHHIIH"), struct.Struct("<IQHHIIQQQQ"), struct.Struct("<IIQI")
CENTRAL, LOCAL = struct.Struct("<IHHHHHHIIIHHHHHII"), struct.Struct("<IHHHHHIIIHH")
_END_AS_TEXT = re.compile(rb"PK\x05\x06.{16}\x00\x00", re.DOTALL)  # without a comment
_MAX_RECORD = 1 << 30
CRC_AT = 16  # position of the CRC in CENTRAL
_MAX32 = 0xFFFFFFFF
# A bit of the external attributes. torch reads no bytes of such an entry, and returns whatever was in memory.
_IS_DIRECTORY = 0x10
_VERSIONS = range(1, 11)  # of the file format: torch 2.13, caffe2/serialize/versions.h
# UTF-8 names, and sizes in a descriptor after the data. Every other flag changes the meaning of the bytes.
_FLAGS = 0x0808

Pread = Callable[[int, int], bytes]
"""A function (first byte, number of bytes) -> bytes; fewer only at the end of the file."""


def pread_of(fd: int) -> Pread:
    """Return a function that reads an open file."""
    return lambda start, nbytes: storage.pread(fd, nbytes, start)


SAVE_AGAIN = (
    "if you trust it, save it again: torch.save(torch.load(FILE, map_location='cpu', weights_only=False), NEW), with torch "
    "1.13 or later"
)


class UnsupportedFile(SourceError):
    """A file seems intact, but contains something that shardkit does not read; no message may call it damaged."""


class ZipEntry(NamedTuple):
    """One entry of the zip; positions count from the zip's first byte."""

    start: int
    nbytes: int
    crc: int
    """CRC-32 of the content; 0 if none is recorded."""
    crc_at: int
    """Position of the CRC-32 in the directory."""


class ZipReader:
    """Reads one zip, of which it keeps both ends in memory."""

    prefix = ""
    """The folder that every entry's name begins with; set by `read_directory`."""

    def __init__(self, pread: Pread, offset: int, length: int, where: str) -> None:
        self._source, self.offset, self.length, self.where = pread, offset, length, where
        if length < END.size:
            self.refuse(f"it has {length} bytes, too few for a record")
        self._head = self._pread(0, min(length, _WINDOW))
        tail = max(length - _WINDOW, 0)
        self._tail_at = tail
        self._tail = self._pread(tail, length - tail) if tail else self._head

    def refuse(self, reason: str) -> NoReturn:
        """Raise SourceError."""
        raise SourceError(f"{self.where}: {reason}")

    def read(self, start: int, nbytes: int) -> bytes:
        """Return bytes of the zip; refuse a range that exceeds it."""
        if start < 0 or nbytes < 0 or start + nbytes > self.length:
            self.refuse(f"it points at bytes {start} to {start + nbytes} of {self.length}")
        if start + nbytes <= len(self._head):
            return self._head[start : start + nbytes]
        if start >= self._tail_at:
            return self._tail[start - self._tail_at : start - self._tail_at + nbytes]
        return self._pread(start, nbytes)

    def content(self, name: str, entry: ZipEntry, limit: int = _MAX_SMALL) -> bytes:
        """Return the bytes of an entry, at most `limit`, after checking their CRC-32 if one is recorded."""
        if entry.nbytes > limit:
            self.refuse(f"its entry {name} has {entry.nbytes} bytes, more than any that torch writes")
        data = self.read(entry.start, entry.nbytes)
        if entry.crc:
            self._compare(name, entry, crc32(data))
        return data

    def check_version(self, data: bytes) -> None:
        """Refuse a file format that torch does not know; `data` is the entry `version`."""
        text = data.strip()
        if not (len(text) <= 4 and text.isdigit() and int(text) in _VERSIONS):
            self.refuse(f"its format has version {escape(repr(data[:20]))}, which is not one of torch's")

    def check_crc(self, name: str, entry: ZipEntry) -> None:
        """Read an entry of any size in pieces and compare its CRC-32. Not for entries without a recorded one (0)."""
        crc, stop = 0, entry.start + entry.nbytes
        for start in range(entry.start, stop, _READ_BYTES):
            crc = crc32(self._pread(start, min(_READ_BYTES, stop - start)), crc)
        self._compare(name, entry, crc)

    def _compare(self, name: str, entry: ZipEntry, crc: int) -> None:
        if crc != entry.crc:
            raise IntegrityError(
                f"{self.where}: entry {name} is damaged: recorded CRC-32 {entry.crc:08x}, found {crc:08x}",
                hint="use another copy of the checkpoint",
            )

    def _pread(self, start: int, nbytes: int) -> bytes:
        pieces, offset = [], self.offset + start
        while nbytes:
            try:
                piece = self._source(offset, nbytes)
            except OSError as error:
                raise ResourceError(f"{self.where}: reading at byte {offset}: {error.strerror}") from None
            if not piece:
                self.refuse(f"the file ends at byte {offset}, inside it")
            pieces.append(piece)
            offset, nbytes = offset + len(piece), nbytes - len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def read_directory(
    reader: ZipReader, is_known: Callable[[str], bool] = lambda _: True, *, max_entries: int = _MAX_ENTRIES
) -> dict[str, ZipEntry]:
    """Check all entries of a zip, and return them by name, without the folder that they have in common.

    Args:
        reader: of the zip; its `prefix` is set to the folder.
        is_known: returns whether an entry may have this name.
        max_entries: a zip with more entries is refused.

    Raises:
        SourceError: damaged, cut short, or with entries that are compressed or encrypted.
    """
    count, start, stop = _find_directory(reader)
    if not 0 < count <= max_entries:
        reader.refuse(f"it has {count} entries")
    if stop - start > _MAX_DIRECTORY:
        reader.refuse(f"its directory has {stop - start} bytes, more than any that torch writes")
    directory = reader.read(start, stop - start)
    entries: dict[str, ZipEntry] = {}
    prefix, pos, free = None, 0, 0
    for _ in range(count):
        name, header_at, entry, pos = _parse_entry(reader, directory, pos)
        top, _, rest = name.partition(b"/")
        short = rest.decode("ascii", "replace")
        if not is_known(short) or short in entries or (prefix is not None and top != prefix):
            reader.refuse(f"entry {escape(name.decode('utf-8', 'replace'))!r} is unknown or given twice")
        prefix, reader.prefix = top, top.decode("utf-8", "replace")
        if header_at < free:
            reader.refuse(f"entry {escape(short)} overlaps the one before")
        entry = _locate_entry(reader, name, header_at, entry._replace(crc_at=start + entry.crc_at))
        free = entry.start + entry.nbytes
        if free > start:
            reader.refuse(f"entry {escape(short)} reaches into the directory")
        entries[short] = entry
    if pos != len(directory):
        reader.refuse("its directory is longer than its entries")
    return entries


def record_length(fd: int, base: int, size: int, name: str) -> int:
    """Return the length in bytes of the record at byte `base`.

    The record ends at the first end record of a zip for which its directory can be read.

    Raises:
        SourceError: no such end is found.
    """
    window = b""
    for start in range(base, min(size, base + _MAX_RECORD), _READ_BYTES):
        window = window[-END.size :] + read_exactly(fd, start, min(_READ_BYTES, size - start), name)
        at = start + min(_READ_BYTES, size - start) - len(window)
        for match in _END_AS_TEXT.finditer(window):
            length = at + match.end() - base
            with suppress(SourceError):
                read_directory(ZipReader(pread_of(fd), base, length, escape(name)))
                return length
    raise SourceError(
        f"{escape(name)}: begins with a record of torch.save that has no end: not a safetensors file",
        hint=DOWNLOAD_AGAIN,
    )


def _find_directory(reader: ZipReader) -> tuple[int, int, int]:
    """Return (number of entries, start, stop) of the central directory."""
    end_at = reader.length - END.size
    record = reader.read(end_at, END.size)
    signature, disk, first_disk, here, count, nbytes, start, comment = END.unpack(record)
    if signature != 0x06054B50 or comment:
        reader.refuse("it does not end like a torch.save record: cut short, or compressed as a whole")
    stop = end_at
    if end_at >= LOCATOR.size + END64.size:
        locator_at = end_at - LOCATOR.size
        signature, disk64, end64_at, disks = LOCATOR.unpack(reader.read(locator_at, LOCATOR.size))
        if signature == 0x07064B50:
            stop = locator_at - END64.size
            values = END64.unpack(reader.read(stop, END64.size))
            if disk64 or disks != 1 or end64_at != stop or values[0] != 0x06064B50 or values[1] != 44:
                reader.refuse("its zip64 end record is not where it should be")
            disk, first_disk, here, count, nbytes, start = values[4:]
    if disk or first_disk or here != count or start + nbytes != stop:
        reader.refuse("its directory is not where its end record says")
    return count, start, stop


def _parse_entry(reader: ZipReader, directory: bytes, pos: int) -> tuple[bytes, int, ZipEntry, int]:
    """Parse the directory's entry at `pos`; return (name, position of its header, entry, `pos` of the next entry)."""
    if pos + CENTRAL.size > len(directory):
        reader.refuse("its directory is cut short")
    fields = CENTRAL.unpack_from(directory, pos)
    flags, method, crc, packed, nbytes, len_name, len_extra, len_comment = (*fields[3:5], *fields[7:13])
    header_at = fields[16]
    middle = pos + CENTRAL.size + len_name
    stop = middle + len_extra + len_comment
    if fields[0] != 0x02014B50 or stop > len(directory):
        reader.refuse("its directory is damaged")
    name = directory[pos + CENTRAL.size : middle]
    nbytes, packed, header_at = _wide_values(
        reader, directory[middle : middle + len_extra], nbytes, packed, header_at
    )
    if method or packed != nbytes or flags & ~_FLAGS:
        message = f"entry {escape(name.decode('utf-8', 'replace'))!r} is compressed or encrypted"
        local = LOCAL.unpack(reader.read(header_at, LOCAL.size))
        if (
            method and local[0] == 0x04034B50 and local[2:4] == (flags, method)
        ):  # no damage: both headers have it
            raise UnsupportedFile(f"{reader.where}: {message}", hint=SAVE_AGAIN)
        reader.refuse(message)
    if fields[13] or fields[15] & _IS_DIRECTORY:
        reader.refuse(f"entry {escape(name.decode('utf-8', 'replace'))!r} is on another disk, or a directory")
    return name, header_at, ZipEntry(0, nbytes, crc, pos + CRC_AT), stop


def _wide_values(reader: ZipReader, extra: bytes, *values: int) -> list[int]:
    """Return the values; those that do not fit into 32 bits are taken from the zip64 extra field."""
    wide = b""
    while len(extra) >= 4:
        kind, size = struct.unpack_from("<HH", extra)
        if kind == 1:
            wide = extra[4 : 4 + size]
        extra = extra[4 + size :]
    result = []
    for value in values:
        if value == _MAX32:
            if len(wide) < 8:
                reader.refuse("its directory lacks a 64-bit size")
            value, wide = int.from_bytes(wide[:8], "little"), wide[8:]
        result.append(value)
    return result


def _locate_entry(reader: ZipReader, name: bytes, header_at: int, entry: ZipEntry) -> ZipEntry:
    """Return the entry with its first byte, after checking its header, which must agree with the directory."""
    fields = LOCAL.unpack(reader.read(header_at, LOCAL.size))
    local_name = reader.read(header_at + LOCAL.size, fields[9]) if fields[9] == len(name) else b""
    if fields[0] != 0x04034B50 or fields[3] or fields[2] & ~_FLAGS or local_name != name:
        reader.refuse(f"the header of entry {escape(name.decode('utf-8', 'replace'))!r} is damaged")
    start = header_at + LOCAL.size + fields[9] + fields[10]
    if start + entry.nbytes > reader.length:
        reader.refuse(f"entry {escape(name.decode('utf-8', 'replace'))!r} reaches past its end")
    return entry._replace(start=start)


def crc_of_range(fd: int, start: int, nbytes: int, name: str) -> int:
    """Return the CRC-32 of a byte range of an open file, read piece by piece.

    Raises:
        SourceError: the file `name` is shorter.
        ResourceError: the device fails.
    """
    crc, stop = 0, start + nbytes
    for offset in range(start, stop, _READ_BYTES):
        crc = crc32(read_exactly(fd, offset, min(_READ_BYTES, stop - offset), name), crc)
    return crc
