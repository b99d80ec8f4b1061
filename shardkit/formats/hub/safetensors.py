"""The safetensors format: read and check headers, and plan the weight files of an output as images with holes.

    8 bytes   length n of the header, unsigned, little-endian
    n bytes   JSON: {name: {"dtype", "shape", "data_offsets": [start, stop]}, "__metadata__": {str: str}}
    the rest  the data; offsets count from here, and tile it without a gap

torch's HuggingFaceStorageWriter writes records of `torch.save` in front of all this, one for each value that is not a
tensor. They are skipped, and the format begins after them.

A header is accepted only if it describes every byte of its file exactly once. The tensors of an output are divided over
files as transformers and huggingface_hub divide them: in order, each into the current file until that would become too
large; a tensor larger than the limit gets a file of its own. Within a file wider elements come first, so that each
tensor starts at a multiple of its element size, because readers use views of the file's bytes.

Source: the safetensors README, section "Format"; safetensors 0.8, safetensors/src/tensor.rs, also `prepare`;
huggingface_hub 2.4, serialization/_base.py, split_state_dict_into_shards_factory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import ClassVar, NamedTuple

from shardkit.core.catalog import FileStamp
from shardkit.core.dtypes import BY_SAFETENSORS, DType
from shardkit.core.regions import Region, Shape, blocks, flat_offset, full_region
from shardkit.core.text import MIB, count, escape, suggestion
from shardkit.errors import SourceError
from shardkit.files import shared_reads
from shardkit.files.digest import crc32
from shardkit.files.shared_reads import HEADER
from shardkit.files.strict_json import (
    DOWNLOAD_AGAIN,
    ZIP,
    is_unicode,
    open_regular,
    parse_object,
    read_exactly,
    refuse_pointer,
    stamp_of,
)
from shardkit.transfer.images import Hole, ImageList, Piece, TensorHoles

# safetensors 0.8, tensor.rs: MAX_HEADER_SIZE
MAX_HEADER_BYTES = 100_000_000

LENGTH_BYTES = 8
"""Number of bytes of the length field before the header's text."""

_METADATA = "__metadata__"
_FIELDS = {"dtype", "shape", "data_offsets"}
_HEADER_ALIGNMENT = 8
_PIECE_BYTES = 64 * MIB  # a larger tensor is several pieces, which several threads may fill
_LIMIT = 2**63  # torch counts elements and bytes in int64


class StoredTensor(NamedTuple):
    """A tensor and the place of its bytes."""

    fqn: str
    dtype: DType
    shape: Shape
    """In torch's elements: for float4_e2m1fn_x2, the last dim is half of that in the header."""
    start: int
    """First byte, counted from the start of the file."""
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsHeader:
    """The parsed header of a safetensors file."""

    tensors: tuple[StoredTensor, ...]
    """In the order of their bytes in the file."""
    metadata: dict[str, str]
    """The header's `__metadata__`, or an empty dict."""
    size: int
    """Bytes of the whole file."""
    crc32: int
    """CRC-32 of the JSON text."""
    stamp: FileStamp | None
    """Stamp of the file when the header was read; None if the file is not on this machine."""
    # The other attributes that a legacy file (`BinFile`) has too.
    notes: tuple[str, ...] = ()
    num_records: int = 0
    """Records of `torch.save` before the tensors."""
    objects: ClassVar[tuple[str, ...]] = ()
    unreadable: ClassVar[Mapping[str, str]] = MappingProxyType({})
    checksums: ClassVar[None] = None


def read_header(path: str, name: str) -> SafetensorsHeader:
    """Read and check the header of a safetensors file.

    Args:
        path: of the file.
        name: of the file in messages.

    Returns:
        A header whose tensors tile the data exactly.

    Raises:
        SourceError: not a regular file, or it breaks a rule of the format; names file and tensors,
            all problems of one kind at once.
        ResourceError: the file may not be read.

    Source: safetensors 0.8, safetensors/src/tensor.rs, SafeTensors::read_metadata and Metadata::validate.
    """
    stamped_text = shared_reads.take(HEADER, path)
    if stamped_text is None:
        with open_regular(path, name) as (fd, size):
            if read_exactly(fd, 0, min(size, len(ZIP)), name) == ZIP:
                return _read_after_records(fd, size, name)
            length = text_length(read_exactly(fd, 0, min(size, LENGTH_BYTES), name), size, name)
            stamped_text = read_exactly(fd, LENGTH_BYTES, length, name), stamp_of(fd)
        shared_reads.note(HEADER, path, *stamped_text)
    text, stamp = stamped_text
    return check_header(text, stamp.size, name, stamp)


