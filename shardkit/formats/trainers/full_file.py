"""Open a whole checkpoint in one `torch.save` file: Lightning's `.ckpt`, a trainer's `{"model": ...}`, a state dict.

Source: lightning 2.6, trainer/connectors/checkpoint_connector.py (dump_checkpoint).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from shardkit.core.text import escape
from shardkit.errors import ShardkitError
from shardkit.files.strict_json import open_regular, read_exactly
from shardkit.formats.contract import Checkpoint, Contents, Opener, asset_directories, parent_folder
from shardkit.formats.rankfiles.files import TensorCollector
from shardkit.formats.rankfiles.inside import find_states, open_states
from shardkit.formats.torchsave.archive import UnsupportedFile
from shardkit.formats.torchsave.classes import foreign_objects_error
from shardkit.formats.torchsave.file import (
    DistributedRef,
    TensorRef,
    TorchFile,
    class_of,
    is_before_zip,
    open_torch_file,
    tree_leaves,
)
from shardkit.formats.trainers.lightning import AVERAGED, AVERAGING, CURRENT, VERSION, holds_average
from shardkit.pickles.policies import UnmadeObject

_ZIP = b"PK\x03\x04"
_FIRST = b"/data.pkl"  # the name of the first entry ends with it
_HEAD = 256

Roots = dict[str, tuple[str | int, ...]]


def is_full_file(path: str) -> bool:
    """True for a file whose first bytes are those of a `torch.save` file."""
    try:
        with open_regular(path, path) as (fd, size):
            head = read_exactly(fd, 0, min(size, _HEAD), path)
    except ShardkitError:
        return False
    if head.startswith(_ZIP):
        return head[30 : 30 + int.from_bytes(head[26:28], "little")].endswith(_FIRST)
    return is_before_zip(head)


def open_full_file(path: str) -> Checkpoint:
    """Open a file with a whole model, and with anything else that was saved beside it.

    Raises:
        SourceError: damaged, from before torch 1.6, not a dict, without tensors, or only a part of a model.
        ResourceError: the file may not be read.
    """
    name = os.path.basename(path)
    file = open_torch_file(path, name)
    if not isinstance(file.tree, dict):
        raise _no_tensors_error(file, "holds no dict at its top, so no state dict either")
    is_lightning = VERSION in file.tree
    gathering = TensorCollector(
        parent_folder(path), lambda path: _is_outside_model(path, is_lightning=is_lightning)
    )
    gathering.add(file, file.tree)
    gathered = gathering.finish()
    if not gathered.catalog.tensors:
        raise _no_tensors_error(file, "holds no tensors")
    states = list(find_states(file.tree))
    unreadable = tuple(gathering.left_out)
    optimizer = partial(open_states, replace(file, tree=None), states, gathered.catalog, unreadable)
    whole = gathered.as_checkpoint(
        path, "full-file", "Lightning (one file)" if is_lightning else "torch.save"
    )
    return replace(
        whole,
        contents=Contents(
            roots=_roots(file.tree, is_lightning=is_lightning),
            optimizer=optimizer if states else None,
            assets=asset_directories(parent_folder(path)),
        ),
        remarks=replace(
            whole.remarks,
            skipped=tuple(_skipped(file.tree, gathered.catalog.objects, gathering.left_out)),
            notes=tuple(_notes(file)),
        ),
    )


def _no_tensors_error(file: TorchFile, what: str) -> UnsupportedFile:
    """Return the error for an intact file without tensors; it names the classes of the objects that are there instead."""
    classes = {
        ".".join(map(str, key)): class_of(value)
        for key, value in tree_leaves(file.tree)
        if type(value) is UnmadeObject and value.name in file.unknown
    }
    if classes:
        return foreign_objects_error(file.name, file.path, file.unknown, classes, file.data)
    return UnsupportedFile(
        f"{escape(file.name)}: {what}", hint="save model.state_dict(), not the model itself"
    )


def _is_outside_model(path: tuple[str | int, ...], *, is_lightning: bool) -> bool:
    """True for a path that is surely outside the model, so that an unreadable 8-bit optimizer does not block the model."""
    return path[0] != "state_dict" if is_lightning else str(path[0]).startswith("optim")


def _skipped(
    tree: dict[str | int, object], objects: tuple[str, ...], left_out: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if str(key) in objects:
            what = f"an object of {class_of(value)}, " if type(value) is UnmadeObject else ""
            yield str(key), f"{what}not a tensor"
    yield from ((name, f"its bytes are not its values: {reason}") for name, reason in left_out.items())


def _roots(tree: dict[str | int, object], *, is_lightning: bool) -> Roots:
    """Return the roots that the format itself fixes; others are found from names later."""
    if all(isinstance(value, (TensorRef, DistributedRef)) for value in tree.values()):
        return {"model": ()}
    roots: Roots = {}
    if is_lightning and "state_dict" in tree:
        roots["model"] = ("state_dict",)
        if AVERAGING in tree and CURRENT in tree:
            roots |= {"current": (CURRENT,), "ema": ("state_dict",)}
        if "optimizer_states" in tree:
            roots["optimizer"] = ("optimizer_states",)
    return roots


def _notes(file: TorchFile) -> Iterator[str]:
    tree = file.tree
    if isinstance(tree, dict) and holds_average(tree) and (VERSION in tree or CURRENT in tree):
        yield AVERAGED
    if file.num_dropped:
        yield f"{file.num_dropped} entries whose keys are neither text nor integers were left out"


OPENERS = {"full-file": Opener(is_full_file, open_full_file)}
