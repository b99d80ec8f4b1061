"""Compare the models of ranks in different pipeline stages.

A stage has only some layers of the model; other ranks have the other layers. A tensor that this rank's model lacks is
therefore not missing if another rank's model has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch.distributed.tensor import DTensor

from shardkit.training.ranks.agree import gather_json, gather_masks, world
from shardkit.training.ranks.local import ExpectedTensor, LocalShard

_PHASE = "comparing the ranks' models"


def with_tied_names(shards: Iterable[LocalShard], ties: Iterable[Sequence[str]]) -> list[LocalShard]:
    """Return shards with all names of their ties, including names on other stages."""
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


def used_elsewhere(used: frozenset[str], unused: frozenset[str]) -> tuple[frozenset[str], bool]:
    """Return the stored names that have no place in this rank's model, but in another's; every rank calls it.

    Args:
        used: stored names from which this rank's model is filled.
        unused: stored names that have no place in this rank's model.

    Returns:
        (these names, whether the ranks' models have different parts of the source). The latter is equal on all ranks.
    """
    if not any(gather_json(bool(unused), phase=_PHASE)):
        return frozenset(), False
    order = sorted(used | unused)
    every = gather_masks(unused - used, order, phase=_PHASE)
    masks = [mask.bits for mask in every if mask.order == every[world()[0]].order]
    elsewhere = {name for index, name in enumerate(order) if any(bits[index] == "0" for bits in masks)}
    return unused & elsewhere, len(set(every)) > 1


def tensors_of_other_ranks(
    shards: Sequence[LocalShard], expected: Mapping[str, ExpectedTensor]
) -> frozenset[str]:
    """Return names of prepared tensors that are rightly not in this rank's model; every rank calls it.

    Another rank must have the tensor. If it is a DTensor there, all ranks of its mesh must have it too.

    Args:
        shards: this rank's shards.
        expected: name -> prepared tensor, in the same order on all ranks.
    """
    by_name = {name: shard for shard in shards for name in shard.names}
    if all(gather_json(expected.keys() <= by_name.keys(), phase=_PHASE)):
        return frozenset()
    masks = [mask.bits for mask in gather_masks(by_name, tuple(expected), phase=_PHASE)]
    # Index in `expected` of each of this rank's tensors -> the ranks of its mesh, which must all have it.
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
