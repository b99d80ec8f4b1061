"""Planning: which source bytes fill which hole. Pure: nothing is opened, no bytes are read.

A hole is filled in one of three ways:

- *streamed* if its bytes, in order, are contiguous runs of source chunks: row-sharded tensors, in either
  direction;
- *gathered* if it is a run of the tensor but the chunks are not, because a tensor that was cut along a later
  dim is put together, or if elements are reordered: band by band, every chunk's part is read, or computed, and
  put in its place;
- *scattered* if a tensor is being cut along a later dim, or its bytes have to be decoded: the source is read
  once, block by block, and every block's part is put into each hole that wants it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import NamedTuple

from shardkit.core.catalog import MIN_COLUMNS, MIN_TOTAL, Catalog, Computed, Decoded, TensorEntry
from shardkit.core.dtypes import DType
from shardkit.core.regions import Region, Shape, flat_offset, intersect, is_contiguous
from shardkit.transfer.images import Hole, Image, ImageSet, TensorHoles

_SMALL_TASK_NBYTES = 1 << 20  # the same where tasks follow the source
_FAR_NBYTES = 8 << 20  # two places are one where so little lies between them
_TASK_NBYTES = 128 << 20  # a thread's share of one image: small enough to balance, large enough to matter


class Move(NamedTuple):
    """Contiguous source bytes that fill contiguous bytes of a hole."""

    file: int
    """Index into the source catalog's files."""
    start: int
    """First byte in that file."""
    nbytes: int
    """Source bytes. The hole takes as many elements."""


class Task(NamedTuple):
    """Pieces of one image, written front to back by one thread."""

    image: int
    start: int
    """First piece."""
    stop: int
    nbytes: int
    """Bytes from the first piece to the end of the last, gaps included."""
    begin: int
    """First byte. The tasks of an image tile it."""


class FlatSource(NamedTuple):
    """A tensor whose chunks are all contiguous ranges of it, in columns and in the tensor's own order."""

    dtype: DType
    starts: array[int]
    """First element of each chunk that has any, counted row-major in the whole tensor."""
    stops: array[int]
    files: array[int]
    places: array[int]
    """First byte of each chunk in its file."""

    def moves(self, start: int, stop: int) -> list[Move]:
        """Return the moves that fill elements `start .. stop`; neighbours in a file are one move."""
        itemsize = self.dtype.itemsize
        if len(self.starts) == 1 and start < stop:  # every tensor of a Hub model
            return [Move(self.files[0], self.places[0] + start * itemsize, (stop - start) * itemsize)]
        moves: list[Move] = []
        index, begin = bisect_right(self.starts, start) - 1, start
        while begin < stop:
            end = min(stop, self.stops[index])
            file, place = self.files[index], self.places[index] + (begin - self.starts[index]) * itemsize
            nbytes = (end - begin) * itemsize
            if moves and moves[-1].file == file and moves[-1].start + moves[-1].nbytes == place:
                moves[-1] = Move(file, moves[-1].start, moves[-1].nbytes + nbytes)
            else:
                moves.append(Move(file, place, nbytes))
            begin, index = end, index + 1
        return moves


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """What to move."""

    images: ImageSet
    catalog: Catalog
    tasks: tuple[Task, ...]
    streamed: dict[str, FlatSource]
    """Tensors whose holes are streamed, by the source's name."""
    gathered: frozenset[str]
    """Tensors whose holes are gathered, by the source's name."""
    scattered: dict[str, tuple[tuple[int, Hole], ...]]
    """(image index, hole) of every hole that is scattered, by the source's name."""
    needs_torch: bool
    """torch computes something."""
    read_bytes: int
    """Source bytes. Those of a scattered tensor are read once."""
    written_bytes: int
    """Size of all images."""
    hole_bytes: int
    """Bytes that fill holes. Progress counts these."""

    def in_order(self) -> TransferPlan:
        """Return the plan for files of which nothing may be written before its turn, since their memory is few parts.

        Tensors that would be scattered are gathered: of each the source is read once as a whole, for its digest, and
        once more for every hole.
        """
        again = sum(
            hole.region.num_elements * self.catalog.tensors[name].dtype.itemsize
            for name, holes in self.scattered.items()
            for _, hole in holes
        )
        return replace(
            self, gathered=self.gathered | self.scattered.keys(), read_bytes=self.read_bytes + again
        )


