"""Codes and scales in fp8, computed from plain weights box by box in bounded memory.

    blocks    X.weight in float8_e4m3fn, X.weight_scale_inv with one scale for each block: DeepSeek V3, Qwen3
    rows      X.weight in float8_e4m3fn, X.weight_scale with one scale for each row: compressed-tensors' channels

A scale needs the largest magnitude of its block. So a weight is read twice: once for all of its scales, which are kept
while its codes are computed, and once for the codes. A block at the end of a dim may be shorter; missing numbers count as
zeros. Values are those of the sources below.

Source: transformers 5.24, integrations/finegrained_fp8.py (Fp8Quantize); compressed-tensors 0.20.0,
quantization/utils/helpers.py (calculate_qparams) and lifecycle/forward_helpers.py (_quantize).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from shardkit.core.catalog import StoredParts
from shardkit.core.dtypes import BY_NAME, DType
from shardkit.core.regions import Region, Shape, blocks, shifted, window
from shardkit.core.text import escape
from shardkit.errors import LayoutError
from shardkit.transfer.codecs.boxes import as_box

if TYPE_CHECKING:
    import numpy
    import torch

CODES = BY_NAME["float8_e4m3fn"]
_LARGEST = 448.0  # of float8_e4m3fn
_MAX_NUMBERS = 1 << 19  # read at once
_MAX_KEPT_NBYTES = 32 << 20
"""Scales that are kept: in a file of thousands of weights, all scales may come before all codes."""


class Fp8Form(NamedTuple):
    """How weights are quantised."""

    block: tuple[int, int] | None
    """Rows and columns of a block; None for one scale for each row."""
    scale: DType
    """Of the stored scales."""
    is_power_of_two: bool = False
    """Scales are rounded up to powers of two."""

    def sizes(self, shape: Shape) -> tuple[int, int]:
        """Return the rows and columns of a block of a weight."""
        return self.block or (1, shape[-1])

    def grid(self, shape: Shape) -> Shape:
        """Return the shape of the scales of a weight."""
        rows, columns = self.sizes(shape)
        return (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // columns))


class _WeightScales(NamedTuple):
    """The scales of a weight."""

    stored: torch.Tensor
    factors: torch.Tensor
    """Weights are multiplied by these, or divided if each row has one."""

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.stored.nbytes + self.factors.nbytes


class KeptScales:
    """The scales of the weights that were used last; shared by the codecs of a job."""

    def __init__(self) -> None:
        self._kept, self._nbytes, self._lock = OrderedDict[str, _WeightScales](), 0, threading.Lock()

    def get(self, source: str) -> _WeightScales | None:
        """Return the scales of a weight if they are kept."""
        with self._lock:
            if source in self._kept:
                self._kept.move_to_end(source)
            return self._kept.get(source)

    def put(self, source: str, scales: _WeightScales) -> None:
        """Keep the scales of a weight, and forget those of the weight that was used least recently."""
        with self._lock:
            self._kept[source] = scales
            self._nbytes += scales.nbytes
            while len(self._kept) > 1 and self._nbytes > _MAX_KEPT_NBYTES:
                self._nbytes -= self._kept.popitem(last=False)[1].nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Quantiser:
    """Computes the scales of a weight."""

    source: str
    """The weight in the catalog."""
    shape: Shape
    """Of the weight; at least two dims."""
    form: Fp8Form
    scales_name: str
    """The tensor of the scales; the first reading of the weight counts as its."""
    kept: KeptScales
    lock: threading.Lock = field(default_factory=threading.Lock)

    def scales(self, parts: StoredParts) -> _WeightScales:
        """Return the scales of the whole weight, computing them unless they are kept.

        Raises:
            LayoutError: a value is infinite or not a number.
        """
        with self.lock:
            scales = self.kept.get(self.source)
            if scales is None:
                scales = _scales_of(self._largest(parts.of_tensor(self.scales_name)), self.form)
                self.kept.put(self.source, scales)
            return scales

    def read(self, parts: StoredParts, region: Region) -> torch.Tensor:
        """Return values of the weight in the dtype of the computation."""
        import torch

        dtype = torch.float32 if self.form.block else getattr(torch, self.form.scale.name)
        return parts.values(self.source, region).to(dtype)

    def _largest(self, parts: StoredParts) -> torch.Tensor:
        """Return the largest magnitude of each block."""
        import torch

        (rows, columns), grid = self.form.sizes(self.shape), self.form.grid(self.shape)
        largest: torch.Tensor | None = None
        for region in self._strips():
            values = self.read(parts, region).abs()
            values = torch.nn.functional.pad(values, (0, grid[-1] * columns - self.shape[-1]))
            most = values.reshape(*values.shape[:-1], grid[-1], columns).amax(-1)
            if largest is None:
                largest = torch.zeros(grid, dtype=values.dtype)
            first, stop = region.offsets[-2] // rows, -(-region.stops[-2] // rows)
            place = largest[window(Region((*region.offsets[:-2], first), (*region.sizes[:-2], stop - first)))]
            torch.maximum(place, most if rows == 1 else most.amax(-2, keepdim=True), out=place)
        assert largest is not None
        if not largest.isfinite().all():
            raise LayoutError(
                f"{escape(self.source)} has values that are infinite, not a number, or too large for scales in "
                f"{self.form.scale.name}",
                hint="without --quantize they are written as they are; if they should not be so, the training diverged, "
                "or the checkpoint is damaged",
            )
        return largest

    def _strips(self) -> Iterator[Region]:
        """Yield regions of whole rows, each within one row of blocks if these have several rows."""
        *leading, num_rows, num_columns = self.shape
        rows = self.form.sizes(self.shape)[0]
        step = max(_MAX_NUMBERS // num_columns, 1)
        ends = range(rows, num_rows + rows, rows) if rows > 1 else range(num_rows, num_rows + 1)
        for index in product(*map(range, leading)):
            start = 0
            for end in ends:
                for first in range(start, min(end, num_rows), step):
                    size = min(step, min(end, num_rows) - first)
                    yield Region((*index, first, 0), (*(1 for _ in index), size, num_columns))
                start = end


def _scales_of(largest: torch.Tensor, form: Fp8Form) -> _WeightScales:
    """Return the scales for the largest magnitudes of blocks."""
    import torch

    dtype = getattr(torch, form.scale.name)
    if form.block is None:
        scales = largest / _LARGEST
        scales = torch.where(scales == 0, torch.tensor(torch.finfo(dtype).eps, dtype=dtype), scales)
        return _WeightScales(scales, scales)
    factors = torch.where(largest > 0, _LARGEST / torch.where(largest > 0, largest, 1.0), 1.0)
    inverse = 1.0 / factors
    if form.is_power_of_two:
        smallest = torch.finfo(torch.float32).tiny
        inverse = torch.pow(2.0, torch.ceil(torch.log2(inverse.clamp(min=smallest))))
    stored = inverse.to(dtype)
    if form.is_power_of_two or dtype is not torch.float32:  # numbers are multiplied by what is stored
        factors = 1.0 / stored.float()
    is_tiny = factors.isinf()  # 448 over the largest is beyond float32: the block is as good as zeros
    return _WeightScales(
        torch.where(is_tiny, 1.0, stored.float()).to(dtype), factors.masked_fill(is_tiny, 1.0)
    )


@dataclass(frozen=True, slots=True, eq=False)
class _OfWeight:
    """What is computed from a weight by its quantiser."""

    quantiser: Quantiser
    needs_torch: ClassVar[bool] = True

    @property
    def of(self) -> tuple[str, ...]:
        """The weight."""
        return (self.quantiser.source,)


class Fp8Scales(_OfWeight):
    """The scales of a weight; a `Codec`."""

    __slots__ = ()

    @property
    def dtype(self) -> DType:
        """Of the stored scales."""
        return self.quantiser.form.scale

    @property
    def shape(self) -> Shape:
        """One element for each block."""
        return self.quantiser.form.grid(self.quantiser.shape)

    def fill(self, parts: StoredParts, region: Region, target: numpy.ndarray) -> None:
        """Fill an array with a box of the scales."""
        target[...] = as_box(self.quantiser.scales(parts).stored[window(region)].contiguous(), self.dtype)


class Fp8Codes(_OfWeight):
    """The codes of a weight; a `Codec`."""

    __slots__ = ()
    dtype: ClassVar[DType] = CODES

    @property
    def shape(self) -> Shape:
        """Of the weight."""
        return self.quantiser.shape

    def fill(self, parts: StoredParts, region: Region, target: numpy.ndarray) -> None:
        """Compute a box of the codes."""
        factors = self.quantiser.scales(parts).factors
        for block in blocks(region.sizes, _MAX_NUMBERS):
            target[window(block)] = self._codes(parts, shifted(block, region.offsets), factors)

    def _codes(self, parts: StoredParts, region: Region, factors: torch.Tensor) -> numpy.ndarray:
        import torch

        form, some = self.quantiser.form, factors[window(Region(region.offsets[:-2], region.sizes[:-2]))]
        for dim, size in zip((-2, -1), form.sizes(self.shape), strict=True):
            places = torch.arange(region.offsets[dim], region.stops[dim]) // size
            some = some.index_select(dim, places)
        values = self.quantiser.read(parts, region)
        scaled = values / some if form.block is None else values * some
        return as_box(scaled.clamp(-_LARGEST, _LARGEST), CODES)
