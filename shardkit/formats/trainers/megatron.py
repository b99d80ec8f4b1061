"""Megatron-Core's `torch_dist` checkpoints: DCP with `metadata.json` and `common.pt` beside it.

Layers are stacked in one tensor with a leading dim, and the names are Megatron's own. Entries that are not
tensors have names like `..._extra_state/shard_0_2`. Tensors come as they are stored.

Source: Megatron-Core 0.16, dist_checkpointing/core.py (`CheckpointingConfig`) and strategies/torch.py.
"""

from __future__ import annotations

from dataclasses import replace

from shardkit.core.text import escape
from shardkit.errors import ResourceError, SourceError
from shardkit.files.links import read_inside
from shardkit.files.strict_json import parse_object
from shardkit.formats.contract import Checkpoint, Opener, asset_directories, listing
from shardkit.formats.dcp.directory import is_dcp, open_dcp_checkpoint

_CONFIG = "metadata.json"
_COMMON = "common.pt"
_BACKEND = "torch_dist"
_MAX_CONFIG = 1 << 20


def is_megatron(path: str) -> bool:
    """True for a directory whose `metadata.json` names one of Megatron's backends for sharded tensors."""
    return _backend(path) is not None


def open_megatron(path: str) -> Checkpoint:
    """Open a Megatron-Core checkpoint; tensors keep Megatron's names and stacked shapes.

    Raises:
        SourceError: another backend than torch_dist; or as for any DCP directory.
        ResourceError: a file may not be read.
    """
    backend = _backend(path)
    if backend != _BACKEND or not is_dcp(path):
        found = f"the backend {escape(str(backend))}" if backend != _BACKEND else "no .metadata"
        raise SourceError(
            f"{escape(path)}: a Megatron checkpoint with {found}; {_BACKEND} can be read",
            hint=f"convert it with Megatron to {_BACKEND} (--ckpt-format torch_dist)",
        )
    checkpoint = open_dcp_checkpoint(path)
    skipped = ((_COMMON, "arguments and other state of the trainer"),) if _COMMON in listing(path) else ()
    return replace(
        checkpoint,
        format="megatron",
        writer="Megatron-Core (torch_dist)",
        assets=asset_directories(path),
        skipped=(*checkpoint.skipped, *skipped),
        notes=(
            *checkpoint.notes,
            "names and shapes are Megatron's: layers are stacked in a leading dim, query, key and value are one tensor",
        ),
    )


def _backend(path: str) -> str | None:
    """Return `sharded_backend` of the directory's `metadata.json`, None if there is none."""
    try:
        content = parse_object(read_inside(path, _CONFIG, _MAX_CONFIG), _CONFIG)
    except (SourceError, ResourceError):
        return None
    backend = content.get("sharded_backend")
    return backend if isinstance(backend, str) else None


OPENERS = {"megatron": Opener(is_megatron, open_megatron)}
