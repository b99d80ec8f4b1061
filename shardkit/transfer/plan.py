"""Planning: which source bytes fill which hole. Pure: nothing is opened, no bytes are read.

A hole is *streamed* where its bytes, in order, are contiguous runs of source chunks: one run for a
row-sharded tensor of a Hub model. Otherwise (a tensor cut along a later dim, or one whose bytes have to
be decoded) it is *scattered*: its source is walked once, block by block, and every block's part is put
into each hole that wants it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from shardkit.core.catalog import Catalog, TensorEntry
from shardkit.core.regions import Region, flat_offset, intersect, is_contiguous, relative_to
from shardkit.transfer.images import Hole, Image, ImageSet, TensorHoles

_TASK_NBYTES = 128 << 20  # a thread's share of one image: small enough to balance, large enough to matter


class Move(NamedTuple):
    """Contiguous source bytes that fill contiguous bytes of a hole."""

    file: int
    """Index into the source catalog's files."""
    start: int
    """First byte in that file."""
    nbytes: int
    """Source bytes; the hole takes as many elements."""


class Task(NamedTuple):
    """Pieces of one image, written front to back by one thread."""

    image: int
    start: int
    """First piece."""
    stop: int
    nbytes: int
    """Bytes from the first piece to the end of the last, gaps included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """What is to be moved."""

    images: ImageSet
    catalog: Catalog
    tasks: tuple[Task, ...]
    scattered: dict[str, tuple[tuple[int, Hole], ...]]
    """(image index, hole) of every hole that cannot be streamed, by the source's tensor name."""
    bases: dict[str, tuple[int, int]]
    """(file, first byte) of every tensor that is one chunk, all of whose holes are streamed."""
    converts: bool
    """Some dtype is converted, which takes torch."""
    read_bytes: int
    """Source bytes; a scattered tensor's are read once."""
    written_bytes: int
    """Size of all images."""
    hole_bytes: int
    """Bytes that fill holes, which is what the progress counts."""


def stream_moves(hole: Hole, catalog: Catalog) -> list[Move] | None:
    """Return the moves that fill a hole in order, or None where it has to be scattered.

    An empty hole needs no move. The catalog tiles the tensor, so what is found fills the hole.
    """
    entry = catalog.tensors[hole.fqn]
    if entry.num_chunks == 1:  # every tensor of a Hub model: the chunk is the tensor
        return _single_move(hole, entry, catalog)
    moves: list[tuple[int, Move]] = []
    for chunk, part, region in _overlaps(hole.region, entry, catalog):
        inner, target = relative_to(part, region.offsets), relative_to(part, hole.region.offsets)
        if not (is_contiguous(inner, region.sizes) and is_contiguous(target, hole.region.sizes)):
            return None
        itemsize, table = entry.dtype.itemsize, catalog.chunks
        start = table.start[chunk] + flat_offset(inner.offsets, region.sizes) * itemsize
        move = Move(table.file[chunk], start, part.num_elements * itemsize)
        moves.append((flat_offset(target.offsets, hole.region.sizes), move))
    return [move for _, move in sorted(moves)]


def moves_for(hole: Hole, plan: TransferPlan) -> list[Move] | None:
    """Return `stream_moves` of a planned hole, at less cost for what the plan has settled."""
    base = plan.bases.get(hole.fqn)
    if base is None:
        return stream_moves(hole, plan.catalog)
    if hole.nbytes == 0:
        return []
    entry = plan.catalog.tensors[hole.fqn]
    itemsize, region = entry.dtype.itemsize, hole.region
    start = base[1] + flat_offset(region.offsets, entry.shape) * itemsize
    return [Move(base[0], start, hole.nbytes // hole.dtype.itemsize * itemsize)]


def _single_move(hole: Hole, entry: TensorEntry, catalog: Catalog) -> list[Move] | None:
    if not is_contiguous(hole.region, entry.shape):
        return None
    if hole.nbytes == 0:
        return []
    if catalog.files[catalog.chunks.file[entry.first_chunk]].decode:
        return None
    itemsize, table, chunk = entry.dtype.itemsize, catalog.chunks, entry.first_chunk
    start = table.start[chunk] + flat_offset(hole.region.offsets, entry.shape) * itemsize
    return [Move(table.file[chunk], start, hole.region.num_elements * itemsize)]


def _overlaps(region: Region, entry: TensorEntry, catalog: Catalog) -> Iterator[tuple[int, Region, Region]]:
    """Yield (chunk, common region, chunk's region), all in elements of the whole tensor."""
    for chunk in entry.chunk_ids:
        held = catalog.chunks.region(chunk)
        part = intersect(region, held)
        if part is not None:
            yield chunk, part, held
        elif not region.sizes:
            yield chunk, region, held


def build_plan(images: ImageSet, catalog: Catalog) -> TransferPlan:
    """Return what it takes to fill every hole of `images` from `catalog`.

    Every hole names a tensor of the catalog and lies inside it; whoever made the images saw to that.
    """
    scattered: dict[str, list[tuple[int, Hole]]] = {}
    bases: dict[str, tuple[int, int]] = {}
    read_bytes = hole_bytes = 0
    converts = False
    for holes in images.tensors():
        entry = catalog.tensors[holes.source]
        hole_bytes += holes.nbytes
        read_bytes += entry.nbytes
        converts |= holes.dtype is not entry.dtype
        if not _all_streamed(holes, entry, images, catalog):
            left = [(n, hole) for n, hole in images.holes(holes.fqn) if stream_moves(hole, catalog) is None]
            scattered.setdefault(holes.source, []).extend(left)
        elif entry.num_chunks == 1:
            bases[holes.source] = (
                catalog.chunks.file[entry.first_chunk],
                catalog.chunks.start[entry.first_chunk],
            )
    return TransferPlan(
        images=images,
        catalog=catalog,
        tasks=tuple(task for number, image in enumerate(images) for task in _tasks(number, image)),
        scattered={fqn: tuple(found) for fqn, found in scattered.items()},
        bases=bases,
        converts=converts,
        read_bytes=read_bytes,
        written_bytes=sum(image.size for image in images),
        hole_bytes=hole_bytes,
    )


def _all_streamed(holes: TensorHoles, entry: TensorEntry, images: ImageSet, catalog: Catalog) -> bool:
    if entry.num_chunks == 1:  # then only a region's sizes matter, and they are few
        if catalog.files[catalog.chunks.file[entry.first_chunk]].decode and entry.nbytes:
            return False
        return all(is_contiguous(Region((0,) * len(sizes), sizes), entry.shape) for sizes in holes.sizes)
    return all(stream_moves(hole, catalog) is not None for _, hole in images.holes(holes.fqn))


def _tasks(number: int, image: Image) -> Iterator[Task]:
    """Cut an image into stretches of about _TASK_NBYTES, at piece boundaries."""
    first = begin = 0
    for index, (_, stop) in enumerate(image.spans()):
        if stop - begin >= _TASK_NBYTES:
            yield Task(number, first, index + 1, stop - begin)
            first, begin = index + 1, stop
    if first < len(image):
        yield Task(number, first, len(image), image.size - begin)
