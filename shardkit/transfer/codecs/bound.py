"""Binding expressions: a catalog with tensors that are composed of, or computed from, those of another one.

`bind` gives each target its own chunks. Where an expression places boxes of stored tensors side by side, chunks point at
the stored bytes, which are moved like any others. Reordered elements become a virtual file: any range of it is computed
from the boxes that it needs, with memory for a few times that range. Targets of unsupported operations of transformers
are computed as a whole (`converted`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from shardkit.core.catalog import Catalog, Codec, StoredParts, with_missing
from shardkit.core.dtypes import DType
from shardkit.core.regions import (
    Region,
    Shape,
    flat_offset,
    flat_range_boxes,
    intersect,
    is_contiguous,
    relative_to,
    runs,
    shifted,
    window,
)
from shardkit.core.text import escape
from shardkit.errors import LayoutError
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
from shardkit.transfer.codecs.boxes import copy_array, kind_of
from shardkit.transfer.codecs.converted import Convert, GroupConverter, GroupMember
from shardkit.transfer.codecs.derive import add_computed, computed_file

if TYPE_CHECKING:
    import numpy

_MAX_RUNS = 64  # per box; boxes with more runs are computed instead of becoming chunks


def bind(
    catalog: Catalog,
    targets: Mapping[str, Expression],
    convert: Convert | None = None,
    codecs: Mapping[str, Codec] = MappingProxyType({}),
) -> Catalog:
    """Return a catalog with the tensors of another one and additional targets.

    Args:
        catalog: of raw extents, or with closed records; the result is the same.
        targets: expression of each target, by its name, which must be new.
        convert: runs converters of transformers, for opaque targets.
        codecs: of further targets, by their names, which must be new.

    Raises:
        LayoutError: an expression needs a missing tensor, one of another shape, tensors of different dtypes, or a
            converter that is not given; lists all.
    """
    _check(catalog, targets, convert)
    bound = replace(catalog, files=list(catalog.files), tensors={}, paths=None)
    bound.chunks = type(catalog.chunks)()
    for name in catalog.tensors:
        bound.copy_tensor(catalog, name, name)
    if catalog.open_records is not None:
        for name, expression in targets.items():
            bound.add_tensor(name, _dtype_of(catalog, expression), expression.shape, iter(()))
        for name, codec in codecs.items():
            add_computed(bound, catalog, name, codec)
        bound.open_records = partial(_open_of, bound, catalog, targets, convert, codecs)
        return bound
    converter = None if convert is None else GroupConverter(convert)
    for name, expression in targets.items():
        dtype = _dtype_of(catalog, expression)
        if isinstance(expression, Opaque):
            assert converter is not None  # `_check`
            parts = tuple(View(part, dtype) for _, part in expression.parts)
            codec = GroupMember(converter=converter, expression=expression, parts=parts, target=name)
            add_computed(bound, catalog, name, codec, group=codec.group)
        else:
            _add(bound, catalog, name, expression, dtype)
    for name, codec in codecs.items():
        add_computed(bound, catalog, name, codec)
    return bound


def _open_of(
    bound: Catalog,
    catalog: Catalog,
    targets: Mapping[str, Expression],
    convert: Convert | None,
    codecs: Mapping[str, Codec],
    names: Collection[str],
    /,
    *,
    as_read: bool = False,
) -> Catalog:
    """Open all records that some tensors need; see `OpenRecords`."""
    expressions = {name: targets[name] for name in targets if name in names}
    needed = {name: codecs[name] for name in codecs if name in names}
    assert catalog.open_records is not None
    opened = catalog.open_records(
        {
            *names,
            *(leaf.name for expression in expressions.values() for leaf in leaves(expression)),
            *(part for codec in needed.values() for part in codec.of),
        }
    )
    return with_missing(bind(opened, expressions, convert, needed), bound)


def _dtype_of(catalog: Catalog, expression: Expression) -> DType:
    return catalog.tensors[next(leaves(expression)).name].dtype


def _check(catalog: Catalog, targets: Mapping[str, Expression], convert: Convert | None) -> None:
    problems = []
    for target, expression in targets.items():
        if isinstance(expression, Opaque) and convert is None:
            problems.append(f"{escape(target)}: only the model's class in transformers can compute it")
        dtypes = set[str]()
        for leaf in leaves(expression):
            entry = catalog.tensors.get(leaf.name)
            if entry is None:
                problems.append(f"{escape(target)}: {escape(leaf.name)} is missing")
            elif entry.shape != leaf.shape:
                problems.append(
                    f"{escape(target)}: {escape(leaf.name)} is {list(entry.shape)}, not {list(leaf.shape)}"
                )
            else:
                dtypes.add(entry.dtype.name)
        if len(dtypes) > 1:
            problems.append(f"{escape(target)}: needs tensors of several dtypes: {', '.join(sorted(dtypes))}")
    LayoutError.raise_for(problems, "tensors cannot be computed from the stored ones")


def _add(bound: Catalog, catalog: Catalog, target: str, expression: Expression, dtype: DType) -> None:
    chunks = list(chain.from_iterable(_chunks(bound, catalog, piece, dtype) for piece in pieces(expression)))
    bound.add_tensor(
        target, dtype, expression.shape, iter(sorted(chunks, key=lambda chunk: chunk[3].offsets))
    )


def _chunks(
    bound: Catalog, catalog: Catalog, piece: FilledBox, dtype: DType
) -> Iterator[tuple[int, int, int, Region]]:
    """Yield the chunks (file, first byte, bytes, region of the target) of a piece."""
    if piece.is_box:
        assert isinstance(piece.of, Stored)
        stretches = list(_stored_chunks(catalog, piece.of.name, piece, dtype.itemsize))
        if None not in stretches:
            yield from (chunk for chunk in stretches if chunk is not None)
            return
    view = View(piece.of if not piece.is_box else Cut(piece.of, piece.part), dtype)
    bound.files.append(computed_file(catalog, view))
    yield len(bound.files) - 1, 0, bound.files[-1].size, piece.region


def _stored_chunks(
    catalog: Catalog, name: str, piece: FilledBox, itemsize: int
) -> Iterator[tuple[int, int, int, Region] | None]:
    """Yield the stretches of stored chunks that make up a box; None if they are too short to be efficient."""
    entry, table = catalog.tensors[name], catalog.chunks
    is_same = _without_ones(piece.part.sizes) == _without_ones(piece.region.sizes)
    for row, region in zip(entry.chunk_ids, table.regions(entry.chunk_ids), strict=True):
        if (
            is_same and region == piece.part and 0 not in region.sizes
        ):  # a whole tensor in one stretch, as in every Hub model
            yield table.file[row], table.start[row], piece.part.num_elements * itemsize, piece.region
            continue
        part = intersect(piece.part, region)
        if part is None:
            continue
        inner, file = relative_to(part, region.offsets), table.file[row]
        box = relative_to(part, piece.part.offsets)
        spans = list(islice(runs(inner, region.sizes), _MAX_RUNS + 1))
        is_one_box = is_same and len(spans) == 1
        is_worth = len(spans) == 1 or (len(spans) <= _MAX_RUNS and catalog.files[file].is_raw)
        if not is_worth or not (is_one_box or is_contiguous(box, piece.part.sizes)):
            yield None
            return
        start = flat_offset(box.offsets, piece.part.sizes)
        for run in spans:  # each a range of the box too
            place, first = table.start[row] + run.source * itemsize, start + run.target
            if is_one_box:
                targets = [_moved(box, piece)]
            else:
                targets = flat_range_boxes(piece.region.sizes, first, first + run.length)
            for target in targets:
                nbytes = target.num_elements * itemsize
                yield file, place, nbytes, shifted(target, piece.region.offsets)
                place += nbytes


def _without_ones(sizes: Shape) -> Shape:
    return tuple(size for size in sizes if size != 1)


def _moved(box: Region, piece: FilledBox) -> Region:
    """Translate a box from a piece's part to its region; the two differ only in dims of size 1."""
    pairs = iter(
        [pair for pair, size in zip(zip(*box, strict=True), piece.part.sizes, strict=True) if size != 1]
    )
    moved = [(0, 1) if size == 1 else next(pairs) for size in piece.region.sizes]
    return Region(tuple(o for o, _ in moved), tuple(n for _, n in moved))


