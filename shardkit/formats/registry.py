"""Which format a checkpoint has, and opening it.

Told from marker files, never from guesses. The order avoids mistakes: exact markers first, then whose class
`.metadata` holds, then names that more than one writer uses.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple

from shardkit.core.text import escape, suggestion
from shardkit.errors import ResourceError, SourceError, UsageError
from shardkit.formats.beside import has_any, inner, listing, matching, own_name
from shardkit.formats.checkpoint import Checkpoint
from shardkit.formats.checkpoints import trainers
from shardkit.formats.hub.assets import list_assets, list_weights, weights_beside
from shardkit.formats.hub.files import PIPELINE

_MAX_SHOWN = 8


class Format(NamedTuple):
    """A format that can be opened."""

    name: str
    module: str
    """`room.module:name` in this package; imported when its turn comes, with `is_<name>` and `open_<name>`."""
    gate: tuple[str, ...]
    """Patterns of which one matches a name in such a directory; it saves importing the module."""
    what: str
    """What makes it one, for people."""


_EXACT = (
    Format(
        "megatron",
        "checkpoints.megatron:megatron",
        ("metadata.json",),
        "metadata.json of Megatron-Core beside .metadata",
    ),
    Format(
        "lightning", "checkpoints.lightning:lightning", ("meta.pt",), "meta.pt beside .metadata (Lightning)"
    ),
    Format(
        "verl",
        "checkpoints.verl:verl",
        ("fsdp_config.json", "model_world_size_*_rank_*.pt", "actor", "critic"),
        "model_world_size_W_rank_R.pt (verl)",
    ),
    Format(
        "deepspeed",
        "deepspeed.checkpoint:deepspeed",
        ("latest*", "global_step*", "zero", "zero_to_fp32.py", "*mp_rank_*_model_states.pt"),
        "latest and global_stepN/, or *mp_rank_*_model_states.pt (DeepSpeed)",
    ),
    Format(
        "accelerate",
        "checkpoints.accelerate:accelerate",
        ("pytorch_model_fsdp_*", ".metadata", "__*.metadata"),
        "pytorch_model_fsdp_0/ (accelerate, transformers Trainer)",
    ),
    Format(
        "torch-checkpointing",
        "checkpoints.torch_checkpointing:torch_checkpointing",
        ("metadata.pkl",),
        "metadata.pkl (torch_checkpointing)",
    ),
    Format(
        "bytecheckpoint",
        "checkpoints.bytecheckpoint:bytecheckpoint",
        (".metadata", "model"),
        ".metadata of ByteCheckpoint",
    ),
)
_BY_NAMES = (
    Format(
        "dcp",
        "dcp.checkpoint:dcp_directory",
        (".metadata", "*.metadata"),
        ".metadata or __R.metadata (torch DCP)",
    ),
    Format(
        "dcp-hf",
        "checkpoints.dcp_hf:dcp_hf",
        ("shard-*.safetensors", "sharded", "model"),
        "shard-R-model-I-of-N.safetensors (torch DCP, safetensors)",
    ),
    Format(
        "hub",
        "hub.checkpoint:hub_directory",
        ("*.safetensors", "*.json", "*.bin"),
        "model.safetensors, or an index and its files (Hub)",
    ),
    Format(
        "accelerate-bin",
        "checkpoints.accelerate:accelerate_bin",
        ("pytorch_model_fsdp*.bin",),
        "pytorch_model_fsdp_0_rankR.bin or pytorch_model_fsdp.bin (accelerate)",
    ),
)
_FULL_FILE = Format(
    "full-file", "checkpoints.full_file:full_file", (), "a file of torch.save with a whole state dict"
)
_FORMATS = {row.name: row for row in (*_EXACT, *_BY_NAMES, _FULL_FILE)}

# (pattern, what it is part of): a file that stands for the directory it lies in.
_PARTS = (
    *(".metadata", "*.distcp", "__*.metadata", "meta.pt", "shard-*-model-*-of-*.safetensors"),
    *("model_world_size_*_rank_*.pt", "pytorch_model_fsdp_*_rank*.bin", "shardkit.json"),
    *("*zero_pp_rank_*_states.pt", "*mp_rank_*_model_states.pt"),
)
_HUB_FILES = (
    PIPELINE,
    "*.safetensors",
    "*.safetensors.index.json",
    "*.gguf",
    "adapter_model.*",
    "pytorch_model*",
)
_OTHERS = (
    (".metadata.tmp", "the save did not finish: .metadata.tmp was never renamed"),
    ("*.distcp", "the save did not finish, or .metadata was not copied: there are .distcp files without it"),
    ("mp_rank_*", "a legacy Megatron checkpoint (mp_rank_*), which is not supported"),
    (".snapshot_metadata", "a TorchSnapshot, which is not supported"),
    ("_CHECKPOINT_METADATA", "an Orbax checkpoint (JAX), which is not supported"),
    ("*.tensors", "a tensorizer file, which is not supported"),
    ("optim_world_size_*", "an optimizer's state without the model"),
)


def format_of(path: str) -> str | None:
    """Return the format of a checkpoint, told from marker files alone; None where it is none.

    The formats: megatron, lightning, verl, deepspeed, accelerate, accelerate-bin, torch-checkpointing,
    bytecheckpoint, dcp, dcp-hf, hub, full-file; and those of trainers that put a directory around
    one of these (mini-trainer, olmo-core, nemo-automodel, nemo-rl, prime-rl, skyrl, verl-megatron, nemo).

    Args:
        path: a directory, or a file that is one or stands for one.
    """
    row, found = _look(directory_of(path))
    if found is not None and found.structure.format is not None:
        return found.structure.format
    if found is not None:
        row, _ = _look(found.weights)
    return row.name if row is not None else None


def open_checkpoint(path: str, *, format: str | None = None) -> Checkpoint:
    """Open a checkpoint of any format: its catalog, and how to get at the tensors.

    Args:
        path: a directory, a file that is one, or a file that belongs to one (`.metadata`, `meta.pt`).
        format: for the rare tie; None tells it from marker files.

    Raises:
        SourceError: nothing there, no checkpoint, or a damaged or incomplete one.
        UsageError: `format` is not the name of a format.
        IntegrityError, ResourceError: from opening it.
    """
    if not os.path.lexists(path):
        raise SourceError(
            f"{escape(path)}: no such file or directory", hint="check the path of the checkpoint"
        )
    directory = directory_of(path)
    if os.path.isdir(directory):
        _check_listing(directory)
    if format is not None:
        return _open(_named(format), directory)
    row, found = _look(directory)
    if found is not None:
        inside, _ = _look(found.weights)
        if inside is None:
            raise _nothing(found.weights)
        return trainers.inside(_open(inside, found.weights), found, directory)
    if row is None:
        raise _nothing(path)
    return _open(row, directory)


def stray_weights(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Yield (name, what it is) of the files with weights in a checkpoint's directory that are no part of what was read.

    Directories are listed, no file with weights is opened. What the format itself names as skipped is left out, and the files that
    lie beside the model's config and belong to it.
    """
    home = checkpoint.path
    if checkpoint.format == "hub" or not os.path.isdir(home):  # a Hub model says so itself
        return
    said = {name for name, _ in checkpoint.skipped}
    left = [name for name in list_weights(home) if name not in said and said.isdisjoint(name.split("/"))]
    read = {os.path.realpath(file.path) for file in checkpoint.catalog.files}
    if left:
        read |= {
            os.path.realpath(path) for folder in checkpoint.assets for path in list_assets(folder)[0].values()
        }
    left = [name for name in left if os.path.realpath(os.path.join(home, name)) not in read]
    yield from weights_beside(left, ())