def build_plan(images: ImageSet, catalog: Catalog) -> TransferPlan:
    """Return the plan that fills every hole of `images` from `catalog`.

    Every hole names a tensor of the catalog and lies inside it: the maker of the images has checked that.

    Args:
        images: with the holes.
        catalog: the source.
    """
    by_source: dict[str, list[TensorHoles]] = {}
    for holes in images.tensors():
        by_source.setdefault(holes.source, []).append(holes)
    streamed, gathered = dict[str, FlatSource](), set[str]()
    scattered: dict[str, tuple[tuple[int, Hole], ...]] = {}
    for name, tensor_holes in by_source.items():
        entry = catalog.tensors[name]
        holes_are_runs = _are_runs((sizes for holes in tensor_holes for sizes in holes.sizes), entry.shape)
        flat = flat_source(entry, catalog) if holes_are_runs else None
        if flat is not None:
            streamed[name] = flat
        elif holes_are_runs and not _is_made_whole(entry, catalog):
            gathered.add(name)
        else:
            scattered[name] = tuple(hole for holes in tensor_holes for hole in images.holes(holes.fqn))
    every = [holes for tensor_holes in by_source.values() for holes in tensor_holes]
    return TransferPlan(
        images=images,
        catalog=catalog,
        tasks=tuple(
            task for number, image in enumerate(images) for task in _tasks(number, image, _TASK_NBYTES)
        ),
        streamed=streamed,
        gathered=frozenset(gathered),
        scattered=scattered,
        needs_torch=any(
            isinstance(file.derivation, Computed) and file.derivation.codec.needs_torch
            for file in catalog.files
        ),
        read_bytes=sum(catalog.tensors[holes.source].nbytes for holes in every),
        written_bytes=sum(image.size for image in images),
        hole_bytes=sum(holes.nbytes for holes in every),
    )


def _are_runs(sizes: Iterable[Shape], shape: Shape) -> bool:
    """True if regions of these sizes are contiguous in a tensor, wherever they lie."""
    return all(is_contiguous(Region((0,) * len(box), box), shape) for box in sizes)


def _is_made_whole(entry: TensorEntry, catalog: Catalog) -> bool:
    """True if a part of a tensor exists only once all of it is decoded, or made with others."""
    every = (catalog.files[catalog.chunks.file[row]].derivation for row in entry.chunk_ids)
    return any(isinstance(each, Decoded) or (each is not None and each.group is not None) for each in every)


def flat_source(entry: TensorEntry, catalog: Catalog) -> FlatSource | None:
    """Return a tensor's chunks as ranges of it; None if one is not a range, or has to be decoded."""
    if entry.num_chunks >= MIN_COLUMNS and len(catalog.chunks) >= MIN_TOTAL:
        flat = _flat_rows(entry, catalog)
        if flat is not None:
            return flat
    regions, table = catalog.chunks.regions(entry.chunk_ids), catalog.chunks
    if not _are_runs({region.sizes for region in regions}, entry.shape):
        return None
    rows = sorted(
        (flat_offset(region.offsets, entry.shape), row, region.num_elements)
        for row, region in zip(entry.chunk_ids, regions, strict=True)
        if region.num_elements
    )
    files = array("i", [table.file[row] for _, row, _ in rows])
    if not all(catalog.files[file].is_raw for file in set(files)):
        return None
    return FlatSource(
        dtype=entry.dtype,
        starts=array("q", [start for start, _, _ in rows]),
        stops=array("q", [start + count for start, _, count in rows]),
        files=files,
        places=array("q", [table.start[row] for _, row, _ in rows]),
    )


def _flat_rows(entry: TensorEntry, catalog: Catalog) -> FlatSource | None:
    """Do the same in columns, for very many chunks; None unless they are rows in the tensor's own order."""
    import numpy as np

    table, rows, num_dims = catalog.chunks, entry.chunk_ids, len(entry.shape)
    boxes = np.frombuffer(table.boxes(rows), dtype=np.int64).reshape(len(rows), -1)
    kept = np.flatnonzero(boxes[:, num_dims:].all(axis=1))
    if num_dims == 0 or not len(kept):
        return None
    offsets, sizes = boxes[kept, :num_dims], boxes[kept, num_dims:]
    if offsets[:, 1:].any() or (sizes[:, 1:] != np.array(entry.shape[1:], dtype=np.int64)).any():
        return None
    starts, counts = offsets[:, 0] * prod(entry.shape[1:]), sizes[:, 0] * prod(entry.shape[1:])
    files = np.frombuffer(table.file, dtype=np.int32)[rows.start : rows.stop][kept]
    if (starts[1:] <= starts[:-1]).any() or not all(
        catalog.files[f].is_raw for f in np.unique(files).tolist()
    ):
        return None
    return FlatSource(
        dtype=entry.dtype,
        starts=array("q", starts.tobytes()),
        stops=array("q", (starts + counts).tobytes()),
        files=array("i", files.tobytes()),
        places=array("q", np.frombuffer(table.start, dtype=np.int64)[rows.start : rows.stop][kept].tobytes()),
    )


def _tasks(number: int, image: Image, nbytes: int) -> Iterator[Task]:
    """Cut an image into stretches of about `nbytes`, at piece boundaries."""
    first = begin = 0
    for index, (_, stop) in enumerate(image.spans()):
        if stop - begin >= nbytes:
            yield Task(number, first, index + 1, stop - begin, begin)
            first, begin = index + 1, stop
    if first < len(image):
        yield Task(number, first, len(image), image.size - begin, begin)


