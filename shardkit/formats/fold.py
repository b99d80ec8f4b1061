"""A checkpoint with dense weights in the place of the factors of orthogonal subspace fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from shardkit.core.dtypes import most_bytes
from shardkit.core.factored import Target, factor_of, stored_targets
from shardkit.formats.contract import Checkpoint, Folded
from shardkit.formats.derived import derive_base, derive_checkpoint
from shardkit.formats.hub.base import Base
from shardkit.transfer.codecs.fold import Fold, refuse_other_dtypes


def take_folded(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint of dense weights, in float32; one without factors as it is.

    Raises:
        LayoutError: factors are missing, do not fit each other, or are no floating numbers; lists all.
    """
    tensors = checkpoint.catalog.tensors
    targets = stored_targets({name: entry.shape for name, entry in tensors.items()})
    if not targets:
        return checkpoint
    refuse_other_dtypes(tensors, targets.values())
    by_weight = {target.weight: target for target in targets.values()}
    folded = derive_checkpoint(checkpoint, _folds(targets))
    return replace(folded, folded=Folded(by_weight, checkpoint.select))


def folded_base(base: Base) -> Base:
    """Return a base as it would be with dense weights, in the dtype of most bytes of its other tensors.

    Raises:
        LayoutError: its factors are not complete, or are no floating numbers.
    """
    tensors = base.tensors or {}
    targets = stored_targets({name: tensor.shape for name, tensor in tensors.items()})
    if not targets:
        return base
    refuse_other_dtypes(tensors, targets.values())
    others = [tensor for name, tensor in tensors.items() if factor_of(name) not in targets]
    dtype = most_bytes((tensor.dtype, prod(tensor.shape) * tensor.dtype.itemsize) for tensor in others)
    return derive_base(base, _folds(targets), dtype=dtype)


def _folds(targets: Mapping[str, Target]) -> dict[str, Fold]:
    return {target.weight: Fold(target) for target in targets.values()}