def _read_after_records(fd: int, size: int, name: str) -> SafetensorsHeader:
    """Read a header that follows records of `torch.save`; its places are relative to the start of the file."""
    # Imported here, as other files of a Hub model do not need torch.save's format.
    from shardkit.formats.torchsave.archive import record_length

    num_records, base = 0, 0
    while read_exactly(fd, base, min(size - base, len(ZIP)), name) == ZIP:
        base, num_records = base + record_length(fd, base, size, name), num_records + 1
    if base == size:
        raise SourceError(
            f"{escape(name)}: {count(num_records, 'record')} of torch.save and nothing behind: not a safetensors file",
            hint="if torch.save wrote it, give it the ending .bin",
        )
    length = text_length(read_exactly(fd, base, min(size - base, LENGTH_BYTES), name), size - base, name)
    text = read_exactly(fd, base + LENGTH_BYTES, length, name)
    header = check_header(text, size - base, name, stamp_of(fd))
    note = (
        f"{escape(name)} begins with {count(num_records, 'record')} of torch.save, for values that are not tensors: they "
        "are not read, and torch itself cannot open such a file"
    )
    tensors = tuple(tensor._replace(start=base + tensor.start) for tensor in header.tensors)
    return replace(header, tensors=tensors, size=size, notes=(note,), num_records=num_records)


def text_length(start: bytes, size: int, name: str) -> int:
    """Return the number of bytes of a header's text.

    Args:
        start: the first LENGTH_BYTES bytes of the file, or all of a shorter file.
        size: bytes of the whole file.
        name: of the file in messages.

    Raises:
        SourceError: the file has no room for the header, or the header is larger than the format allows.
    """
    if size < LENGTH_BYTES:
        raise _damaged_error(name, f"expected at least {LENGTH_BYTES} bytes, found {size}")
    refuse_pointer(start, name)
    if start.startswith(ZIP):
        raise SourceError(
            f"{escape(name)} begins with a record of torch.save, as torch's HuggingFaceStorageWriter puts before tensors",
            hint="on a disk it is read: download the file",
        )
    length = int.from_bytes(start, "little")
    if length > MAX_HEADER_BYTES:
        raise _damaged_error(
            name, f"a header of {length} bytes, the format allows {MAX_HEADER_BYTES}: not a safetensors file"
        )
    if length > size - LENGTH_BYTES:
        raise _damaged_error(
            name, f"truncated: a header of {length} bytes, the file has {size - LENGTH_BYTES} for it"
        )
    return length


def check_header(text: bytes, size: int, name: str, stamp: FileStamp | None = None) -> SafetensorsHeader:
    """Parse and check the text of a header, which may come from a local file or from the Hub.

    Args:
        text: the JSON, `text_length` bytes.
        size: bytes of the whole file.
        name: of the file in messages.
        stamp: of the file; None if it is not on this machine.

    Raises:
        SourceError: as `read_header`.
    """
    if not text.startswith(b"{"):
        raise _damaged_error(name, "the header does not begin with '{': not a safetensors file")
    header = parse_object(text, name)
    metadata = _check_metadata(header.pop(_METADATA, {}), name)
    base = LENGTH_BYTES + len(text)
    tensors = _check_entries(header, base, name)
    _check_tiling(tensors, base, size, name)
    return SafetensorsHeader(tensors=tensors, metadata=metadata, size=size, crc32=crc32(text), stamp=stamp)


def _check_metadata(metadata: object, name: str) -> dict[str, str]:
    if not isinstance(metadata, dict):
        raise _damaged_error(
            name, f"__metadata__: expected an object of strings, found {type(metadata).__name__}"
        )
    problems = []
    for key, value in metadata.items():
        if not isinstance(value, str):
            problems.append(f"{escape(key)}: expected a string, found {type(value).__name__}")
        elif not is_unicode(key) or not is_unicode(value):
            problems.append(f"{escape(key)}: a lone surrogate, which is not Unicode text")
    SourceError.raise_for(
        problems,
        f"{escape(name)}: {len(problems)} of {len(metadata)} entries of __metadata__ are malformed",
        hint="__metadata__ maps strings to strings, and no tensor may have that name",
    )
    return metadata


