"""Fold the factors of OSFT: checkpoints and bases with a dense weight in place of each weight's factors."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from shardkit.core.dtypes import most_bytes
from shardkit.core.factored import Target, factor_of, stored_targets
from shardkit.core.text import escape
from shardkit.errors import LayoutError
from shardkit.formats.contract import Checkpoint
from shardkit.formats.derived import derive_base, derive_checkpoint
from shardkit.formats.hub.base import Base
from shardkit.transfer.codecs.dequantize import Held
from shardkit.transfer.codecs.fold import Fold


def floating_targets(tensors: Mapping[str, Held]) -> dict[str, Target]:
    """Return the targets whose factors are among the tensors, by path, like `stored_targets`.

    Raises:
        LayoutError: factors are missing, do not match, or are not ordinary floating numbers; lists all.
    """
    targets = stored_targets({name: tensor.shape for name, tensor in tensors.items()})
    dtypes = {name: tensors[name].dtype for target in targets.values() for name in target.shapes}
    LayoutError.raise_for(
        [f"{escape(name)}: {dtype.name}" for name, dtype in dtypes.items() if not dtype.is_convertible],
        "factors of OSFT are not floating-point numbers",
        hint="something quantised them: take the checkpoint of the training itself",
    )
    return targets


def fold_checkpoint(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose factors are replaced by dense float32 weights; one without factors is returned as it is.

    Its `select` still returns the factors by name, too.

    Raises:
        LayoutError: factors are missing, do not match, or are not floating numbers; lists all.
    """
    targets = floating_targets(checkpoint.catalog.tensors)
    return derive_checkpoint(checkpoint, _folds(targets)) if targets else checkpoint


def fold_base(base: Base) -> Base:
    """Return the description of a base with dense weights; these have the dtype of most bytes of its other tensors.

    Raises:
        LayoutError: its factors are incomplete, or are not floating numbers.
    """
    tensors = base.tensors or {}
    targets = floating_targets(tensors)
    if not targets:
        return base
    other_tensors = [tensor for name, tensor in tensors.items() if factor_of(name) not in targets]
    dtype = most_bytes((tensor.dtype, prod(tensor.shape) * tensor.dtype.itemsize) for tensor in other_tensors)
    return derive_base(base, _folds(targets), dtype=dtype)


def _folds(targets: Mapping[str, Target]) -> dict[str, Fold]:
    return {target.weight: Fold(target) for target in targets.values()}