FileRanges = dict[int, list[tuple[int, int]]]
"""File -> (first byte, byte after the last) of what is read of it; in no order, and some may overlap."""


class Reading(NamedTuple):
    """What a plan reads, for sources of which each request costs time."""

    tasks: list[Task]
    """In the order of the sources' bytes: what lies together there is read together, for whichever image it is."""
    ranges: FileRanges
    num_places: int
    """How many places of the files a task reads in turn."""


def plan_reading(plan: TransferPlan, skipped: Collection[str], *, in_source_order: bool) -> Reading:
    """Return the ranges that the tasks of a plan read, and the best order of the tasks.

    Args:
        plan: what goes where.
        skipped: names of images that are not written.
        in_source_order: cut the images into small tasks and put them in the order of the sources; else the tasks stay
            as they are.
    """
    images = [image if image.name not in skipped else None for image in plan.images]
    tasks = [task for task in plan.tasks if images[task.image] is not None]
    if in_source_order:
        tasks = [
            task
            for number, image in enumerate(images)
            if image is not None
            for task in _tasks(number, image, _SMALL_TASK_NBYTES)
        ]
    ranges, num_places = FileRanges(), 1
    # The tasks of a large tensor follow one another: where it lies in several files, these are read once for all of them.
    together = dict[tuple[int, str], list[tuple[tuple[int, int], Task]]]()
    files_of = dict[tuple[int, str], set[int]]()
    for task in tasks:
        image = plan.images[task.image]
        read = sorted(_task_ranges(plan, image, task))
        for file, start, stop in read:
            ranges.setdefault(file, []).append((start, stop))
        tensor = task.image, next(iter(image.pieces(task.start, task.stop))).fqn
        together.setdefault(tensor, []).append((read[0][:2] if read else (-1, 0), task))
        files = files_of.setdefault(tensor, set())
        files.update(file for file, _, _ in read)
        num_places = max(num_places, len(files), _num_places(read))
    kept = {number for number, image in enumerate(images) if image is not None}
    dealt_out = [fqn for fqn, holes in plan.scattered.items() if any(number in kept for number, _ in holes)]
    for file, spans in chunk_ranges(plan.catalog, dealt_out).items():
        ranges.setdefault(file, []).extend(spans)
    if plan.catalog.late is not None:  # whole records: what describes one comes with its data
        pieces = (piece for task in tasks for piece in plan.images[task.image].pieces(task.start, task.stop))
        ranges |= chunk_ranges(plan.catalog, {piece.fqn: None for piece in pieces})
    if in_source_order:
        tasks = [task for group in sorted(map(sorted, together.values())) for _, task in group]
    return Reading(tasks, ranges, num_places)


def chunk_ranges(catalog: Catalog, names: Iterable[str]) -> FileRanges:
    """Return where all of some tensors lies, with what describes it where records are closed."""
    table, ranges = catalog.chunks, FileRanges()
    for fqn in names:
        entry = catalog.tensors[fqn]
        for row in entry.chunk_ids:
            start = table.start[row]
            ranges.setdefault(table.file[row], []).append((start, start + table.nbytes[row]))
    return ranges


def _task_ranges(plan: TransferPlan, image: Image, task: Task) -> Iterator[tuple[int, int, int]]:
    """Yield (file, first byte, byte after the last) of what fills the holes of a task."""
    for index, piece in enumerate(image.pieces(task.start, task.stop), task.start):
        source = plan.streamed.get(piece.fqn)
        if source is not None:
            stop = piece.first + piece.nbytes // piece.dtype.itemsize
            for move in source.moves(piece.first, stop):
                yield move.file, move.start, move.start + move.nbytes
        elif piece.fqn in plan.gathered:
            yield from _gathered_ranges(plan.catalog, image.hole(index))


def _gathered_ranges(catalog: Catalog, hole: Hole) -> Iterator[tuple[int, int, int]]:
    """Yield the run of each chunk in which its part of a hole lies."""
    entry, table = catalog.tensors[hole.fqn], catalog.chunks
    for row, region in zip(entry.chunk_ids, table.regions(entry.chunk_ids), strict=True):
        part = intersect(hole.region, region)
        if part is not None:
            corner = tuple(a - b for a, b in zip(part.offsets, region.offsets, strict=True))
            far = tuple(a + b - 1 for a, b in zip(corner, part.sizes, strict=True))
            first, last = (flat_offset(index, region.sizes) * entry.dtype.itemsize for index in (corner, far))
            start = table.start[row]
            yield table.file[row], start + first, start + last + entry.dtype.itemsize


def _num_places(read: Sequence[tuple[int, int, int]]) -> int:
    """Return how many of these ranges lie too far from the one before for one request."""
    far = ((a[0], a[2] + _FAR_NBYTES) < (b[0], b[1]) for a, b in pairwise(read))
    return 1 + sum(far)
