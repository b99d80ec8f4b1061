"""What an opened model seems to lack, as its config, the names of its tensors and the numbers of its files tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from shardkit._folding import fold_lines
from shardkit.core.regions import Shape
from shardkit.core.text import count, listed
from shardkit.errors import ShardkitError, SourceError
from shardkit.files import storage
from shardkit.formats.contract import Checkpoint
from shardkit.formats.dequantize import config_of
from shardkit.formats.hub.adapter import find_settings, is_adapter_file
from shardkit.formats.hub.files import absent_parts, is_part, is_plain_file
from shardkit.keys.check import Gap, find_gaps, refuse_factors
from shardkit.keys.peft import classify_peft, find_cut
from shardkit.keys.select import select_model


class Gaps(NamedTuple):
    """What seems to be missing; finding nothing proves nothing."""

    weights: tuple[Gap, ...] = ()
    files: tuple[str, ...] = ()
    """Numbered weight files that are neither there nor in the index."""
    cut: tuple[str, ...] = ()
    """Modules of an adapter whose shapes are not those that its settings call for."""
    has_own_code: bool = False
    """The model's own code may make something else of the config."""

    @property
    def is_part(self) -> bool:
        """Surely a part of a model: files and the layers that the config counts are missing together."""
        return bool(
            self.files and not self.has_own_code and any(gap.kind == "layers" for gap in self.weights)
        )

    def lines(self, where: str) -> Iterator[str]:
        """Yield each as a warning; `where` is what lacks it, such as "the model"."""
        yield from (gap.line(where) for gap in self.weights)
        if self.cut:
            modules, shown = count(len(self.cut), "module"), [line.pattern for line in fold_lines(self.cut)]
            yield f"{modules} of the adapter have other shapes than its settings call for: {'; '.join(shown[:3])}"
        if self.files:
            files = count(len(self.files), "weight file")
            yield f"{files} of a numbered set, neither here nor in the index: {listed(self.files)}"


def gaps_of(checkpoint: Checkpoint) -> Gaps:
    """Return the weights that a model seems to lack; none for a named part, an adapter, or names that show nothing.

    Args:
        checkpoint: opened, of any format.
    """
    hub = checkpoint.hub
    if hub is None:
        try:
            config = config_of(checkpoint)
        except SourceError:  # no JSON; verify tells by its checksum
            config = None
        is_known = config is not None or any(".lora_" in name for name in checkpoint.catalog.tensors)
        shapes = _shapes_in(checkpoint) if is_known else {}
        return _of_adapter(checkpoint, shapes) or gaps_among(shapes, config)
    shapes = {name: entry.shape for name, entry in hub.catalog.tensors.items()}
    files = [file.name for file in hub.identity.files]
    if _is_model(checkpoint.path, files):
        return _gaps(shapes, hub.config, absent_parts(files))
    return _of_adapter(checkpoint, shapes) or Gaps()


def _of_adapter(checkpoint: Checkpoint, shapes: Mapping[str, Shape]) -> Gaps | None:
    """Return the weights that an adapter lacks; None if there is no adapter, or its settings are not known."""
    try:
        peft = classify_peft(shapes)
        places = (*checkpoint.assets, checkpoint.catalog.directory, checkpoint.path)
        settings = find_settings(places) if peft.kind != "none" else None
    except ShardkitError:
        return None
    if settings is None or not settings.is_whole:
        return None
    return Gaps(cut=tuple(find_cut(peft, shapes, settings.values, {})))


def gaps_among(shapes: Mapping[str, Shape], config: Mapping[str, Any] | None) -> Gaps:
    """Return the weights that a model in memory seems to lack; none if they are factors, an adapter or without layers.

    A vocabulary may have grown since its config was written.

    Args:
        shapes: by its names there.
        config: its config.json, if there is one.
    """
    try:
        refuse_factors(shapes)
        is_plain = classify_peft(shapes).kind == "none"
    except ShardkitError:
        return Gaps()
    if not is_plain or not any(".0." in name for name in shapes):
        return Gaps()
    gaps = _gaps(shapes, config)
    return gaps._replace(weights=tuple(gap for gap in gaps.weights if gap.kind != "grown"))


def _gaps(shapes: Mapping[str, Shape], config: Mapping[str, Any] | None, files: tuple[str, ...] = ()) -> Gaps:
    return Gaps(tuple(find_gaps(shapes, config)), files, has_own_code="auto_map" in (config or {}))


def _is_model(path: str, files: list[str]) -> bool:
    """True unless the weights are an adapter's, or a file that a person named and that may be any part."""
    if len(files) != 1:
        return True
    is_chosen = not storage.isdir(path) and (is_part(files[0]) or not is_plain_file(files[0]))
    return not (is_chosen or is_adapter_file(files[0]))


def _shapes_in(checkpoint: Checkpoint) -> dict[str, Shape]:
    """Return shapes by the names of the model in a checkpoint of a training; none where these are another trainer's own."""
    catalog = checkpoint.catalog
    try:
        chosen = select_model(catalog.tensors, catalog.objects, catalog.paths, checkpoint.roots)
    except ShardkitError:
        return {}
    if chosen.unloadable:
        return {}
    return {name: catalog.tensors[stored].shape for stored, name in chosen.names.items()}
