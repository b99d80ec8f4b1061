"""Warn if PEFT would add an adapter to other weights than it was trained on.

PEFT loads the base and adds the adapter. Some kinds of adapters change the base's weights when they are created, so that
the base as published does not fit them; and PEFT may repeat this change when it loads the adapter.

Source: peft 0.21.2, tuners/lora/layer.py (pissa_init, olora_init, corda_init, loftq_init, lora_ga_init) and variants.py (KaSA).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from shardkit.core.catalog import Catalog
from shardkit.core.regions import full_region
from shardkit.core.text import count, escape
from shardkit.errors import ShardkitError
from shardkit.formats.contract import Checkpoint
from shardkit.formats.hub.adapter import ADAPTER_CONFIG
from shardkit.formats.hub.base import Base
from shardkit.keys.peft import PeftNames
from shardkit.transfer.sources import Reader, SourceFiles, bands, is_far

_REMADE = ("pissa", "olora")
"""PEFT changes the base's weights when it creates such an adapter, and in the same way when it loads it."""
_NOT_REMADE = ("pissa_niter_", "corda", "loftq", "lora_ga")
"""PEFT changes the base's weights when it creates such an adapter, by random numbers, by data or by quantisation."""
_LEFT_ALONE = "lora_ga"
"""Of these, PEFT does not change weights when it loads this kind: that would need gradients."""
_COMPARED_BYTES = 4096  # of each weight


def base_warnings(
    checkpoint: Checkpoint,
    stored: Mapping[str, str],
    peft: PeftNames,
    written: Collection[str],
    settings: Mapping[str, Any],
    base: Base | None,
) -> Iterator[str]:
    """Yield a warning if the base with the adapter would be another model than the trained one.

    Args:
        checkpoint: the opened checkpoint.
        stored: name in `peft` -> name in the checkpoint.
        peft: the checkpoint's names, classified.
        written: names in `peft` of the tensors that go into the adapter's file.
        settings: content of `adapter_config.json`.
        base: the base, or None.
    """
    label = f"{escape(base.label)}'s" if base is not None and base.is_given else "the base's"
    init = str(settings.get("init_lora_weights")).lower()
    is_remade, is_not_remade = init in _REMADE, init.startswith(_NOT_REMADE)
    names = {name: base_name for name, base_name in peft.base_names.items() if name not in written}
    is_equal = _compare(checkpoint, stored, names, base)
    adapted = is_equal.keys() & {module.base for module in peft.modules if module.base is not None}
    changes_again = (is_remade or is_not_remade) and init != _LEFT_ALONE
    if changes_again and adapted and all(is_equal[name] for name in adapted):
        yield (
            f"the adapter was trained on {label} weights as they are, and with init_lora_weights={escape(init)} PEFT changes "
            f"them when it loads the adapter: write true there in {ADAPTER_CONFIG}; --merge-lora writes the trained model"
        )
        return
    if is_remade or settings.get("kasa_config"):
        is_equal = {name: equal for name, equal in is_equal.items() if name not in adapted}
    num_other = sum(not equal for equal in is_equal.values())
    if num_other or (is_not_remade and not adapted):
        why = f": init_lora_weights={escape(init)} changed them" if is_not_remade else ""
        counts = f" ({num_other:,} of {count(len(is_equal), 'compared weight')} differ)" if num_other else ""
        way = (
            "--merge-lora writes the trained one"
            if peft.modules
            else "name the one that has them with --base"
        )
        if peft.kind == "adapter":
            way = "a checkpoint that has those weights too can be merged: --merge-lora"
        yield (
            f"the adapter was trained on other weights than {label}{why}{counts}. PEFT adds it to {label}, so "
            f"another model comes out; {way}"
        )


def _compare(
    checkpoint: Checkpoint, stored: Mapping[str, str], names: Mapping[str, str], base: Base | None
) -> dict[str, bool]:
    """Return whether weights begin with the same bytes as the base's, for all that can be compared on this machine.

    Args:
        checkpoint: the opened checkpoint.
        stored: name -> name in the checkpoint.
        names: name in `stored` -> name in the base.
        base: the base, or None.
    """
    base_catalog = None if base is None else base.catalog
    if base_catalog is None or is_far(base_catalog) or is_far(checkpoint.catalog):
        return {}
    catalog = checkpoint.catalog
    pairs = {
        name: base_name
        for name, base_name in names.items()
        if _fit(catalog, stored[name], base_catalog, base_name)
    }
    try:
        catalog = checkpoint.select([stored[name] for name in pairs])
        with SourceFiles(catalog.files) as files, SourceFiles(base_catalog.files) as base_files:
            with files.reader() as reader, base_files.reader() as base_reader:
                return {
                    name: _head(catalog, stored[name], reader) == _head(base_catalog, base_name, base_reader)
                    for name, base_name in pairs.items()
                    if _fit(catalog, stored[name], base_catalog, base_name)
                }
    except ShardkitError:  # these weights are not written, so damage in them must not stop the export
        return {}


def _fit(catalog: Catalog, name: str, base: Catalog, base_name: str) -> bool:
    """Return whether two tensors have the same dtype and shape, and both are stored as raw bytes."""
    if base_name not in base.tensors:
        return False
    entries = catalog.tensors[name], base.tensors[base_name]
    is_raw = all(
        table.files[table.chunks.file[row]].is_raw
        for table, entry in zip((catalog, base), entries, strict=True)
        for row in entry.chunk_ids
    )
    return is_raw and len({(entry.dtype, entry.shape) for entry in entries}) == 1


def _head(catalog: Catalog, name: str, reader: Reader) -> bytes:
    """Return the first bytes of a tensor."""
    whole = full_region(catalog.tensors[name].shape)
    return bytes(next(bands(catalog, name, whole, reader, _COMPARED_BYTES), b""))
