"""Plain values of NVFP4 weights: 4-bit numbers, an fp8 scale for each 16 of them, and a scale of all these scales.

    ModelOpt            number * (scale * weight_scale_2), and a number that rounded to zero lost its sign
    compressed-tensors  number * (scale / weight_global_scale), with negative zeros

Both compute in float32, in this order, and round once. The low half of a byte is the first of its two numbers.

Source: nvidia-modelopt 0.47.0, torch/quantization/qtensor/nvfp4_tensor.py (NVFP4QTensor.dequantize); compressed-tensors
0.20.0, compressors/nvfp4/base.py (decompress) and quantization/lifecycle/forward_helpers.py (_dequantize).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit.core.catalog import StoredParts
from shardkit.core.regions import Region
from shardkit.transfer.codecs.dequantize import E2M1, Product

if TYPE_CHECKING:
    import torch

_PAIR = 2  # numbers in a byte
_WITHOUT_SIGN_OF_ZERO = tuple(number or 0.0 for number in E2M1)


class TwoScales(Product):
    """The values of an NVFP4 weight; a `Codec`."""

    __slots__ = ()

    @property
    def of(self) -> tuple[str, ...]:
        """Its numbers, their scales, and the scale of these."""
        assert self.scaled.second is not None
        return *super().of, self.scaled.second

    def _numbers(self, parts: StoredParts, region: Region) -> torch.Tensor:
        """Return a box of the numbers in float32."""
        import torch

        dim = next(dim for dim, size in enumerate(self.scaled.block) if size > 1)
        first, stop = region.offsets[dim] // _PAIR, -(-region.stops[dim] // _PAIR)
        offsets, sizes = list(region.offsets), list(region.sizes)
        offsets[dim], sizes[dim] = first, stop - first
        pairs = parts.values(self.scaled.numbers, Region(tuple(offsets), tuple(sizes))).int()
        table = torch.tensor(E2M1 if self.scaled.divides else _WITHOUT_SIGN_OF_ZERO, dtype=torch.float32)
        unpacked = torch.stack((table[pairs & 0xF], table[pairs >> 4]), dim + 1).flatten(dim, dim + 1)
        return unpacked.narrow(dim, region.offsets[dim] % _PAIR, region.sizes[dim])

    def _scales(self, parts: StoredParts, region: Region) -> torch.Tensor:
        """Return the scale of each number of a box in float32. A dim that shares one scale has size 1."""
        assert self.scaled.second is not None
        scales, second = super()._scales(parts, region), parts.whole(self.scaled.second).reshape(())
        return scales / second if self.scaled.divides else scales * second
