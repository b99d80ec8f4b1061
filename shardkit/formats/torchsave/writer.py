"""Make `torch.save` records: of one tensor, as bytes around a hole, and of plain data.

A record of a tensor is a zip of seven stored entries. Only the data and their CRC-32 differ between tensors;
everything else depends on dtype and shape. So these bytes, the skeleton, are made once for each pair, and no tensor is
ever built. They equal torch's byte for byte, except for the entry in `_SERIALIZATION_ID`. The tests
compare them with `torch.save` under `torch.serialization.skip_data`.

A record of plain data is what DCP calls a byte entry. Its pickle has no memo, so that equal values have
equal bytes; torch's weights-only loader accepts it.

Source: torch 2.13, caffe2/serialize/inline_container.cc and torch/serialization.py (`_save`).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple, TypeGuard

from shardkit.core.dtypes import DType
from shardkit.core.regions import Shape
from shardkit.files.digest import crc32
from shardkit.formats.torchsave.archive import CENTRAL, CRC_AT, END, END64, LOCAL, LOCATOR
from shardkit.formats.torchsave.record import STORAGES

_ALIGNMENT = 64  # torch's storage_alignment; recorded in an entry of its own
_U32_MAX = 0xFFFFFFFF
_UTF8, _DESCRIPTOR = 0x0800, 0x0008  # general purpose flags
_MAX_DEPTH = 8  # of plain data
_INT64 = 1 << 63

Plain = None | bool | int | float | str | list["Plain"] | tuple["Plain", ...] | dict[str, "Plain"]

# torch makes this from a hash of entry names and CRCs, and uses it only to count loads of one file. Here it is constant,
# so that records depend on their content alone; the first twenty digits are those of torch for these names.
_SERIALIZATION_ID = b"1572819951185464302600000000000000000000"
_BEFORE_DATA = (
    (".format_version", b"1"),
    (".storage_alignment", b"%d" % _ALIGNMENT),
    ("byteorder", b"little"),
)
_AFTER_DATA = (("version", b"3\n"), (".data/serialization_id", _SERIALIZATION_ID))

_TYPED_STORAGES = {dtype: name for name, dtype in STORAGES.items()}


class _WrittenEntry(NamedTuple):
    """One entry of the zip, written or about to be written."""

    name: str
    header_at: int
    size: int
    crc: int
    flags: int


@dataclass(frozen=True, slots=True)
class RecordSkeleton:
    """The bytes of a record around its data."""

    prefix: bytes
    """The bytes before the data."""
    prefix_crc: int
    """CRC-32 of `prefix`."""
    data_nbytes: int
    """Bytes of the hole."""
    nbytes: int
    """Bytes of the whole record."""
    _suffix: bytes
    _crc_places: tuple[int, ...]
    """Positions of the data's CRC in the suffix: in the descriptor, if there is one, and in the directory."""

    @property
    def suffix_nbytes(self) -> int:
        """Number of bytes after the hole, which `suffix()` returns."""
        return len(self._suffix)

    def suffix(self, data_crc: int) -> bytes:
        """Return the bytes after the data.

        Args:
            data_crc: CRC-32 of the data, or 0 for "not recorded".
        """
        if data_crc == 0:  # the suffix holds zeros already
            return self._suffix
        out = bytearray(self._suffix)
        for place in self._crc_places:
            out[place : place + 4] = data_crc.to_bytes(4, "little")
        return bytes(out)


@lru_cache(maxsize=4096)
def record_skeleton(
    dtype: DType, shape: Shape, strides: Shape | None = None, storage_offset: int = 0
) -> RecordSkeleton:
    """Return the bytes around the data in the record of a tensor that has its storage to itself.

    Args:
        dtype: of the tensor.
        shape: in elements.
        strides: in elements; None for a contiguous tensor. Only strides of dims of size 1 may differ from that.
        storage_offset: in elements; not 0 only for a tensor without elements.
    """
    num_elements = prod(shape)
    nbytes = num_elements * dtype.itemsize
    head = bytearray()
    strides = _contiguous_strides(shape) if strides is None else strides
    pickle = _pickle_tensor(dtype, shape, strides, storage_offset)
    entries = [_append_entry(head, 0, *entry) for entry in (("data.pkl", pickle), *_BEFORE_DATA)]
    data = _WrittenEntry("archive/data/0", len(head), nbytes, 0, _UTF8 | (_DESCRIPTOR if nbytes else 0))
    head += _local_header(data)
    tail = bytearray(_descriptor(data))
    places = [4] if tail else []
    base = len(head) + nbytes
    entries.append(data)
    entries += [_append_entry(tail, base, *entry) for entry in _AFTER_DATA]
    places.append(len(tail) + sum(len(_directory_entry(entry)) for entry in entries[:4]) + CRC_AT)
    _append_directory(tail, base, entries)
    prefix = bytes(head)
    return RecordSkeleton(prefix, crc32(prefix), nbytes, base + len(tail), bytes(tail), tuple(places))


