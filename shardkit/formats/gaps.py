"""Warnings about incomplete models: a numbered set of weight files with gaps, an adapter with modules of wrong shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardkit._folding import fold_lines
from shardkit.core.regions import Shape
from shardkit.core.text import count, listed
from shardkit.errors import ShardkitError
from shardkit.files import storage
from shardkit.formats.contract import Checkpoint
from shardkit.formats.hub.adapter import find_settings, is_adapter_file
from shardkit.formats.hub.files import is_part, is_plain_file, missing_parts
from shardkit.keys.peft import classify_peft, find_misfits
from shardkit.keys.select import select_model


def find_gaps(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return warnings about missing weight files and about modules of an adapter that were cut.

    If the user named a single file, there are none: it may be any part of a model.
    """
    return (*find_absent_files(checkpoint), *find_cut_modules(checkpoint))


def find_absent_files(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield a line if a Hub model lacks weight files of a numbered set, and the index does not list them either."""
    if checkpoint.hub is not None and is_whole_model(checkpoint):
        if files := missing_parts([file.name for file in checkpoint.hub.identity.files]):
            yield f"{count(len(files), 'weight file')} of a numbered set, neither here nor in the index: {listed(files)}"


def find_cut_modules(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield a line if modules of an adapter have other shapes than its settings call for."""
    if is_whole_model(checkpoint) or not any(".lora_" in name for name in checkpoint.catalog.tensors):
        return
    shapes = _shapes_of_model(checkpoint)
    try:
        peft = classify_peft(shapes)
        settings = find_settings((*checkpoint.contents.assets, checkpoint.catalog.directory, checkpoint.path))
    except ShardkitError:
        return
    if settings is None or not settings.is_complete:
        return
    if cut := find_misfits(peft, shapes, settings.values, {}):
        modules, shown = count(len(cut), "module"), [line.pattern for line in fold_lines(cut)]
        yield f"{modules} of the adapter have other shapes than its settings call for: {'; '.join(shown[:3])}"


def is_whole_model(checkpoint: Checkpoint) -> bool:
    """True for a Hub model, unless its weights are an adapter's, or a single file that the user named."""
    if checkpoint.hub is None:
        return False
    files = [file.name for file in checkpoint.hub.identity.files]
    if len(files) != 1:
        return True
    is_chosen = not storage.isdir(checkpoint.path) and (is_part(files[0]) or not is_plain_file(files[0]))
    return not (is_chosen or is_adapter_file(files[0]))


def _shapes_of_model(checkpoint: Checkpoint) -> Mapping[str, Shape]:
    """Return the shapes of a checkpoint's model by name; an empty dict if only its trainer can load these names."""
    catalog = checkpoint.catalog
    if checkpoint.hub is not None:
        return {name: entry.shape for name, entry in catalog.tensors.items()}
    try:
        chosen = select_model(catalog.tensors, catalog.objects, catalog.paths, checkpoint.contents.roots)
    except ShardkitError:
        return {}
    if chosen.unloadable:
        return {}
    return {name: catalog.tensors[stored].shape for stored, name in chosen.names.items()}
