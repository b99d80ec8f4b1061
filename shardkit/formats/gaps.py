"""What an opened model lacks by the numbers of its weight files, and an adapter by its settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardkit._folding import fold_lines
from shardkit.core.regions import Shape
from shardkit.core.text import count, listed
from shardkit.errors import ShardkitError
from shardkit.files import storage
from shardkit.formats.contract import Checkpoint
from shardkit.formats.hub.adapter import find_settings, is_adapter_file
from shardkit.formats.hub.files import absent_parts, is_part, is_plain_file
from shardkit.keys.peft import classify_peft, find_misfits
from shardkit.keys.select import select_model


def find_gaps(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return warnings of absent files and of cut modules; none for a file that a person named and that may be any part."""
    return (*absent_files(checkpoint), *cut_modules(checkpoint))


def absent_files(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield a line if a Hub model has only some weight files of a numbered set, and the index does not list the others."""
    if checkpoint.hub is not None and is_whole_model(checkpoint):
        if files := absent_parts([file.name for file in checkpoint.hub.identity.files]):
            yield f"{count(len(files), 'weight file')} of a numbered set, neither here nor in the index: {listed(files)}"


def cut_modules(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield a line if modules of an adapter have other shapes than its settings call for."""
    if is_whole_model(checkpoint) or not any(".lora_" in name for name in checkpoint.catalog.tensors):
        return
    shapes = _shapes_in(checkpoint)
    try:
        peft = classify_peft(shapes)
        settings = find_settings((*checkpoint.contents.assets, checkpoint.catalog.directory, checkpoint.path))
    except ShardkitError:
        return
    if settings is None or not settings.is_whole:
        return
    if cut := find_misfits(peft, shapes, settings.values, {}):
        modules, shown = count(len(cut), "module"), [line.pattern for line in fold_lines(cut)]
        yield f"{modules} of the adapter have other shapes than its settings call for: {'; '.join(shown[:3])}"


def is_whole_model(checkpoint: Checkpoint) -> bool:
    """True for a Hub model, unless its weights are an adapter's, or a file that a person named and that may be any part."""
    if checkpoint.hub is None:
        return False
    files = [file.name for file in checkpoint.hub.identity.files]
    if len(files) != 1:
        return True
    is_chosen = not storage.isdir(checkpoint.path) and (is_part(files[0]) or not is_plain_file(files[0]))
    return not (is_chosen or is_adapter_file(files[0]))


def _shapes_in(checkpoint: Checkpoint) -> Mapping[str, Shape]:
    """Return shapes by the names of the model in a checkpoint; none where these are another trainer's own."""
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
