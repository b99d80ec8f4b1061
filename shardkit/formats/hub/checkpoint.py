"""A Hub model itself as a checkpoint: to be split anew, cast, or put into one file."""

from __future__ import annotations

import os

from shardkit.core.catalog import subset
from shardkit.errors import ShardkitError
from shardkit.formats.beside import asset_directories, listing
from shardkit.formats.checkpoint import Checkpoint, HubModel, Opener
from shardkit.formats.hub.directory import open_model
from shardkit.formats.hub.files import select_file, select_weights

_FILES = (".safetensors", ".safetensors.index.json", ".bin.index.json")


def is_hub_directory(path: str) -> bool:
    """True for a directory with the weights of a Hub model, a safetensors file, or an index."""
    try:
        if not os.path.isdir(path):
            select_file(os.path.basename(path))
            return path.endswith(_FILES) and os.path.isfile(path)
        select_weights(listing(path), path)
    except ShardkitError:
        return False
    return True


def open_hub_directory(path: str) -> Checkpoint:
    """Open a Hub model; every tensor is one chunk, under the name that it keeps.

    Raises:
        SourceError: no weights or several, a damaged file, an index that its files contradict.
        ResourceError: a file may not be read.
    """
    return as_checkpoint(path, open_model(path))


def as_checkpoint(path: str, model: HubModel) -> Checkpoint:
    """Return an opened Hub model as a checkpoint."""
    catalog = model.catalog
    return Checkpoint(
        path=path,
        format="hub",
        writer="a Hub model",
        catalog=catalog,
        select=lambda names: subset(catalog, names),
        hub=model,
        roots={"model": ()},
        assets=asset_directories(model.directory),
        skipped=model.beside,
        notes=catalog.notes,
    )


OPENERS = {"hub": Opener(is_hub_directory, open_hub_directory)}
