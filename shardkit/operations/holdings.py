"""Holdings: which rank and which file holds which bytes of which tensor. Pictures are drawn from them.

The *matrix* has a row for each rank (or file), a column for each unit of the wrap policy (or layer), and in its cells the
bytes that the rank holds of the unit. A *strip* is the sequence of records in a file.

A checkpoint of 1,024 ranks and 1,000 tensors has a million chunks. But layers are cut alike and ranks have equal shares.
So each way of cutting a tensor, each distinct row of the matrix and each distinct strip is stored once, and referred to
by its index. If there is more than a page can show, neighbours are merged, and `merged` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from shardkit.core.catalog import Catalog, SourceFile, TensorEntry
from shardkit.core.mesh import Mesh
from shardkit.core.placements import Placements
from shardkit.core.text import count, without_numbers
from shardkit.files import storage
from shardkit.layout.layout import Layout, find_containers, innermost_unit

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

    Numbers = NDArray[numpy.int64]

MAX_ROWS, MAX_UNITS, MAX_CELLS = 4096, 200, 150_000
MAX_TENSORS, MAX_RECORDS, MAX_PIECES = 5000, 60_000, 60_000
_MOST_RECORDS = 4000  # in one file: more than a screen has pixels
_LEAST_UNITS = 8
_MAX_READ = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldUnit:
    """A column of the matrix: a unit of the wrap policy, or else a layer; or several merged neighbours."""

    path: str
    """Module path, of the first unit if several are merged; "" is for tensors outside of layers."""
    count: int = 1
    """Number of merged units."""
    last: str | None = None
    """Module path of the last of several merged units."""
    gathered_bytes: int = 0
    """Bytes that a rank has of one unit while fully_shard has gathered it (with tp or ep, its own part); the maximum if
    several are merged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A row of the matrix: a rank, or a file if no mesh is recorded."""

    cells: int
    """Index into `Holdings.cells`."""
    held_bytes: int
    """Bytes of all units."""
    reads: tuple[tuple[int, int], ...]
    """(file, bytes) of the files with these bytes, most bytes first; only the first few files."""
    num_files: int
    """Number of all files with these bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldFile:
    """A file with tensors in it."""

    name: str
    file_bytes: int | None
    """None if the file is missing."""
    strip: int | None = None
    """Index into `Holdings.strips`; None if the file's tensors have to be decoded, so that they have no byte range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """The records of a file in the order of their bytes. Headers, padding and gaps are between them.

    Each field has one item for each record, or for several merged neighbours.
    """

    starts: tuple[int, ...]
    nbytes: tuple[int, ...]
    tensors: tuple[int, ...]
    """Index into `Holdings.tensors`, of the first record if several are merged."""
    counts: tuple[int, ...]
    """Number of merged records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorCut:
    """How a tensor is cut into chunks."""

    shape: tuple[int, ...]
    num_pieces: int
    """Number of pieces, without empty ones."""
    files: tuple[int, ...]
    """Index of the file of each piece; empty if there are too many pieces to show."""
    boxes: tuple[int, ...]
    """Offsets and then sizes of each piece, in elements, all in one sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTensor:
    """A tensor, or several whose names differ only in numbers."""

    name: str
    """With `*` instead of numbers if there are several."""
    count: int
    dtype: str
    tensor_bytes: int
    """Bytes of all of them."""
    unit: int
    cut: int
    """Index into `Holdings.cuts`."""
    num_without: int = 0
    """Number of ranks that hold nothing of it, among the shown ranks of its pipeline stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """Which file has which bytes of a checkpoint, and which rank reads them."""

    has_ranks: bool
    """True if rows are the ranks of a mesh, False if they are files."""
    num_holders: int
    """Number of ranks or files, including those that are not shown."""
    has_units: bool
    """True if columns are the wrapped units, False if they are layers, recognised by names."""
    units: tuple[HeldUnit, ...] = ()
    holders: tuple[Holder, ...] = ()
    cells: tuple[tuple[int, ...], ...] = ()
    """The distinct rows of the matrix: bytes of each unit."""
    files: tuple[HeldFile, ...]
    strips: tuple[Strip, ...]
    tensors: tuple[HeldTensor, ...] = ()
    cuts: tuple[TensorCut, ...] = ()
    tensor_bytes: int
    """Bytes of all tensors, each counted once."""
    merged: tuple[str, ...] = ()
    """Lines on what was merged or left out, because a page cannot show all."""

    def to_json(self) -> dict[str, Any]:
        """Return the holdings as plain data."""
        return asdict(self)


