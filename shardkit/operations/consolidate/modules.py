"""Modules with weights of their own (sentence-transformers' `2_Dense/`) that the checkpoint has trained too.

What is copied from the base is the base's. Where the checkpoint's names say for certain which module a tensor belongs
to, the output gets the trained values in its place; where they do not, a warning says so.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from shardkit.core.catalog import Catalog
from shardkit.core.dtypes import CASTS
from shardkit.core.text import count, escape, listed
from shardkit.errors import ShardkitError
from shardkit.formats.checkpoint import Checkpoint
from shardkit.formats.hub.assets import is_weights, modules
from shardkit.formats.hub.base import Base
from shardkit.formats.hub.directory import open_weights
from shardkit.formats.hub.files import select_file
from shardkit.formats.hub.images import OutputTensor, SafetensorsImages
from shardkit.operations.casts import BASE, KEEP
from shardkit.transfer.plan import TransferPlan, build_plan

_ENDING = ".safetensors"


class _Place(NamedTuple):
    """A module whose weights are copied, and which the checkpoint has tensors of."""

    file: str
    """Its weights, relative to the model."""
    place: str
    """What its tensors' names begin with in the checkpoint."""
    trained: list[str]
    """These names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModule:
    """A module's weight file, to be written from the checkpoint."""

    file: str
    """Relative to the output."""
    place: str
    """What its tensors' names begin with in the checkpoint."""
    catalog: Catalog
    """Of its tensors."""
    output: SafetensorsImages
    """One image."""
    plan: TransferPlan

    @property
    def note(self) -> str:
        """What a person should be told."""
        number = count(len(self.catalog.tensors), "tensor")
        return f"{escape(self.file)} is the checkpoint's ({number} of {escape(self.place)}), not the base's"


def trained_modules(
    checkpoint: Checkpoint,
    base: Base | None,
    assets: Iterable[str],
    root: str,
    left: Iterable[str],
    *,
    dtype: str,
    takes: bool,
) -> tuple[list[TrainedModule], list[str]]:
    """Return the modules that are written from the checkpoint, and a warning for each that stays the base's though trained.

    Args:
        checkpoint: what is consolidated.
        base: a sentence-transformers model, or any other.
        assets: names of what is copied beside the weights.
        root: where the model begins in the checkpoint, dotted, as "0.auto_model".
        left: names of tensors that are no part of the model.
        dtype: as `--dtype`.
        takes: False where a person chose by name what is written.

    Raises:
        SourceError: a trained tensor cannot be read.
    """
    found, warnings = list[TrainedModule](), list[str]()
    for module in _places(base, assets, root, left):
        assert base is not None
        why = "" if takes else "names were chosen by hand"
        if not why:
            made = _made(checkpoint, base, module, dtype)
            if isinstance(made, TrainedModule):
                found.append(made)
                continue
            why = made
        trained = f"{count(len(module.trained), 'tensor')} of that module ({listed(module.trained)})"
        warnings.append(
            f"{escape(module.file)} is the base's, though the checkpoint has {trained}: {why}; "
            f"--root {escape(module.place)} writes these, to put in its place"
        )
    return found, warnings


def _places(base: Base | None, assets: Iterable[str], root: str, left: Iterable[str]) -> Iterator[_Place]:
    folders = modules(base.directory) if base is not None else {}
    parts, main = root.split("."), folders.get(os.curdir)
    if main not in parts:
        return
    before, names, files = parts[: parts.index(main)], sorted(left), list(assets)
    for folder, name in folders.items():
        copied = [file for file in files if file.startswith(f"{folder}/") and is_weights(file)]
        place = ".".join((*before, name))
        trained = [each for each in names if each.startswith(f"{place}.")]
        if name and folder != os.curdir and copied and trained:
            yield _Place(copied[0], place, trained)


def _made(checkpoint: Checkpoint, base: Base, module: _Place, dtype: str) -> TrainedModule | str:
    """Return what is written, or why it is not certain that these are the module's tensors."""
    directory, file = os.path.split(base.assets[module.file])
    if not file.endswith(_ENDING):
        return "its file is not of safetensors"
    try:
        held = open_weights(directory, select_file(file), chosen_by_hand=True).catalog.tensors
    except ShardkitError as error:
        return f"its file cannot be opened: {error.message}"
    entries = checkpoint.catalog.tensors
    names = {source.removeprefix(f"{module.place}."): source for source in module.trained}
    if differing := _differing(held.keys(), names.keys()):
        return f"its file has other names ({listed(differing)})"
    shapes = [name for name, source in names.items() if entries[source].shape != held[name].shape]
    if shapes:
        return f"its file has other shapes ({listed(shapes)})"
    chosen = []
    for name in held:  # in the file's order
        stored = entries[names[name]].dtype
        wanted = held[name].dtype if dtype == BASE else CASTS.get(dtype, stored)
        can_cast = stored.is_convertible and wanted.is_convertible and dtype != KEEP
        chosen.append(OutputTensor(name, names[name], wanted if can_cast else stored, held[name].shape))
    catalog = checkpoint.select(list(names.values()))
    output = SafetensorsImages(chosen, max_shard_bytes=None, stem=module.file.removesuffix(_ENDING))
    return TrainedModule(
        file=module.file,
        place=module.place,
        catalog=catalog,
        output=output,
        plan=build_plan(output, catalog),
    )


def _differing(held: Collection[str], found: Collection[str]) -> list[str]:
    return sorted(set(held) ^ set(found))
