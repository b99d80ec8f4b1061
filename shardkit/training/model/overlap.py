"""Fill parameters of a live model that share memory: each is filled separately, and then copied back and compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from shardkit.core.text import escape, listed
from shardkit.errors import LayoutError
from shardkit.training.model.buffers import same_bits
from shardkit.training.ranks.local import LocalShard, is_expanded


def with_own_memory(shards: Sequence[LocalShard]) -> list[LocalShard]:
    """Return shards, in which those that share memory are replaced by copies with memory of their own."""
    shared = {index for group in _on_one_memory(shards) for index in group}
    return [
        replace(shard, whole=shard.whole.detach().clone()) if index in shared else shard
        for index, shard in enumerate(shards)
    ]


def refuse_expanded(shards: Sequence[LocalShard]) -> None:
    """Raise an error for expanded parameters, which do not have memory for all of their elements.

    Raises:
        LayoutError: there are such parameters; the error names all of them.
    """
    LayoutError.raise_for(
        [
            f"{escape(shard.fqn)}: {list(shard.shape)} with strides {list(shard.tensor.stride())}"
            for shard in shards
            if is_expanded(shard.tensor)
        ],
        "parameters are expanded: several of their elements are one place in memory, which has one value",
        hint="give each its memory before load_into: parameter.data = parameter.data.clone()",
    )


def copy_back(shards: Sequence[LocalShard], filled: Sequence[LocalShard]) -> list[str]:
    """Copy separately filled shards back into the model's memory; return a problem for each group that lost values.

    Args:
        shards: the model's shards.
        filled: the filled result of `with_own_memory` for these shards.
    """
    groups = _on_one_memory(shards) if filled else []
    with torch.no_grad():
        for index in (index for group in groups for index in group):
            shards[index].tensor.copy_(filled[index].tensor)
    return [
        f"{listed([shards[index].fqn for index in group])} lie on one memory, and the source has other values for "
        f"{escape(shards[lost[0]].fqn)} than for the rest"
        for group in groups
        if (lost := [index for index in group if not same_bits(shards[index].tensor, filled[index].tensor)])
    ]


def _on_one_memory(shards: Sequence[LocalShard]) -> list[list[int]]:
    """Return groups of indexes of shards whose byte ranges overlap."""
    groups: list[list[int]] = []
    before: tuple[str, int] | None = None
    for device, start, stop, index in sorted(_extents(shards)):
        if before is not None and before[0] == device and start < before[1]:
            groups[-1].append(index)
            stop = max(stop, before[1])
        else:
            groups.append([index])
        before = device, stop
    return [sorted(group) for group in groups if len(group) > 1]


def _extents(shards: Sequence[LocalShard]) -> Iterator[tuple[str, int, int, int]]:
    for index, shard in enumerate(shards):
        local = shard.tensor
        if shard.persistent and type(local) is torch.Tensor and not local.is_meta and local.numel():
            last = sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True))
            yield str(local.device), local.data_ptr(), local.data_ptr() + (last + 1) * local.itemsize, index
