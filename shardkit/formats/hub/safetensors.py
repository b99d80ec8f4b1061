"""The header of a safetensors file, checked in full: every byte of the file is described exactly once.

    8 bytes   length n of the header, unsigned, little-endian
    n bytes   JSON: {name: {"dtype", "shape", "data_offsets": [start, stop]}, "__metadata__": {str: str}}
    the rest  the data; offsets count from here, and tile it without a gap

Source: the safetensors README, section "Format", and safetensors 0.8, safetensors/src/tensor.rs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple
from zlib import crc32

from shardkit.core.catalog import FileStamp
from shardkit.core.dtypes import BY_SAFETENSORS, DType
from shardkit.core.regions import Shape
from shardkit.core.text import escape, suggestion
from shardkit.errors import SourceError
from shardkit.files.strict_json import (
    DOWNLOAD_AGAIN,
    is_unicode,
    open_regular,
    parse_object,
    read_exactly,
    stamp_of,
)

# safetensors 0.8, tensor.rs: MAX_HEADER_SIZE
MAX_HEADER_BYTES = 100_000_000

LENGTH_BYTES = 8
"""Bytes before the header's text, which say how long it is."""

_FIELDS = {"dtype", "shape", "data_offsets"}
_LIMIT = 2**63  # torch counts elements and bytes in int64


class StoredTensor(NamedTuple):
    """A tensor and where its bytes lie."""

    fqn: str
    dtype: DType
    shape: Shape
    """As torch counts elements: float4_e2m1fn_x2 has half of the header's last dim."""
    start: int
    """First byte, counted from the start of the file."""
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsHeader:
    """What a safetensors file holds; no tensor data."""

    tensors: tuple[StoredTensor, ...]
    """In the order of their bytes in the file."""
    metadata: dict[str, str]
    """`__metadata__`, empty where there is none."""
    size: int
    """Bytes of the whole file."""
    crc32: int
    """CRC-32 of the JSON text."""
    stamp: FileStamp | None
    """The file's, when the header was read; None where the file is not on this machine."""


def read_header(path: str, name: str) -> SafetensorsHeader:
    """Read and check the header of a safetensors file.

    Args:
        path: where the file is.
        name: how to call it in messages.

    Returns:
        Header whose tensors tile the data exactly.

    Raises:
        SourceError: not a regular file, or any rule of the format is broken; names file and tensors,
            all problems of one kind at once.
        ResourceError: the file may not be read.

    Source: safetensors 0.8, safetensors/src/tensor.rs, SafeTensors::read_metadata and Metadata::validate.
    """
    with open_regular(path, name) as (fd, size):
        length = text_length(read_exactly(fd, 0, min(size, LENGTH_BYTES), name), size, name)
        text, stamp = read_exactly(fd, LENGTH_BYTES, length, name), stamp_of(fd)
    return check_header(text, size, name, stamp)


def text_length(start: bytes, size: int, name: str) -> int:
    """Return the bytes of a header's text.

    Args:
        start: the file's first LENGTH_BYTES, fewer where it has no more.
        size: bytes of the whole file.
        name: how to call it in messages.

    Raises:
        SourceError: the file has no room for the header, or the header is larger than the format allows.
    """
    if size < LENGTH_BYTES:
        raise _damaged(name, f"expected at least {LENGTH_BYTES} bytes, found {size}")
    length = int.from_bytes(start, "little")
    if length > MAX_HEADER_BYTES:
        raise _damaged(
            name, f"a header of {length} bytes, the format allows {MAX_HEADER_BYTES}: not a safetensors file"
        )
    if length > size - LENGTH_BYTES:
        raise _damaged(
            name, f"truncated: a header of {length} bytes, the file has {size - LENGTH_BYTES} for it"
        )
    return length


def check_header(text: bytes, size: int, name: str, stamp: FileStamp | None = None) -> SafetensorsHeader:
    """Check a header, wherever its text came from.

    Args:
        text: the JSON, `text_length` bytes.
        size: bytes of the whole file.
        name: how to call it in messages.
        stamp: of the file on this machine.

    Raises:
        SourceError: as `read_header`.
    """
    if not text.startswith(b"{"):
        raise _damaged(name, "the header does not begin with '{': not a safetensors file")
    header = parse_object(text, name)
    metadata = _check_metadata(header.pop("__metadata__", {}), name)
    base = LENGTH_BYTES + len(text)
    tensors = _check_entries(header, base, name)
    _check_tiling(tensors, base, size, name)
    return SafetensorsHeader(tensors=tensors, metadata=metadata, size=size, crc32=crc32(text), stamp=stamp)


def _check_metadata(metadata: object, name: str) -> dict[str, str]:
    if not isinstance(metadata, dict):
        raise _damaged(name, f"__metadata__: expected an object of strings, found {type(metadata).__name__}")
    problems = []
    for key, value in metadata.items():
        if not isinstance(value, str):
            problems.append(f"{escape(key)}: expected a string, found {type(value).__name__}")
        elif not is_unicode(key) or not is_unicode(value):
            problems.append(f"{escape(key)}: a lone surrogate, which is not Unicode text")
    if problems:
        raise SourceError(
            f"{escape(name)}: {len(problems)} of {len(metadata)} entries of __metadata__ are malformed",
            problems=problems,
            hint="__metadata__ maps strings to strings, and no tensor may have that name",
        )
    return metadata


