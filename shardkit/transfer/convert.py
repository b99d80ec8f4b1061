"""Converting dtypes piece by piece, as torch does; bf16 becomes fp32, which rounds nothing, without torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from shardkit.core.dtypes import BY_NAME, DType

Converter = Callable[[memoryview, memoryview], bool]
"""Fills the second buffer with the converted elements of the first. Both are writable and hold equally many. True if a
finite element became infinite."""

_SLICE = 1 << 16  # elements that are looked at together
_WIDENED = (BY_NAME["bfloat16"], BY_NAME["float32"])


def needs_torch(source: DType, target: DType) -> bool:
    """True if torch converts elements of one dtype to the other."""
    return source is not target and (source, target) != _WIDENED


def make_converter(source: DType, target: DType) -> Converter:
    """Return a converter of elements of one floating dtype to another; it imports torch where `needs_torch`."""
    if not needs_torch(source, target):
        return _widen
    import torch

    stored, wanted = getattr(torch, source.name), getattr(torch, target.name)
    # Rounding may make fp32 infinite in bf16 too, but only beyond 3.39e38: no weight is that large.
    has_less_range = source.name == "float64" or (target.name == "float16" and source.itemsize <= 4)

    def convert(values: memoryview, converted: memoryview) -> bool:
        before, after = torch.frombuffer(values, dtype=stored), torch.frombuffer(converted, dtype=wanted)
        after.copy_(before)
        if not has_less_range or all(each.isfinite() for each in torch.aminmax(after)):
            return False
        return any(
            bool((after[at : at + _SLICE].isinf() & before[at : at + _SLICE].isfinite()).any())
            for at in range(0, len(after), _SLICE)
        )

    return convert


def _widen(values: memoryview, converted: memoryview) -> bool:
    """Turn bf16 into fp32: its bits are the upper half. torch gives the same, and takes a second to import."""
    import numpy

    bits = numpy.frombuffer(converted, "<u4")
    bits[:] = numpy.frombuffer(values, "<u2")
    bits <<= 16
    return False


@contextlib.contextmanager
def one_thread_each(is_needed: bool) -> Iterator[None]:
    """Let torch convert in the calling thread alone, because shardkit runs enough threads itself.

    It does nothing, and imports nothing, where no dtype is converted.
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
