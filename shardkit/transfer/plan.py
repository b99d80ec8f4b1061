"""Planning: which source bytes fill which hole. Pure: nothing is opened, no bytes are read.

A hole is filled in one of three ways:

- *streamed* if its bytes, in order, are contiguous runs of source chunks: row-sharded tensors, in either
  direction;
- *gathered* if it is a run of the tensor but the chunks are not, because the tensor was cut along a later dim, or if
  elements are reordered: the bytes are assembled in bands, from parts of all chunks, read or computed;
- *scattered* if the tensor is being cut along a later dim, or has to be decoded: the source is read once, block by
  block, and the overlap of each block with each hole is written.
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

_SMALL_TASK_NBYTES = 1 << 20  # the size of tasks that follow the order of the source
_FAR_NBYTES = 8 << 20  # places with smaller gaps count as one
_TASK_NBYTES = 128 << 20  # a thread's share of one image: small enough to balance, large enough to matter


class Move(NamedTuple):
    """A copy of contiguous source bytes to contiguous bytes of a hole."""

    file: int
    """Index into the source catalog's files."""
    start: int
    """First byte in that file."""
    nbytes: int
    """Source bytes. The hole gets the same number of elements."""


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
    """A tensor whose chunks are contiguous ranges of it; in columns, in the order of the tensor."""

    dtype: DType
    starts: array[int]
    """First element of each non-empty chunk, counted row-major in the whole tensor."""
    stops: array[int]
    files: array[int]
    places: array[int]
    """First byte of each chunk in its file."""

    def moves(self, start: int, stop: int) -> list[Move]:
        """Return the moves that fill elements `start .. stop`, merging neighbours in a file."""
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

    def in_order(self) -> TransferPlan:
        """Return the plan for files that must be written strictly front to back, as only a few parts are in memory.

        Scattered tensors become gathered ones: each is read once as a whole, for its digest, and once more for every
        hole.
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

    Every hole must be inside a tensor of the catalog; whoever creates the images has to check that.

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
    )


def _are_runs(sizes: Iterable[Shape], shape: Shape) -> bool:
    """True if regions of these sizes are contiguous in a tensor, at any offset."""
    return all(is_contiguous(Region((0,) * len(box), box), shape) for box in sizes)


def _is_made_whole(entry: TensorEntry, catalog: Catalog) -> bool:
    """True if parts of a tensor are only available after decoding all of it, or computing it with others."""
    every = (catalog.files[catalog.chunks.file[row]].derivation for row in entry.chunk_ids)
    return any(isinstance(each, Decoded) or (each is not None and each.group is not None) for each in every)


def flat_source(entry: TensorEntry, catalog: Catalog) -> FlatSource | None:
    """Return the chunks as ranges of their tensor; None if a chunk is not a range, or has to be decoded."""
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
    """Like `flat_source`, in columns, for very many chunks; None unless these are rows in the order of the tensor."""
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
"""File -> (first byte, byte after the last) of each range to read; unordered, possibly overlapping."""


class Reading(NamedTuple):
    """The reads of a plan, for sources with expensive requests."""

    tasks: list[Task]
    """In the order of the sources' bytes: neighbouring data are read together, even for different images."""
    ranges: FileRanges
    num_places: int
    """Number of places in the files from which a task reads in turn."""


def plan_reading(plan: TransferPlan, skipped: Collection[str], *, in_source_order: bool) -> Reading:
    """Return the ranges that the tasks of a plan read, and the best order of the tasks.

    Args:
        plan: of the job.
        skipped: names of images that are not written.
        in_source_order: cut images into small tasks, in the order of the sources; otherwise keep the tasks of the plan.
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
    # The tasks of a large tensor are consecutive, so that its files are read once for all of them.
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
    if plan.catalog.late is not None:  # whole records: headers are fetched together with data
        pieces = (piece for task in tasks for piece in plan.images[task.image].pieces(task.start, task.stop))
        ranges |= chunk_ranges(plan.catalog, {piece.fqn: None for piece in pieces})
    if in_source_order:
        tasks = [task for group in sorted(map(sorted, together.values())) for _, task in group]
    return Reading(tasks, ranges, num_places)


def chunk_ranges(catalog: Catalog, names: Iterable[str]) -> FileRanges:
    """Return the file ranges of some tensors; of closed records, including their headers."""
    table, ranges = catalog.chunks, FileRanges()
    for fqn in names:
        entry = catalog.tensors[fqn]
        for row in entry.chunk_ids:
            start = table.start[row]
            ranges.setdefault(table.file[row], []).append((start, start + table.nbytes[row]))
    return ranges


def _task_ranges(plan: TransferPlan, image: Image, task: Task) -> Iterator[tuple[int, int, int]]:
    """Yield (file, first byte, byte after the last) of the sources of a task's holes."""
    for index, piece in enumerate(image.pieces(task.start, task.stop), task.start):
        source = plan.streamed.get(piece.fqn)
        if source is not None:
            stop = piece.first + piece.nbytes // piece.dtype.itemsize
            for move in source.moves(piece.first, stop):
                yield move.file, move.start, move.start + move.nbytes
        elif piece.fqn in plan.gathered:
            yield from _gathered_ranges(plan.catalog, image.hole(index))


def _gathered_ranges(catalog: Catalog, hole: Hole) -> Iterator[tuple[int, int, int]]:
    """Yield the file range of each chunk that contains its overlap with a hole."""
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
    """Count the ranges that are too far from their predecessor for a common request."""
    far = ((a[0], a[2] + _FAR_NBYTES) < (b[0], b[1]) for a, b in pairwise(read))
    return 1 + sum(far)
