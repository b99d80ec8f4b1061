"""Plain values of quantised tensors: stored numbers times stored scales, computed box by box in bounded memory.

The product is taken in float32 and rounded once, as transformers does. Each box is read together with the scales that
it needs, so no scale is ever parted from what it scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shardkit.core.catalog import Catalog, SourceReader
from shardkit.core.dtypes import DType
from shardkit.core.regions import Region, Shape, blocks, full_region
from shardkit.keys.expressions import Expression, Stored, permute
from shardkit.keys.quantised import Quantised, Scaled
from shardkit.transfer.bound import bind, computed_file, fill_range, read_box

if TYPE_CHECKING:
    import numpy
    import torch

_MAX_NUMBERS = 1 << 18  # multiplied at once: with two floats for each they fit the cache
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_BIAS = 127


def dequantize(catalog: Catalog, quantised: Quantised, dtype: DType) -> Catalog:
    """Return a catalog with plain tensors in the place of quantised ones; it has their scales no more.

    Args:
        catalog: of raw extents.
        quantised: of its tensors.
        dtype: of the plain tensors.
    """
    assert catalog.encoding == "raw"
    inner = replace(catalog, files=list(catalog.files), tensors={}, chunks=type(catalog.chunks)(), paths=None)
    numbers = dict[str, str]()
    for name, scaled in quantised.scaled.items():
        numbers[scaled.numbers] = name
    made = dict[str, Expression]()
    for stored in catalog.tensors:
        if stored in numbers:
            name = numbers[stored]
            scaled = quantised.scaled[name]
            product = Product(catalog, scaled, dtype)
            inner.files.append(computed_file(catalog, product, stored, name))
            chunk = (len(inner.files) - 1, 0, inner.files[-1].size, full_region(scaled.shape))
            turned = permute(Stored(name, scaled.shape), scaled.dims)
            inner.add_tensor(name, dtype, scaled.shape, iter((chunk,)))
            if not isinstance(turned, Stored):
                made[name] = turned
        elif stored not in quantised.consumed:
            inner.copy_tensor(catalog, stored, stored)
    plain = _in_place(bind(inner, {f"{name} (turned)": each for name, each in made.items()}), inner, made)
    plain.paths = plain_paths(catalog, quantised)
    return plain


def plain_paths(catalog: Catalog, quantised: Quantised) -> dict[str, tuple[str | int, ...]] | None:
    """Return the path of each tensor in the state dict that was saved, once they are plain; None if none is known."""
    if catalog.paths is None:
        return None
    paths = {name: path for name, path in catalog.paths.items() if name not in quantised.consumed}
    for name, scaled in quantised.scaled.items():
        path = catalog.paths.get(scaled.numbers)
        if path:
            added = scaled.numbers[len(name) :]  # "_blocks"
            last = str(path[-1])
            paths[name] = path if not added else (*path[:-1], last.removesuffix(added))
    return paths


def _in_place(bound: Catalog, inner: Catalog, made: Mapping[str, Expression]) -> Catalog:
    """Return a catalog in which tensors that were turned have the names of what they were made of."""
    whole = replace(bound, tensors={}, chunks=type(bound.chunks)())
    for name in inner.tensors:
        whole.copy_tensor(bound, f"{name} (turned)" if name in made else name, name)
    return whole


@dataclass(frozen=True, slots=True)
class Product:
    """The values of a quantised tensor, in the order of its numbers; a `Computation`."""

    catalog: Catalog
    """Of raw extents; its files have the numbers that the reader knows them by."""
    scaled: Scaled
    dtype: DType

    @property
    def shape(self) -> Shape:
        """Of the numbers, unpacked."""
        return self.scaled.shape

    @property
    def itemsize(self) -> int:
        """Bytes of a value."""
        return self.dtype.itemsize

    @property
    def needs_torch(self) -> bool:
        """It computes with torch."""
        return True

    def fill(self, reader: SourceReader, start: int, buffer: memoryview, fqn: str) -> None:
        """Fill a buffer with the bytes from `start` on; both are multiples of the item size."""
        fill_range(self, reader, start, buffer, fqn)

    def box(self, reader: SourceReader, region: Region, fqn: str) -> numpy.ndarray:
        """Return the values of a box, as unsigned integers of their size."""
        import numpy

        values = numpy.empty(region.sizes, f"u{self.itemsize}")
        for each in blocks(region.sizes, _MAX_NUMBERS):
            offsets = tuple(a + b for a, b in zip(region.offsets, each.offsets, strict=True))
            window = tuple(slice(o, o + n) for o, n in zip(*each, strict=True))
            values[window] = self._values(reader, Region(offsets, each.sizes), fqn)
        return values

    def _values(self, reader: SourceReader, region: Region, fqn: str) -> numpy.ndarray:
        import torch

        wanted = getattr(torch, self.dtype.name)
        numbers, scales = self._numbers(reader, region, fqn), self._scales(reader, region, fqn)
        product = torch.ldexp(numbers, scales) if self.scaled.is_packed else numbers * scales
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[self.itemsize]
        found: numpy.ndarray = product.to(wanted).view(integers).numpy().view(f"u{self.itemsize}")
        return found

    def _numbers(self, reader: SourceReader, region: Region, fqn: str) -> torch.Tensor:
        """Return a box of the numbers in float32."""
        import torch

        name = self.scaled.numbers
        if not self.scaled.is_packed:
            return _floats(read_box(self.catalog, name, region, reader, fqn), self._stored_dtype(name))
        size, first, stop = self.scaled.block[-1], region.offsets[-1], region.stops[-1]
        groups = first // size, -(-stop // size)
        part = Region(
            (*region.offsets[:-1], groups[0], 0), (*region.sizes[:-1], groups[1] - groups[0], size // 2)
        )
        pairs = torch.from_numpy(read_box(self.catalog, name, part, reader, fqn)).int()
        table = torch.tensor(_E2M1, dtype=torch.float32)
        unpacked = torch.stack((table[pairs & 0xF], table[pairs >> 4]), dim=-1)
        row = unpacked.reshape(*region.sizes[:-1], (groups[1] - groups[0]) * size)
        return row[..., first - groups[0] * size : stop - groups[0] * size]

    def _scales(self, reader: SourceReader, region: Region, fqn: str) -> torch.Tensor:
        """Return the scale of each number of a box: exponents of 2 where numbers are packed, else in float32.

        A dim that shares one scale has size 1.
        """
        import torch

        name, block = self.scaled.scales, self.scaled.block
        entry = self.catalog.tensors[name]
        if entry.num_elements == 1:
            return self._as_scales(
                read_box(self.catalog, name, full_region(entry.shape), reader, fqn)
            ).reshape(())
        first = [offset // n for offset, n in zip(region.offsets, block, strict=True)]
        last = [(stop - 1) // n for stop, n in zip(region.stops, block, strict=True)]
        grid = Region(tuple(first), tuple(b - a + 1 for a, b in zip(first, last, strict=True)))
        scales = self._as_scales(read_box(self.catalog, name, grid, reader, fqn))
        for dim, size in enumerate(grid.sizes):
            if size > 1:
                at = torch.arange(region.offsets[dim], region.stops[dim]) // block[dim] - first[dim]
                scales = scales.index_select(dim, at)
        return scales

    def _as_scales(self, raw: numpy.ndarray) -> torch.Tensor:
        import torch

        dtype = self._stored_dtype(self.scaled.scales)
        if dtype is not torch.uint8:
            return _floats(raw, dtype)
        exponents = torch.from_numpy(raw).int() - _BIAS
        return exponents if self.scaled.is_packed else torch.pow(2.0, exponents)

    def _stored_dtype(self, name: str) -> Any:
        import torch

        return getattr(torch, self.catalog.tensors[name].dtype.name)


def _floats(raw: numpy.ndarray, dtype: Any) -> torch.Tensor:
    """Return stored floats, given as unsigned integers, in float32."""
    import numpy
    import torch

    flat = numpy.ascontiguousarray(raw).reshape(-1).view(numpy.uint8)
    return torch.from_numpy(flat).view(dtype).to(torch.float32).reshape(raw.shape)
