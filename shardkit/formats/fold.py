"""A checkpoint with dense weights in the place of the factors of orthogonal subspace fine-tuning."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from math import prod

from shardkit.core.catalog import Catalog
from shardkit.core.dtypes import most_bytes
from shardkit.formats.contract import Checkpoint, Folded
from shardkit.formats.hub.base import Base, BaseTensor
from shardkit.osft.plan import Target, factor_of, stored_targets
from shardkit.transfer.computed.fold import FOLDED, fold_catalog


def take_folded(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint of dense weights, in float32; one without factors as it is.

    Raises:
        LayoutError: factors are missing, do not fit each other, or are no floating numbers; lists all.
    """
    tensors = checkpoint.catalog.tensors
    targets = stored_targets({name: entry.shape for name, entry in tensors.items()})
    if not targets:
        return checkpoint
    catalog, hub = fold_catalog(checkpoint.catalog, targets), checkpoint.hub
    by_weight = {target.weight: target for target in targets.values()}
    return replace(
        checkpoint,
        catalog=catalog,
        hub=None if hub is None else replace(hub, catalog=catalog),
        dcp=None,
        select=partial(_select, checkpoint, by_weight),
        folded=Folded(by_weight, checkpoint.select),
    )


def folded_base(base: Base) -> Base:
    """Return a base as it would be with dense weights, in the dtype of most bytes of its other tensors.

    Raises:
        LayoutError: its factors are not complete.
    """
    tensors = base.tensors or {}
    targets = stored_targets({name: tensor.shape for name, tensor in tensors.items()})
    if not targets:
        return base
    others = [tensor for name, tensor in tensors.items() if factor_of(name) not in targets]
    dtype = most_bytes((each.dtype, prod(each.shape) * each.dtype.itemsize) for each in others) or FOLDED
    dense: dict[str, BaseTensor] = {}
    for name, tensor in tensors.items():
        target = targets.get(factor_of(name) or "")
        if target is None:
            dense[name] = tensor
        else:
            dense[target.weight] = BaseTensor(dtype, (target.rows, target.columns))
    catalog = None if base.catalog is None else fold_catalog(base.catalog, targets)
    return replace(base, tensors=dense, catalog=catalog)


def _stored(targets: Mapping[str, Target], names: Collection[str]) -> list[str]:
    """Return the stored tensors that have to be read for some tensors."""
    found = dict[str, None]()
    for name in names:
        target = targets.get(name)
        found.update(dict.fromkeys((name,) if target is None else target.shapes))
    return list(found)


def _select(checkpoint: Checkpoint, targets: Mapping[str, Target], names: Collection[str]) -> Catalog:
    wanted = {targets[name].path: targets[name] for name in names if name in targets}
    return fold_catalog(checkpoint.select(_stored(targets, names)), wanted)