def _check_entries(header: dict[str, object], base: int, name: str) -> tuple[StoredTensor, ...]:
    """Check each tensor by itself, and return all in the order of their bytes."""
    tensors, problems = [], []
    for fqn, fields in header.items():
        try:
            tensors.append(_check_entry(fqn, fields, base))
        except ValueError as error:
            problems.append(f"{escape(fqn)}: {error}")
    SourceError.raise_for(
        problems,
        f"{escape(name)}: {len(problems)} of {len(header)} tensors are described wrongly in the header",
        hint=DOWNLOAD_AGAIN,
    )
    # Stable: empty tensors at the same place stay in the header's order.
    return tuple(sorted(tensors, key=lambda tensor: (tensor.start, tensor.start + tensor.nbytes)))


def _check_entry(fqn: str, fields: object, base: int) -> StoredTensor:
    """Return the tensor of one entry of the header.

    Raises:
        ValueError: the entry breaks a rule; the text says which.
    """
    if not is_unicode(fqn):
        raise ValueError("the name holds a lone surrogate, which is not Unicode text")
    if not isinstance(fields, dict):
        raise ValueError(f"expected an object, found {type(fields).__name__}")
    if fields.keys() != _FIELDS:
        raise ValueError(f"expected the fields {_names_text(_FIELDS)}, found {_names_text(fields) or 'none'}")
    shape = _check_integers("shape", fields["shape"])
    offsets = _check_integers("data_offsets", fields["data_offsets"])
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"data_offsets: expected [start, stop], found {list(offsets)}")
    _check_count(shape)
    dtype, shape = _check_dtype(fields["dtype"], shape)
    expected, nbytes = prod(shape) * dtype.itemsize, offsets[1] - offsets[0]
    if expected != nbytes:
        raise ValueError(
            f"{dtype.safetensors} of shape {_value_text(shape)} takes {expected} bytes, data_offsets give {nbytes}"
        )
    return StoredTensor(fqn, dtype, shape, base + offsets[0], nbytes)


def _check_integers(field: str, value: object) -> tuple[int, ...]:
    # `type` and not isinstance: a bool is an int to Python.
    if not isinstance(value, list) or any(type(item) is not int for item in value):
        raise ValueError(f"{field}: expected a list of integers, found {_value_text(value)}")
    if any(not 0 <= item < _LIMIT for item in value):
        raise ValueError(f"{field}: expected integers from 0 to 2^63 - 1, found {_value_text(value)}")
    return tuple(value)


def _check_count(shape: Shape) -> None:
    count = 1
    for size in shape:  # not prod(): a hostile shape has millions of dims, and the product never ends
        count *= size or 1
        if count >= _LIMIT:
            raise ValueError(f"shape: {_value_text(shape)} has more elements than 63 bits can count")


def _check_dtype(tag: object, shape: Shape) -> tuple[DType, Shape]:
    """Return the dtype, and the shape in torch's elements."""
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
        raise ValueError(f"shape: {_value_text(shape)} of F4, torch needs an even last dim")
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
            yield f"{place}, {count(tensor.start - position, 'byte')} after the end of {previous}"
        elif tensor.start < position:
            yield f"{place} overlap {previous}, which ends at {position}"
        if stop > size:
            yield f"{place}, past the end of the file at {size}"
        if stop >= position:
            position, previous = stop, escape(tensor.fqn)
    if position < size:
        yield f"{count(size - position, 'byte')} after the end of {previous} belong to no tensor"


def _damaged_error(name: str, reason: str) -> SourceError:
    return SourceError(f"{escape(name)}: {reason}", hint=DOWNLOAD_AGAIN)


def _names_text(names: set[str] | dict[str, object]) -> str:
    return ", ".join(sorted(escape(name) for name in names))


def _value_text(value: object) -> str:
    """Return a value from a header for a message, cut and escaped."""
    if isinstance(value, tuple):
        value = list(value)
    return escape(str(value) if isinstance(value, list) else repr(value))


class OutputTensor(NamedTuple):
    """A tensor to be written."""

    fqn: str
    """The name in the file."""
    source: str
    """The name in the source catalog."""
    dtype: DType
    """The dtype in the file."""
    shape: Shape
    """In torch's elements."""

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def num_values(self) -> int:
        """Number of values: an element of float4_e2m1fn_x2 has two."""
        return prod(_header_shape(self))


class _PieceFrame(NamedTuple):
    """The bytes around a piece: the header before the first piece of a file, and none around the others."""

    prefix: bytes
    prefix_crc: int

    def suffix(self, data_crc: int, /) -> bytes:
        """Return no bytes."""
        return b""


_NO_FRAME = _PieceFrame(b"", 0)


