"""Reading boxes of stored and computed tensors, without reading more than the box needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from shardkit.core.catalog import Catalog, Codec, Computed, SourceReader, StoredParts, TensorEntry
from shardkit.core.dtypes import DType
from shardkit.core.regions import (
    Region,
    Shape,
    blocks,
    flat_offset,
    flat_range_boxes,
    full_region,
    intersect,
    relative_to,
    runs,
    shifted,
    window,
)
from shardkit.core.text import escape
from shardkit.errors import IntegrityError

if TYPE_CHECKING:
    import numpy
    import torch

# What lies between runs of fewer bytes is read too, if they begin no further apart than a stride: a call costs as much.
_SHORT_NBYTES, _MAX_STRIDE = 2048, 32 << 10
_SPAN_NBYTES = 4 << 20  # read so at a time
_TILE = 512, 16
"""Elements of a transposed copy's tile, along the source's fast dim and along the target's: in more rows than 16, those of
a power of two of bytes would evict each other from the cache."""


@dataclass(frozen=True, slots=True)
class _OtherNumbers:
    """A reader with other file numbers."""

    reader: SourceReader
    numbers: Sequence[int]
    """The reader's number of each file."""

    def read_into(self, file: int, buffer: memoryview, start: int, fqn: str, /) -> int | None:
        return self.reader.read_into(self.numbers[file], buffer, start, fqn)


@dataclass(frozen=True, slots=True)
class _ReadParts:
    """The stored tensors that a computed tensor needs; a `StoredParts`."""

    catalog: Catalog
    """Of raw extents."""
    reader: SourceReader
    fqn: str
    """The computed tensor, for messages."""

    def entry(self, name: str) -> TensorEntry:
        """Return dtype and shape of a tensor."""
        return self.catalog.tensors[name]

    def of_tensor(self, fqn: str) -> _ReadParts:
        """Return the same with another computed tensor, for which reads then count."""
        return replace(self, fqn=fqn)

    def box(self, name: str, region: Region) -> numpy.ndarray:
        """Return a box of a tensor, as unsigned integers of its item size (void above 8 bytes)."""
        return read_box(self.catalog, name, region, self.reader, self.fqn)

    def values(self, name: str, region: Region) -> torch.Tensor:
        """Return a box of a tensor, in its own dtype."""
        return as_tensor(self.box(name, region), self.catalog.tensors[name].dtype)

    def whole(self, name: str) -> torch.Tensor:
        """Return all of a tensor, in its own dtype."""
        return self.values(name, full_region(self.catalog.tensors[name].shape))


def fill_box(
    computed: Computed, reader: SourceReader, region: Region, target: numpy.ndarray, fqn: str
) -> None:
    """Fill an array with a box of a computed tensor; `target` is as for `Codec.fill`."""
    renumbered = reader if computed.numbers is None else _OtherNumbers(reader, computed.numbers)
    computed.codec.fill(_ReadParts(computed.catalog, renumbered, fqn), region, target)


def box_of(codec: Codec, parts: StoredParts, region: Region) -> numpy.ndarray:
    """Return a box of what a codec computes, as unsigned integers of its item size (void above 8 bytes)."""
    import numpy

    box = numpy.empty(region.sizes, kind_of(codec.dtype.itemsize))
    codec.fill(parts, region, box)
    return box


