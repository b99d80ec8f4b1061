"""A catalog whose tensors are made of another's: boxes point at the same bytes, the rest is computed in pieces.

`bind` gives each target its own chunks. Where an expression puts boxes of stored tensors side by side, a chunk
points at the stored bytes, and they move like any others. What is reordered becomes a file that exists only while
it is read: any range of it is computed from the boxes that it needs, and no more memory is taken than for a few
times that range. What a converter of transformers makes by operations that are not known is made whole (`converted`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from shardkit.core.catalog import Catalog, Computation, OnRead, SourceFile, SourceReader, beside
from shardkit.core.dtypes import DType
from shardkit.core.regions import (
    Region,
    Shape,
    blocks,
    flat_offset,
    flat_range_boxes,
    full_region,
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
    FilledBox,
    Opaque,
    Permuted,
    Reshaped,
    Stored,
    Zeros,
    cover,
    leaves,
    pieces,
)
from shardkit.transfer.converted import Convert, GroupConverter, opaque_groups
from shardkit.transfer.sources import SourceFiles

if TYPE_CHECKING:
    import numpy

_MAX_RUNS = 64  # of a box that becomes chunks of its own; more are computed
# What lies between runs of fewer bytes is read too, if they begin no further apart than a stride: a call costs as much.
_SHORT_NBYTES, _MAX_STRIDE = 2048, 32 << 10
_SPAN_NBYTES = 4 << 20  # read so at a time
_TILE = 128  # elements


def bind(catalog: Catalog, targets: Mapping[str, Expression], convert: Convert | None = None) -> Catalog:
    """Return a catalog of raw extents that has targets beside the tensors of another.

    Args:
        catalog: of raw extents; or of records that are still closed, and then so is the result.
        targets: what each further tensor is made of, by its name, which is none of the catalog's.
        convert: runs the converters of transformers that make opaque targets.

    Raises:
        LayoutError: an expression needs a tensor that is not there or has another shape, tensors of several
            dtypes, or a converter where there is none; lists all.
    """
    _check(catalog, targets, convert)
    bound = replace(catalog, files=list(catalog.files), tensors={}, paths=None)
    bound.chunks = type(catalog.chunks)()
    for name in catalog.tensors:
        bound.copy_tensor(catalog, name, name)
    if catalog.open_records is not None:
        for name, made in targets.items():
            bound.add_tensor(name, _dtype_of(catalog, made), made.shape, iter(()))
        bound.open_records = partial(_open_of, bound, catalog, targets, convert)
        return bound
    groups = opaque_groups(targets)
    whole = dict[str, int]()
    if groups:
        assert convert is not None  # `_check`
        converted = GroupConverter(catalog, convert, partial(_read_whole, catalog))
        for name, opaque in chain.from_iterable(group.items() for group in groups):
            whole[name] = len(bound.files)
            bound.files.append(converted.file(opaque, name))
    for name, made in targets.items():
        if name in whole:
            chunk = (whole[name], 0, bound.files[whole[name]].size, full_region(made.shape))
            bound.add_tensor(name, _dtype_of(catalog, made), made.shape, iter((chunk,)))
        else:
            _add(bound, catalog, name, made)
    return bound


def _open_of(
    bound: Catalog,
    catalog: Catalog,
    targets: Mapping[str, Expression],
    convert: Convert | None,
    names: Collection[str],
    /,
    *,
    as_read: bool = False,
) -> Catalog:
    """Open the records that some tensors are made of, at once; see `OpenRecords`."""
    made = {name: targets[name] for name in targets if name in names}
    assert catalog.open_records is not None
    opened = catalog.open_records({*names, *(leaf.name for each in made.values() for leaf in leaves(each))})
    return beside(bind(opened, made, convert), bound)


def _dtype_of(catalog: Catalog, made: Expression) -> DType:
    return catalog.tensors[next(leaves(made)).name].dtype


def _read_whole(catalog: Catalog, made: Expression, files: SourceFiles, fqn: str) -> numpy.ndarray:
    itemsize = catalog.tensors[next(leaves(made)).name].dtype.itemsize
    with files.reader() as reader:
        return View(catalog, made, itemsize).box(reader, full_region(made.shape), fqn)


def _check(catalog: Catalog, targets: Mapping[str, Expression], convert: Convert | None) -> None:
    problems = []
    for target, made in targets.items():
        if isinstance(made, Opaque) and convert is None:
            problems.append(f"{escape(target)}: only the model's class in transformers makes it")
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
    dtype = _dtype_of(catalog, made)
    chunks = list(
        chain.from_iterable(_chunks(bound, catalog, target, piece, dtype.itemsize) for piece in pieces(made))
    )
    bound.add_tensor(target, dtype, made.shape, iter(sorted(chunks, key=lambda chunk: chunk[3].offsets)))


def _chunks(
    bound: Catalog, catalog: Catalog, target: str, piece: FilledBox, itemsize: int
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
    bound.files.append(computed_file(catalog, view, first.name if first is not None else None, target))
    yield len(bound.files) - 1, 0, bound.files[-1].size, piece.region


def computed_file(catalog: Catalog, elements: Computation, stored: str | None, target: str) -> SourceFile:
    """Return a file of elements that are computed from a catalog's.

    Args:
        catalog: of raw extents.
        elements: from it.
        stored: a tensor that they are made of: messages name its file. None if there is none.
        target: what they are, for messages.
    """
    entry = None if stored is None else catalog.tensors[stored]
    home = catalog.files[catalog.chunks.file[entry.first_chunk] if entry and entry.num_chunks else 0]
    nbytes = prod(elements.shape) * elements.itemsize
    return SourceFile(
        name=home.name,
        path=home.path,
        size=nbytes,
        decode=partial(_decode, catalog, elements, nbytes, target),
        compute=elements,
    )


def _stored_chunks(
    catalog: Catalog, name: str, piece: FilledBox, itemsize: int
) -> Iterator[tuple[int, int, int, Region] | None]:
    """Yield the stretches of stored chunks that make up a box; None where they are too short to be worth it."""
    entry, table = catalog.tensors[name], catalog.chunks
    is_same = _without_ones(piece.part.sizes) == _without_ones(piece.region.sizes)
    for row, held in zip(entry.chunk_ids, table.regions(entry.chunk_ids), strict=True):
        if (
            is_same and held == piece.part and 0 not in held.sizes
        ):  # a whole tensor in one stretch, as in every Hub model
            yield table.file[row], table.start[row], piece.part.num_elements * itemsize, piece.region
            continue
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


def _moved(box: Region, piece: FilledBox) -> Region:
    """Return a box within a piece's part as one within its region; the two differ in dims of size 1 alone."""
    pairs = iter(
        [pair for pair, size in zip(zip(*box, strict=True), piece.part.sizes, strict=True) if size != 1]
    )
    moved = [(0, 1) if size == 1 else next(pairs) for size in piece.region.sizes]
    return Region(tuple(o for o, _ in moved), tuple(n for _, n in moved))


