"""Converting dtypes piece by piece, bit-identical to torch, without torch.

Numbers are converted through float32, as in torch, and rounded to nearest, ties to even. NaN stays NaN; in torch its bits
depend on the processor and on the number of elements, here they are always those of its AVX code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from shardkit.core.dtypes import BY_NAME, DType

if TYPE_CHECKING:
    import numpy

_FLOAT32 = BY_NAME["float32"]
Converter = Callable[[memoryview, memoryview], bool]
"""Fills the second buffer with the converted elements of the first; both are writable and have the same number of
elements. Returns True if a finite element became infinite."""

_BLOCK = 1 << 16  # elements at a time: all intermediate results fit in the processor's cache
_STORED = {"float64": "<f8", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}  # numpy has no bf16
_LARGEST = {"bfloat16": 3.3961775292304957e38, "float16": 65520.0}  # larger values are rounded to infinity


class _Narrow(NamedTuple):
    """A floating dtype of 8 or 16 bits."""

    mantissa_bits: int
    smallest_exponent: int
    """Of its normal numbers, with the bias of float32."""
    limit: float
    """All larger numbers become this one."""


_FP16 = _Narrow(10, 113, 65536.0)  # that becomes infinite
_E4M3 = _Narrow(3, 121, 448.0)


def make_converter(source: DType, target: DType) -> Converter:
    """Return a converter from one floating dtype to another."""

    def convert(values: memoryview, converted: memoryview) -> bool:
        import numpy  # a tenth of a second that most runs do not need

        before = numpy.frombuffer(values, _STORED[source.name])
        after = numpy.frombuffer(converted, "<u2" if target.itemsize == 2 else _STORED[target.name])
        spare = numpy.empty(min(len(before), _BLOCK), "<f4")
        is_infinite = False
        with numpy.errstate(over="ignore", invalid="ignore"):
            for first in range(0, len(before), _BLOCK):
                part = slice(first, first + _BLOCK)
                is_infinite |= _convert(before[part], after[part], spare, target)
        return is_infinite

    return convert


def _convert(before: numpy.ndarray, after: numpy.ndarray, spare: numpy.ndarray, target: DType) -> bool:
    """Convert a block, using `spare`, a float32 array. True if a finite element became infinite."""
    import numpy

    wide = before
    if before.dtype != spare.dtype:
        wide = after if after.dtype == spare.dtype else spare[: len(before)]
        _widen(before, wide)
    if target.name == "bfloat16":
        _round_to_bf16(wide, after)
    elif target.name == "float16":
        _round_to(_FP16, wide, after)
    elif after is not wide:
        after[:] = wide
    if target.itemsize >= max(before.dtype.itemsize, 4):
        return False
    largest = _LARGEST.get(target.name, numpy.inf)
    if -largest < wide.min() and wide.max() < largest:  # also False if one is NaN
        return False
    is_nan = numpy.isnan(wide)
    if target.name == "bfloat16":
        after[is_nan] = 0xFFFF
    elif target.name == "float16":  # its sign, and the first bits of its mantissa
        bits = wide.view("<u4")[is_nan]
        after[is_nan] = (bits >> 16) & 0x8000 | (bits >> 13) & 0x3FF | 0x7E00
    is_large = ~(numpy.abs(wide) < largest) & ~is_nan
    if before.dtype.kind == "f":
        is_large &= numpy.isfinite(before)
    else:
        is_large &= numpy.isfinite(wide)
    return bool(is_large.any())


def _widen(stored: numpy.ndarray, wide: numpy.ndarray) -> None:
    """Convert to float32; the bits of bf16 are the upper half of those of float32."""
    if stored.dtype.kind == "f":
        wide[...] = stored
        return
    bits = wide.view("<u4")
    bits[...] = stored
    bits <<= 16


def _round_to_bf16(wide: numpy.ndarray, narrow: numpy.ndarray) -> None:
    """Fill an array with the bits of bf16. The results for NaN are undefined."""
    bits = wide.view("<u4")
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    narrow[:] = rounded


def _round_to(form: _Narrow, wide: numpy.ndarray, narrow: numpy.ndarray) -> None:
    """Fill an array with the bits of a narrow dtype. The results for NaN are undefined.

    Adding a power of two that is 2^(23 - n) times as large rounds a float32 to n bits after the leading one, and numbers
    below the smallest normal one to multiples of the smallest number, which the low bits of the sum then count. The low bits
    of the addend are those of the narrow exponent, so that the low bits of the sum are the result.

    Args:
        form: of the narrow dtype.
        wide: float32.
        narrow: unsigned integers of its size.
    """
    import numpy

    total = numpy.abs(wide)
    if not total.max() <= form.limit:
        numpy.minimum(total, numpy.float32(form.limit), out=total)
    exponents = (total.view("<u4") >> 23).astype("u1")
    # With a scalar, `maximum` takes several times as long.
    numpy.maximum(exponents, numpy.full(len(wide), form.smallest_exponent, "u1"), out=exponents)
    n = form.mantissa_bits
    addend = exponents.astype("<u4")
    addend *= (1 << 23) + (1 << n)
    addend += (23 - n << 23) - (form.smallest_exponent << n)
    total += addend.view("<f4")
    narrow[...] = total.view("<u4")
    sign = 1 << 8 * narrow.dtype.itemsize - 1
    narrow += numpy.multiply(numpy.signbit(wide).view("u1"), sign, dtype=narrow.dtype)


def to_fp8(values: numpy.ndarray) -> numpy.ndarray:
    """Return the bits of values in float8_e4m3fn; those beyond 448, its largest number, become that.

    Args:
        values: float32, and no NaN.
    """
    import numpy

    bits = numpy.empty(values.shape, "u1")
    wide, narrow = values.reshape(-1), bits.reshape(-1)
    for first in range(0, len(wide), _BLOCK):
        part = slice(first, first + _BLOCK)
        _round_to(_E4M3, wide[part], narrow[part])
    return bits


def as_float32(stored: numpy.ndarray, dtype: DType) -> numpy.ndarray:
    """Return values of a floating dtype in float32.

    Args:
        stored: unsigned integers; the result is a view of those of float32.
        dtype: of the values.
    """
    import numpy

    if dtype.itemsize == numpy.dtype("f4").itemsize:
        return stored.view("f4")
    wide = numpy.empty(stored.shape, "f4")
    _widen(stored if dtype.name == "bfloat16" else stored.view(_STORED[dtype.name]), wide)
    return wide


def to_bits(values: numpy.ndarray, target: DType) -> numpy.ndarray:
    """Return values in float32 as unsigned integers of another floating dtype's size."""
    import numpy

    if target.name == "float32":
        return values.view("u4")
    bits = numpy.empty(values.shape, f"u{target.itemsize}")
    make_converter(_FLOAT32, target)(values.reshape(-1).view("u1").data, bits.reshape(-1).view("u1").data)
    return bits


@contextlib.contextmanager
def one_thread_each(is_needed: bool) -> Iterator[None]:
    """Restrict torch to the calling thread, as shardkit runs enough threads itself.

    If torch is not needed, do nothing and do not import it.
    """
    if not is_needed:
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