def bare_skeleton(dtype: DType, shape: Shape) -> RecordSkeleton:
    """Return the skeleton of an entry without a record around its data: no bytes around the hole."""
    nbytes = prod(shape) * dtype.itemsize
    return RecordSkeleton(b"", 0, nbytes, nbytes, b"", ())


def _append_entry(out: bytearray, base: int, name: str, content: bytes) -> _WrittenEntry:
    """Append a whole entry to `out`, whose first byte is byte `base` of the record."""
    flags = _UTF8 | _DESCRIPTOR
    entry = _WrittenEntry(f"archive/{name}", base + len(out), len(content), crc32(content), flags)
    out += _local_header(entry) + content + _descriptor(entry)
    return entry


def _local_header(entry: _WrittenEntry) -> bytes:
    """Return an entry's header, padded so that the content starts at a multiple of the alignment.

    Sizes and CRC are in the descriptor after the content. The padding is an extra field "FB" filled with "Z", as in torch.
    """
    # Of the two sizes in the zip64 field, plain and stored, torch writes 0 for the stored one: the descriptor has it.
    zip64 = _zip64_field(entry, stored_size=0)
    padding = -(entry.header_at + LOCAL.size + len(entry.name) + len(zip64) + 4) % _ALIGNMENT
    extra = zip64 + b"FB" + struct.pack("<H", padding) + b"Z" * padding
    fixed = (0x04034B50, 0, entry.flags, 0, 0, 0, 0, 0, 0, len(entry.name), len(extra))
    return LOCAL.pack(*fixed) + entry.name.encode() + extra


def _zip64_field(entry: _WrittenEntry, stored_size: int) -> bytes:
    """Return the extra field for sizes and an offset that do not fit into 32 bits; torch writes it into both headers.

    Args:
        entry: its plain size comes first in the field.
        stored_size: the size in the zip, which comes second.
    """
    values = [entry.size, stored_size] if entry.size >= _U32_MAX else []
    values += [entry.header_at] if entry.header_at >= _U32_MAX else []
    return struct.pack(f"<HH{len(values)}Q", 1, 8 * len(values), *values) if values else b""


def _descriptor(entry: _WrittenEntry) -> bytes:
    """Return the data descriptor, which follows an entry's content and has its CRC and sizes; empty without the flag."""
    if not entry.flags & _DESCRIPTOR:
        return b""
    sizes = "QQ" if _zip64_field(entry, entry.size) else "II"
    return struct.pack("<II" + sizes, 0x08074B50, entry.crc, entry.size, entry.size)


def _append_directory(out: bytearray, base: int, entries: list[_WrittenEntry]) -> None:
    start = base + len(out)
    for entry in entries:
        out += _directory_entry(entry)
    end = base + len(out)
    count = len(entries)
    zip64_end = (0x06064B50, 44, 0x031E, 0x002D, 0, 0, count, count, end - start, start)
    out += END64.pack(*zip64_end)
    out += LOCATOR.pack(0x07064B50, 0, end, 1)
    out += END.pack(0x06054B50, 0, 0, count, count, end - start, min(start, _U32_MAX), 0)


def _directory_entry(entry: _WrittenEntry) -> bytes:
    extra = _zip64_field(entry, entry.size)
    size, offset = min(entry.size, _U32_MAX), min(entry.header_at, _U32_MAX)
    fixed = (0x02014B50, 0, 0, entry.flags, 0, 0, 0, entry.crc, size, size, len(entry.name), len(extra))
    return CENTRAL.pack(*fixed, 0, 0, 0, 0, offset) + entry.name.encode() + extra


class _Pickler:
    """Writes the protocol 2 opcodes of a tensor's `data.pkl`, and memoises them as pickle does."""

    def __init__(self) -> None:
        self.out = bytearray(b"\x80\x02")
        self._memo = 0

    def put(self, opcodes: bytes) -> None:
        """Append opcodes, and one that adds their result to the memo."""
        self.out += opcodes + b"q" + bytes([self._memo])
        self._memo += 1

    def text(self, value: str) -> None:
        self.put(b"X" + struct.pack("<I", len(value)) + value.encode())

    def attribute(self, module: str, name: str) -> None:
        self.put(b"c" + f"{module}\n{name}\n".encode())

    def integer(self, value: int) -> None:
        self.out += pickle_int(value)

    def int_tuple(self, values: Shape) -> None:
        if not values:
            self.out += b")"
            return
        self.out += b"(" if len(values) > 3 else b""
        for value in values:
            self.integer(value)
        self.put((b"\x85", b"\x86", b"\x87")[len(values) - 1] if len(values) <= 3 else b"t")


