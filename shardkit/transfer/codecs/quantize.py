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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from shardkit.core.catalog import StoredParts
from shardkit.core.dtypes import BY_NAME, DType
from shardkit.core.regions import Region, Shape, blocks, full_region, relative_to, shifted, window
from shardkit.core.text import escape
from shardkit.errors import LayoutError
from shardkit.transfer.codecs.convert import as_float32, to_bits, to_fp8
from shardkit.transfer.codecs.products import pieces, spread

if TYPE_CHECKING:
    import numpy

CODES = BY_NAME["float8_e4m3fn"]
_FLOAT32 = BY_NAME["float32"]
_LARGEST = 448.0  # of float8_e4m3fn
_POWERS_OF_TWO = BY_NAME["float8_e8m0fnu"]
_EPSILON = {"float32": 2.0**-23, "bfloat16": 2.0**-7}
"""The scale of a row that would have a scale of zero, by the dtype of scales."""
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
    """Scales are rounded up to powers of two; always so if they are stored as exponents."""

    def sizes(self, shape: Shape) -> tuple[int, int]:
        """Return the rows and columns of a block of a weight."""
        return self.block or (1, shape[-1])

    def grid(self, shape: Shape) -> Shape:
        """Return the shape of the scales of a weight."""
        rows, columns = self.sizes(shape)
        return (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // columns))


class _WeightScales(NamedTuple):
    """The scales of a weight."""

    stored: numpy.ndarray
    """As unsigned integers of their size."""
    factors: numpy.ndarray
    """In float32: weights are multiplied by these, or divided if each row has one."""

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

    @property
    def dtype(self) -> DType:
        """The dtype of the computation; its numbers are in float32 all the same."""
        return _FLOAT32 if self.form.block else self.form.scale

    @property
    def sizes(self) -> Shape:
        """Of a block along each dim."""
        return (*(1 for _ in self.shape[:-2]), *self.form.sizes(self.shape))

    def _largest(self, parts: StoredParts) -> numpy.ndarray:
        """Return the largest magnitude of each block, which is that of its bits."""
        import numpy

        dtype, columns = parts.entry(self.source).dtype, self.sizes[-1]
        bits = numpy.zeros(self.form.grid(self.shape), f"u{dtype.itemsize}")
        for region in pieces(full_region(self.shape), self.sizes, _MAX_NUMBERS):
            magnitudes = parts.box(self.source, region)
            magnitudes &= numpy.iinfo(magnitudes.dtype).max >> 1
            if self.sizes[-2] > 1:
                magnitudes = magnitudes.max(-2, keepdims=True)
            starts = [0, *range(columns - region.offsets[-1] % columns, region.sizes[-1], columns)]
            touched = zip(region.offsets, region.stops, self.sizes, strict=True)
            place = bits[tuple(slice(start // size, -(-stop // size)) for start, stop, size in touched)]
            numpy.maximum(place, numpy.maximum.reduceat(magnitudes, starts, axis=-1), out=place)
        largest = _as_computed(bits, dtype, self.dtype)
        if not numpy.isfinite(largest).all():
            raise LayoutError(
                f"{escape(self.source)} has values that are infinite, not a number, or too large for scales in "
                f"{self.form.scale.name}",
                hint="without --quantize they are written as they are; if they should not be so, the training diverged, "
                "or the checkpoint is damaged",
            )
        return largest


def _as_computed(bits: numpy.ndarray, dtype: DType, computed: DType) -> numpy.ndarray:
    """Return numbers in float32, rounded to the dtype of the computation.

    Args:
        bits: the numbers, as unsigned integers.
        dtype: of these.
        computed: float32, or the dtype of scales.
    """
    import numpy

    with numpy.errstate(over="ignore", invalid="ignore"):
        values = as_float32(bits, dtype)
    return values if computed in (dtype, _FLOAT32) else _rounded(values, computed)


def _rounded(values: numpy.ndarray, dtype: DType) -> numpy.ndarray:
    return as_float32(to_bits(values, dtype), dtype)


def _scaled(values: numpy.ndarray, factors: numpy.ndarray, form: Fp8Form) -> numpy.ndarray:
    """Return the numbers to round to codes; `values` may be changed."""
    import numpy

    with numpy.errstate(over="ignore"):  # numpy 1.26.0 warns of elements that it adds to fill a vector
        if form.block is None:
            return _as_computed((values / factors).view("u4"), _FLOAT32, form.scale)
        values *= factors
        return values


def _scales_of(largest: numpy.ndarray, form: Fp8Form) -> _WeightScales:
    """Return the scales for the largest magnitudes of blocks, all in float32."""
    import numpy

    with numpy.errstate(all="ignore"):
        if form.block is None:
            scales = _rounded(largest / numpy.float32(_LARGEST), form.scale)
            scales = numpy.where(scales == 0, numpy.float32(_EPSILON[form.scale.name]), scales)
            return _WeightScales(to_bits(scales, form.scale), scales)
        one = numpy.float32(1)
        # torch divides a number by a tensor so: the quotient is rounded twice.
        factors = numpy.where(largest > 0, one / largest * numpy.float32(_LARGEST), one)
        inverse = one / factors
        if form.is_power_of_two:
            # Rounded to float32, as in torch: there, a number just above a power of two may have the power's logarithm.
            logarithms = numpy.log2(numpy.maximum(inverse, numpy.finfo("f4").tiny).astype("f8"))
            exponents = numpy.ceil(logarithms.astype("f4"))
            inverse = numpy.ldexp(one, exponents.astype("i4"))
        stored = inverse if form.scale is _POWERS_OF_TWO else _rounded(inverse, form.scale)
        if form.is_power_of_two or form.scale is not _FLOAT32:  # numbers are multiplied by what is stored
            factors = one / stored
        # 448 over the largest is beyond float32: the block is as good as zeros.
        is_tiny = numpy.isinf(factors)
        stored, factors = numpy.where(is_tiny, one, stored), numpy.where(is_tiny, one, factors)
    if form.scale is _POWERS_OF_TWO:
        return _WeightScales((stored.view("u4") >> 23).astype("u1"), factors)
    return _WeightScales(to_bits(stored, form.scale), factors)


@dataclass(frozen=True, slots=True, eq=False)
class _OfWeight:
    """What is computed from a weight by its quantiser."""

    quantiser: Quantiser
    needs_torch: ClassVar[bool] = False

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
        target[...] = self.quantiser.scales(parts).stored[window(region)]


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
        quantiser, sizes = self.quantiser, self.quantiser.sizes
        factors, dtype = quantiser.scales(parts).factors, parts.entry(quantiser.source).dtype
        for block in blocks(region.sizes, _MAX_NUMBERS):
            box = shifted(block, region.offsets)
            bits = parts.box(quantiser.source, box)
            for piece in pieces(box, sizes):
                values = _as_computed(bits[window(relative_to(piece, box.offsets))], dtype, quantiser.dtype)
                some = spread(factors, (0,) * factors.ndim, sizes, piece)
                place = target[window(relative_to(piece, region.offsets))]
                place[...] = to_fp8(_scaled(values, some, quantiser.form))
