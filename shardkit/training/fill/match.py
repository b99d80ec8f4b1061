"""Which part of which stored tensor fills which shard."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import torch

from shardkit.core.catalog import TensorEntry
from shardkit.core.dtypes import DType
from shardkit.core.regions import Region, full_region, intersect, relative_to
from shardkit.core.text import escape
from shardkit.errors import LayoutError
from shardkit.training.fill.reading import torch_dtype, window
from shardkit.training.ranks.context import Weights
from shardkit.training.ranks.local import LocalShard


class Wanted(NamedTuple):
    """A part of a stored tensor, and this rank's memory for it."""

    shard: LocalShard
    entry: TensorEntry
    """The stored tensor."""
    region: Region
    """What of it this rank holds; may be empty."""
    target: torch.Tensor
    """Memory of the region's sizes."""


def match(
    shards: Iterable[LocalShard],
    weights: Weights,
    *,
    initialised: Collection[str] = (),
    grown: Mapping[str, int] | None = None,
) -> list[Wanted]:
    """Return what of a source fills which shard; it is held against names, shapes and dtypes.

    Args:
        shards: of the model, materialised. Buffers that are in no state dict are not looked for.
        weights: the source.
        initialised: FQNs that are not read.
        grown: FQN -> rows that the source has of a longer tensor.

    Raises:
        LayoutError: tensors that the source does not have, or has with another shape, or with a dtype that is
            not converted; all of them at once.
    """
    found: list[Wanted] = []
    problems: list[str] = []
    for shard in shards:
        if not shard.persistent or any(name in initialised for name in shard.names):
            continue
        name = next((name for name in shard.names if name in weights.names), None)
        entry = weights.catalog.tensors.get(weights.names[name]) if name is not None else None
        if entry is None:
            problems.append(f"{escape(shard.fqn)}: not in the source")
            continue
        rows = next((grown[each] for each in shard.names if each in grown), None) if grown else None
        shape = shard.shape if rows is None else (rows, *shard.shape[1:])
        if entry.shape != shape:
            problems.append(
                f"{escape(shard.fqn)}: {list(shape)} in the model, {list(entry.shape)} in the source"
            )
        elif not converts(entry.dtype, shard.dtype):
            problems.append(
                f"{escape(shard.fqn)}: {shard.dtype} in the model, {entry.dtype.name} in the source"
            )
        else:
            found.append(_want(shard, entry))
    if problems:
        raise LayoutError(f"{escape(weights.path)} does not fit the model", problems=problems)
    return found


def converts(source: DType, target: torch.dtype) -> bool:
    """True where values of a stored dtype have a meaning in another: floats of two bytes and more."""
    return torch_dtype(source) == target or (
        source.is_convertible and target.is_floating_point and target.itemsize >= 2
    )


def _want(shard: LocalShard, entry: TensorEntry) -> Wanted:
    region = intersect(shard.region, full_region(entry.shape))
    if region is None:  # an empty shard, or one of nothing but new rows
        region = Region(shard.region.offsets, (0,) * len(entry.shape))
    return Wanted(shard, entry, region, shard.tensor[window(relative_to(region, shard.region.offsets))])
