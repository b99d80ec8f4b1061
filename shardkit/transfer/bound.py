"""A catalog whose tensors are made of another's: boxes point at the same bytes, the rest is computed in pieces.

`bind` gives each target its own chunks. Where an expression puts boxes of stored tensors side by side, a chunk
points at the stored bytes, and they move like any others. What is reordered becomes a file that exists only while
it is read: any range of it is computed from the boxes that it needs, and no more memory is taken than for a few
times that range.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from shardkit.core.catalog import Catalog, OnRead, SourceFile, SourceReader, TensorEntry
from shardkit.core.regions import (
    Region,
    Shape,
    flat_offset,
    flat_range_boxes,
    intersect,
    is_contiguous,
    relative_to,
    runs,
)
from shardkit.core.text import escape
from shardkit.errors import IntegrityError, LayoutError
from shardkit.keys.expressions import (
    Concat,
    Cut,
    Expression,
    Permuted,
    Piece,
    Reshaped,
    Stored,
    Zeros,
    cover,
    leaves,
    pieces,
)
from shardkit.transfer.sources import SourceFiles

if TYPE_CHECKING:
    import numpy

_MAX_RUNS = 64  # of a box that becomes chunks of its own; more are computed
_SHORT_NBYTES = 2048  # of a run: below this, what lies between runs is read too
_MAX_SPARSE = 16  # times the wanted bytes that may be read so
_TILE = 128  # elements


def bind(catalog: Catalog, targets: Mapping[str, Expression]) -> Catalog:
    """Return a catalog of raw extents that has targets beside the tensors of another.

    Args:
        catalog: of raw extents.
        targets: what each further tensor is made of, by its name, which is none of the catalog's.

    Raises:
        LayoutError: an expression needs a tensor that is not there or has another shape, or tensors of several
            dtypes; lists all.
    """
    assert catalog.encoding == "raw"
    _check(catalog, targets)
    bound = replace(catalog, files=list(catalog.files), tensors={}, paths=None)
    bound.chunks = type(catalog.chunks)()
    for name in catalog.tensors:
        bound.copy_tensor(catalog, name, name)
    for name, made in targets.items():
        _add(bound, catalog, name, made)
    return bound


def _check(catalog: Catalog, targets: Mapping[str, Expression]) -> None:
    problems = []
    for target, made in targets.items():
        dtypes = set[str]()
        for leaf in leaves(made):
            entry = catalog.tensors.get(leaf.name)
            if entry is None:
                problems.append(f"{escape(target)}: {escape(leaf.name)} is not there")
            elif entry.shape != leaf.shape:
                problems.append(
                    f"{escape(target)}: {escape(leaf.name)} is {list(entry.shape)}, not {list(leaf.shape)}"
                )
            else:
                dtypes.add(entry.dtype.name)
        if len(dtypes) > 1:
            problems.append(
                f"{escape(target)}: made of tensors of several dtypes: {', '.join(sorted(dtypes))}"
            )
    LayoutError.raise_for(problems, "tensors cannot be made of what is stored")


def _add(bound: Catalog, catalog: Catalog, target: str, made: Expression) -> None:
    dtype = catalog.tensors[next(leaves(made)).name].dtype
    chunks = list(
        chain.from_iterable(_chunks(bound, catalog, target, piece, dtype.itemsize) for piece in pieces(made))
    )
    bound.add_tensor(target, dtype, made.shape, iter(sorted(chunks, key=lambda chunk: chunk[3].offsets)))


def _chunks(
    bound: Catalog, catalog: Catalog, target: str, piece: Piece, itemsize: int
) -> Iterator[tuple[int, int, int, Region]]:
    """Yield the chunks (file, first byte, bytes, region of the target) of a piece."""
    if piece.is_box:
        assert isinstance(piece.of, Stored)
        found = list(_stored_chunks(catalog, piece.of.name, piece, itemsize))
        if None not in found:
            yield from (chunk for chunk in found if chunk is not None)
            return
    view = View(catalog, piece.of if not piece.is_box else Cut(piece.of, piece.part), itemsize)
    first = next(leaves(piece.of), None)
    home = catalog.files[0] if first is None else _home(catalog, first.name)
    nbytes = piece.region.num_elements * itemsize
    bound.files.append(
        SourceFile(
            name=home.name,
            path=home.path,
            size=nbytes,
            decode=partial(_decode, catalog, view, nbytes, target),
            compute=view.fill,
        )
    )
    yield len(bound.files) - 1, 0, nbytes, piece.region


def _home(catalog: Catalog, name: str) -> SourceFile:
    entry = catalog.tensors[name]
    return catalog.files[catalog.chunks.file[entry.first_chunk]] if entry.num_chunks else catalog.files[0]


def _stored_chunks(
    catalog: Catalog, name: str, piece: Piece, itemsize: int
) -> Iterator[tuple[int, int, int, Region] | None]:
    """Yield the stretches of stored chunks that make up a box; None where they are too short to be worth it."""
    entry, table = catalog.tensors[name], catalog.chunks
    is_same = _without_ones(piece.part.sizes) == _without_ones(piece.region.sizes)
    for row, held in zip(entry.chunk_ids, table.regions(entry.chunk_ids), strict=True):
        part = intersect(piece.part, held)
        if part is None:
            continue
        inner, file = relative_to(part, held.offsets), table.file[row]
        box = relative_to(part, piece.part.offsets)
        if is_contiguous(inner, held.sizes) and (is_same or is_contiguous(box, piece.part.sizes)):
            place = table.start[row] + flat_offset(inner.offsets, held.sizes) * itemsize
            start = flat_offset(box.offsets, piece.part.sizes)
            if is_same:
                found = [_moved(box, piece)]
            else:
                found = flat_range_boxes(piece.region.sizes, start, start + box.num_elements)
            for each in found:
                nbytes = each.num_elements * itemsize
                yield file, place, nbytes, _shifted(each, piece.region.offsets)
                place += nbytes
            continue
        if catalog.files[file].decode is not None:
            yield None
            return
        # Several runs of the chunk, each a range of the box too.
        found_runs = list(runs(inner, held.sizes)) if inner.num_elements else []
        is_worth = len(found_runs) <= _MAX_RUNS and is_contiguous(box, piece.part.sizes)
        if not is_worth:
            yield None
            return
        start = flat_offset(box.offsets, piece.part.sizes)
        for run in found_runs:
            place = table.start[row] + run.source * itemsize
            first = start + run.target
            for each in flat_range_boxes(piece.region.sizes, first, first + run.length):
                nbytes = each.num_elements * itemsize
                yield file, place, nbytes, _shifted(each, piece.region.offsets)
                place += nbytes


def _without_ones(sizes: Shape) -> Shape:
    return tuple(size for size in sizes if size != 1)


def _moved(box: Region, piece: Piece) -> Region:
    """Return a box within a piece's part as one within its region; the two differ in dims of size 1 alone."""
    pairs = iter(
        [pair for pair, size in zip(zip(*box, strict=True), piece.part.sizes, strict=True) if size != 1]
    )
    moved = [(0, 1) if size == 1 else next(pairs) for size in piece.region.sizes]
    return Region(tuple(o for o, _ in moved), tuple(n for _, n in moved))


