"""Converting dtypes on bounded pieces, with torch's own rounding."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from shardkit.core.dtypes import DType


class Converter:
    """Converts elements of one floating dtype to another, from buffer to buffer.

    torch is imported when the first converter is made, and never for a same-dtype copy.
    """

    def __init__(self, source: DType, target: DType) -> None:
        import torch

        self._frombuffer = torch.frombuffer
        self._source, self._target = getattr(torch, source.name), getattr(torch, target.name)

    def __call__(self, source: memoryview, target: memoryview) -> None:
        """Fill `target` with the converted elements of `source`; equal numbers, both buffers writable."""
        values = self._frombuffer(source, dtype=self._source)
        self._frombuffer(target, dtype=self._target).copy_(values)


@contextlib.contextmanager
def one_thread_each(is_needed: bool) -> Iterator[None]:
    """Let torch convert in the calling thread alone: ours are as many as there is work for.

    Does nothing, and imports nothing, where no dtype is converted.
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
