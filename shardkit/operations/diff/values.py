"""Compare the values of two tensors: which differ, by how much, and whether a tolerance allows it.

A *band* is a run of consecutive elements of a tensor; both sides, A and B, are given band by band, with the same elements.
Bits are compared as integers of the element's size, so NaN payloads and signs of zeros count. Values are compared as
float64, which represents every shorter float exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Any, NamedTuple

import numpy as np

from shardkit.core.dtypes import BY_NAME, DType
from shardkit.transfer.codecs.codes import code_values

Array = np.ndarray[Any, np.dtype[Any]]

_NUMPY_FLOATS = {"float64": "<f8", "float32": "<f4", "float16": "<f2"}
_PACKED = BY_NAME["float4_e2m1fn_x2"]
_MAX_FLOAT = float(np.finfo(np.float64).max)
_VALUES_AT_ONCE = 16384  # a dozen float64s for each value fit into the processor's cache

_OF_NUMBERS = ("float", "complex")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStats:
    """How much two tensors differ, over the elements that are finite on both sides.

    The real and imaginary parts of complex numbers count as separate values.
    """

    max_abs: float
    """Largest |a - b|."""
    max_rel: float
    """Largest |a - b| / max(|a|, |b|); at most 2."""
    cosine: float | None
    """Cosine of the angle between the tensors as vectors; None if one of them is zero."""
    relative_error: float | None
    """|a - b| / max(|a|, |b|) of the tensors as vectors (Euclidean norms); None if both are zero."""
    num_nonfinite: int
    """Number of values that differ and of which at least one is infinite or NaN. The other statistics leave them out."""


class Tolerance(NamedTuple):
    """Elements are close if |a - b| <= atol + rtol * |b|, as in numpy.allclose; NaN equals NaN."""

    rtol: float
    atol: float


def has_values(dtype: DType) -> bool:
    """True if each element's bits stand for one number; fp4 packs two into one."""
    return dtype is not _PACKED


class ExpertSizes(NamedTuple):
    """How many experts a tensor has along dim 0, and how many elements each; 1 for a tensor without experts."""

    num_experts: int = 1
    elements_per_expert: int = 0

    def cut(self, first: int, num_elements: int) -> Iterator[tuple[int, int, int]]:
        """Yield (expert, start, stop) of pieces of a band that fit into the processor's cache, each in one expert.

        Args:
            first: index of the band's first element in the tensor, in row-major order.
            num_elements: elements of the band.
        """
        start = 0
        while start < num_elements:
            stop, expert = min(start + _VALUES_AT_ONCE, num_elements), 0
            if self.num_experts > 1:
                expert = (first + start) // self.elements_per_expert
                stop = min(stop, (expert + 1) * self.elements_per_expert - first)
            yield expert, start, stop
            start = stop


_NO_EXPERTS = ExpertSizes()


