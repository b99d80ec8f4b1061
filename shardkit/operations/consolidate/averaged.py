"""`--weights ema` if the averaged weights have their own folder or file beside the model's, as SimpleTuner's `ema/`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

from shardkit.core.text import count, escape
from shardkit.errors import UsageError
from shardkit.formats.contract import Checkpoint, folder_below, folder_name, listing, parent_folder
from shardkit.formats.registry import open_checkpoint, recognise
from shardkit.keys.names import split
from shardkit.keys.roots import MODEL_KEYS
from shardkit.keys.trainer_state import is_averaged

AVERAGED = "ema"
"""Name of the weights in the opened checkpoint, which consists of nothing else."""


def averaged_beside(checkpoint: Checkpoint) -> Checkpoint:
    """Return the averaged weights beside a checkpoint, opened as a checkpoint. If there are none, return the argument.

    The argument is also returned if it has averaged weights itself, by its tensor names.

    Raises:
        UsageError: several sets of averaged weights were found.
        SourceError, IntegrityError, ResourceError: they cannot be opened.
    """
    is_inside = AVERAGED in checkpoint.contents.roots or AVERAGED in checkpoint.contents.refused_weights
    if is_inside or any(any(map(is_averaged, split(name))) for name in checkpoint.catalog.tensors):
        return checkpoint
    places = sorted(_places(checkpoint))
    if not places:
        return checkpoint
    if len(places) > 1:
        raise UsageError(
            f"--weights ema: {count(len(places), 'set')} of averaged weights found beside the model's",
            problems=map(escape, places),
            hint="give the path of the one you mean as the checkpoint, without --weights",
        )
    averaged = open_checkpoint(places[0])
    return replace(
        averaged,
        contents=replace(
            averaged.contents,
            roots={**averaged.contents.roots, AVERAGED: ()},
            assets=(*averaged.contents.assets, *checkpoint.contents.assets),
        ),
        remarks=averaged.remarks.plus(
            [f"averaged weights taken from {escape(places[0])}, beside the model's"]
        ),
    )


def _places(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the paths of checkpoints that are named after averages, in the checkpoint's directory or else beside it."""
    path, stem = checkpoint.path, _stem(folder_name(checkpoint.path))
    within = [name for name in listing(path) if is_averaged(_stem(name))]
    yield from (place for name in within for place in _checkpoints(path, name))
    is_models = stem in MODEL_KEYS or stem.startswith("pytorch_model")
    siblings = [
        name
        for name in listing(parent_folder(path))
        if _stem(name) in (f"{stem}_{AVERAGED}", f"{stem}-{AVERAGED}")
        or (is_models and is_averaged(_stem(name)))
    ]
    if not within:
        yield from (place for name in siblings for place in _checkpoints(parent_folder(path), name))


def _stem(name: str) -> str:
    return name.partition(".")[0]


def _checkpoints(home: str, name: str) -> Iterator[str]:
    """Yield the path `home/name` if it is a checkpoint, else the checkpoints in that directory."""
    path = os.path.join(home, name)
    if recognise(path) is not None:
        yield path
    elif folder_below(home, name) is not None:
        places = (os.path.join(path, below) for below in listing(path))
        yield from (place for place in places if recognise(place) is not None)
