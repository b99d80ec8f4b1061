"""Read the description of one `torch.save` record: where its tensor's bytes lie, and as what.

A record is a zip with stored entries, somewhere inside a `.distcp`. Only its directory and the small
entries are read (two `pread` calls for the records that torch writes), never the tensor, unless its
CRC-32 is to be checked. Everything that would make the raw bytes mean something else is refused:
compression, big-endian data, conjugated or negated views, classes of tensors that are not plain.

Source: torch 2.2 and 2.13, caffe2/serialize/inline_container.cc and torch/_utils.py; APPNOTE.TXT 6.3.9.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, NoReturn

from shardkit.core.dtypes import DType
from shardkit.core.regions import Shape
from shardkit.core.text import escape
from shardkit.errors import IntegrityError, ResourceError, SourceError
from shardkit.formats.tensor_pickle import StoredTensor, parse_tensor
from shardkit.transfer.digest import crc32

_NAMES = frozenset(
    {"data.pkl", "byteorder", "data/0", "version", ".data/serialization_id"}
    | {".format_version", ".storage_alignment"}  # not in torch 2.2
)
_DATA = "data/0"
_WINDOW = 4096  # bytes read at each end: the directory and the small entries of a usual record
_MAX_SMALL = 1 << 16  # bytes of any entry but the data
_READ_BYTES = 1 << 20
_END, _END64, _LOCATOR = struct.Struct("<IHHHHIIH"), struct.Struct("<IQHHIIQQQQ"), struct.Struct("<IIQI")
_CENTRAL, _LOCAL = struct.Struct("<IHHHHHHIIIHHHHHII"), struct.Struct("<IHHHHHIIIHH")
_MAX16, _MAX32 = 0xFFFF, 0xFFFFFFFF
_FLAGS = 0x0808  # UTF-8 names, sizes in a descriptor behind the data; all others change what the bytes are


class _Entry(NamedTuple):
    """One entry of the zip; positions count from the record's first byte."""

    start: int
    nbytes: int
    crc: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """A stored tensor."""

    dtype: DType
    shape: Shape
    """Elements."""
    stride: Shape
    """Elements; a dense tensor that was not contiguous is stored as it lay."""
    storage_offset: int
    """Elements of the storage before the tensor's first."""
    data_start: int
    """First byte of the storage, counted from the start of the file."""
    data_nbytes: int
    """Bytes of the storage."""
    crc32: int | None
    """CRC-32 of the storage as recorded, None where it was not (0 on data that is not empty)."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor itself."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def start(self) -> int:
        """First byte of the tensor in the file."""
        return self.data_start + self.storage_offset * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """True where the tensor's elements lie row-major without gaps."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return 0 in self.shape
            expected *= size
        return True


def read_record(
    fd: int, offset: int, length: int, *, where: str = "record", check_crc: bool = False
) -> TensorRecord:
    """Read the description of the record at a byte range of a file.

    Args:
        fd: the open file; read with `pread`.
        offset: the record's first byte.
        length: its bytes.
        where: what to call the file in messages, escaped.
        check_crc: also read the data and compare its CRC-32, where one was recorded.

    Raises:
        SourceError: damaged, cut short, or a tensor that raw bytes alone do not give.
        IntegrityError: an entry's CRC-32 is not that of its bytes.
        ResourceError: the device fails.
    """
    reader = _Reader(fd, offset, length, f"{where}, record at byte {offset}")
    entries = _read_directory(reader)
    for name in ("data.pkl", _DATA):
        if name not in entries:
            reader.refuse(f"it has no entry {name}: not one tensor")
    small = {name: reader.content(name, entry) for name, entry in entries.items() if name != _DATA}
    if small.get("byteorder", b"little") != b"little":
        reader.refuse(
            f"its byte order is {escape(small['byteorder'].decode('ascii', 'replace'))!r}, not little"
        )
    tensor = parse_tensor(small["data.pkl"], f"{reader.where}, data.pkl")
    data = entries[_DATA]
    _check_storage(reader, tensor, data)
    if check_crc and data.crc and data.nbytes:
        reader.check_crc(_DATA, data)
    return TensorRecord(
        dtype=tensor.dtype,
        shape=tensor.shape,
        stride=tensor.stride,
        storage_offset=tensor.storage_offset,
        data_start=offset + data.start,
        data_nbytes=data.nbytes,
        crc32=data.crc if data.crc or not data.nbytes else None,
    )


