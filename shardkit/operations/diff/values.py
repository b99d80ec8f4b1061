"""The values of two tensors side by side: which differ, by how much, and whether a tolerance allows it.

Bits are compared as integers of the element's size, so NaN payloads and signs of zeros count. Values are compared as
float64, which holds every shorter float exactly. Rounding starts from float64 too, so nothing is rounded twice; torch's
own cast of float64 is the exception: it rounds through float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import sqrt
from typing import Any, Literal, NamedTuple

import numpy as np

from shardkit.core.dtypes import BY_NAME, DType

Array = np.ndarray[Any, np.dtype[Any]]

_NUMPY_FLOATS = {"float64": "<f8", "float32": "<f4", "float16": "<f2"}
_PACKED = BY_NAME["float4_e2m1fn_x2"]
_UNSIGNED_FLOAT = BY_NAME["float8_e8m0fnu"]
_EIGHT_BIT = {
    "float8_e4m3fn": (4, 7, "fn"),
    "float8_e4m3fnuz": (4, 8, "fnuz"),
    "float8_e5m2": (5, 15, "ieee"),
    "float8_e5m2fnuz": (5, 16, "fnuz"),
}
"""Bits of the exponent, its bias, and which patterns are no numbers: "fn" the last one, "fnuz" that of -0, "ieee" those
of the largest exponent, the first of which is infinity.

Source: torch 2.13, torch/headeronly/util/Float8_*.h.
"""
_MAX_FLOAT = float(np.finfo(np.float64).max)
_MANTISSA_BITS = 52  # of float64, as stored
_ROUNDED_AT_ONCE = 16384  # values: a dozen float64s of each stay in the processor's cache

RoundedSide = Literal["a", "b"]
"""The side that may hold the other's values, rounded."""
Roundings = dict[tuple[RoundedSide, DType], int]
"""(the side, what it is rounded to) -> how many values other than 0 became 0."""
_RoundingWay = tuple[RoundedSide, DType, bool]
"""The side, what it is rounded to, and whether through float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStats:
    """How much two tensors differ, over the elements that are finite numbers on both sides.

    The real and imaginary parts of complex tensors count as values of their own.
    """

    max_abs: float
    """Largest |a - b|."""
    max_rel: float
    """Largest |a - b| / max(|a|, |b|); at most 2."""
    max_ulp: int | None
    """Largest number of representable values between a and b; None if the dtypes differ or have no ulp."""
    cosine: float | None
    """Cosine of the angle between the tensors as vectors; None if one of them is zero."""
    relative_error: float | None
    """|a - b| / max(|a|, |b|) of the tensors as vectors (Euclidean norms); None if both are zero."""
    num_nonfinite: int
    """Values that differ where at least one is infinite or NaN; no figure above includes them."""


class Tolerance(NamedTuple):
    """Elements are close where |a - b| <= atol + rtol * |b|, as numpy.allclose has it; NaN equals NaN."""

    rtol: float
    atol: float


def has_values(dtype: DType) -> bool:
    """True if each element's bits stand for one number; fp4 packs two into one."""
    return dtype is not _PACKED


def is_shorter(a: DType, b: DType) -> bool:
    """True if `a` is an ordinary float shorter than `b`, so that `b` can be rounded to it."""
    return a.is_convertible and b.is_convertible and a.itemsize < b.itemsize


class _FloatFormat(NamedTuple):
    """An IEEE-like binary format."""

    mantissa_bits: int
    """As stored."""
    min_exponent: int
    """Of the smallest normal number, 2 ** min_exponent."""
    max_exponent: int
    """Of the largest one."""


# IEEE 754-2019, table 3.5 (binary16, binary32); bfloat16 is the upper half of binary32.
_FORMS = {
    BY_NAME["float16"]: _FloatFormat(10, -14, 15),
    BY_NAME["bfloat16"]: _FloatFormat(7, -126, 127),
    BY_NAME["float32"]: _FloatFormat(23, -126, 127),
}
ROUNDED_TO = (BY_NAME["bfloat16"], BY_NAME["float16"])
"""The dtypes that "equal after rounding" considers, in the order of preference."""