@dataclass(frozen=True, slots=True)
class SafetensorsImage:
    """One weight file to be written."""

    name: str
    size: int
    header: bytes
    """All bytes before the data: the length, the JSON text and blanks."""
    tensors: tuple[OutputTensor, ...]
    """In the order of their bytes."""
    holes: tuple[Hole, ...]
    """One or more for each tensor, in file order and without gaps."""

    def __len__(self) -> int:
        return len(self.holes)

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of every piece, in bytes."""
        start = 0  # the first piece includes the header
        for hole in self.holes:
            yield start, hole.start + hole.nbytes
            start = hole.start + hole.nbytes

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """Yield the pieces `start .. stop`."""
        shapes = {tensor.source: tensor.shape for tensor in self.tensors}
        for index, hole in enumerate(self.holes[start:stop], start):
            frame = _NO_FRAME if index else _PieceFrame(self.header, crc32(self.header))
            first = flat_offset(hole.region.offsets, shapes[hole.fqn])
            yield Piece(hole.start - len(frame.prefix), frame, hole.fqn, first, hole.nbytes, hole.dtype)

    def hole(self, index: int) -> Hole:
        """Return the hole of a piece."""
        return self.holes[index]


class SafetensorsImages(ImageList[SafetensorsImage]):
    """The weight files of one model."""

    def __init__(
        self,
        tensors: Sequence[OutputTensor],
        *,
        max_shard_bytes: int | None,
        stem: str = "model",
        files: Mapping[str, Sequence[str]] | None = None,
        index: str | None = None,
        settings: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Place every tensor.

        Args:
            tensors: with distinct names, in the order in which they are divided over files.
            max_shard_bytes: most bytes of tensors in one file; None makes a single file.
            stem: beginning of the file names.
            files: file name -> names of its tensors in order; together these are all tensors. None divides by size.
            index: the name of the index of `files`; None if they have no index.
            settings: further items of each header's `__metadata__`.

        Raises:
            SourceError: dtypes or names that safetensors cannot hold, or a header that is too large.
        """
        check_writable(tensors)
        self.stem = stem
        if files is not None:
            named_tensors = {tensor.fqn: tensor for tensor in tensors}
            self.images = [
                _make_image(name, [named_tensors[fqn] for fqn in fqns], settings)
                for name, fqns in files.items()
            ]
        else:
            groups = _split_tensors(tensors, max_shard_bytes)
            self.images = [
                _make_image(_file_name(stem, number, len(groups)), group, settings)
                for number, group in enumerate(groups)
            ]
        self.has_index = len(self.images) > 1 or index is not None
        self.index_name = index or f"{stem}.safetensors.index.json"
        """File name of the index."""
        self.data_nbytes = [sum(tensor.nbytes for tensor in image.tensors) for image in self.images]
        self._stored: dict[str, OutputTensor] = {}
        self._holes: dict[str, list[tuple[int, Hole]]] = {}
        for number, image in enumerate(self.images):
            holes = iter(image.holes)
            for tensor in image.tensors:
                self._stored[tensor.fqn] = tensor
                self._holes[tensor.fqn] = [(number, next(holes)) for _ in _regions(tensor)]

    def tensors(self) -> Iterator[TensorHoles]:
        """Yield one `TensorHoles` for each tensor, which describes all of its holes."""
        for fqn, tensor in self._stored.items():
            sizes = tuple({hole.region.sizes: None for _, hole in self._holes[fqn]})
            yield TensorHoles(fqn, tensor.source, sizes, tensor.dtype, tensor.nbytes)

    def holes(self, fqn: str) -> Iterator[tuple[int, Hole]]:
        """Yield (image index, hole) of a tensor, in the order of its bytes."""
        yield from self._holes[fqn]

    def with_mark(self, mark: str) -> SafetensorsImages:
        """Return the same images with a mark in their names, and always with an index.

        The files of two models can then be in one directory, and the index lists those that are the model.
        """
        changed, total = copy(self), len(self.images)
        changed.has_index = True
        changed.images = [
            replace(image, name=f"{self.stem}-{mark}-{number:05d}-of-{total:05d}.safetensors")
            for number, image in enumerate(self.images, 1)
        ]
        return changed

    def index(self) -> bytes | None:
        """Return the index in transformers' form; None for a single file, which needs no index."""
        if not self.has_index:
            return None
        content = {
            "metadata": {
                "total_parameters": sum(tensor.num_values for tensor in self._stored.values()),
                "total_size": sum(self.data_nbytes),
            },
            "weight_map": {tensor.fqn: image.name for image in self.images for tensor in image.tensors},
        }
        return json.dumps(content, indent=2, sort_keys=True).encode() + b"\n"


