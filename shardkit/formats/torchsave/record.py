"""Read the description of one `torch.save` record: where its tensor's bytes lie, and as what.

A record is a zip with stored entries, somewhere inside a `.distcp`. Only its directory and the small
entries are read (two `pread` calls for the records that torch writes), never the tensor, unless its
CRC-32 is to be checked. Everything that would make the raw bytes mean something else is refused:
compression, big-endian data, conjugated or negated views, classes of tensors that are not plain.

Source: torch 2.2 and 2.13, caffe2/serialize/inline_container.cc and torch/_utils.py; APPNOTE.TXT 6.3.9.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from shardkit.core.dtypes import DType
from shardkit.core.regions import Shape
from shardkit.core.text import escape
from shardkit.files import storage
from shardkit.formats.torchsave.archive import Entry, Pread, ZipReader, read_directory
from shardkit.formats.torchsave.tensors import parse_tensor

_NAMES = frozenset(
    {"data.pkl", "byteorder", "data/0", "version", ".data/serialization_id"}
    | {".format_version", ".storage_alignment"}  # not in torch 2.2
)
_DATA = "data/0"


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
    def reach(self) -> int:
        """Bytes of the storage up to the tensor's last."""
        if 0 in self.shape:
            return self.storage_offset * self.dtype.itemsize
        steps = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return (self.storage_offset + steps + 1) * self.dtype.itemsize

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
    return read_entries(
        lambda start, nbytes: storage.pread(fd, nbytes, start),
        offset,
        length,
        where=where,
        check_crc=check_crc,
    )[0]


def read_entries(
    pread: Pread, offset: int, length: int, *, where: str = "record", check_crc: bool = False
) -> tuple[TensorRecord, dict[str, Entry]]:
    """Read the description of a record from anything that gives bytes; also return its entries.

    Args:
        pread: (first byte, most bytes) -> bytes; fewer only at the end.
        offset, length, where, check_crc: as for `read_record`, which says what is raised.
    """
    reader = ZipReader(pread, offset, length, f"{where}, record at byte {offset}")
    entries = read_directory(reader, _NAMES.__contains__, max_entries=len(_NAMES))
    for name in ("data.pkl", _DATA):
        if name not in entries:
            reader.refuse(f"it has no entry {name}: not one tensor")
    small = {name: reader.content(name, entry) for name, entry in entries.items() if name != _DATA}
    if small.get("byteorder", b"little") != b"little":
        reader.refuse(
            f"its byte order is {escape(small['byteorder'].decode('ascii', 'replace'))!r}, not little"
        )
    reader.check_version(small.get("version", b"3"))
    tensor = parse_tensor(small["data.pkl"], f"{reader.where}, data.pkl")
    data = entries[_DATA]
    record = TensorRecord(
        dtype=tensor.dtype,
        shape=tensor.shape,
        stride=tensor.stride,
        storage_offset=tensor.storage_offset,
        data_start=offset + data.start,
        data_nbytes=data.nbytes,
        crc32=data.crc if data.crc or not data.nbytes else None,
    )
    if tensor.storage_nbytes != data.nbytes:
        reader.refuse(f"its data has {data.nbytes} bytes, its storage {tensor.storage_nbytes}")
    if record.reach > data.nbytes:
        reader.refuse(f"its tensor reaches to byte {record.reach} of a storage of {data.nbytes}")
    if check_crc and data.crc and data.nbytes:
        reader.check_crc(_DATA, data)
    return record, entries
