"""Boxes in a tensor's index space, how torch splits a dim, and where a box's bytes lie.

All counts are elements unless a name says bytes. A shape is a tuple of sizes; `()` is a scalar.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, product
from math import prod
from operator import itemgetter
from typing import NamedTuple

Shape = tuple[int, ...]


class Region(NamedTuple):
    """A box of a tensor's index space, in elements."""

    offsets: Shape
    sizes: Shape

    @property
    def num_elements(self) -> int:
        """Elements in the box: 1 for a scalar, 0 when any size is 0."""
        return prod(self.sizes)

    @property
    def stops(self) -> Shape:
        """Exclusive upper corner."""
        return tuple(o + s for o, s in zip(self.offsets, self.sizes, strict=True))


class ElementRun(NamedTuple):
    """Contiguous elements that a region and a chunk have in common."""

    source: int
    """First element within the row-major chunk."""
    target: int
    """First element within the row-major region."""
    length: int


def full_region(shape: Shape) -> Region:
    """Return the region that is the whole tensor."""
    return Region((0,) * len(shape), shape)


def intersect(a: Region, b: Region) -> Region | None:
    """Return the common box, or None if the two share no element."""
    offsets = tuple(map(max, a.offsets, b.offsets))
    sizes = tuple(min(x, y) - o for x, y, o in zip(a.stops, b.stops, offsets, strict=True))
    return Region(offsets, sizes) if all(size > 0 for size in sizes) else None


def relative_to(region: Region, origin: Shape) -> Region:
    """Return `region` with its offsets counted from `origin`."""
    return Region(tuple(o - base for o, base in zip(region.offsets, origin, strict=True)), region.sizes)


def shifted(region: Region, origin: Shape) -> Region:
    """Return `region` with `origin` added to its offsets."""
    return Region(tuple(o + base for o, base in zip(region.offsets, origin, strict=True)), region.sizes)


def window(region: Region) -> tuple[slice, ...]:
    """Return the index of a region in an array or a tensor."""
    return tuple(slice(o, o + size) for o, size in zip(*region, strict=True))


