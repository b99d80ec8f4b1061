"""Converting dtypes on bounded pieces, with torch's own rounding."""

from __future__ import annotations

import warnings

from shardkit.core.dtypes import DType


class Converter:
    """Converts elements of one floating dtype to another, from buffer to buffer.

    torch is imported when the first converter is made, and never for a same-dtype copy.
    """

    def __init__(self, source: DType, target: DType) -> None:
        import torch

        self._torch = torch
        self._source, self._target = getattr(torch, source.name), getattr(torch, target.name)

    def __call__(self, source: memoryview, target: memoryview) -> None:
        """Fill `target` with the converted elements of `source`; equal numbers of elements."""
        with warnings.catch_warnings():
            # torch warns that a read-only buffer could be written through the tensor; it is only read.
            warnings.simplefilter("ignore")
            values = self._torch.frombuffer(source, dtype=self._source)
        self._torch.frombuffer(target, dtype=self._target).copy_(values)
