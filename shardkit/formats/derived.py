"""Checkpoints and bases some of whose tensors are computed from stored ones by codecs, as they are read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial

from shardkit.core.catalog import Catalog, Codec
from shardkit.core.dtypes import DType
from shardkit.formats.contract import Checkpoint
from shardkit.formats.hub.base import Base, BaseTensor
from shardkit.transfer.codecs.derive import derive, replaced


def derive_checkpoint(
    checkpoint: Checkpoint, codecs: Mapping[str, Codec], gone: Collection[str] = ()
) -> Checkpoint:
    """Return a checkpoint with computed tensors, which `derive` adds to its catalog.

    Its `dcp` is None, because the stored chunks are no longer those of the tensors: reading goes through `select`.

    Args:
        checkpoint: with the stored tensors.
        codecs: by the name of a new tensor, what computes it.
        gone: stored names that the result does not have.
    """
    catalog, hub = derive(checkpoint.catalog, codecs, gone), checkpoint.hub
    return replace(
        checkpoint,
        catalog=catalog,
        hub=None if hub is None else replace(hub, catalog=catalog),
        dcp=None,
        select=partial(_select, checkpoint.select, codecs, gone),
    )


def derive_base(
    base: Base, codecs: Mapping[str, Codec], gone: Collection[str] = (), *, dtype: DType | None = None
) -> Base:
    """Return a base with computed tensors, to compare with a model that was trained from them.

    Args:
        base: with the stored tensors.
        codecs: as for `derive`.
        gone: as for `derive`.
        dtype: recorded for the computed tensors; None records the codec's.
    """
    place, tensors = replaced(codecs, gone), dict[str, BaseTensor]()
    for stored, tensor in (base.tensors or {}).items():
        if stored not in place and stored not in gone:
            tensors[stored] = tensor
        for name in place.get(stored, ()):
            tensors[name] = BaseTensor(dtype or codecs[name].dtype, codecs[name].shape)
    catalog = None if base.catalog is None else derive(base.catalog, codecs, gone)
    return replace(base, tensors=None if base.tensors is None else tensors, catalog=catalog)


def _select(
    select: Callable[[Collection[str]], Catalog],
    codecs: Mapping[str, Codec],
    gone: Collection[str],
    names: Collection[str],
) -> Catalog:
    chosen = {name: codecs[name] for name in names if name in codecs}
    stored = dict.fromkeys(
        part for name in names for part in (codecs[name].of if name in codecs else (name,))
    )
    return derive(select(list(stored)), chosen, gone)