def _check_entries(header: dict[str, object], base: int, name: str) -> tuple[StoredTensor, ...]:
    """Check each tensor by itself and return them in the order of their bytes."""
    tensors, problems = [], []
    for fqn, fields in header.items():
        try:
            tensors.append(_check_entry(fqn, fields, base))
        except ValueError as error:
            problems.append(f"{escape(fqn)}: {error}")
    if problems:
        raise SourceError(
            f"{escape(name)}: {len(problems)} of {len(header)} tensors are described wrongly in the header",
            problems=problems,
            hint=DOWNLOAD_AGAIN,
        )
    # Stable: empty tensors at the same place stay in the header's order.
    return tuple(sorted(tensors, key=lambda tensor: (tensor.start, tensor.start + tensor.nbytes)))


def _check_entry(fqn: str, fields: object, base: int) -> StoredTensor:
    """Return a tensor, or raise ValueError with what is wrong."""
    if not is_unicode(fqn):
        raise ValueError("the name holds a lone surrogate, which is not Unicode text")
    if not isinstance(fields, dict):
        raise ValueError(f"expected an object, found {type(fields).__name__}")
    if fields.keys() != _FIELDS:
        raise ValueError(f"expected the fields {_list(_FIELDS)}, found {_list(fields) or 'none'}")
    shape = _check_integers("shape", fields["shape"])
    offsets = _check_integers("data_offsets", fields["data_offsets"])
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"data_offsets: expected [start, stop], found {list(offsets)}")
    _check_count(shape)
    dtype, shape = _check_dtype(fields["dtype"], shape)
    expected, found = prod(shape) * dtype.itemsize, offsets[1] - offsets[0]
    if expected != found:
        raise ValueError(
            f"{dtype.safetensors} of shape {_show(shape)} takes {expected} bytes, data_offsets give {found}"
        )
    return StoredTensor(fqn, dtype, shape, base + offsets[0], found)


def _check_integers(field: str, value: object) -> tuple[int, ...]:
    # `type` and not isinstance: a bool is an int to Python.
    if not isinstance(value, list) or any(type(item) is not int for item in value):
        raise ValueError(f"{field}: expected a list of integers, found {_show(value)}")
    if any(not 0 <= item < _LIMIT for item in value):
        raise ValueError(f"{field}: expected integers from 0 to 2^63 - 1, found {_show(value)}")
    return tuple(value)


def _check_count(shape: Shape) -> None:
    count = 1
    for size in shape:  # not prod(): a hostile shape has millions of dims, and the product never ends
        count *= size or 1
        if count >= _LIMIT:
            raise ValueError(f"shape: {_show(shape)} has more elements than 63 bits can count")


def _check_dtype(tag: object, shape: Shape) -> tuple[DType, Shape]:
    """Return the dtype, and the shape as torch counts elements."""
    if not isinstance(tag, str):
        raise ValueError(f"dtype: expected a string, found {type(tag).__name__}")
    if tag.startswith("F6_"):
        raise ValueError(f"dtype: {escape(tag)} is six bits wide, torch has no such type")
    dtype = BY_SAFETENSORS.get(tag)
    if dtype is None:
        raise ValueError(f"dtype: {escape(tag)!r} is not known{suggestion(tag, BY_SAFETENSORS)}")
    if tag != "F4":
        return dtype, shape
    # safetensors counts 4-bit values, torch's float4_e2m1fn_x2 pairs of them along the last dim.
    if not shape or shape[-1] % 2:
        raise ValueError(f"shape: {_show(shape)} of F4, torch needs an even last dim")
    return dtype, (*shape[:-1], shape[-1] // 2)


def _check_tiling(tensors: tuple[StoredTensor, ...], base: int, size: int, name: str) -> None:
    problems = list(_tiling_problems(tensors, base, size))
    if not problems:
        return
    stop = max((tensor.start + tensor.nbytes for tensor in tensors), default=base)
    truncated = "truncated: " if stop > size else ""
    raise SourceError(
        f"{escape(name)}: {truncated}the header describes {stop} bytes, the file has {size}"
        if stop != size
        else f"{escape(name)}: tensors do not tile the data",
        problems=problems,
        hint=DOWNLOAD_AGAIN,
    )


def _tiling_problems(tensors: tuple[StoredTensor, ...], base: int, size: int) -> Iterator[str]:
    """Yield every gap, overlap and excess; `base` is the first byte of the data."""
    position, previous = base, "the header"
    for tensor in tensors:
        stop = tensor.start + tensor.nbytes
        place = f"{escape(tensor.fqn)}: bytes {tensor.start} to {stop}"
        if tensor.start > position:
            yield f"{place}, {tensor.start - position} bytes after the end of {previous}"
        elif tensor.start < position:
            yield f"{place} overlap {previous}, which ends at {position}"
        if stop > size:
            yield f"{place}, past the end of the file at {size}"
        if stop >= position:
            position, previous = stop, escape(tensor.fqn)
    if position < size:
        yield f"{size - position} bytes after the end of {previous} belong to no tensor"


def _damaged(name: str, reason: str) -> SourceError:
    return SourceError(f"{escape(name)}: {reason}", hint=DOWNLOAD_AGAIN)


def _list(names: set[str] | dict[str, object]) -> str:
    return ", ".join(sorted(escape(name) for name in names))


def _show(value: object) -> str:
    """Return a value from a header for a message, cut and escaped."""
    if isinstance(value, tuple):
        value = list(value)
    return escape(str(value) if isinstance(value, list) else repr(value))
