"""A checkpoint with plain weights in the place of quantised ones, or the refusal of one that is quantised."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

from shardkit.core.catalog import Catalog
from shardkit.core.dtypes import BY_NAME, DType
from shardkit.core.text import count, escape
from shardkit.formats.contract import Checkpoint, Dequantized
from shardkit.formats.hub.base import Base, BaseTensor
from shardkit.formats.hub.directory import read_config, read_json
from shardkit.keys.quantised import (
    EXPORT_CONFIG,
    Quantised,
    can_dequantize,
    find_scaled,
    holds_narrow,
    method_of,
    plain_config,
    plain_shape,
    refuse_quantised,
    why_narrow,
    why_quantised,
)
from shardkit.transfer.computed.dequantize import dequantize as dequantize_catalog
from shardkit.transfer.computed.dequantize import plain_paths

PLAIN = BY_NAME["bfloat16"]
"""The dtype of weights that were quantised, unless another is asked for."""


def config_of(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Return the config.json of a checkpoint's model, if there is one."""
    if checkpoint.hub is not None:
        return checkpoint.hub.config
    return next((config for each in checkpoint.assets if (config := read_config(each)) is not None), None)


def why_scaled(checkpoint: Checkpoint) -> str | None:
    """Return the evidence that a checkpoint's values have scales, where neither config.json nor names show a method."""
    tensors, hub = checkpoint.catalog.tensors, checkpoint.hub
    if not holds_narrow(tensors):
        return None
    return why_narrow(tensors, None if hub is None else read_json(hub.directory, EXPORT_CONFIG))


def take_plain(
    checkpoint: Checkpoint,
    *,
    dequantize: bool,
    dtype: DType | None = None,
    by_config: bool = False,
    by_content: bool = False,
    has_option: bool = True,
) -> Checkpoint:
    """Return a checkpoint of plain weights.

    A config beside the checkpoint of a training may be that of its base: then only names show that weights are
    quantised.

    Args:
        checkpoint: opened; its files have all their checksums.
        dequantize: put plain tensors in the place of quantised ones. Otherwise these are refused.
        dtype: of the plain tensors; None is PLAIN.
        by_config: take a config's word for it all the same.
        by_content: refuse narrow numbers with scales beside them too, whatever names and config tell. They may be moved
            and compared as bytes, but not be divided or made plain.
        has_option: who asks could be told to dequantise.

    Raises:
        LayoutError: it is quantised, or in a way that is not known here; or scales do not fit what they scale.
    """
    config, tensors = config_of(checkpoint), checkpoint.catalog.tensors
    why = why_quantised(tensors, config if by_config or checkpoint.hub is not None else None)
    if by_content and (scaled := why_scaled(checkpoint)) is not None:
        raise refuse_quantised(scaled if why is None else f"{why}; {scaled}", checkpoint.path)
    if why is None:
        return checkpoint
    if not dequantize:
        raise refuse_quantised(why, checkpoint.path, has_option=has_option)
    quantised = find_scaled(tensors, config, checkpoint.path)
    return _plain(checkpoint, quantised, dtype or PLAIN, method_of(config))


def plain_base(base: Base) -> Base:
    """Return a base as it would be with plain weights: what a trained model is compared with.

    One that is quantised in a way that is not known here stays as it is.

    Raises:
        LayoutError: its scales do not fit what they scale.
    """
    method, tensors = method_of(base.config), base.tensors or {}
    if why_quantised(tensors, base.config) is None or not can_dequantize(method):
        return base
    quantised = find_scaled(tensors, base.config, base.label)
    numbers = {each.numbers: name for name, each in quantised.scaled.items()}
    plain: dict[str, BaseTensor] = {}
    for stored, tensor in tensors.items():
        if stored in numbers:
            name = numbers[stored]
            plain[name] = BaseTensor(PLAIN, plain_shape(quantised.scaled[name]))
        elif stored not in quantised.consumed:
            plain[stored] = tensor
    return replace(
        base,
        config=None if base.config is None else plain_config(base.config),
        tensors=None if base.tensors is None else plain,
        catalog=None if base.catalog is None else dequantize_catalog(base.catalog, quantised, PLAIN),
    )


def _plain(checkpoint: Checkpoint, quantised: Quantised, dtype: DType, method: str | None) -> Checkpoint:
    catalog, hub = checkpoint.catalog, checkpoint.hub
    number = len(quantised.scaled)
    notes = [f"dequantised to {dtype.name}: {count(number, 'tensor')}; the scales are gone"] if number else []
    if hub is not None and method is not None:
        notes.append(f"quantization_config ({escape(method)}) is no longer in the config")
    if catalog.encoding == "raw":
        plain = dequantize_catalog(catalog, quantised, dtype)
    else:
        plain = _described(catalog, quantised, dtype)
    plain.notes = (*plain.notes, *notes) if hub is not None else plain.notes
    config = None if hub is None or hub.config is None else plain_config(hub.config)
    return replace(
        checkpoint,
        catalog=plain,
        hub=None if hub is None else replace(hub, catalog=plain, config=config),
        dcp=None,
        select=partial(_select, checkpoint, quantised, dtype),
        notes=(*checkpoint.notes, *notes),
        dequantized=Dequantized(method or ", ".join(sorted(quantised.methods)), frozenset(quantised.scaled)),
    )


def _described(catalog: Catalog, quantised: Quantised, dtype: DType) -> Catalog:
    """Return a catalog of the plain tensors whose records were not opened yet: those that are made have no chunks."""
    plain = replace(catalog, tensors={}, chunks=type(catalog.chunks)(), paths=plain_paths(catalog, quantised))
    by_numbers = {each.numbers: name for name, each in quantised.scaled.items()}
    for stored in catalog.tensors:
        if stored in by_numbers:
            name = by_numbers[stored]
            plain.add_tensor(name, dtype, plain_shape(quantised.scaled[name]), iter(()))
        elif stored not in quantised.consumed:
            plain.copy_tensor(catalog, stored, stored)
    return plain


def _stored(quantised: Quantised, names: Collection[str]) -> list[str]:
    """Return the stored tensors that have to be read for some tensors."""
    found = dict[str, None]()
    for name in names:
        scaled = quantised.scaled.get(name)
        found.update(dict.fromkeys((name,) if scaled is None else (scaled.numbers, scaled.scales)))
    return list(found)


def _select(checkpoint: Checkpoint, quantised: Quantised, dtype: DType, names: Collection[str]) -> Catalog:
    wanted = {name: quantised.scaled[name] for name in names if name in quantised.scaled}
    stored = checkpoint.select(_stored(quantised, names))
    return dequantize_catalog(stored, replace(quantised, scaled=wanted), dtype)