def _shifted(region: Region, origin: Shape) -> Region:
    return Region(tuple(a + b for a, b in zip(region.offsets, origin, strict=True)), region.sizes)


def _decode(catalog: Catalog, view: View, nbytes: int, fqn: str, on_read: OnRead) -> memoryview:
    """Return all bytes of a view."""
    whole = memoryview(bytearray(nbytes))
    with SourceFiles(catalog.files, on_read=on_read) as files, files.reader() as reader:
        view.fill(reader, 0, whole, fqn)
    return whole


@dataclass(frozen=True, slots=True)
class View:
    """The bytes of an expression, row-major and contiguous, computed range by range."""

    catalog: Catalog
    """Of raw extents; its files have the numbers that the reader knows them by."""
    made: Expression
    itemsize: int

    def fill(self, reader: SourceReader, start: int, buffer: memoryview, fqn: str) -> None:
        """Fill a buffer with the bytes from `start` on; both are multiples of the item size.

        Args:
            reader: reads the catalog's files.
            start: first byte.
            buffer: writable.
            fqn: the tensor that they are read for, for messages.
        """
        first, stop, done = start // self.itemsize, (start + len(buffer)) // self.itemsize, 0
        for box in flat_range_boxes(self.made.shape, first, stop):
            nbytes = box.num_elements * self.itemsize
            self._into(reader, self.made, box, buffer[done : done + nbytes], fqn)
            done += nbytes

    def _into(
        self, reader: SourceReader, made: Expression, region: Region, memory: memoryview, fqn: str
    ) -> None:
        target = _as_elements(memory, region.sizes, self.itemsize)
        _copy(self._read(reader, made, region, fqn), target)

    def _read(self, reader: SourceReader, made: Expression, region: Region, fqn: str) -> numpy.ndarray:
        """Return a box of an expression as an array of elements of the item size."""
        import numpy

        match made:
            case Stored():
                return read_box(self.catalog, made.name, region, reader, fqn)
            case Cut():
                return self._read(reader, made.of, _shifted(region, made.region.offsets), fqn)
            case Permuted():
                back = [made.dims.index(dim) for dim in range(len(made.dims))]
                below = Region(tuple(region.offsets[d] for d in back), tuple(region.sizes[d] for d in back))
                turned: numpy.ndarray = self._read(reader, made.of, below, fqn).transpose(made.dims)
                return turned
            case Reshaped():
                below, whole = cover(made.of.shape, made.shape, region)
                values = self._read(reader, made.of, below, fqn)
                if not values.flags.c_contiguous:
                    straight = numpy.empty(values.shape, values.dtype)
                    _copy(values, straight)
                    values = straight
                box: numpy.ndarray = values.reshape(whole.sizes)[_window(relative_to(region, whole.offsets))]
                return box
            case Zeros():
                return numpy.zeros(region.sizes, _kind(self.itemsize))
            case Concat():
                found = numpy.empty(region.sizes, _kind(self.itemsize))
                for part, place in made.placed():
                    inner = intersect(place, region)
                    if inner is not None:
                        values = self._read(reader, part, relative_to(inner, place.offsets), fqn)
                        _copy(values, found[_window(relative_to(inner, region.offsets))])
                return found


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
    found, left = numpy.empty(region.sizes, _kind(itemsize)), region.num_elements
    for row, held in zip(entry.chunk_ids, table.regions(entry.chunk_ids), strict=True):
        part = intersect(region, held)
        if part is None:
            continue
        file, start, inner = table.file[row], table.start[row], relative_to(part, held.offsets)
        window = _window(relative_to(part, region.offsets))
        if part == region:
            _read_part(reader, file, start, inner, held.sizes, found, shown)
            return found
        values = numpy.empty(part.sizes, _kind(itemsize))
        _read_part(reader, file, start, inner, held.sizes, values, shown)
        found[window] = values
        left -= part.num_elements
    if left:
        raise IntegrityError(
            f"{escape(name)}: {left} elements that {escape(shown)} is made of are in no chunk"
        )
    return found