class _Reader:
    """Bytes of one record, both ends of which are read at once."""

    def __init__(self, fd: int, offset: int, length: int, where: str) -> None:
        self.fd, self.offset, self.length, self.where = fd, offset, length, where
        if length < _END.size:
            self.refuse(f"it has {length} bytes, too few for a record")
        self._head = self._pread(0, min(length, _WINDOW))
        tail = max(length - _WINDOW, 0)
        self._tail_at = tail
        self._tail = self._pread(tail, length - tail) if tail else self._head

    def refuse(self, reason: str) -> NoReturn:
        """Raise SourceError."""
        raise SourceError(f"{self.where}: {reason}")

    def read(self, start: int, nbytes: int) -> bytes:
        """Return bytes of the record; refuse a range that leaves it."""
        if start < 0 or nbytes < 0 or start + nbytes > self.length:
            self.refuse(f"it points at bytes {start} to {start + nbytes} of {self.length}")
        if start + nbytes <= len(self._head):
            return self._head[start : start + nbytes]
        if start >= self._tail_at:
            return self._tail[start - self._tail_at : start - self._tail_at + nbytes]
        return self._pread(start, nbytes)

    def content(self, name: str, entry: _Entry) -> bytes:
        """Return a small entry's bytes; their CRC-32 is right."""
        if entry.nbytes > _MAX_SMALL:
            self.refuse(f"its entry {name} has {entry.nbytes} bytes, more than any that torch writes")
        data = self.read(entry.start, entry.nbytes)
        if entry.crc:
            self._compare(name, entry, crc32(data))
        return data

    def check_crc(self, name: str, entry: _Entry) -> None:
        """Read a large entry and compare its CRC-32."""
        crc, stop = 0, entry.start + entry.nbytes
        for start in range(entry.start, stop, _READ_BYTES):
            crc = crc32(self._pread(start, min(_READ_BYTES, stop - start)), crc)
        self._compare(name, entry, crc)

    def _compare(self, name: str, entry: _Entry, found: int) -> None:
        if found != entry.crc:
            raise IntegrityError(
                f"{self.where}: entry {name} is damaged: recorded CRC-32 {entry.crc:08x}, found {found:08x}",
                hint="use another copy of the checkpoint",
            )

    def _pread(self, start: int, nbytes: int) -> bytes:
        pieces, at = [], self.offset + start
        while nbytes:
            try:
                piece = os.pread(self.fd, nbytes, at)
            except OSError as error:
                raise ResourceError(f"{self.where}: reading at byte {at}: {error.strerror}") from None
            if not piece:
                self.refuse(f"the file ends at byte {at}, inside it")
            pieces.append(piece)
            at, nbytes = at + len(piece), nbytes - len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _read_directory(reader: _Reader) -> dict[str, _Entry]:
    """Return the entries by their name without the common first part; all of them checked."""
    count, at, stop = _find_directory(reader)
    if not 0 < count <= len(_NAMES):
        reader.refuse(f"it has {count} entries")
    directory = reader.read(at, stop - at)
    entries: dict[str, _Entry] = {}
    prefix, pos, free = None, 0, 0
    for _ in range(count):
        name, header_at, entry, pos = _parse_entry(reader, directory, pos)
        top, _, rest = name.partition(b"/")
        short = rest.decode("ascii", "replace")
        if short not in _NAMES or short in entries or (prefix is not None and top != prefix):
            reader.refuse(f"entry {escape(name.decode('utf-8', 'replace'))!r} is unknown or given twice")
        prefix = top
        if header_at < free:
            reader.refuse(f"entry {short} overlaps the one before")
        entry = _locate(reader, name, header_at, entry)
        free = entry.start + entry.nbytes
        if free > at:
            reader.refuse(f"entry {short} reaches into the directory")
        entries[short] = entry
    if pos != len(directory):
        reader.refuse("its directory is longer than its entries")
    return entries