def rounded(values: Array, dtype: DType) -> Array:
    """Return float64 values rounded to the nearest of a shorter float's, ties to even; all NaNs become one.

    Args:
        values: float64.
        dtype: float32, float16 or bfloat16.
    """
    form = _FORMS[dtype]
    cut = np.uint64(_MANTISSA_BITS - form.mantissa_bits)
    words = values.view(np.uint64)
    below_half = (np.uint64(1) << (cut - np.uint64(1))) - np.uint64(1)
    odd = (words >> cut) & np.uint64(1)
    result = np.asarray(((words + below_half + odd) >> cut << cut).view(np.float64))
    with np.errstate(all="ignore"):
        size = np.abs(values)
        # Subnormal numbers have a fixed spacing. It is float64's own at this number, so adding the number rounds.
        anchor = 2.0 ** (_MANTISSA_BITS + form.min_exponent - form.mantissa_bits)
        small = size < 2.0**form.min_exponent
        if small.any():
            result = np.where(small, np.copysign((size + anchor) - anchor, values), result)
        result = np.where(
            np.abs(result) >= 2.0 ** (form.max_exponent + 1), np.copysign(np.inf, values), result
        )
        return np.where(np.isnan(values), np.nan, result)


def _off_rounding(source: Array, other: Array, dtype: DType, *, is_twice: bool) -> tuple[Array, int]:
    """Tell which values are not the source's after rounding, and count those that rounding made 0.

    A finite number that becomes infinite does not count as rounded.

    Args:
        is_twice: to float32 first, as `tensor.to` does with float64. Source: torch 2.6 to 2.15,
            c10::convert<BFloat16, double> and <Half, double>, whose constructors take a float.
    """
    wanted = rounded(rounded(source, BY_NAME["float32"]) if is_twice else source, dtype)
    off = wanted.view(np.uint64) != other.view(np.uint64)
    off &= ~(np.isnan(source) & np.isnan(other))
    off |= np.isinf(wanted) & np.isfinite(source)
    return off, int(np.count_nonzero((wanted == 0) & (source != 0)))