def _read_part(
    reader: SourceReader,
    file: int,
    start: int,
    part: Region,
    sizes: Shape,
    target: numpy.ndarray,
    fqn: str,
) -> None:
    """Fill a contiguous array with a box of a chunk of some sizes that lies from byte `start` on."""
    import numpy

    if not part.num_elements:
        return
    itemsize = target.dtype.itemsize
    first = flat_offset(part.offsets, sizes)
    span = flat_offset(tuple(stop - 1 for stop in part.stops), sizes) + 1 - first
    run = next(runs(part, sizes)).length
    if run < span and run * itemsize < _SHORT_NBYTES and span <= _MAX_SPARSE * part.num_elements:
        raw = numpy.empty(span, target.dtype)
        reader.read_into(file, _bytes(raw), start + first * itemsize, fqn)
        strides = [itemsize] * len(sizes)
        for dim in range(len(sizes) - 2, -1, -1):
            strides[dim] = strides[dim + 1] * sizes[dim + 1]
        target[...] = numpy.lib.stride_tricks.as_strided(raw, part.sizes, strides, writeable=False)
        return
    memory = _bytes(target)
    for each in runs(part, sizes):
        into = memory[each.target * itemsize : (each.target + each.length) * itemsize]
        reader.read_into(file, into, start + each.source * itemsize, fqn)


def _copy(source: numpy.ndarray, target: numpy.ndarray) -> None:
    """Copy an array; a transposed one in tiles, which stay in the processor's cache: six times as fast."""
    strides = [
        abs(stride) if size > 1 else 1 << 62
        for size, stride in zip(source.shape, source.strides, strict=True)
    ]
    fast = strides.index(min(strides)) if strides else 0
    last = max((dim for dim, size in enumerate(target.shape) if size > 1), default=0)
    if fast == last or source.size <= _TILE * _TILE:
        target[...] = source
        return
    window = [slice(None)] * source.ndim
    for row in range(0, source.shape[fast], _TILE):
        window[fast] = slice(row, row + _TILE)
        for column in range(0, source.shape[last], _TILE):
            window[last] = slice(column, column + _TILE)
            target[tuple(window)] = source[tuple(window)]


def _bytes(values: numpy.ndarray) -> memoryview:
    """Return the memory of a contiguous array."""
    import numpy

    return values.reshape(-1).view(numpy.uint8).data


def _kind(itemsize: int) -> str:
    return f"u{itemsize}" if itemsize in (1, 2, 4, 8) else f"V{itemsize}"


def _as_elements(memory: memoryview, sizes: Shape, itemsize: int) -> numpy.ndarray:
    import numpy

    return numpy.frombuffer(memory, dtype=_kind(itemsize)).reshape(sizes)


def _window(box: Region) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(*box, strict=True))


def is_direct(catalog: Catalog, entry: TensorEntry) -> bool:
    """True if no part of a tensor has to be computed."""
    return all(catalog.files[catalog.chunks.file[row]].compute is None for row in entry.chunk_ids)