def fill_computed(computed: Computed, reader: SourceReader, start: int, buffer: memoryview, fqn: str) -> None:
    """Fill a buffer with the row-major bytes of a computed tensor, from byte `start` on.

    Both `start` and the buffer's length are multiples of the item size.
    """
    import numpy

    itemsize, done = computed.codec.dtype.itemsize, 0
    stop = start + len(buffer)
    for box in flat_range_boxes(computed.codec.shape, start // itemsize, stop // itemsize):
        nbytes = box.num_elements * itemsize
        target = numpy.frombuffer(buffer[done : done + nbytes], kind_of(itemsize))
        fill_box(computed, reader, box, target.reshape(box.sizes), fqn)
        done += nbytes


def read_box(
    catalog: Catalog, name: str, region: Region, reader: SourceReader, fqn: str | None = None
) -> numpy.ndarray:
    """Return a box of a stored tensor, as an array of unsigned integers of its item size (void above 8 bytes).

    Args:
        catalog: of raw extents.
        name: the stored tensor.
        region: of it, in elements.
        reader: reads the catalog's files.
        fqn: for messages; the stored name if None.
    """
    import numpy

    entry, table, shown = catalog.tensors[name], catalog.chunks, name if fqn is None else fqn
    itemsize = entry.dtype.itemsize
    box, num_missing = numpy.empty(region.sizes, kind_of(itemsize)), region.num_elements
    for row, chunk in zip(entry.chunk_ids, table.regions(entry.chunk_ids), strict=True):
        part = intersect(region, chunk)
        if part is None:
            continue
        inner = relative_to(part, chunk.offsets)
        place = _ChunkPlace(table.file[row], table.start[row], chunk.sizes)
        place_in = window(relative_to(part, region.offsets))
        derivation = catalog.files[place.file].derivation
        # One box costs less than its runs.
        if isinstance(derivation, Computed) and derivation.codec.shape == chunk.sizes:
            fill_box(derivation, reader, inner, box[place_in or ...], shown)
            num_missing -= part.num_elements
            continue
        if part == region:
            _read_part(reader, place, inner, box, shown)
            return box
        values = numpy.empty(part.sizes, kind_of(itemsize))
        _read_part(reader, place, inner, values, shown)
        box[place_in] = values
        num_missing -= part.num_elements
    if num_missing:
        raise IntegrityError(
            f"{escape(name)}: {num_missing} elements that {escape(shown)} needs are in no chunk"
        )
    return box


class _ChunkPlace(NamedTuple):
    """Where a chunk lies, row-major."""

    file: int
    start: int
    """Its first byte."""
    sizes: Shape
    """In elements."""

    def span(self, part: Region) -> tuple[int, int]:
        """Return the first element of a box of the chunk, and the number of elements from there to its last."""
        first = flat_offset(part.offsets, self.sizes)
        return first, flat_offset(tuple(stop - 1 for stop in part.stops), self.sizes) + 1 - first


def _read_part(
    reader: SourceReader, place: _ChunkPlace, part: Region, target: numpy.ndarray, fqn: str
) -> None:
    """Fill a contiguous array with a box of a chunk."""
    if not part.num_elements:
        return
    itemsize = target.dtype.itemsize
    _, span = place.span(part)
    length = next(runs(part, place.sizes)).length
    num_runs = part.num_elements // length
    if num_runs > 1 and length * itemsize < _SHORT_NBYTES and span * itemsize <= num_runs * _MAX_STRIDE:
        _read_spans(reader, place, part, target, fqn)
        return
    memory = flat_bytes(target).data
    for run in runs(part, place.sizes):
        into = memory[run.target * itemsize : (run.target + run.length) * itemsize]
        reader.read_into(place.file, into, place.start + run.source * itemsize, fqn)


def copy_array(source: numpy.ndarray, target: numpy.ndarray) -> None:
    """Copy an array; a transposed one in tiles, which stay in the processor's cache: six times as fast."""
    strides = [
        abs(stride) if size > 1 else 1 << 62
        for size, stride in zip(source.shape, source.strides, strict=True)
    ]
    fast = strides.index(min(strides)) if strides else 0
    last = max((dim for dim, size in enumerate(target.shape) if size > 1), default=0)
    rows, columns = _TILE
    if fast == last or source.size <= rows * columns:
        target[...] = source
        return
    tile = [slice(None)] * source.ndim
    for row in range(0, source.shape[fast], rows):
        tile[fast] = slice(row, row + rows)
        for column in range(0, source.shape[last], columns):
            tile[last] = slice(column, column + columns)
            target[tuple(tile)] = source[tuple(tile)]


def _read_spans(
    reader: SourceReader, place: _ChunkPlace, part: Region, target: numpy.ndarray, fqn: str
) -> None:
    """Fill an array with a box of a chunk, reading the gaps between its runs too, a stretch at a time."""
    import numpy

    itemsize = target.dtype.itemsize
    strides = [itemsize] * len(place.sizes)
    for dim in range(len(place.sizes) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * place.sizes[dim + 1]
    span_nbytes = place.span(part)[1] * itemsize
    limit = max(part.num_elements * _SPAN_NBYTES // max(span_nbytes, _SPAN_NBYTES), 1)
    for block in blocks(part.sizes, limit):
        box = shifted(block, part.offsets)
        first, length = place.span(box)
        raw = numpy.empty(length, target.dtype)
        reader.read_into(place.file, flat_bytes(raw).data, place.start + first * itemsize, fqn)
        target[window(block)] = numpy.lib.stride_tricks.as_strided(raw, box.sizes, strides, writeable=False)


def as_tensor(box: numpy.ndarray, dtype: DType) -> torch.Tensor:
    """Return a box as a tensor of a dtype."""
    import torch

    return torch.from_numpy(flat_bytes(box)).view(getattr(torch, dtype.name)).reshape(box.shape)


def as_box(values: torch.Tensor, dtype: DType) -> numpy.ndarray:
    """Convert values to a dtype, and return them as unsigned integers of its size."""
    import torch

    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    box: numpy.ndarray = values.to(getattr(torch, dtype.name)).view(integers).numpy()
    return box.view(f"u{dtype.itemsize}")


def flat_bytes(values: numpy.ndarray) -> numpy.ndarray:
    """Return the bytes of an array, row-major; a contiguous one is not copied."""
    import numpy

    return numpy.ascontiguousarray(values).reshape(-1).view(numpy.uint8)


def kind_of(itemsize: int) -> str:
    """Return numpy's name for elements of an item size."""
    return f"u{itemsize}" if itemsize in (1, 2, 4, 8) else f"V{itemsize}"