def pickle_int(value: int) -> bytes:
    """Return the opcodes of a non-negative int below 2^63, as pickle writes them in protocol 2 and later."""
    if value < 256:
        return bytes((0x4B, value))
    if value < 65536:
        return struct.pack("<BH", 0x4D, value)
    if value < 1 << 31:
        return struct.pack("<Bi", 0x4A, value)
    digits = value.to_bytes(value.bit_length() // 8 + 1, "little")
    return bytes((0x8A, len(digits))) + digits


def _pickle_tensor(dtype: DType, shape: Shape, strides: Shape, storage_offset: int) -> bytes:
    """Return the `data.pkl` of a CPU tensor that has its storage to itself.

    A dtype without a storage class of its own uses `_rebuild_tensor_v3`, whose storage counts bytes.

    Source: torch 2.13, torch._tensor.Tensor._reduce_ex_internal.
    """
    storage, num_elements = _TYPED_STORAGES.get(dtype.name), prod(shape)
    pickler = _Pickler()
    pickler.attribute("torch._utils", "_rebuild_tensor_v2" if storage else "_rebuild_tensor_v3")
    pickler.out += b"(("
    pickler.text("storage")
    pickler.attribute(*(("torch", storage) if storage else ("torch.storage", "UntypedStorage")))
    pickler.text("0")
    pickler.text("cpu")
    pickler.integer(num_elements if storage else num_elements * dtype.itemsize)
    pickler.put(b"t")
    pickler.out += b"Q"
    pickler.integer(storage_offset)
    pickler.int_tuple(shape)
    pickler.int_tuple(strides)
    pickler.out += b"\x89"
    pickler.attribute("collections", "OrderedDict")
    pickler.put(b")R")
    if not storage:
        pickler.attribute("torch", dtype.name)
    pickler.put(b"t")
    pickler.put(b"R")
    return bytes(pickler.out) + b"."


def _contiguous_strides(shape: Shape) -> Shape:
    """Return the strides of a contiguous tensor in elements; like torch, count a dim of size 0 as 1."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def pickle_record(pickle: bytes) -> bytes:
    """Return the record of an object without tensors.

    Args:
        pickle: the object's pickle, which becomes `data.pkl`.
    """
    out = bytearray()
    contents = (("data.pkl", pickle), *_BEFORE_DATA, *_AFTER_DATA)
    entries = [_append_entry(out, 0, *entry) for entry in contents]
    _append_directory(out, 0, entries)
    return bytes(out)


def is_plain(value: object, depth: int = 0) -> TypeGuard[Plain]:
    """True for None, bools, numbers of 64 bits, text, and for lists, tuples and dicts of them.

    False if they are nested more than 8 levels deep.
    """
    if type(value) is int:
        return -_INT64 <= value < _INT64
    if value is None or type(value) in (bool, float, str):
        return True
    if depth == _MAX_DEPTH:
        return False
    if isinstance(value, dict):
        return all(type(key) is str and is_plain(item, depth + 1) for key, item in value.items())
    return isinstance(value, (list, tuple)) and all(is_plain(item, depth + 1) for item in value)


def plain_record(value: Plain) -> bytes:
    """Return the record of a plain value."""
    out = bytearray(b"\x80\x02")
    _append(out, value)
    out += b"."
    return pickle_record(bytes(out))


def _append(out: bytearray, value: Plain) -> None:
    """Append the opcodes of a value."""
    if value is None:
        out += b"N"
    elif isinstance(value, bool):
        out += b"\x88" if value else b"\x89"
    elif isinstance(value, int):
        _append_int(out, value)
    elif isinstance(value, float):
        out += b"G" + struct.pack(">d", value)
    elif isinstance(value, str):
        text = value.encode()
        out += b"X" + struct.pack("<I", len(text)) + text
    elif isinstance(value, dict):
        out += b"}("
        for key, item in value.items():
            _append(out, key)
            _append(out, item)
        out += b"u"
    else:
        out += b"](" if isinstance(value, list) else b"("
        for item in value:
            _append(out, item)
        out += b"e" if isinstance(value, list) else b"t"


def _append_int(out: bytearray, value: int) -> None:
    if -(1 << 31) <= value < 1 << 31:
        out += b"J" + struct.pack("<i", value)
    else:
        digits = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        out += b"\x8a" + bytes((len(digits),)) + digits