def find_holdings(
    catalog: Catalog,
    layout: Layout | None = None,
    *,
    names: Callable[[SourceFile], str] = lambda file: file.name,
) -> Holdings:
    """Return the holdings of an opened checkpoint. If several names share their bytes, only the first one counts.

    Args:
        catalog: catalog with all chunks.
        layout: which rank holds which region; None if this is not recorded.
        names: returns the name to show for a file.
    """
    builder = _Builder(catalog, layout, names)
    copies = {name for group in shared_extents(catalog) for name in group[1:]}
    for fqn, entry in catalog.tensors.items():
        if fqn not in copies:
            builder.add(fqn, entry)
    return builder.result()


def shared_extents(catalog: Catalog) -> tuple[tuple[str, ...], ...]:
    """Return the groups of names whose chunks are at the same places in files."""
    chunks, groups = catalog.chunks, dict[tuple[object, ...], list[str]]()
    for fqn, entry in catalog.tensors.items():
        if not entry.num_chunks or (not entry.nbytes and catalog.encoding == "raw"):
            continue  # empty tensors share nothing
        row = entry.first_chunk
        place = (chunks.file[row], chunks.start[row], entry.num_chunks, entry.dtype, entry.shape)
        groups.setdefault(place, []).append(fqn)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def find_file_holdings(files: Iterable[tuple[str, int | None, Sequence[tuple[int, int, str]]]]) -> Holdings:
    """Return the holdings of files alone, for a checkpoint that cannot be opened.

    Args:
        files: (name, bytes, records) of each file; a record is (first byte, bytes, tensor).
    """
    listed = list(files)
    names = dict.fromkeys(fqn for *_, rows in listed for *_, fqn in rows)
    numbers = {fqn: number for number, fqn in enumerate(names)}
    packer = _Packer()
    held_files = []
    for name, size, rows in listed:
        kept = sorted((start, nbytes, numbers[fqn]) for start, nbytes, fqn in rows)
        strip = packer.add(*(list(column) for column in zip(*kept, strict=True))) if kept else None
        held_files.append(HeldFile(name=name, file_bytes=size, strip=strip))
    tensors = [
        HeldTensor(name=fqn, count=1, dtype="", tensor_bytes=0, unit=0, cut=0)
        for fqn in list(numbers)[:MAX_TENSORS]
    ]
    return Holdings(
        has_ranks=False,
        num_holders=len(held_files),
        has_units=False,
        files=tuple(held_files),
        strips=tuple(packer.strips),
        tensors=tuple(tensors),
        tensor_bytes=sum(nbytes for *_, rows in listed for _, nbytes, _ in rows),
        merged=packer.merged(),
    )


