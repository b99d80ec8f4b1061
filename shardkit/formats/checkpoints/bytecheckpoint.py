"""A ByteCheckpoint: `global_step_N/` with `model/`, `optimizer/` and more, or `model/` itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from shardkit.core.text import listed
from shardkit.formats.beside import asset_directories, inner, listing
from shardkit.formats.checkpoint import Checkpoint
from shardkit.formats.checkpoints.bytecheckpoint_metadata import (
    is_bytecheckpoint_metadata,
    open_bytecheckpoint_files,
)
from shardkit.formats.dcp.checkpoint import as_checkpoint
from shardkit.formats.dcp.directory import DcpDirectory
from shardkit.formats.optimizer import (
    GROUPS,
    PARAMS,
    STATE,
    OptimizerState,
    StateWriter,
    Unmapped,
    unmapped,
)
from shardkit.formats.torchsave.file import TorchFile, open_torch_file

_MODEL, _OPTIMIZER = "model", "optimizer"
_OTHERS = {
    "optimizer": "the optimizer's state",
    "extra_state": "state of the trainer",
    "loader_ckpt": "state of the data loader",
}


def is_bytecheckpoint(path: str) -> bool:
    """True for a directory with ByteCheckpoint's `.metadata`, or whose `model/` has it."""
    return is_bytecheckpoint_metadata(path) or _model_in(path) is not None


def open_bytecheckpoint(path: str) -> Checkpoint:
    """Open the model of a ByteCheckpoint (or the one state that lies in `path`).

    Raises:
        SourceError: missing, damaged, hostile or contradictory; without tensors; or flat parameters of FSDP1.
        IntegrityError: the two descriptions of a chunk differ.
        ResourceError: a file may not be read.
    """
    directory = None if is_bytecheckpoint_metadata(path) else _model_in(path)
    checkpoint = as_checkpoint(path, open_bytecheckpoint_files(directory or path))
    return replace(
        checkpoint,
        format="bytecheckpoint",
        writer="ByteCheckpoint",
        optimizer=_optimizer(path),
        assets=asset_directories(directory, path),
        skipped=tuple((name, _OTHERS[name]) for name in sorted(listing(path) & _OTHERS.keys())),
    )


def _model_in(path: str) -> str | None:
    directory = inner(path, _MODEL)
    return directory if directory is not None and is_bytecheckpoint_metadata(directory) else None


def _optimizer(path: str) -> Callable[[], OptimizerState | Unmapped] | None:
    """Return what opens the optimizer's state, None where there is none."""
    directory = inner(path, _OPTIMIZER)
    if directory is None or not is_bytecheckpoint_metadata(directory):
        return None
    return partial(_open_optimizer, directory)


def _open_optimizer(directory: str) -> OptimizerState | Unmapped:
    """Open the state by FQN that FSDP2 gives; its groups are one byte entry, which is looked into."""
    opened = open_bytecheckpoint_files(directory)
    catalog = opened.select(tuple(opened.catalog.tensors))
    paths = catalog.paths or {}
    odd = [name for name in catalog.tensors if len(paths.get(name, ())) != 3 or paths[name][0] != STATE]
    if odd:
        return unmapped([_OPTIMIZER], f"its entries are no states of single parameters: {listed(odd)}")
    names = {str(path[1]) for path in paths.values()}
    file = _groups_record(opened)
    groups: Any = file.tree if file is not None else None
    if (
        not isinstance(groups, list)
        or not all(isinstance(group, dict) for group in groups)
        or not all(isinstance(group.get(PARAMS), list) for group in groups)
    ):
        return unmapped([_OPTIMIZER], f"it has no {GROUPS}, which hold its settings")
    params = [[str(name) for name in group[PARAMS]] for group in groups]
    unknown = names - {name for group in params for name in group}
    if any(name.isdecimal() for name in names) or unknown:
        return unmapped(
            [_OPTIMIZER], "its parameters are only numbered, and nothing tells which ones they are"
        )
    assert file is not None
    writer = StateWriter(catalog, file.source)
    writer.add_groups(groups, params)
    lost = [name for name in opened.objects if name != GROUPS]
    return writer.finish([f"not taken over from the optimizer: {listed(lost)}"] if lost else [])


def _groups_record(opened: DcpDirectory) -> TorchFile | None:
    place = opened.objects.get(GROUPS)
    if place is None:
        return None
    source = opened.catalog.files[place.file]
    return open_torch_file(source.path, f"{_OPTIMIZER}/{source.name}", (place.start, place.nbytes))