class Norms:
    """Adds up the norms of two tensors and of their difference, band by band.

    Args:
        a: dtype of one side.
        b: dtype of the other.
        experts: how elements are divided into experts, for an error of each expert.
    """

    def __init__(self, a: DType, b: DType, experts: ExpertSizes = _NO_EXPERTS) -> None:
        self._a, self._b, self._experts = a, b, experts
        self._sums = np.zeros((experts.num_experts, 3))
        self.num_missing = 0
        """Number of elements at the beginning that were not added, because their bands are equal."""

    def add(self, left_bytes: memoryview, right_bytes: memoryview, first: int) -> None:
        """Add a band of both sides, with the same number of elements; `first` is the number of its first element."""
        with np.errstate(all="ignore"):
            for expert, start, stop in self._experts.cut(first, len(left_bytes) // self._a.itemsize):
                a = float64s(left_bytes[start * self._a.itemsize : stop * self._a.itemsize], self._a)
                b = float64s(right_bytes[start * self._b.itemsize : stop * self._b.itemsize], self._b)
                for index, values in enumerate((a - b, a, b)):
                    self._sums[expert, index] += float(np.vdot(values, values).real)

    def relative_error(self) -> float | None:
        """Return |a - b| / max(|a|, |b|); None if both are zero, or if some values are not finite."""
        return _relative(*map(float, self._sums.sum(axis=0)))

    def of_experts(self) -> list[float | None]:
        """Return `relative_error` for each expert."""
        return [_relative(*map(float, sums)) for sums in self._sums]


def _relative(difference: float, *sides: float) -> float | None:
    """Return the relative error from the sums of squares of the difference and of both sides."""
    is_finite = isfinite(difference) and isfinite(max(sides))
    return sqrt(difference) / sqrt(max(sides)) if is_finite and max(sides) else None


class Measure:
    """Adds up how two tensors differ, band by band.

    Args:
        a: dtype of one side.
        b: dtype of the other.
        tolerance: count elements beyond it; None counts none.
        stats: compute statistics. For this, every band must be added, including equal ones.
        experts: how elements are divided into experts.
    """

    def __init__(
        self,
        a: DType,
        b: DType,
        *,
        tolerance: Tolerance | None,
        stats: bool,
        experts: ExpertSizes = _NO_EXPERTS,
    ) -> None:
        self._experts = experts
        self._by_expert = [0] * experts.num_experts
        """Number of elements of each expert that differ, or with a tolerance, that are beyond it."""
        self._a, self._b, self._tolerance = a, b, tolerance
        can = has_values(a) and has_values(b)
        self._figures = _Figures(a, b) if stats and can else None
        are_numbers = can and a.kind in _OF_NUMBERS and b.kind in _OF_NUMBERS
        self.norms = Norms(a, b, experts) if are_numbers else None
        """None if the elements are not numbers."""
        self._needs_values = can and (tolerance is not None or a is not b)
        self.num_changed = 0
        self.first_changed: int | None = None
        """Row-major number of the first element that differs."""
        self.num_outside = 0
        self._start = 0

    def add(self, left_bytes: memoryview, right_bytes: memoryview) -> None:
        """Compare a band of both sides, with the same number of elements."""
        num_elements = len(left_bytes) // self._a.itemsize
        is_same = self._a is self._b and have_same_bytes(left_bytes, right_bytes)
        if not is_same:
            self._add_different(left_bytes, right_bytes)
        if self._figures is not None:
            self._figures.add(left_bytes, right_bytes)
        if self.norms is not None and self.num_changed:
            self.norms.add(left_bytes, right_bytes, self._start)
        elif self.norms is not None:
            self.norms.num_missing += num_elements
        self._start += num_elements

    def of_experts(self) -> tuple[float, ...] | None:
        """Return how much each expert differs: its relative error, else its share of elements that differ; 0 if equal."""
        if self._experts.num_experts == 1:
            return None
        norms = self.norms.of_experts() if self.norms is not None else [None] * self._experts.num_experts
        return tuple(
            (norm or changed / self._experts.elements_per_expert) if changed else 0.0
            for norm, changed in zip(norms, self._by_expert, strict=True)
        )

    def stats(self) -> TensorStats | None:
        """Return the statistics, or None if they were not requested."""
        return self._figures.result() if self._figures is not None else None

    def _add_different(self, left_bytes: memoryview, right_bytes: memoryview) -> None:
        """Count the elements of a band that differ.

        With one dtype these are elements with other bits; with two dtypes, with other values, or all elements if a dtype
        does not encode one number per element. With a tolerance, those beyond it are counted, too.
        """
        values = (
            (float64s(left_bytes, self._a), float64s(right_bytes, self._b)) if self._needs_values else None
        )
        if self._a is self._b:
            changed = _changed_bits(left_bytes, right_bytes, self._a)
        elif values is None:
            changed = np.ones(len(left_bytes) // self._a.itemsize, dtype=bool)  # no common meaning
        else:
            changed = ~_are_same(*values)
        number = int(np.count_nonzero(changed))
        if number and self.first_changed is None:
            self.first_changed = self._start + int(np.argmax(changed))
        self.num_changed += number
        if self._tolerance is not None:
            outside = changed if values is None else changed & ~_are_close(*values, self._tolerance)
            self.num_outside += int(np.count_nonzero(outside))
            changed = outside
        if self._experts.num_experts > 1:
            for expert, start, stop in self._experts.cut(self._start, len(changed)):
                self._by_expert[expert] += int(np.count_nonzero(changed[start:stop]))


def have_same_bytes(left_bytes: memoryview, right_bytes: memoryview) -> bool:
    """True if both sides have the same bytes. Compares eight bytes at a time."""
    whole = len(left_bytes) & ~7
    return (
        len(left_bytes) == len(right_bytes)
        and bool(
            np.array_equal(
                np.frombuffer(left_bytes[:whole], np.uint64), np.frombuffer(right_bytes[:whole], np.uint64)
            )
        )
        and left_bytes[whole:] == right_bytes[whole:]
    )


def _words(view: memoryview, itemsize: int) -> Array:
    return np.frombuffer(view, dtype=f"<u{itemsize}")


def _changed_bits(left_bytes: memoryview, right_bytes: memoryview, dtype: DType) -> Array:
    size = min(dtype.itemsize, 8)
    changed: Array = _words(left_bytes, size) != _words(right_bytes, size)
    return np.asarray(changed.reshape(-1, 2).any(axis=1)) if dtype.itemsize > size else changed


def float64s(view: memoryview, dtype: DType) -> Array:
    """Return elements as float64, complex ones as complex128, 64-bit integers as they are."""
    with np.errstate(invalid="ignore"):  # numpy warns when it widens signalling NaNs
        return _widened(view, dtype)


def _widened(view: memoryview, dtype: DType) -> Array:
    """As `float64s`, which prevents the warnings."""
    if dtype.name in _NUMPY_FLOATS:
        return np.frombuffer(view, dtype=_NUMPY_FLOATS[dtype.name]).astype(np.float64)
    if dtype.name == "bfloat16":  # the upper half of a float32
        wide = _words(view, 2).astype(np.uint32) << np.uint32(16)
        return np.asarray(wide.view(np.float32), dtype=np.float64)
    if dtype.kind == "float":
        return np.take(code_values(dtype.name), _words(view, 1))
    if dtype.kind == "complex":
        parts = np.frombuffer(view, dtype=f"<f{dtype.itemsize // 2}").astype(np.float64)
        return parts.view(np.complex128)
    if dtype.kind == "bool":
        return _words(view, 1).astype(np.float64)
    sign = "u" if dtype.name.startswith("u") else "i"
    whole = np.frombuffer(view, dtype=f"<{sign}{dtype.itemsize}")
    return whole if dtype.itemsize == 8 else whole.astype(np.float64)


def _are_same(a: Array, b: Array) -> Array:
    """Return a mask of values that are the same number. Signs of zeros count; all NaNs are the same."""
    with np.errstate(all="ignore"):
        same: Array = a == b
    if a.dtype.kind == b.dtype.kind == "f":
        same &= np.signbit(a) == np.signbit(b)
    same |= _is_nan(a) & _is_nan(b)
    return same


def _is_nan(a: Array) -> Array:
    return np.isnan(a) if a.dtype.kind in "fc" else np.zeros(a.shape, dtype=bool)


def _are_close(a: Array, b: Array, tolerance: Tolerance) -> Array:
    """Return a mask as numpy.isclose, but in fewer passes, and without rounding 64-bit integers first."""
    with np.errstate(all="ignore"):
        # The difference of integers may overflow, and so may the absolute value of the smallest one.
        distance = _distance(a, b) if a.dtype.kind in "iu" else np.abs(a - b)
        size = np.abs(b.astype(np.float64) if b.dtype.kind in "iu" else b)
        close: Array = distance <= tolerance.atol + tolerance.rtol * size
        close &= np.isfinite(b)
        if not close.all():
            close |= (a == b) | (_is_nan(a) & _is_nan(b))
    return close


class _Figures:
    """Adds up the statistics of two tensors, band by band."""

    def __init__(self, a: DType, b: DType) -> None:
        self._a, self._b = a, b
        self._max_abs = self._max_rel = 0.0
        self._num_nonfinite = 0
        self._aa = self._bb = self._ab = self._dd = 0.0

    def add(self, left_bytes: memoryview, right_bytes: memoryview) -> None:
        """Add a band of both sides, with the same number of elements."""
        a, b = _as_reals(float64s(left_bytes, self._a), float64s(right_bytes, self._b))
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

    def _add_finite(self, a: Array, b: Array, distance: Array) -> None:
        """Add values of both sides that are finite, and their distance."""
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
        """Return the statistics; one that overflows becomes the largest float64, or None."""
        norms, larger = sqrt(self._aa) * sqrt(self._bb), sqrt(max(self._aa, self._bb))
        return TensorStats(
            max_abs=min(self._max_abs, _MAX_FLOAT),
            max_rel=min(self._max_rel, 2.0),
            cosine=_finite(self._ab / norms) if norms else None,
            relative_error=_finite(sqrt(self._dd) / larger) if larger else None,
            num_nonfinite=self._num_nonfinite,
        )


def _dot(a: Array, b: Array) -> float:
    """Return the sum of products, computed in this thread: BLAS would start and await threads for so little work."""
    return float(np.einsum("i,i->", a, b))


def _finite(number: float) -> float | None:
    return number if np.isfinite(number) else None


def _as_reals(a: Array, b: Array) -> tuple[Array, Array]:
    """Return both sides as real numbers; complex ones become their real and imaginary parts."""
    if "c" not in (a.dtype.kind, b.dtype.kind):
        return a, b
    return a.astype(np.complex128).view(np.float64), b.astype(np.complex128).view(np.float64)


def _distance(a: Array, b: Array) -> Array:
    """Return |a - b| as float64, as exactly as float64 can be, also for 64-bit integers."""
    if a.dtype == b.dtype and a.dtype.kind in "iu":
        return np.where(a > b, a - b, b - a).view(np.uint64).astype(np.float64)  # wraps to the right number
    with np.errstate(all="ignore"):
        return np.abs(a.astype(np.float64, copy=False) - b.astype(np.float64, copy=False))
