"""Plain values of quantised tensors: stored numbers times stored scales, computed box by box in bounded memory.

The product is taken in float32 and rounded once, as transformers does. Each box is read together with the scales that
it needs, so no scale is ever parted from what it scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from shardkit.core.catalog import StoredParts
from shardkit.core.dtypes import DType
from shardkit.core.regions import Region, Shape, blocks
from shardkit.keys.quantised import MXFP4, Scaled
from shardkit.transfer.codecs.boxes import as_box, shifted, window

if TYPE_CHECKING:
    import numpy
    import torch

_MAX_NUMBERS = 1 << 18  # multiplied at once: with two floats for each they fit the cache
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_BIAS = 127


@dataclass(frozen=True, slots=True)
class Product:
    """The values of a quantised tensor: its numbers times their scales; a `Codec`."""

    scaled: Scaled
    dtype: DType
    needs_torch: ClassVar[bool] = True

    @property
    def of(self) -> tuple[str, ...]:
        """Its numbers and their scales."""
        return self.scaled.numbers, self.scaled.scales

    @property
    def shape(self) -> Shape:
        """Of the tensor once it is plain."""
        return tuple(self.scaled.shape[dim] for dim in self.scaled.dims)

    def box(self, parts: StoredParts, region: Region) -> numpy.ndarray:
        """Return the values of a box, as unsigned integers of their size."""
        import numpy

        back = [self.scaled.dims.index(dim) for dim in range(len(self.scaled.dims))]
        below = Region(tuple(region.offsets[d] for d in back), tuple(region.sizes[d] for d in back))
        values = numpy.empty(below.sizes, f"u{self.dtype.itemsize}")
        for block in blocks(below.sizes, _MAX_NUMBERS):
            values[window(block)] = self._values(parts, shifted(block, below.offsets))
        turned: numpy.ndarray = values.transpose(self.scaled.dims)
        return turned

    def _values(self, parts: StoredParts, region: Region) -> numpy.ndarray:
        import torch

        numbers, scales = self._numbers(parts, region), self._scales(parts, region)
        product = torch.ldexp(numbers, scales) if self.scaled.method == MXFP4 else numbers * scales
        return as_box(product, self.dtype)

    def _numbers(self, parts: StoredParts, region: Region) -> torch.Tensor:
        """Return a box of the numbers in float32."""
        import torch

        name = self.scaled.numbers
        if self.scaled.method != MXFP4:
            return parts.values(name, region).float()
        size, first, stop = self.scaled.block[-1], region.offsets[-1], region.stops[-1]
        groups = first // size, -(-stop // size)
        part = Region(
            (*region.offsets[:-1], groups[0], 0), (*region.sizes[:-1], groups[1] - groups[0], size // 2)
        )
        pairs = parts.values(name, part).int()
        table = torch.tensor(E2M1, dtype=torch.float32)
        unpacked = torch.stack((table[pairs & 0xF], table[pairs >> 4]), dim=-1)
        row = unpacked.reshape(*region.sizes[:-1], (groups[1] - groups[0]) * size)
        return row[..., first - groups[0] * size : stop - groups[0] * size]

    def _scales(self, parts: StoredParts, region: Region) -> torch.Tensor:
        """Return the scale of each number of a box: exponents of 2 where numbers are packed, else in float32.

        A dim that shares one scale has size 1.
        """
        import torch

        name, block = self.scaled.scales, self.scaled.block
        if all(n >= size for n, size in zip(block, self.scaled.shape, strict=True)):
            return self._as_scales(parts.whole(name)).reshape(())
        first = [offset // n for offset, n in zip(region.offsets, block, strict=True)]
        last = [(stop - 1) // n for stop, n in zip(region.stops, block, strict=True)]
        part = Region(tuple(first), tuple(b - a + 1 for a, b in zip(first, last, strict=True)))
        scales = self._as_scales(parts.values(name, part))
        for dim, size in enumerate(part.sizes):
            if size > 1:
                at = torch.arange(region.offsets[dim], region.stops[dim]) // block[dim] - first[dim]
                scales = scales.index_select(dim, at)
        return scales

    def _as_scales(self, stored: torch.Tensor) -> torch.Tensor:
        import torch

        if stored.dtype is not torch.uint8:
            return stored.float()
        exponents = stored.int() - _BIAS
        return exponents if self.scaled.method == MXFP4 else torch.pow(2.0, exponents)
