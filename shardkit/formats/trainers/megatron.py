"""Megatron-Core's `torch_dist` checkpoints: DCP with `metadata.json` and `common.pt` beside it.

Equal layers are stacked in one tensor with a leading dim; layers that differ are stored one by one. The names are
Megatron's own, and the vocabulary may be padded. Entries that are not tensors have names like
`..._extra_state/shard_0_2`. Names and shapes are not changed here.

Source: Megatron-Core 0.16, dist_checkpointing/core.py (`CheckpointingConfig`) and strategies/torch.py.
"""

from __future__ import annotations

import re
from dataclasses import replace

from shardkit.core.text import escape
from shardkit.errors import ShardkitError, SourceError
from shardkit.files.links import locate
from shardkit.formats.contract import Checkpoint, Contents, Opener, asset_directories, listing, settings_in
from shardkit.formats.dcp.directory import is_dcp, open_dcp_checkpoint
from shardkit.formats.torchsave.file import open_torch_file
from shardkit.keys.rule_sets import Padding
from shardkit.pickles.policies import Fields

_CONFIG = "metadata.json"
_COMMON = "common.pt"
_BACKEND = "torch_dist"
_ONE_LAYER = re.compile(r"\.layers\.[0-9]+\.")


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
        actual = f"the backend {escape(str(backend))}" if backend != _BACKEND else "no .metadata"
        raise SourceError(
            f"{escape(path)}: a Megatron checkpoint with {actual}; only {_BACKEND} can be read",
            hint=f"convert it with Megatron to {_BACKEND} (--ckpt-format torch_dist)",
        )
    checkpoint = open_dcp_checkpoint(path)
    is_stacked = not any(map(_ONE_LAYER.search, checkpoint.catalog.tensors))
    stacked = "layers are stacked in a leading dim, " if is_stacked else ""
    skipped = ((_COMMON, "arguments and other state of the trainer"),) if _COMMON in listing(path) else ()
    return replace(
        checkpoint,
        format="megatron",
        writer="Megatron-Core (torch_dist)",
        contents=Contents(assets=asset_directories(path), padding=_padding(path)),
        remarks=checkpoint.remarks.plus(
            [f"names and shapes are Megatron's: {stacked}query, key and value are one tensor"], skipped
        ),
    )


def _padding(path: str) -> Padding | None:
    """Return the padding of the vocabulary from the trainer's arguments in `common.pt`; None without arguments.

    Source: Megatron-LM, megatron/training/tokenizer, `_vocab_size_with_padding`.
    """
    try:
        tree = open_torch_file(locate(path, _COMMON), _COMMON).tree
    except ShardkitError:  # the file is read only for the padding, so a damaged one does not matter
        return None
    args = tree.get("args") if isinstance(tree, dict) else None
    if not isinstance(args, Fields):
        return None
    numbers = {key: value for key, value in args.items.items() if type(value) is int and value > 0}
    unit, ranks = numbers.get("make_vocab_size_divisible_by"), numbers.get("tensor_model_parallel_size")
    return Padding(
        rows=numbers.get("padded_vocab_size"),
        multiple=unit * ranks if unit and ranks else None,
        used=numbers.get("vocab_size"),
    )


def _backend(path: str) -> str | None:
    """Return `sharded_backend` from the directory's `metadata.json`, or None."""
    backend = settings_in(path, _CONFIG).get("sharded_backend")
    return backend if isinstance(backend, str) else None


OPENERS = {"megatron": Opener(is_megatron, open_megatron)}
