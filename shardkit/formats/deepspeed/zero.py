"""How DeepSpeed's ZeRO lays parameters out in the flat partitions of its ranks. Pure arithmetic.

ZeRO-1 and 2 put the parameters of a group one after another into one flat tensor, which is then cut into one
partition for each rank. ZeRO-3 cuts every parameter by itself, and a rank puts its parts one after another.

Source: DeepSpeed 0.19, runtime/zero/stage_1_and_2.py, runtime/zero/partition_parameters.py and
utils/zero_to_fp32.py.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

from shardkit.core.regions import Shape


class FlatPiece(NamedTuple):
    """Elements of a parameter that lie side by side in one rank's part of one group."""

    rank: int
    group: int
    start: int
    """First element in the rank's flat tensor of the group."""
    target: int
    """First element of the parameter, row-major."""
    length: int


Pieces = dict[str, list[FlatPiece]]
"""By parameter, in the order of its elements."""


def joined_pieces(
    group: int,
    shapes: Mapping[str, Shape],
    lengths: Sequence[int],
    paddings: Sequence[int] | None = None,
) -> Pieces:
    """Return where the parameters of a ZeRO-1 or 2 group lie.

    Args:
        group: its number.
        shapes: by name, in the order of the flat tensor.
        lengths: elements of each rank's partition; the padding at the end may be cut off.
        paddings: elements between a parameter and the next, one for each; None where there are none.

    Raises:
        ValueError: the partitions do not hold what the shapes need; says how much is there.
    """
    if paddings is not None and len(paddings) != len(shapes):
        raise ValueError(f"group {group} has {len(shapes)} parameters, but {len(paddings)} paddings")
    bounds = [0, *accumulate(lengths)]
    pieces: Pieces = {}
    start = 0
    for (name, shape), padding in zip(shapes.items(), paddings or [0] * len(shapes), strict=True):
        stop = start + prod(shape)
        pieces[name] = list(_across(group, bounds, start, min(stop, bounds[-1])))
        start = stop + padding
    # DeepSpeed fills up to a multiple of twice the ranks, for NCCL; how much of that is saved differs.
    align = 2 * len(lengths)
    if not start <= bounds[-1] <= -(-start // align) * align:
        raise ValueError(f"group {group} needs {start} elements, its partitions hold {bounds[-1]}")
    return pieces


def _across(group: int, bounds: Sequence[int], start: int, stop: int) -> Iterator[FlatPiece]:
    """Yield the pieces of elements `start` to `stop` of partitions laid end to end at `bounds`."""
    at = start
    rank = bisect_right(bounds, start) - 1
    while at < stop:
        length = min(bounds[rank + 1], stop) - at
        if length:
            yield FlatPiece(rank, group, at - bounds[rank], at - start, length)
        at += length
        rank += 1


def partitioned_pieces(shapes: Mapping[str, Shape], lengths: Sequence[Sequence[int]]) -> Pieces:
    """Return where the parameters of a ZeRO-3 model lie.

    Args:
        shapes: by name, in the order of the flat tensors, of all groups.
        lengths: of each rank, the elements of its flat tensor of each group.

    Raises:
        ValueError: the flat tensors do not hold what the shapes need; says which rank and how much.
    """
    num_ranks = len(lengths)
    parts = {name: -(-prod(shape) // num_ranks) for name, shape in shapes.items()}
    needed = sum(parts.values())
    for rank, held in enumerate(lengths):
        if sum(held) != needed or list(held) != list(lengths[0]):
            raise ValueError(
                f"rank {rank} needs {needed} elements, it holds {sum(held)} in {len(held)} groups"
            )
    bounds = [0, *accumulate(lengths[0])] if lengths else [0]
    pieces: Pieces = {}
    start = 0
    for name, shape in shapes.items():
        part, size = parts[name], prod(shape)
        pieces[name] = []
        for rank in range(num_ranks):
            target = rank * part
            stop = start + min(part, size - target)
            # The last ranks' parts may be short or empty; a part could cross from one group into the next.
            for found in _across(0, bounds, start, stop):
                pieces[name].append(
                    FlatPiece(rank, found.rank, found.start, target + found.target, found.length)
                )
        start += part
    return pieces