def _shifted(region: Region, origin: Shape) -> Region:
    return Region(tuple(a + b for a, b in zip(region.offsets, origin, strict=True)), region.sizes)


def _decode(catalog: Catalog, elements: Computation, nbytes: int, fqn: str, on_read: OnRead) -> memoryview:
    """Return the bytes of all elements."""
    whole = memoryview(bytearray(nbytes))
    with SourceFiles(catalog.files, on_read=on_read) as files, files.reader() as reader:
        elements.fill(reader, 0, whole, fqn)
    return whole


def fill_range(elements: Computation, reader: SourceReader, start: int, buffer: memoryview, fqn: str) -> None:
    """Do what `Computation.fill` says, box by box; `start` and the buffer's length are multiples of the item size."""
    itemsize, done = elements.itemsize, 0
    for box in flat_range_boxes(elements.shape, start // itemsize, (start + len(buffer)) // itemsize):
        nbytes = box.num_elements * itemsize
        target = _as_elements(buffer[done : done + nbytes], box.sizes, itemsize)
        _copy(elements.box(reader, box, fqn), target)
        done += nbytes


@dataclass(frozen=True, slots=True)
class View:
    """The elements of an expression; a `Computation`."""

    catalog: Catalog
    """Of raw extents; its files have the numbers that the reader knows them by."""
    made: Expression
    itemsize: int

    @property
    def shape(self) -> Shape:
        """Of the expression."""
        return self.made.shape

    @property
    def needs_torch(self) -> bool:
        """It only moves elements."""
        return False

    def fill(self, reader: SourceReader, start: int, buffer: memoryview, fqn: str) -> None:
        """Fill a buffer with the bytes from `start` on; both are multiples of the item size."""
        fill_range(self, reader, start, buffer, fqn)

    def box(self, reader: SourceReader, region: Region, fqn: str) -> numpy.ndarray:
        """Return a box of the elements."""
        return self._read(reader, self.made, region, fqn)

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
            case Opaque():
                raise AssertionError("an opaque tensor is whole, and a target of its own")


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
        inner = relative_to(part, held.offsets)
        place = _ChunkPlace(table.file[row], table.start[row], held.sizes)
        window = _window(relative_to(part, region.offsets))
        elements = catalog.files[place.file].compute
        if elements is not None and elements.shape == held.sizes:  # one box costs less than its runs
            found[window] = elements.box(reader, inner, shown)
            left -= part.num_elements
            continue
        if part == region:
            _read_part(reader, place, inner, found, shown)
            return found
        values = numpy.empty(part.sizes, _kind(itemsize))
        _read_part(reader, place, inner, values, shown)
        found[window] = values
        left -= part.num_elements
    if left:
        raise IntegrityError(
            f"{escape(name)}: {left} elements that {escape(shown)} is made of are in no chunk"
        )
    return found


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
    run = next(runs(part, place.sizes)).length
    num_runs = part.num_elements // run
    if num_runs > 1 and run * itemsize < _SHORT_NBYTES and span * itemsize <= num_runs * _MAX_STRIDE:
        _read_spans(reader, place, part, target, fqn)
        return
    memory = _bytes(target)
    for each in runs(part, place.sizes):
        into = memory[each.target * itemsize : (each.target + each.length) * itemsize]
        reader.read_into(place.file, into, place.start + each.source * itemsize, fqn)


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


def _read_spans(
    reader: SourceReader, place: _ChunkPlace, part: Region, target: numpy.ndarray, fqn: str
) -> None:
    """Fill an array with a box of a chunk; what lies between its runs is read too, a stretch at a time."""
    import numpy

    itemsize = target.dtype.itemsize
    strides = [itemsize] * len(place.sizes)
    for dim in range(len(place.sizes) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * place.sizes[dim + 1]
    span_nbytes = place.span(part)[1] * itemsize
    limit = max(part.num_elements * _SPAN_NBYTES // max(span_nbytes, _SPAN_NBYTES), 1)
    for block in blocks(part.sizes, limit):
        box = _shifted(block, part.offsets)
        first, length = place.span(box)
        raw = numpy.empty(length, target.dtype)
        reader.read_into(place.file, _bytes(raw), place.start + first * itemsize, fqn)
        target[_window(block)] = numpy.lib.stride_tricks.as_strided(raw, box.sizes, strides, writeable=False)


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