def _find_directory(reader: _Reader) -> tuple[int, int, int]:
    """Return (number of entries, first byte, byte after the last) of the central directory."""
    end_at = reader.length - _END.size
    signature, disk, first_disk, here, count, nbytes, at, comment = _END.unpack(
        reader.read(end_at, _END.size)
    )
    if signature != 0x06054B50 or comment:
        reader.refuse("it does not end like a torch.save record: cut short, or compressed as a whole")
    stop = end_at
    if end_at >= _LOCATOR.size + _END64.size:
        locator_at = end_at - _LOCATOR.size
        signature, disk64, end64_at, disks = _LOCATOR.unpack(reader.read(locator_at, _LOCATOR.size))
        if signature == 0x07064B50:
            stop = locator_at - _END64.size
            values = _END64.unpack(reader.read(stop, _END64.size))
            if disk64 or disks != 1 or end64_at != stop or values[0] != 0x06064B50 or values[1] != 44:
                reader.refuse("its zip64 end record is not where it should be")
            disk, first_disk, here, count, nbytes, at = values[4:]
    if disk or first_disk or here != count or at + nbytes != stop:
        reader.refuse("its directory is not where its end record says")
    return count, at, stop


def _parse_entry(reader: _Reader, directory: bytes, pos: int) -> tuple[bytes, int, _Entry, int]:
    """Return (name, position of the local header, entry, position of the next) at `pos`."""
    if pos + _CENTRAL.size > len(directory):
        reader.refuse("its directory is cut short")
    fields = _CENTRAL.unpack_from(directory, pos)
    flags, method, crc, packed, nbytes, len_name, len_extra, len_comment = (*fields[3:5], *fields[7:13])
    header_at = fields[16]
    middle = pos + _CENTRAL.size + len_name
    stop = middle + len_extra + len_comment
    if fields[0] != 0x02014B50 or stop > len(directory):
        reader.refuse("its directory is damaged")
    name = directory[pos + _CENTRAL.size : middle]
    nbytes, packed, header_at = _wide(
        reader, directory[middle : middle + len_extra], nbytes, packed, header_at
    )
    if method or packed != nbytes or flags & ~_FLAGS:
        reader.refuse(f"entry {escape(name.decode('utf-8', 'replace'))!r} is compressed or encrypted")
    return name, header_at, _Entry(0, nbytes, crc), stop


def _wide(reader: _Reader, extra: bytes, *values: int) -> list[int]:
    """Replace values that did not fit into 32 bits by those in the zip64 extra field."""
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


def _locate(reader: _Reader, name: bytes, header_at: int, entry: _Entry) -> _Entry:
    """Return the entry with its place, taken from its own header, which must agree."""
    fields = _LOCAL.unpack(reader.read(header_at, _LOCAL.size))
    found = reader.read(header_at + _LOCAL.size, fields[9]) if fields[9] == len(name) else b""
    if fields[0] != 0x04034B50 or fields[3] or fields[2] & ~_FLAGS or found != name:
        reader.refuse(f"the header of entry {escape(name.decode('utf-8', 'replace'))!r} is damaged")
    start = header_at + _LOCAL.size + fields[9] + fields[10]
    if start + entry.nbytes > reader.length:
        reader.refuse(f"entry {escape(name.decode('utf-8', 'replace'))!r} reaches past its end")
    return entry._replace(start=start)


def _check_storage(reader: _Reader, tensor: StoredTensor, data: _Entry) -> None:
    """The view must lie inside the storage, and the storage must be the entry."""
    if tensor.storage_nbytes != data.nbytes:
        reader.refuse(f"its data has {data.nbytes} bytes, its storage {tensor.storage_nbytes}")
    itemsize = tensor.dtype.itemsize
    if 0 in tensor.shape:
        last = tensor.storage_offset
    else:
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride, strict=True))
        last = tensor.storage_offset + reach + 1
    if last * itemsize > data.nbytes:
        reader.refuse(f"its tensor reaches to byte {last * itemsize} of a storage of {data.nbytes}")
