"""A codec that encodes: a weight becomes fp8 codes and one scale for each block of 128 x 128, as DeepSeek's models have them.

The formula is another one than those of `transfer/codecs/quantize`: the seam for computed tensors carries any. `quantised`
is the formula for whole weights. The codecs compute the same from the blocks that a box lies in.

Source: DeepGEMM 2.0, tests/utils (per_block_cast_to_fp8).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy
import torch

from shardkit.core.catalog import Codec, StoredParts
from shardkit.core.dtypes import BY_NAME, DType
from shardkit.core.regions import Region, Shape, blocks, intersect, relative_to, window
from shardkit.formats.contract import Checkpoint
from shardkit.formats.derived import derive_checkpoint
from shardkit.transfer.codecs.boxes import as_box, shifted

BLOCK = 128
LARGEST = 448.0  # of float8_e4m3fn
AT_ONCE = 16  # blocks that are read and computed together
SCALES = "_scale_inv"


def encoders(shapes: Mapping[str, Shape]) -> dict[str, Codec]:
    """Return what is made of some stored tensors: codes and scales in the place of each matrix of a `proj`."""
    made = dict[str, Codec]()
    for name, shape in shapes.items():
        if name.endswith("proj.weight"):
            made |= {name: Codes(name, shape), name + SCALES: Scales(name, shape)}
    return made


def encoded(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with them."""
    stored = checkpoint.catalog.tensors
    return derive_checkpoint(checkpoint, encoders({name: entry.shape for name, entry in stored.items()}))


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes and the scales of a whole weight."""
    rows, columns = weight.shape
    padded = torch.zeros(grid_of(rows) * BLOCK, grid_of(columns) * BLOCK, dtype=weight.dtype)
    padded[:rows, :columns] = weight
    view = padded.view(-1, BLOCK, padded.size(1) // BLOCK, BLOCK)
    largest = view.abs().float().amax(dim=(1, 3), keepdim=True).clamp(1e-4)
    codes = (view * (LARGEST / largest)).to(torch.float8_e4m3fn).view_as(padded)
    return codes[:rows, :columns].contiguous(), (largest / LARGEST).view(view.size(0), view.size(2))


def grid_of(size: int) -> int:
    """Return the number of blocks along a side."""
    return -(-size // BLOCK)


@dataclass(frozen=True, slots=True)
class _OfBlocks:
    """What is made of the blocks of a stored weight."""

    weight: str
    stored: Shape
    """Of the weight."""
    needs_torch: ClassVar[bool] = True

    @property
    def of(self) -> tuple[str, ...]:
        return (self.weight,)

    def read(self, parts: StoredParts, grid: Region) -> Iterator[tuple[Region, Region, torch.Tensor]]:
        """Yield a few blocks at a time: which of the grid, the region of the weight, and its values."""
        for block in blocks(grid.sizes, AT_ONCE):
            some = shifted(block, grid.offsets)
            stops = [min(stop * BLOCK, size) for stop, size in zip(some.stops, self.stored, strict=True)]
            first = tuple(offset * BLOCK for offset in some.offsets)
            region = Region(first, tuple(b - a for a, b in zip(first, stops, strict=True)))
            yield some, region, parts.values(self.weight, region)


class Codes(_OfBlocks):
    """The codes of a weight; a `Codec`."""

    __slots__ = ()

    @property
    def dtype(self) -> DType:
        return BY_NAME["float8_e4m3fn"]

    @property
    def shape(self) -> Shape:
        return self.stored

    def fill(self, parts: StoredParts, region: Region, target: numpy.ndarray) -> None:
        first = tuple(offset // BLOCK for offset in region.offsets)
        sizes = (grid_of(stop) - at for stop, at in zip(region.stops, first, strict=True))
        for _, whole, values in self.read(parts, Region(first, tuple(sizes))):
            part = intersect(region, whole)
            assert part is not None
            codes = as_box(quantised(values)[0], self.dtype)
            place = window(relative_to(part, region.offsets))
            target[place] = codes[window(relative_to(part, whole.offsets))]


class Scales(_OfBlocks):
    """The scales of a weight's blocks; a `Codec`."""

    __slots__ = ()

    @property
    def dtype(self) -> DType:
        return BY_NAME["float32"]

    @property
    def shape(self) -> Shape:
        return tuple(map(grid_of, self.stored))

    def fill(self, parts: StoredParts, region: Region, target: numpy.ndarray) -> None:
        for some, _, values in self.read(parts, region):
            target[window(relative_to(some, region.offsets))] = as_box(quantised(values)[1], self.dtype)
