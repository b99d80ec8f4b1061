"""Dequantise a checkpoint, or refuse it because it is quantised.

Plain weights store one number for each value; quantised weights are narrow numbers with scales beside them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardkit.core.dtypes import DType
from shardkit.core.text import count, escape
from shardkit.formats.contract import PLAIN, Checkpoint, Dequantized, PlainWeights
from shardkit.formats.derived import derive_base, derive_checkpoint
from shardkit.formats.hub.base import Base
from shardkit.formats.hub.directory import read_config, read_json
from shardkit.formats.quantised import (
    QuantisedTensors,
    can_dequantize,
    find_scaled,
    holds_narrow,
    method_of,
    plain_config,
    refuse_quantised,
    unclaimed_tensors,
    unmarked_tensors,
    why_narrow,
    why_quantised,
)
from shardkit.transfer.codecs.dequantize import Held, Product
from shardkit.transfer.codecs.nvfp4 import EXPORT_CONFIG


def config_of(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Return the config.json of a checkpoint's model, or None."""
    if checkpoint.hub is not None:
        return checkpoint.hub.config
    return next(
        (config for path in checkpoint.contents.assets if (config := read_config(path)) is not None), None
    )


def why_scaled(checkpoint: Checkpoint, *, is_claimed_known: bool = False) -> str | None:
    """Return the evidence that values have scales although neither config.json nor names show a method, or None.

    Args:
        checkpoint: opened.
        is_claimed_known: leave out tensors that can be dequantised here.
    """
    hub, tensors = checkpoint.hub, dict[str, Held](checkpoint.catalog.tensors)
    if is_claimed_known:
        tensors = unclaimed_tensors(tensors)
    if not holds_narrow(tensors):
        return None
    return why_narrow(tensors, None if hub is None else read_json(hub.directory, EXPORT_CONFIG))


def plain_checkpoint(checkpoint: Checkpoint, plain: PlainWeights) -> Checkpoint:
    """Return a checkpoint of plain weights; one that is not quantised is returned as it is.

    A config beside a training checkpoint may be that of the base. So names alone decide whether a training checkpoint
    is quantised, unless `plain.by_config` is true.

    Args:
        checkpoint: opened; its files have all their checksums.
        plain: whether to refuse or dequantise, and what counts as quantised.

    Raises:
        LayoutError: it is quantised, and `plain` refuses that; or its method is unknown here; or scales do not fit
            their tensors.
    """
    config, tensors = config_of(checkpoint), checkpoint.catalog.tensors
    evidence = why_quantised(tensors, config if plain.by_config or checkpoint.hub is not None else None)
    if plain.by_content:
        scaled = why_scaled(checkpoint)
    else:
        scaled = why_narrow(unmarked_tensors(tensors)) if plain.dequantize else None
    why = "; ".join(filter(None, (evidence, scaled)))
    if not why:
        return checkpoint
    if not plain.dequantize:
        raise refuse_quantised(why, checkpoint.path, has_dequantize_option=plain.has_dequantize_option)
    if plain.by_content and why_scaled(checkpoint, is_claimed_known=True) is not None:
        raise refuse_quantised(why, checkpoint.path, is_tried=True)
    quantised = find_scaled(tensors, config, checkpoint.path)
    return _dequantize(checkpoint, quantised, plain.dtype, method_of(config))


def plain_base(base: Base) -> Base:
    """Return the description of a base with plain weights, to compare a trained model with it.

    A base whose method of quantising is unknown here is returned as it is.

    Raises:
        LayoutError: its scales do not fit their tensors.
    """
    tensors = base.tensors or {}
    is_quantised = why_quantised(tensors, base.config) is not None or bool(unmarked_tensors(tensors))
    if not is_quantised or not can_dequantize(base.config):
        return base
    quantised = find_scaled(tensors, base.config, base.label)
    plain = replace(derive_base(base, _codecs(quantised, PLAIN), quantised.gone), stored=base)
    return plain if plain.config is None else replace(plain, config=plain_config(plain.config))


def _codecs(quantised: QuantisedTensors, dtype: DType) -> dict[str, Product]:
    return {name: scaled.method.codec(scaled, dtype) for name, scaled in quantised.scaled.items()}


def _dequantize(
    checkpoint: Checkpoint, quantised: QuantisedTensors, dtype: DType, method: str | None
) -> Checkpoint:
    number = len(quantised.scaled)
    notes = [f"dequantised to {dtype.name}: {count(number, 'tensor')}; the scales are gone"] if number else []
    if checkpoint.hub is not None and method is not None:
        notes.append(f"quantization_config ({escape(method)}) is no longer in the config")
    plain = derive_checkpoint(checkpoint, _codecs(quantised, dtype), quantised.gone)
    hub = plain.hub
    if hub is not None:
        plain.catalog.notes = (*plain.catalog.notes, *notes)
        hub = hub if hub.config is None else replace(hub, config=plain_config(hub.config))
    return replace(
        plain,
        hub=hub,
        remarks=replace(
            checkpoint.remarks.plus(notes),
            dequantized=Dequantized(
                ", ".join(sorted(quantised.methods)) or str(method), frozenset(quantised.scaled)
            ),
        ),
    )
