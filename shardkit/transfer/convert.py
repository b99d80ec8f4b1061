"""Converting dtypes piece by piece, with torch's own rounding."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from shardkit.core.dtypes import DType


class Converter:
    """Converts elements of one floating dtype to another, from buffer to buffer.

    Making the first converter imports torch; copies without conversion never do.
    """

    def __init__(self, source: DType, target: DType) -> None:
        import torch

        self._frombuffer = torch.frombuffer
        self._source, self._target = getattr(torch, source.name), getattr(torch, target.name)

    def __call__(self, source: memoryview, target: memoryview) -> None:
        """Fill `target` with the converted elements of `source`. Both are writable and hold equally many."""
        values = self._frombuffer(source, dtype=self._source)
        self._frombuffer(target, dtype=self._target).copy_(values)


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
