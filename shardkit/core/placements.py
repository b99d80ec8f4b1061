"""Placements: how the axes of a mesh cut a tensor, and which regions of it a rank then holds.

A placement describes one mesh axis: `R` replicates, `S(dim)` cuts a dim like `torch.chunk`. `SS(dim,factor)` is torch's
`_StridedShard`. Usually it encodes the order of cuts: axes further right, with `factor` parts in total, cut the dim
*before* this one (`fully_shard` on a tensor-parallel parameter). If no axes further right make that many parts, the
dim is *packed*: it consists of `factor` blocks (gate and up), each of which the axis cuts. A rank then holds one range
of each block: several regions of the tensor that are consecutive in its memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import NamedTuple

from shardkit.core.regions import Region, Shape, split_dim
from shardkit.core.text import escape
from shardkit.errors import LayoutError

_TEXT = re.compile(r"R|S\(([0-9]{1,3})\)|SS\(([0-9]{1,3}),([0-9]{1,9})\)")


@dataclass(frozen=True, slots=True)
class Placement:
    """Effect of one axis on a tensor: it cuts `shard_dim`, or replicates if that is None."""

    shard_dim: int | None = None
    split_factor: int = 1
    """Number of parts before this axis cuts, not counting cuts of axes further left. At least 1."""

    def __str__(self) -> str:
        if self.shard_dim is None:
            return "R"
        return (
            f"S({self.shard_dim})" if self.split_factor == 1 else f"SS({self.shard_dim},{self.split_factor})"
        )

    @classmethod
    def parse(cls, text: str) -> Placement:
        """Return the placement that `str()` wrote.

        Raises:
            LayoutError: not a supported placement.
        """
        match = _TEXT.fullmatch(text)
        if match is None or (match.group(3) is not None and int(match.group(3)) < 2):
            raise LayoutError(f"unknown placement {escape(text)!r}")
        plain, strided, factor = match.groups()
        if strided is not None:
            return cls(int(strided), int(factor))
        return cls(None if plain is None else int(plain))


REPLICATE = Placement()
Placements = tuple[Placement, ...]
"""One placement for each mesh axis, in mesh order."""


class DimSplit(NamedTuple):
    """The cut of a dim by one axis."""

    axis: int
    dim: int
    num_parts: int
    """Size of the axis."""
    num_blocks: int = 1
    """Blocks of the dim that are cut alike; more than one in a packed dim."""


class HeldRegion(NamedTuple):
    """A region of a tensor, and the corner where it begins in the memory of the rank that holds it."""

    region: Region
    corner: Shape


def cuts(placements: Sequence[Placement], sizes: Sequence[int]) -> list[DimSplit]:
    """Return the cuts of a tensor's dims, in the order in which they apply; axes that replicate are left out.

    Args:
        placements: one for each axis.
        sizes: of the axes.
    """
    ordered: list[DimSplit] = []
    for axis in reversed(range(len(sizes))):
        dim, factor = placements[axis].shard_dim, placements[axis].split_factor
        if dim is None:
            continue
        parts, index = 1, 0
        for place, cut in enumerate(ordered):
            if parts == factor:
                break
            if cut.dim == dim:
                parts, index = parts * cut.num_parts, place + 1
        if parts == factor:
            ordered.insert(index, DimSplit(axis, dim, sizes[axis]))
        else:
            ordered.insert(0, DimSplit(axis, dim, sizes[axis], factor))
    return ordered


def held_regions(shape: Shape, ordered: Sequence[DimSplit], coord: Sequence[int]) -> list[HeldRegion]:
    """Return the parts of a tensor that the rank at a position of the mesh holds, in row-major order.

    Args:
        shape: of the whole tensor, in elements.
        ordered: from `cuts`.
        coord: the rank's position on each axis.

    Returns:
        One part, or several that together form a box in the rank's memory. A rank that holds nothing has one empty part,
        which starts at the end of each dim without elements, like torch's offsets.
    """
    ranges: dict[int, list[tuple[int, int]]] = {}
    for axis, dim, num_parts, num_blocks in ordered:
        before = ranges.get(dim, [(0, shape[dim])])
        ranges[dim] = _cut(before, num_parts, coord[axis], num_blocks) or [(shape[dim], 0)]
    by_dim = [ranges.get(dim, [(0, size)]) for dim, size in enumerate(shape)]
    if any(spans[0][1] == 0 for spans in by_dim):
        by_dim = [[(spans[0][0], sum(length for _, length in spans))] for spans in by_dim]
    if all(len(spans) == 1 for spans in by_dim):
        offsets, held_sizes = tuple(spans[0][0] for spans in by_dim), tuple(spans[0][1] for spans in by_dim)
        return [HeldRegion(Region(offsets, held_sizes), (0,) * len(shape))]
    corners = [list(accumulate((length for _, length in spans), initial=0)) for spans in by_dim]
    boxes = (zip(spans, begins, strict=False) for spans, begins in zip(by_dim, corners, strict=True))
    return [
        HeldRegion(
            Region(tuple(start for (start, _), _ in box), tuple(length for (_, length), _ in box)),
            tuple(begin for _, begin in box),
        )
        for box in product(*boxes)
    ]


def _cut(ranges: list[tuple[int, int]], num_parts: int, index: int, num_blocks: int) -> list[tuple[int, int]]:
    """Return part `index` of each block of a dim as (start, length) ranges, none of them empty."""
    total = sum(length for _, length in ranges)
    kept: list[tuple[int, int]] = []
    for block in range(num_blocks):
        begin, size = split_dim(total, num_blocks, block)
        offset, length = split_dim(size, num_parts, index)
        for start, held_length in _narrow(ranges, begin + offset, length):
            if kept and sum(kept[-1]) == start:
                kept[-1] = (kept[-1][0], kept[-1][1] + held_length)
            else:
                kept.append((start, held_length))
    return kept


def _narrow(ranges: list[tuple[int, int]], begin: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges that cover elements `begin .. begin + length` of the concatenation of `ranges`."""
    for start, size in ranges:
        first, stop = max(begin, 0), min(begin + length, size)
        if first < stop:
            yield start + first, stop - first
        begin -= size


def stock_region(
    shape: Shape, placements: Sequence[Placement], sizes: Sequence[int], coord: Sequence[int]
) -> Region:
    """Return the region that stock `dcp.load` and `dcp.save` assume for a rank's memory.

    For packed placements, and for some uneven sizes with `_StridedShard`, the rank actually holds other elements.

    Args:
        shape: of the whole tensor, in elements.
        placements: one for each axis.
        sizes: of the axes.
        coord: the rank's position on each axis.

    Source: torch 2.13, torch/distributed/tensor/_utils.py, _compute_local_shape_and_global_offset: axes cut from left
    to right, each `_StridedShard` as if the dim were packed; the first element's offset stands for all.
    """
    offsets, held_sizes = [0] * len(shape), list(shape)
    ranges: dict[int, list[tuple[int, int]]] = {}
    for placement, size, index in zip(placements, sizes, coord, strict=True):
        dim = placement.shard_dim
        if dim is None:
            continue
        kept = _cut(ranges.get(dim, [(0, shape[dim])]), size, index, placement.split_factor)
        ranges[dim] = kept
        held_sizes[dim] = sum(length for _, length in kept)
        offsets[dim] = kept[0][0] if kept else shape[dim]
    return Region(tuple(offsets), tuple(held_sizes))