class Measure:
    """Adds up how two tensors differ, band by band.

    Args:
        a: dtype of one side.
        b: dtype of the other.
        tolerance: count what is beyond it.
        stats: take figures. Every band must then be given, equal ones too.
    """

    def __init__(self, a: DType, b: DType, *, tolerance: Tolerance | None, stats: bool) -> None:
        self._a, self._b, self._tolerance = a, b, tolerance
        can = has_values(a) and has_values(b)
        self._figures = _Figures(a, b) if stats and can else None
        self._needs_values = can and (tolerance is not None or a is not b)
        self.num_changed = 0
        self.first_changed: int | None = None
        """Row-major."""
        self.num_outside = 0
        self._counts_off = is_shorter(a, b) or is_shorter(b, a)
        sides: tuple[tuple[RoundedSide, DType], ...] = (
            (("b", a), ("a", b)) if a.is_convertible and b.is_convertible else ()
        )
        ways: list[_RoundingWay] = [
            (side, dtype, is_twice)
            for side, source in sides
            for dtype in ROUNDED_TO
            for is_twice in ((False, True) if source.name == "float64" else (False,))
        ]
        self._flushed: dict[_RoundingWay, int] = dict.fromkeys(ways, 0)
        """How many values other than 0 became 0, for each way that holds for all elements so far."""
        shorter: RoundedSide = "a" if is_shorter(a, b) else "b"
        self._off: dict[_RoundingWay, int] = {
            (shorter, {"a": a, "b": b}[shorter], is_twice): 0
            for is_twice in ((False, True) if "float64" in (a.name, b.name) else (False,))
        }
        self.num_unchecked: int | None = None if a is b else 0
        """Elements at the beginning, in equal bands, that `check_rounding` has yet to see; None if all are equal."""
        self._has_other_value = a is not b  # other than NaNs whose bits differ
        self._start = 0

    def add(self, left: memoryview, right: memoryview) -> None:
        """Compare a band of both sides, with the same number of elements."""
        num_elements = len(left) // self._a.itemsize
        is_same = self._a is self._b and have_same_bytes(left, right)
        if not is_same:
            self._add_different(left, right)
        if not is_same and self.num_unchecked is None:
            self.num_unchecked = self._start
        if self.num_unchecked is not None:
            self.check_rounding(left, right)
        if self._figures is not None:
            self._figures.add(left, right)
        self._start += num_elements

    def check_rounding(self, left: memoryview, right: memoryview) -> None:
        """Drop each of `roundings` that does not hold for these elements; count the elements that are not rounded."""
        counted = self._off if self._counts_off else {}
        for start in range(0, len(left) // self._a.itemsize, _ROUNDED_AT_ONCE):
            wanted = dict.fromkeys((*self._flushed, *counted))
            if not wanted:
                return
            stop = start + _ROUNDED_AT_ONCE
            a = float64s(left[start * self._a.itemsize : stop * self._a.itemsize], self._a)
            b = float64s(right[start * self._b.itemsize : stop * self._b.itemsize], self._b)
            self._has_other_value = self._has_other_value or not bool(_are_same(a, b).all())
            for way in wanted:
                side, dtype, is_twice = way
                sides = (a, b) if side == "b" else (b, a)
                off, num_flushed = _off_rounding(*sides, dtype, is_twice=is_twice)
                num_off = int(np.count_nonzero(off))
                if way in counted:
                    counted[way] += num_off
                if num_off:
                    self._flushed.pop(way, None)
                elif way in self._flushed:
                    self._flushed[way] += num_flushed

    @property
    def roundings(self) -> Roundings:
        """The roundings that hold for all elements so far."""
        roundings: Roundings = {}
        for (side, dtype, _), num_flushed in self._flushed.items():
            roundings.setdefault((side, dtype), num_flushed)
        return roundings

    @property
    def num_off_rounding(self) -> int | None:
        """Elements that are not the longer side's after rounding; None if neither side is longer."""
        return min(self._off.values()) if self._counts_off else None

    @property
    def may_be_rounded(self) -> bool:
        """True if one side holds the other's values rounded, as far as `check_rounding` has looked."""
        return bool(self.roundings) and self.num_unchecked is not None and self._has_other_value

    def stats(self) -> TensorStats | None:
        """Return the figures, where they were taken."""
        return self._figures.result() if self._figures is not None else None

    def _add_different(self, left: memoryview, right: memoryview) -> None:
        values = (float64s(left, self._a), float64s(right, self._b)) if self._needs_values else None
        if self._a is self._b:
            changed = _changed_bits(left, right, self._a)
        elif values is None:
            changed = np.ones(len(left) // self._a.itemsize, dtype=bool)  # no common meaning
        else:
            changed = ~_are_same(*values)
        number = int(np.count_nonzero(changed))
        if number and self.first_changed is None:
            self.first_changed = self._start + int(np.argmax(changed))
        self.num_changed += number
        if self._tolerance is not None:
            outside = changed if values is None else changed & ~_are_close(*values, self._tolerance)
            self.num_outside += int(np.count_nonzero(outside))


def have_same_bytes(left: memoryview, right: memoryview) -> bool:
    """True if both sides have the same bytes; compares eight at a time."""
    whole = len(left) & ~7
    return (
        len(left) == len(right)
        and bool(
            np.array_equal(np.frombuffer(left[:whole], np.uint64), np.frombuffer(right[:whole], np.uint64))
        )
        and left[whole:] == right[whole:]
    )


def _words(view: memoryview, itemsize: int) -> Array:
    return np.frombuffer(view, dtype=f"<u{itemsize}")


def _changed_bits(left: memoryview, right: memoryview, dtype: DType) -> Array:
    size = min(dtype.itemsize, 8)
    changed: Array = _words(left, size) != _words(right, size)
    return np.asarray(changed.reshape(-1, 2).any(axis=1)) if dtype.itemsize > size else changed


def float64s(view: memoryview, dtype: DType) -> Array:
    """Return elements as float64, complex ones as complex128, 64-bit integers as they are."""
    with np.errstate(invalid="ignore"):  # numpy warns of signalling NaNs that it widens
        return _widened(view, dtype)


def _widened(view: memoryview, dtype: DType) -> Array:
    if dtype.name in _NUMPY_FLOATS:
        return np.frombuffer(view, dtype=_NUMPY_FLOATS[dtype.name]).astype(np.float64)
    if dtype.name == "bfloat16":  # the upper half of a float32
        wide = _words(view, 2).astype(np.uint32) << np.uint32(16)
        return np.asarray(wide.view(np.float32), dtype=np.float64)
    if dtype.kind == "float":
        return np.take(_table(dtype.name), _words(view, 1))
    if dtype.kind == "complex":
        parts = np.frombuffer(view, dtype=f"<f{dtype.itemsize // 2}").astype(np.float64)
        return parts.view(np.complex128)
    if dtype.kind == "bool":
        return _words(view, 1).astype(np.float64)
    sign = "u" if dtype.name.startswith("u") else "i"
    whole = np.frombuffer(view, dtype=f"<{sign}{dtype.itemsize}")
    return whole if dtype.itemsize == 8 else whole.astype(np.float64)


@cache
def _table(name: str) -> Array:
    """Return the values of all 256 patterns of an 8-bit float."""
    if name == _UNSIGNED_FLOAT.name:
        return np.append(np.ldexp(1.0, np.arange(-127, 128)), np.nan)
    exponent_bits, bias, special = _EIGHT_BIT[name]
    mantissa_bits = 7 - exponent_bits
    patterns = np.arange(128)
    exponents, mantissas = patterns >> mantissa_bits, patterns & (1 << mantissa_bits) - 1
    is_normal = exponents > 0
    scaled = mantissas + (is_normal << mantissa_bits)
    values: Array = np.ldexp(scaled.astype(np.float64), np.maximum(exponents, 1) - bias - mantissa_bits)
    if special == "ieee":
        values[exponents == exponents.max()] = np.nan
        values[exponents.argmax()] = np.inf
    elif special == "fn":
        values[-1] = np.nan
    negative = -values
    if special == "fnuz":  # in place of -0
        negative[0] = np.nan
    return np.concatenate([values, negative])


def _are_same(a: Array, b: Array) -> Array:
    """Tell which values are the same number, zeros with their signs; NaNs are all one."""
    with np.errstate(all="ignore"):
        same: Array = a == b
    if a.dtype.kind == b.dtype.kind == "f":
        same &= np.signbit(a) == np.signbit(b)
    same |= _is_nan(a) & _is_nan(b)
    return same


def _is_nan(a: Array) -> Array:
    return np.isnan(a) if a.dtype.kind in "fc" else np.zeros(a.shape, dtype=bool)


def _are_close(a: Array, b: Array, tolerance: Tolerance) -> Array:
    """Do what numpy.isclose does, in fewer passes, and for 64-bit integers too without rounding them first."""
    with np.errstate(all="ignore"):
        # Differences of integers, and the size of the smallest one, might overflow.
        distance = _distance(a, b) if a.dtype.kind in "iu" else np.abs(a - b)
        size = np.abs(b.astype(np.float64) if b.dtype.kind in "iu" else b)
        close: Array = distance <= tolerance.atol + tolerance.rtol * size
        close &= np.isfinite(b)
        if not close.all():
            close |= (a == b) | (_is_nan(a) & _is_nan(b))
    return close


class _Figures:
    """The statistics of two tensors, added up."""

    def __init__(self, a: DType, b: DType) -> None:
        self._a, self._b = a, b
        self._has_ulp = a is b and a.kind == "float" and has_values(a)
        self._max_abs = self._max_rel = 0.0
        self._max_ulp = 0
        self._num_nonfinite = 0
        self._aa = self._bb = self._ab = self._dd = 0.0

    def add(self, left: memoryview, right: memoryview) -> None:
        """Add a band of both sides, with the same number of elements."""
        a, b = _as_reals(float64s(left, self._a), float64s(right, self._b))
        is_same, distance = a == b, _distance(a, b)
        a, b = a.astype(np.float64, copy=False), b.astype(np.float64, copy=False)
        finite = np.isfinite(a) & np.isfinite(b)
        is_plain = bool(finite.all())
        if not is_plain:
            both_nan = np.isnan(a) & np.isnan(b)
            self._num_nonfinite += int(np.count_nonzero(~finite & ~is_same & ~both_nan))
            a, b, distance = a[finite], b[finite], distance[finite]
        if len(a):
            self._add_finite(a, b, distance)
        if self._has_ulp:
            ulp = _most_ulp(left, right, self._a, None if is_plain else finite)
            self._max_ulp = max(self._max_ulp, ulp)

    def _add_finite(self, a: Array, b: Array, distance: Array) -> None:
        with np.errstate(all="ignore"):
            self._max_abs = max(self._max_abs, float(distance.max()))
            largest = np.maximum(np.abs(a), np.abs(b))
            relative = np.divide(distance, largest, out=np.zeros_like(distance), where=largest > 0)
            self._max_rel = max(self._max_rel, float(relative.max()))
            self._aa += _dot(a, a)
            self._bb += _dot(b, b)
            self._ab += _dot(a, b)
            self._dd += _dot(distance, distance)

    def result(self) -> TensorStats:
        """Return the figures; one that overflows float64 is its largest number, or None."""
        norms, larger = sqrt(self._aa) * sqrt(self._bb), sqrt(max(self._aa, self._bb))
        return TensorStats(
            max_abs=min(self._max_abs, _MAX_FLOAT),
            max_rel=min(self._max_rel, 2.0),
            max_ulp=self._max_ulp if self._has_ulp else None,
            cosine=_finite(self._ab / norms) if norms else None,
            relative_error=_finite(sqrt(self._dd) / larger) if larger else None,
            num_nonfinite=self._num_nonfinite,
        )


def _dot(a: Array, b: Array) -> float:
    """Return the sum of products, in this thread: BLAS would start more threads for so little work, and wait."""
    return float(np.einsum("i,i->", a, b))


def _finite(number: float) -> float | None:
    return number if np.isfinite(number) else None


def _as_reals(a: Array, b: Array) -> tuple[Array, Array]:
    """Return both sides as real numbers; complex ones become their real and imaginary parts."""
    if "c" not in (a.dtype.kind, b.dtype.kind):
        return a, b
    return a.astype(np.complex128).view(np.float64), b.astype(np.complex128).view(np.float64)


def _distance(a: Array, b: Array) -> Array:
    """Return |a - b| as float64; for 64-bit integers too it is as exact as float64 can be."""
    if a.dtype == b.dtype and a.dtype.kind in "iu":
        return np.where(a > b, a - b, b - a).view(np.uint64).astype(np.float64)  # wraps to the right number
    with np.errstate(all="ignore"):
        return np.abs(a.astype(np.float64, copy=False) - b.astype(np.float64, copy=False))


def _most_ulp(left: memoryview, right: memoryview, dtype: DType, finite: Array | None) -> int:
    """Return the largest number of representable values between two elements; `finite` None takes all elements."""
    a, b = (_ordered(side, dtype) for side in (left, right))
    if finite is not None:
        a, b = a[finite], b[finite]
    if not len(a):
        return 0
    if dtype.itemsize < 8:
        return int(np.abs(a - b).max())
    return int(np.where(a > b, a - b, b - a).view(np.uint64).max())  # wraps to the right number


def _ordered(view: memoryview, dtype: DType) -> Array:
    """Return floats as integers that count representable values from zero; both zeros are 0."""
    if dtype is _UNSIGNED_FLOAT:
        return _words(view, 1).astype(np.int32)
    wide = np.int32 if dtype.itemsize <= 2 else np.int64
    words = np.frombuffer(view, dtype=f"<i{dtype.itemsize}").astype(wide)
    sign = words >> wide(8 * words.itemsize - 1)  # 0 or -1; arithmetic, as a branch for each sign is slow
    magnitude = words & wide((1 << (8 * dtype.itemsize - 1)) - 1)
    return np.asarray((magnitude ^ sign) - sign)