class _Packer:
    """Collects the distinct strips of files."""

    def __init__(self) -> None:
        self.strips: list[Strip] = []
        self._strip_numbers: dict[tuple[object, ...], int] = {}
        self._num_records, self._num_merged = 0, 0

    def add(self, starts: list[int], nbytes: list[int], tensors: list[int]) -> int:
        """Return the index of the strip with these records, which must be in the order of their bytes."""
        key = (tuple(starts), tuple(nbytes), tuple(tensors))
        if key not in self._strip_numbers:
            self._strip_numbers[key] = len(self.strips)
            self.strips.append(self._strip(starts, nbytes, tensors))
        return self._strip_numbers[key]

    def _strip(self, starts: list[int], nbytes: list[int], tensors: list[int]) -> Strip:
        """Return a strip in which neighbours are merged if necessary.

        A strip may use half of the records that are left of MAX_RECORDS, so that something is left for the next one.
        """
        room = max(min((MAX_RECORDS - self._num_records) // 2, _MOST_RECORDS), 16)
        step = -(-len(starts) // room)
        firsts = range(0, len(starts), step)
        self._num_records += len(firsts)
        self._num_merged += step > 1
        lasts = [min(first + step, len(starts)) - 1 for first in firsts]
        ends = [starts[last] + nbytes[last] for last in lasts]
        return Strip(
            starts=tuple(starts[first] for first in firsts),
            nbytes=tuple(end - starts[first] for first, end in zip(firsts, ends, strict=True)),
            tensors=tuple(tensors[first] for first in firsts),
            counts=tuple(last - first + 1 for first, last in zip(firsts, lasts, strict=True)),
        )

    def merged(self) -> tuple[str, ...]:
        """Return a line about merged records, if there are any."""
        if not self._num_merged:
            return ()
        return (
            f"records that are neighbours are drawn as one in {count(self._num_merged, 'kind')} of files",
        )


class _Distribution(NamedTuple):
    """One way of cutting a tensor and of distributing the pieces over rows and files."""

    cut: int
    """Index into `Holdings.cuts`."""
    row_bytes: Numbers
    """Bytes in each row of the matrix."""
    reads: tuple[tuple[int, int, int], ...]
    """(row, file, bytes)."""
    num_without: int
    """Number of ranks that hold nothing."""


class _Builder:
    """Builds the holdings, tensor by tensor."""

    def __init__(self, catalog: Catalog, layout: Layout | None, names: Callable[[SourceFile], str]) -> None:
        self._catalog, self._layout, self._names = catalog, layout, names
        self._files: dict[str, int] = {}
        self._sizes: list[int] = []
        self._plain: list[bool] = []
        self._number = [self._number_of(file) if file.is_raw else -1 for file in catalog.files]
        self._num_rows = min(layout.mesh.size, MAX_ROWS) if layout is not None else len(self._files)
        self._units = _Units(catalog, layout)
        self._distributions: dict[tuple[object, ...], _Distribution] = {}
        self._cuts: dict[tuple[object, ...], int] = {}
        self._cut_list: list[TensorCut] = []
        self._num_pieces = 0
        self._placed: list[tuple[str, TensorEntry, _Distribution, int]] = []

    def _number_of(self, file: SourceFile, fqn: str | None = None) -> int:
        """Return the number of a file. For a decoded tensor, it is the file that contains the encoded bytes."""
        name = self._names(file) if fqn is None else file.name.removesuffix(f":{fqn}")
        if name not in self._files:
            self._files[name] = len(self._files)
            self._sizes.append(file.size if file.is_raw else size_on_disk(file.path))
            self._plain.append(file.is_raw)
        return self._files[name]

    def add(self, fqn: str, entry: TensorEntry) -> None:
        """Add a tensor."""
        table, rows = self._catalog.chunks, entry.chunk_ids
        for file in set(table.file[rows.start : rows.stop]):
            if self._number[file] < 0:
                self._number[file] = self._number_of(self._catalog.files[file], fqn)
        files, boxes = table.file[rows.start : rows.stop], table.boxes(rows)
        placed = None if self._layout is None else self._layout.tensors.get(fqn)
        mesh = None if self._layout is None or placed is None else self._layout.mesh_of(fqn)
        placements = None if placed is None else placed.placements
        key = (entry.shape, entry.dtype.itemsize, files.tobytes(), boxes.tobytes(), placements, mesh)
        if key not in self._distributions:
            numbers = [self._number[file] for file in files]
            self._distributions[key] = self._distribution(entry, numbers, boxes.tolist(), placements, mesh)
        unit = self._units.of(fqn)
        if placed is not None and mesh is not None and not placed.is_buffer:
            axes = zip(mesh.axes, placed.placements, strict=True)
            # fully_shard does not gather over the axes of tp and ep.
            cuts = (axis.size for axis, p in axes if axis.role == "tensor" and p.shard_dim is not None)
            num_parts = prod(cuts)
            self._units.gather(unit, entry.nbytes, num_parts)
        self._placed.append((fqn, entry, self._distributions[key], unit))

    def _distribution(
        self,
        entry: TensorEntry,
        files: list[int],
        boxes: list[int],
        placements: Placements | None,
        mesh: Mesh | None,
    ) -> _Distribution:
        import numpy

        num_dims = len(entry.shape)
        cut = self._cut(entry.shape, files, boxes)
        num_without = 0
        if placements is not None and mesh is not None and mesh.size:
            reads = list(self._read(entry, files, boxes, placements, mesh))
            ranks = range(self._num_rows) if mesh.ranks is None else mesh.ranks
            able = len(range(ranks.start, min(ranks.stop, self._num_rows)))
            num_without = able - len({row for row, *_ in reads}) if entry.nbytes else 0
        else:
            sizes = [
                prod(boxes[start + num_dims : start + 2 * num_dims])
                for start in range(0, len(boxes), 2 * num_dims or 1)
            ]
            file_sizes = zip(files, sizes or [1] * len(files), strict=True)
            reads = [(self._row_of(file), file, n * entry.dtype.itemsize) for file, n in file_sizes if n]
        held_bytes = numpy.zeros(max(self._num_rows, len(self._files)), dtype=numpy.int64)
        for row, _, nbytes in reads:
            held_bytes[row] += nbytes
        return _Distribution(cut, held_bytes, tuple(reads), num_without)

    def _row_of(self, file: int) -> int:
        """Return the row for a tensor without placements: its file, or the rank that reads this file."""
        if self._layout is None:
            return file
        ranks = self._layout.mesh.file_ranks
        return min(ranks[file] if file < len(ranks) else 0, self._num_rows - 1)

    def _read(
        self, entry: TensorEntry, files: list[int], boxes: list[int], placements: Placements, mesh: Mesh
    ) -> Iterator[tuple[int, int, int]]:
        """Yield (rank, file, bytes) for each region that a rank holds."""
        width = 2 * len(entry.shape)
        place = {tuple(boxes[index * width : (index + 1) * width]): file for index, file in enumerate(files)}
        for rank in range(self._num_rows):
            for region, _ in mesh.held(entry.shape, placements, rank):
                nbytes = region.num_elements * entry.dtype.itemsize
                file = place.get((*region.offsets, *region.sizes))
                if nbytes and file is not None:
                    yield rank, file, nbytes

    def _cut(self, shape: tuple[int, ...], files: list[int], boxes: list[int]) -> int:
        width = 2 * len(shape)
        if prod(shape):  # torch writes an empty chunk for ranks without rows
            full = [
                at for at in range(len(files)) if 0 not in boxes[at * width + width // 2 : (at + 1) * width]
            ]
            files = [files[at] for at in full]
            boxes = [number for at in full for number in boxes[at * width : (at + 1) * width]]
        key = (shape, tuple(files), tuple(boxes))
        if key not in self._cuts:
            self._cuts[key] = len(self._cut_list)
            is_shown = self._num_pieces + len(files) <= MAX_PIECES
            self._num_pieces += len(files) if is_shown else 0
            self._cut_list.append(
                TensorCut(
                    shape=shape,
                    num_pieces=len(files),
                    files=tuple(files) if is_shown else (),
                    boxes=tuple(boxes) if is_shown else (),
                )
            )
        return self._cuts[key]

    def result(self) -> Holdings:
        """Return the holdings of all added tensors."""
        tensors, number_of = self._tensors()
        strips, strip_of, merged = self._strips(number_of)
        units, holders, cells = self._matrix()
        num_ranks = self._layout.mesh.size if self._layout is not None else 0
        return Holdings(
            has_ranks=self._layout is not None,
            num_holders=num_ranks or len(self._files),
            has_units=self._units.is_recorded,
            units=units,
            holders=holders,
            cells=cells,
            files=tuple(
                HeldFile(name=name, file_bytes=self._sizes[number], strip=strip_of.get(number))
                for name, number in self._files.items()
            ),
            strips=strips,
            tensors=tensors,
            cuts=tuple(self._cut_list),
            tensor_bytes=sum(entry.nbytes for _, entry, _, _ in self._placed),
            merged=(*self._merged_lines(num_ranks, len(units), len(tensors)), *merged),
        )

    def _merged_lines(self, num_ranks: int, num_units: int, num_tensors: int) -> Iterator[str]:
        if num_ranks > MAX_ROWS:
            yield f"the first {MAX_ROWS} of {num_ranks} ranks are shown"
        if num_units < self._units.num_units:
            yield f"{self._units.num_units} units or layers share {num_units} columns, neighbours together"
        if num_tensors < len(self._placed):
            yield f"{len(self._placed)} tensors share {num_tensors} lines, those that are alike together"
        hidden = sum(not cut.files for cut in self._cut_list if cut.num_pieces)
        if hidden:
            yield f"{count(hidden, 'way', 'ways')} of cutting tensors have too many pieces to be shown"

    def _tensors(self) -> tuple[tuple[HeldTensor, ...], dict[str, int]]:
        """Return the tensors, merged if there are many, and name -> index."""
        groups: dict[tuple[object, ...], list[int]] = {}
        is_folded = len(self._placed) > MAX_TENSORS
        for index, (fqn, entry, way, _) in enumerate(self._placed):
            key = (without_numbers(fqn), entry.dtype, way.cut) if is_folded else (fqn,)
            groups.setdefault(key, []).append(index)
        held_tensors, number_of = list[HeldTensor](), dict[str, int]()
        for group in list(groups.values()):
            fqn, entry, way, unit = self._placed[group[0]]
            number_of |= {self._placed[index][0]: len(held_tensors) for index in group}
            held_tensors.append(
                HeldTensor(
                    name=fqn if len(group) == 1 else without_numbers(fqn),
                    count=len(group),
                    dtype=entry.dtype.name,
                    tensor_bytes=len(group) * entry.nbytes,
                    unit=unit,
                    cut=way.cut,
                    num_without=way.num_without,
                )
            )
        return tuple(held_tensors[:MAX_TENSORS]), number_of

    def _strips(
        self, number_of: Mapping[str, int]
    ) -> tuple[tuple[Strip, ...], dict[int, int], tuple[str, ...]]:
        import numpy

        table, packer, strip_of = self._catalog.chunks, _Packer(), dict[int, int]()
        rows = numpy.concatenate(
            [
                numpy.arange(0),
                *(numpy.arange(e.first_chunk, e.first_chunk + e.num_chunks) for _, e, _, _ in self._placed),
            ]
        )
        owners = numpy.repeat(
            numpy.array([number_of[fqn] for fqn, *_ in self._placed], dtype=numpy.int64),
            numpy.array([entry.num_chunks for _, entry, _, _ in self._placed], dtype=numpy.int64),
        )
        files = (
            numpy.array(self._number, dtype=numpy.int64)[
                numpy.frombuffer(table.file, dtype=numpy.int32)[rows]
            ]
            if len(rows)
            else rows
        )
        starts, nbytes = (
            numpy.frombuffer(column, dtype=numpy.int64)[rows] if len(rows) else rows
            for column in (table.start, table.nbytes)
        )
        order = numpy.lexsort((nbytes, starts, files))
        bounds = numpy.searchsorted(files[order], numpy.arange(len(self._files) + 1))
        for file, is_plain in enumerate(self._plain):
            mine = order[bounds[file] : bounds[file + 1]]
            mine = mine[nbytes[mine] > 0]
            if is_plain and len(mine):
                strip_of[file] = packer.add(
                    starts[mine].tolist(), nbytes[mine].tolist(), owners[mine].tolist()
                )
        return tuple(packer.strips), strip_of, packer.merged()

    def _matrix(self) -> tuple[tuple[HeldUnit, ...], tuple[Holder, ...], tuple[tuple[int, ...], ...]]:
        import numpy

        num_rows = self._num_rows if self._layout is not None else len(self._files)
        matrix = numpy.zeros((self._units.num_units, num_rows), dtype=numpy.int64)
        reads: list[dict[int, int]] = [{} for _ in range(num_rows)]
        times: dict[int, tuple[_Distribution, int]] = {}
        for _, _, way, unit in self._placed:
            matrix[unit] += numpy.pad(way.row_bytes, (0, max(num_rows - len(way.row_bytes), 0)))[:num_rows]
            times[id(way)] = (way, times.get(id(way), (way, 0))[1] + 1)
        for way, number in times.values():
            for row, file, nbytes in way.reads:
                reads[row][file] = reads[row].get(file, 0) + number * nbytes
        units, matrix = self._units.merged(matrix)
        distinct, which = numpy.unique(matrix.T, axis=0, return_inverse=True)
        holders = []
        for row, cells in enumerate(which.reshape(-1).tolist()):
            most = sorted(reads[row].items(), key=lambda read: (-read[1], read[0]))
            total = int(distinct[cells].sum())
            holders.append(
                Holder(cells=cells, held_bytes=total, reads=tuple(most[:_MAX_READ]), num_files=len(most))
            )
        return units, tuple(holders), tuple(map(tuple, distinct.tolist()))


def imbalance_of(sizes: Sequence[int]) -> float:
    """Return the largest size, divided by the mean size."""
    return max(sizes) * len(sizes) / sum(sizes) if sum(sizes) else 1.0


def size_on_disk(path: str) -> int:
    """Return the size of a file in bytes; 0 if the system cannot tell."""
    try:
        return storage.stat(path).st_size
    except OSError:
        return 0


class _Units:
    """The columns of the matrix: recorded units, or else layers, recognised by names."""

    def __init__(self, catalog: Catalog, layout: Layout | None) -> None:
        self._layout = layout
        self.is_recorded = layout is not None and len(layout.units) > 1
        if layout is not None and self.is_recorded:
            self._paths = [unit.path for unit in layout.units]
        else:
            containers = find_containers(catalog.tensors)
            paths = [f"{path}.{index}" for path, size in containers.items() for index in range(size)]
            self._paths = ["", *paths]
        self._index = {path: index for index, path in enumerate(self._paths)}
        self._gathered = [0] * len(self._paths)

    def gather(self, unit: int, nbytes: int, num_parts: int) -> None:
        """Count a tensor of a unit, of which a rank gathers one of `num_parts` parts."""
        self._gathered[unit] += -(-nbytes // num_parts)

    @property
    def num_units(self) -> int:
        """Number of units before merging."""
        return len(self._paths)

    def of(self, fqn: str) -> int:
        """Return the index of a tensor's unit."""
        placed = self._layout.tensors.get(fqn) if self._layout is not None and self.is_recorded else None
        if placed is not None and placed.unit < len(self._paths):
            return placed.unit
        return innermost_unit(fqn, self._index)

    def merged(self, matrix: Numbers) -> tuple[tuple[HeldUnit, ...], Numbers]:
        """Merge neighbours into as many columns as a page can show; return them and their sums of the matrix's rows.

        Args:
            matrix: bytes, with a row for each unit (transposed, compared with the matrix that is shown).
        """
        import numpy

        num_distinct = len(numpy.unique(matrix.T, axis=0))
        most = max(min(MAX_UNITS, MAX_CELLS // max(num_distinct, 1)), _LEAST_UNITS)
        step = -(-self.num_units // most)
        firsts = range(0, self.num_units, step)
        units = [
            HeldUnit(
                path=self._paths[first],
                count=len(self._paths[first : first + step]),
                last=self._paths[first : first + step][-1] if step > 1 else None,
                gathered_bytes=max(self._gathered[first : first + step]),
            )
            for first in firsts
        ]
        return tuple(units), numpy.add.reduceat(matrix, list(firsts), axis=0)