def _file_name(stem: str, number: int, total: int) -> str:
    return f"{stem}.safetensors" if total == 1 else f"{stem}-{number + 1:05d}-of-{total:05d}.safetensors"


def _split_tensors(tensors: Sequence[OutputTensor], limit: int | None) -> list[list[OutputTensor]]:
    """Divide tensors over files in the way that the module's docstring describes."""
    if limit is None or not tensors:
        return [list(tensors)]
    groups, current, size = list[list[OutputTensor]](), list[OutputTensor](), 0
    for tensor in tensors:
        if tensor.nbytes > limit:
            groups.append([tensor])
            continue
        if size + tensor.nbytes > limit:
            groups.append(current)
            current, size = [], 0
        current.append(tensor)
        size += tensor.nbytes
    return [*groups, current] if current else groups


def _make_image(name: str, tensors: Sequence[OutputTensor], settings: Mapping[str, str]) -> SafetensorsImage:
    ordered = tuple(tensors)
    if not are_aligned(ordered):
        ordered = tuple(sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize))  # stable
    header = make_header(name, ordered, {"format": "pt", **settings})
    holes, start = list[Hole](), len(header)
    for tensor in ordered:
        for region in _regions(tensor):
            first = start + flat_offset(region.offsets, tensor.shape) * tensor.dtype.itemsize
            nbytes = region.num_elements * tensor.dtype.itemsize
            holes.append(Hole(tensor.source, region, tensor.dtype, first, nbytes))
        start += tensor.nbytes
    return SafetensorsImage(name, start, header, ordered, tuple(holes))


def are_aligned(tensors: Sequence[OutputTensor]) -> bool:
    """True if, stored in this order, each tensor starts at a multiple of its element size."""
    start = 0
    for tensor in tensors:
        if start % tensor.dtype.itemsize:
            return False
        start += tensor.nbytes
    return True


def _regions(tensor: OutputTensor) -> list[Region]:
    """Return the contiguous regions in which a tensor is filled; more than one only for a large tensor."""
    if tensor.nbytes <= _PIECE_BYTES:
        return [full_region(tensor.shape)]
    return list(blocks(tensor.shape, _PIECE_BYTES // tensor.dtype.itemsize))


def make_header(
    name: str,
    tensors: Sequence[OutputTensor],
    metadata: Mapping[str, str] = MappingProxyType({"format": "pt"}),
) -> bytes:
    """Return all bytes before the data of a file: length, JSON text and blanks.

    Args:
        name: of the file, for messages.
        tensors: in the order of their bytes.
        metadata: the header's `__metadata__`.

    Raises:
        SourceError: the header is too large.
    """
    content: dict[str, object] = {_METADATA: dict(metadata)}
    start = 0
    for tensor in tensors:
        content[tensor.fqn] = {
            "dtype": tensor.dtype.safetensors,
            "shape": list(_header_shape(tensor)),
            "data_offsets": [start, start + tensor.nbytes],
        }
        start += tensor.nbytes
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise SourceError(
            f"{escape(name)}: a header of {len(text)} bytes for {len(tensors)} tensors, safetensors allows "
            f"{MAX_HEADER_BYTES}",
            hint="a smaller --max-shard-size puts fewer tensors into each file",
        )
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _header_shape(tensor: OutputTensor) -> Shape:
    """Return the shape in safetensors' elements: it counts 4-bit values one by one, torch's float4 in pairs."""
    if tensor.dtype.safetensors == "F4" and tensor.shape:
        return (*tensor.shape[:-1], tensor.shape[-1] * 2)
    return tensor.shape


def check_writable(tensors: Sequence[OutputTensor]) -> None:
    """Refuse tensors that safetensors cannot hold.

    Raises:
        SourceError: it lacks their dtypes, or forbids their names; lists the tensors.
    """
    unknown = [
        f"{escape(tensor.fqn)}: {tensor.dtype.name}" for tensor in tensors if tensor.dtype.safetensors is None
    ]
    SourceError.raise_for(
        unknown,
        f"safetensors has no way to hold {len(unknown)} of the tensors",
        hint="leave them out with --exclude",
    )
    refused = [
        escape(tensor.fqn) for tensor in tensors if tensor.fqn == _METADATA or not is_unicode(tensor.fqn)
    ]
    SourceError.raise_for(
        refused, f"safetensors cannot hold {len(refused)} of the names", hint="give them others with --rename"
    )