@dataclass(frozen=True, slots=True)
class View:
    """Computes the elements of an expression; a `Codec`."""

    expression: Expression
    dtype: DType
    needs_torch: ClassVar[bool] = False

    @property
    def of(self) -> tuple[str, ...]:
        """The stored tensors of the expression."""
        return tuple(dict.fromkeys(leaf.name for leaf in leaves(self.expression)))

    @property
    def shape(self) -> Shape:
        """Of the expression."""
        return self.expression.shape

    def fill(self, parts: StoredParts, region: Region, target: numpy.ndarray) -> None:
        """Fill an array with a box of the expression."""
        copy_array(self._read(parts, self.expression, region), target)

    def _read(self, parts: StoredParts, expression: Expression, region: Region) -> numpy.ndarray:
        """Return a box of an expression as an array of elements of the item size."""
        import numpy

        match expression:
            case Stored():
                return parts.box(expression.name, region)
            case Cut():
                return self._read(parts, expression.of, shifted(region, expression.region.offsets))
            case Permuted():
                back = [expression.dims.index(dim) for dim in range(len(expression.dims))]
                below = Region(tuple(region.offsets[d] for d in back), tuple(region.sizes[d] for d in back))
                turned: numpy.ndarray = self._read(parts, expression.of, below).transpose(expression.dims)
                return turned
            case Reshaped():
                below, whole = cover(expression.of.shape, expression.shape, region)
                values = self._read(parts, expression.of, below)
                if not values.flags.c_contiguous:
                    straight = numpy.empty(values.shape, values.dtype)
                    copy_array(values, straight)
                    values = straight
                box: numpy.ndarray = values.reshape(whole.sizes)[window(relative_to(region, whole.offsets))]
                return box
            case Zeros():
                return numpy.zeros(region.sizes, kind_of(self.dtype.itemsize))
            case Concat():
                joined = numpy.empty(region.sizes, kind_of(self.dtype.itemsize))
                for part, place in expression.placed():
                    inner = intersect(place, region)
                    if inner is not None:
                        values = self._read(parts, part, relative_to(inner, place.offsets))
                        copy_array(values, joined[window(relative_to(inner, region.offsets))])
                return joined
            case Opaque():
                raise AssertionError("an opaque tensor is whole, and a target of its own")