def split_dim(size: int, num_parts: int, index: int) -> tuple[int, int]:
    """Return (offset, size) of part `index` of a dim that is cut like `torch.chunk`.

    Every part has ceil(size / num_parts) elements, but the trailing ones may be shorter or empty. An empty part starts
    at the end of the dim.

    Source: torch 2.13, torch.distributed.tensor.placement_types.Shard.local_shard_size_and_offset.
    """
    step = -(-size // num_parts)
    start = min(index * step, size)
    return start, min(step, size - start)


def contiguous_suffix(sizes: Sequence[int], shape: Sequence[int]) -> int:
    """Return the first dim from which a box of `sizes` spans `shape` whole.

    From that dim on, the box is one run. Returns `len(shape)` if the box does not even span the last dim.
    """
    dim = len(shape)
    while dim > 0 and sizes[dim - 1] == shape[dim - 1]:
        dim -= 1
    return dim


def is_contiguous(region: Region, shape: Shape) -> bool:
    """True if the region's elements lie side by side in a row-major tensor of `shape`."""
    dim = contiguous_suffix(region.sizes, shape)
    return all(size == 1 for size in region.sizes[: max(dim - 1, 0)]) or region.num_elements == 0


def flat_offset(offsets: Sequence[int], shape: Sequence[int]) -> int:
    """Return the row-major element index of a corner within a tensor of `shape`."""
    index = 0
    for offset, size in zip(offsets, shape, strict=True):
        index = index * size + offset
    return index


def flat_offsets(corners: Sequence[Shape], shape: Shape) -> list[int]:
    """Return `flat_offset` of each corner within a tensor of `shape`; much faster than one at a time."""
    if len(shape) == 1:
        return [corner[0] for corner in corners]
    if len(shape) == 2:
        width = shape[1]
        return [row * width + column for row, column in corners]
    return [flat_offset(corner, shape) for corner in corners]


def runs(region: Region, shape: Shape) -> Iterator[ElementRun]:
    """Yield the contiguous runs of `region` within a row-major chunk of `shape`, in the region's order.

    Args:
        region: its offsets count from the chunk's own corner.
        shape: the chunk's sizes.
    """
    if region.num_elements == 0:
        return
    first_whole = contiguous_suffix(region.sizes, shape)
    outer = max(first_whole - 1, 0)  # the dim before those that are spanned whole is part of the run
    length = prod(region.sizes[outer:])
    corner = region.offsets[outer:]
    target = 0
    for index in product(
        *(range(o, o + s) for o, s in zip(region.offsets[:outer], region.sizes[:outer], strict=True))
    ):
        yield ElementRun(flat_offset((*index, *corner), shape), target, length)
        target += length


def blocks(sizes: Shape, limit: int) -> Iterator[Region]:
    """Cut a box into contiguous sub-boxes of at most `limit` elements, in row-major order.

    A block has a single index in each leading dim, a range of one dim, and all of each remaining dim. It is therefore
    one run of the box, and its overlap with another box spans the trailing dims of that overlap.

    Args:
        sizes: the box. A scalar gives one block, a box without elements none.
        limit: most elements of a block, at least 1.
    """
    if prod(sizes) == 0:
        return
    dim, inner = len(sizes), 1
    while dim > 0 and inner * sizes[dim - 1] <= limit:
        inner *= sizes[dim - 1]
        dim -= 1
    if dim == 0:
        yield Region((0,) * len(sizes), sizes)
        return
    cut = dim - 1
    step = max(limit // inner, 1)
    tail_offsets, tail_sizes = (0,) * (len(sizes) - dim), sizes[dim:]
    for index in product(*(range(size) for size in sizes[:cut])):
        for start in range(0, sizes[cut], step):
            size = min(step, sizes[cut] - start)
            yield Region((*index, start, *tail_offsets), ((1,) * cut) + (size, *tail_sizes))


def flat_range_boxes(shape: Shape, start: int, stop: int) -> list[Region]:
    """Cut a range of a row-major tensor's elements into contiguous boxes, in order.

    At most 2 * ndim - 1 boxes: at each level the partial rows at both ends, and the complete rows between them.

    Args:
        shape: the tensor's sizes.
        start: first element of the range, counted row-major.
        stop: end of the range, at most the tensor's number of elements.
    """
    if start >= stop:
        return []
    if not shape:
        return [Region((), ())]
    inner = prod(shape[1:])
    first, begin = divmod(start, inner)
    last, end = divmod(stop, inner)
    if first == last:
        return _in_row(first, flat_range_boxes(shape[1:], begin, end))
    boxes: list[Region] = []
    if begin:
        boxes += _in_row(first, flat_range_boxes(shape[1:], begin, inner))
        first += 1
    if first < last:
        boxes.append(Region((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])))
    if end:
        boxes += _in_row(last, flat_range_boxes(shape[1:], 0, end))
    return boxes


def _in_row(row: int, boxes: list[Region]) -> list[Region]:
    """Return boxes of a tensor's row as boxes of the tensor."""
    return [Region((row, *box.offsets), (1, *box.sizes)) for box in boxes]


def find_tiling_error(shape: Shape, regions: Sequence[Region]) -> str | None:
    """Return why `regions` do not tile a tensor of `shape` exactly once, or None if they do.

    Empty regions are ignored. The cost is O(n log n) for grids, which trainers write, and for regions that are
    disjoint along a single dim.
    """
    whole = full_region(shape)
    if len(regions) == 1 and regions[0] == whole and min(shape, default=0) >= 0:
        return None  # in most checkpoints a tensor is one chunk
    strange = set(map(len, chain.from_iterable(regions))) - {len(shape)}
    if strange:
        return f"a chunk has {strange.pop()} dims, the tensor has {len(shape)}"
    kept = [region for region in regions if 0 not in region.sizes]
    if _is_grid(shape, kept):
        return None
    for region in kept:
        if any(o < 0 or s < 0 or o + s > size for o, s, size in zip(*region, shape, strict=True)):
            return (
                f"chunk at {list(region.offsets)} of size {list(region.sizes)} reaches outside {list(shape)}"
            )
    num_covered = sum(region.num_elements for region in kept)
    overlap = _find_overlap(kept)
    if overlap:
        a, b = overlap
        return f"chunks at {list(a.offsets)} and {list(b.offsets)} overlap"
    if num_covered != whole.num_elements:
        return f"chunks hold {num_covered} of {whole.num_elements} elements"
    return None


def _is_grid(shape: Shape, regions: list[Region]) -> bool:
    """True if regions with elements are the cells of a grid.

    In a grid each dim is cut into ranges, and every combination is present. If no two regions have the same offsets,
    counting the cells suffices.
    """
    if len(set(map(itemgetter(0), regions))) != len(regions):
        return False
    num_cells = 1
    for dim, size in enumerate(shape):
        ranges = sorted((region.offsets[dim], region.sizes[dim]) for region in regions)
        reached, num_ranges, last = 0, 0, None
        for part in ranges:
            if part != last:
                if part[0] != reached or part[1] < 0:
                    return False
                reached, num_ranges, last = part[0] + part[1], num_ranges + 1, part
        if reached != size:
            return False
        num_cells *= num_ranges
    return num_cells == len(regions)


def _find_overlap(regions: list[Region]) -> tuple[Region, Region] | None:
    """Sweep along the dim with the most cuts: only regions whose ranges meet there can overlap."""
    if not regions or not regions[0].offsets:
        return (regions[0], regions[1]) if len(regions) > 1 else None
    num_dims = len(regions[0].offsets)
    dim = max(range(num_dims), key=lambda d: len({region.offsets[d] for region in regions}))
    active: list[Region] = []
    for region in sorted(regions, key=lambda region: region.offsets[dim]):
        start = region.offsets[dim]
        active = [earlier for earlier in active if earlier.offsets[dim] + earlier.sizes[dim] > start]
        for earlier in active:
            if intersect(region, earlier):
                return earlier, region
        active.append(region)
    return None
