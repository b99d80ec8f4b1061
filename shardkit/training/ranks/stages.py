"""Stages of a pipeline: what one rank's model lacks, and another rank's has, is not missing.

A stage has some layers of the model, and other ranks have the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch.distributed.tensor import DTensor

from shardkit.training.ranks.agree import gather_json, gather_masks, world
from shardkit.training.ranks.local import ExpectedTensor, LocalShard

_PHASE = "comparing the ranks' models"


def with_ties(shards: Iterable[LocalShard], ties: Iterable[Sequence[str]]) -> list[LocalShard]:
    """Return shards with all names of their ties, those too that are on another stage."""
    groups = {name: group for group in ties for name in group}
    local_shards = list(shards)
    local_names = {name for shard in local_shards for name in shard.names}
    return [
        replace(
            shard, names=(*shard.names, *(tied_name for tied_name in group if tied_name not in local_names))
        )
        if (group := next((groups[name] for name in shard.names if name in groups), None)) is not None
        else shard
        for shard in local_shards
    ]


def unused_here_alone(used: frozenset[str], unused: frozenset[str]) -> tuple[frozenset[str], bool]:
    """Return the stored names that this rank's model has no place for and another rank's has; every rank calls it.

    Args:
        used: stored names that this rank's model is filled from.
        unused: stored names that it has no place for.

    Returns:
        The names, and whether the ranks' models have different parts of the source; the latter is the same on all ranks.
    """
    if not any(gather_json(bool(unused), phase=_PHASE)):
        return frozenset(), False
    order = sorted(used | unused)
    every = gather_masks(unused - used, order, phase=_PHASE)
    masks = [mask.bits for mask in every if mask.order == every[world()[0]].order]
    elsewhere = {name for index, name in enumerate(order) if any(bits[index] == "0" for bits in masks)}
    return unused & elsewhere, len(set(every)) > 1


def on_other_ranks(shards: Sequence[LocalShard], expected: Mapping[str, ExpectedTensor]) -> frozenset[str]:
    """Return what was prepared and is not in this rank's model, and that is as it should be; every rank calls it.

    Who shares a mesh has the same tensors.

    Args:
        shards: of this rank.
        expected: what was prepared, by name, in the same order on all ranks.
    """
    by_name = {name: shard for shard in shards for name in shard.names}
    if all(gather_json(expected.keys() <= by_name.keys(), phase=_PHASE)):
        return frozenset()
    masks = [mask.bits for mask in gather_masks(by_name, tuple(expected), phase=_PHASE)]
    # Each rank tells whom it shares a tensor with, in places of `expected`: those who lack it are the wrong ones.
    mesh_ranks = {
        index: shard.whole.device_mesh.mesh.flatten().tolist()
        for index, fqn in enumerate(expected)
        if (shard := by_name.get(fqn)) is not None and isinstance(shard.whole, DTensor)
    }
    torn = {index for index, ranks in mesh_ranks.items() if any(masks[rank][index] == "0" for rank in ranks)}
    wrong = {index for indices in gather_json(sorted(torn), phase=_PHASE) for index in indices}
    return frozenset(
        fqn
        for index, fqn in enumerate(expected)
        if fqn not in by_name and index not in wrong and any(bits[index] == "1" for bits in masks)
    )
