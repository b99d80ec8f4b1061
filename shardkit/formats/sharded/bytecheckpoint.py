"""A ByteCheckpoint: `global_step_N/` with `model/`, `optimizer/` and more, or `model/` itself."""

from __future__ import annotations

from dataclasses import replace

from shardkit.formats.bytecheckpoint import is_bytecheckpoint_metadata, open_bytecheckpoint_files
from shardkit.formats.sharded.checkpoint import Checkpoint
from shardkit.formats.sharded.dcp_directory import as_checkpoint
from shardkit.formats.sharded.nearby import asset_directories, inner, listing

_MODEL = "model"
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
        layout="bytecheckpoint",
        writer="ByteCheckpoint",
        assets=asset_directories(directory, path),
        skipped=tuple((name, _OTHERS[name]) for name in sorted(listing(path) & _OTHERS.keys())),
    )


def _model_in(path: str) -> str | None:
    directory = inner(path, _MODEL)
    return directory if directory is not None and is_bytecheckpoint_metadata(directory) else None