def directory_of(path: str) -> str:
    """Return the directory for which a file of it stands; any other path as it is."""
    if os.path.isdir(path) or not has_any((os.path.basename(path),), *_PARTS):
        return path
    return os.path.dirname(path) or os.curdir


def _check_listing(directory: str) -> None:
    try:
        os.listdir(directory)
    except OSError as error:
        raise ResourceError(
            f"{escape(directory)} cannot be listed: {error.strerror}", hint="it must be readable by you"
        ) from None


def _look(path: str) -> tuple[Format | None, trainers.Found | None]:
    """Return the format of a path, or the structure around it."""
    if not os.path.isdir(path):
        return next((row for row in (_FORMATS["hub"], _FULL_FILE) if _is(row, path)), None), None
    names = listing(path)
    for row in _EXACT:
        if has_any(names, *row.gate) and _is(row, path):
            return row, None
    found = trainers.find_structure(path)
    if found is not None:
        return None, found
    return next((row for row in _BY_NAMES if has_any(names, *row.gate) and _is(row, path)), None), None


def _is(row: Format, path: str) -> bool:
    answer: Callable[[str], bool] = _function(row, "is")
    return answer(path)


def _function(row: Format, verb: str) -> Any:
    module, _, name = row.module.partition(":")
    return getattr(import_module(f"shardkit.formats.{module}"), f"{verb}_{name}")


def _open(row: Format, path: str) -> Checkpoint:
    opener: Callable[[str], Checkpoint] = _function(row, "open")
    checkpoint = opener(path)
    return trainers.recognise(checkpoint) if row.name == "dcp" else replace(checkpoint, path=path)


def _named(format: str) -> Format:
    if format not in _FORMATS:
        raise UsageError(
            f"unknown format {escape(format)!r}{suggestion(format, _FORMATS)}",
            hint=f"formats are: {', '.join(sorted(_FORMATS))}",
        )
    return _FORMATS[format]


def _nothing(path: str) -> SourceError:
    """Say what was looked for, what is there, and what it may be."""
    if not os.path.isdir(path):
        return SourceError(
            f"{escape(path)}: not a checkpoint that can be opened by itself",
            hint="give a checkpoint directory, a .safetensors file, or a file of torch.save with a state dict",
        )
    names = listing(path)
    if has_any(names, *_HUB_FILES) and not has_any(names, "*.distcp"):
        return _no_hub_model(names, path)
    shown = ", ".join(map(escape, sorted(names)[:_MAX_SHOWN])) + (", ..." if len(names) > _MAX_SHOWN else "")
    guess = next((text for pattern, text in _OTHERS if matching(names, pattern)), None)
    below = list(_checkpoints_below(path, names)) if guess is None else []
    if below:
        guess = f"it holds checkpoints: {', '.join(map(escape, below))}"
    looked_for = [] if guess else [f"looked for: {row.what}" for row in _FORMATS.values()]
    return SourceError(
        f"{escape(path)} is not a checkpoint{f': {guess}' if guess else ''}",
        problems=[f"it holds: {shown or 'nothing'}", *looked_for],
        hint="give one of them" if below else "give the directory that the trainer's save made",
    )


def _no_hub_model(names: frozenset[str], path: str) -> SourceError:
    """Say why files that look like a Hub model's are none that can be opened."""
    from shardkit.formats.hub.files import select_weights

    try:
        select_weights(names, own_name(path))
    except SourceError as error:
        return error
    return SourceError(f"{escape(path)} is not a checkpoint: its files cannot be opened")


def _checkpoints_below(path: str, names: frozenset[str]) -> Iterator[str]:
    """Yield the directories below that are checkpoints, the first few."""
    for name in sorted(names)[: _MAX_SHOWN**2]:
        directory = inner(path, name)
        if directory is not None and format_of(directory) is not None:
            yield own_name(directory)
