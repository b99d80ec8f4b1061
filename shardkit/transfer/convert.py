"""Converting dtypes piece by piece, as torch does; bf16 becomes fp32, which rounds nothing, without torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from shardkit.core.dtypes import BY_NAME, DType

Converter = Callable[[memoryview, memoryview], None]
"""Fills the second buffer with the converted elements of the first. Both are writable and hold equally many."""

_WIDENED = (BY_NAME["bfloat16"], BY_NAME["float32"])


def needs_torch(source: DType, target: DType) -> bool:
    """True if torch converts elements of one dtype to the other."""
    return source is not target and (source, target) != _WIDENED


def make_converter(source: DType, target: DType) -> Converter:
    """Return what converts elements of one floating dtype to another; it imports torch where `needs_torch`."""
    if not needs_torch(source, target):
        return _widen
    import torch

    stored, wanted = getattr(torch, source.name), getattr(torch, target.name)

    def convert(values: memoryview, converted: memoryview) -> None:
        torch.frombuffer(converted, dtype=wanted).copy_(torch.frombuffer(values, dtype=stored))

    return convert


def _widen(values: memoryview, converted: memoryview) -> None:
    """Turn bf16 into fp32: its bits are the upper half. torch gives the same, and takes a second to import."""
    import numpy

    bits = numpy.frombuffer(converted, "<u4")
    bits[:] = numpy.frombuffer(values, "<u2")
    bits <<= 16


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
