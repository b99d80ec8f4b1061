"""The sequence of messages from a source rank to those that it serves: the same on both sides, and pure.

Large tensors go band by band, one message for each rank that holds a part. Small ones are packed together behind
a status: a source that cannot read on says so there, and nobody waits for what will not come.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from shardkit.core.catalog import TensorEntry
from shardkit.core.regions import Region, blocks, intersect
from shardkit.core.text import MIB

BAND_NBYTES = 4 * MIB
"""Most bytes of a tensor in one message."""
_ALIGN = 16  # bytes; of the parts in a packed message, so that they can be viewed as any dtype


class Sent(NamedTuple):
    """How a tensor is sent."""

    entry: TensorEntry
    dtype: torch.dtype
    """The narrower of the stored and the wanted one."""


class Band(NamedTuple):
    """A contiguous box of a tensor, of bounded size."""

    number: int
    """Of the tensor, in the order in which they are sent."""
    box: Region


class Step(NamedTuple):
    """What is sent together."""

    packed: tuple[Band, ...]
    """Whole small tensors, behind a status, in one message to each rank."""
    bands: tuple[Band, ...]
    """Of one large tensor, after it."""


class Part(NamedTuple):
    """A rank's part of a tensor, in a packed message."""

    number: int
    box: Region
    start: int
    """First byte in the message."""
    stop: int


def build_steps(tensors: Sequence[Sent]) -> Iterator[Step]:
    """Yield what is sent together, in order; the last step ends with a status."""
    packed: list[Band] = []
    nbytes = 0
    for number, (entry, dtype) in enumerate(tensors):
        itemsize = max(dtype.itemsize, entry.dtype.itemsize)
        bands = tuple(Band(number, box) for box in blocks(entry.shape, max(BAND_NBYTES // itemsize, 1)))
        if len(bands) > 1:
            yield Step(tuple(packed), bands)
            packed, nbytes = [], 0
        elif bands:
            size = entry.num_elements * itemsize
            if packed and nbytes + size > BAND_NBYTES:
                yield Step(tuple(packed), ())
                packed, nbytes = [], 0
            packed.extend(bands)
            nbytes += size
    yield Step(tuple(packed), ())
    yield Step((), ())  # how the last one ended


def packed_layout(
    step: Step, tensors: Sequence[Sent], regions: Mapping[int, Region]
) -> tuple[list[Part], int]:
    """Return where each part lies in a rank's packed message, and the bytes of the message.

    Args:
        step: what is sent together.
        tensors: all that is sent.
        regions: what the rank holds of each, by number.
    """
    parts: list[Part] = []
    at = _ALIGN  # the status
    for number, box in step.packed:
        part = intersect(regions[number], box) if number in regions else None
        if part is not None:
            nbytes = part.num_elements * tensors[number].dtype.itemsize
            parts.append(Part(number, part, at, at + nbytes))
            at += -(-nbytes // _ALIGN) * _ALIGN
    return parts, at
