"""The table of all formats that shardkit opens: which files mark a format, which module opens it, what it can do.

A format is recognised by marker files, never guessed. The order of the table decides if a directory has the markers of
several: exact markers come first, then the directories that trainers put around a checkpoint, then names that more than
one writer uses.

A new format is one module with `OPENERS`, and one row here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module

from shardkit.core.text import count, escape, suggestion
from shardkit.errors import ResourceError, ShardkitError, SourceError, UsageError
from shardkit.files import manifest, storage, stores
from shardkit.files.home import folders_above, home_of, is_data_folder
from shardkit.files.strict_json import refuse_pointers
from shardkit.formats.contract import (
    NAME_A_REPO,
    Checkpoint,
    Opener,
    folder_name,
    has_any,
    listing,
    missing_path,
    with_path_hint,
)
from shardkit.formats.hub.assets import list_assets, list_weights, weights_beside
from shardkit.formats.hub.directory import choose_weights
from shardkit.formats.hub.files import empty_directory_error, unread_format
from shardkit.formats.trainers import plain_dcp

_log = logging.getLogger("shardkit")

_MAX_SHOWN = 8
_NO_CHECKPOINT = "not a checkpoint that can be opened by itself"
_GIVE = "give a checkpoint directory, a .safetensors file, or a file of torch.save with a state dict"


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format that can be opened: a row of the table."""

    name: str
    module: str
    """The module that opens it, relative to this package. Its `OPENERS` have an entry for `name`. It is imported only
    for a path that may have the format."""
    gate: tuple[str, ...]
    """Patterns. The directory's own name or a name in it must match one, else the module is not imported to check."""
    what: str
    """Its marker files, in words for people."""
    parts: tuple[str, ...] = ()
    """Patterns of files that a user may name instead of the directory around them."""
    is_sharded: bool = True
    """True if the ranks of a training job saved it. False for a Hub model or a file of `torch.save`, of any origin."""
    is_trainers: bool = True
    """True if its markers belong to one trainer; False if several writers use these names."""
    is_dcp_alone: bool = False
    """True if only its DCP directories are opened, so that it is complete if they are."""
    keeps_folders: bool = True
    """True if reshard keeps its DCP directories and the files beside them; False if reshard writes one directory."""
    follows_tracker: bool = False
    """True if the directory holds several saves, and stands for the save that its tracker file names."""


_EXACT = (
    Format(
        name="megatron",
        module="trainers.megatron",
        gate=("metadata.json",),
        what="metadata.json of Megatron-Core beside .metadata",
        keeps_folders=False,
    ),
    Format(
        name="lightning",
        module="trainers.lightning",
        gate=("meta.pt",),
        what="meta.pt beside .metadata (Lightning)",
        parts=("meta.pt",),
    ),
    Format(
        name="verl",
        module="trainers.verl",
        gate=("fsdp_config.json", "model_world_size_*_rank_*.pt", "actor", "critic"),
        what="model_world_size_W_rank_R.pt (verl)",
        parts=("model_world_size_*_rank_*.pt",),
    ),
    Format(
        name="deepspeed",
        module="deepspeed.checkpoint",
        gate=("latest*", "global_step*", "zero", "zero_to_fp32.py", "*mp_rank_*_model_states.pt"),
        what="latest and global_stepN/, or *mp_rank_*_model_states.pt (DeepSpeed)",
        parts=("*zero_pp_rank_*_states.pt", "*mp_rank_*_model_states.pt"),
        follows_tracker=True,
    ),
    Format(
        name="accelerate",
        module="trainers.accelerate",
        gate=("pytorch_model_fsdp_*",),
        what="pytorch_model_fsdp_0/ (accelerate, transformers Trainer)",
        is_dcp_alone=True,
    ),
    Format(
        name="torch-checkpointing",
        module="trainers.torch_checkpointing",
        gate=("metadata.pkl",),
        what="metadata.pkl (torch_checkpointing)",
    ),
)
_HUB = Format(
    name="hub",
    module="hub.directory",
    gate=("*.safetensors", "*.json", "*.bin"),
    what="model.safetensors, or an index and its files (Hub)",
    is_sharded=False,
    is_trainers=False,
)
_BY_NAMES = (
    Format(
        name="dcp",
        module="trainers.plain_dcp",
        gate=(".metadata", "*.metadata"),
        what=".metadata or __R.metadata (torch DCP)",
        parts=(".metadata", "*.distcp", "__*.metadata"),
        is_trainers=False,
        is_dcp_alone=True,
    ),
    Format(
        name="dcp-hf",
        module="dcp.hugging_face",
        gate=("shard-*.safetensors", "sharded", "model"),
        what="shard-R-model-I-of-N.safetensors (torch DCP, safetensors)",
        parts=("shard-*-model-*-of-*.safetensors",),
        is_trainers=False,
    ),
    _HUB,
    Format(
        name="accelerate-bin",
        module="trainers.accelerate",
        gate=("pytorch_model_fsdp*.bin",),
        what="pytorch_model_fsdp_0_rankR.bin or pytorch_model_fsdp.bin (accelerate)",
        parts=("pytorch_model_fsdp_*_rank*.bin",),
    ),
)
_FULL_FILE = Format(
    name="full-file",
    module="trainers.full_file",
    gate=(),
    what="a file of torch.save with a whole state dict",
    is_sharded=False,
    is_trainers=False,
)
_FORMATS = {row.name: row for row in (*_EXACT, *_BY_NAMES, _FULL_FILE)}
_PARTS = (manifest.NAME, *(pattern for row in _FORMATS.values() for pattern in row.parts))

_HUB_FILES = ("*.safetensors", "*.safetensors.index.json", "adapter_model.*", "pytorch_model*")


def recognise(path: str) -> Format | None:
    """Return the format of a checkpoint by its marker files alone, or None if the path is not a checkpoint.

    For a directory that a trainer puts around a checkpoint, this is the format of the checkpoint inside under the
    trainer's name, such as "olmo-core" or "skyrl".

    Args:
        path: a directory, a file that is a checkpoint, or a file that stands for its directory.
    """
    row, recognised = _find_format(home_of(directory_of(path)))
    if recognised is None:
        return row
    inside, _ = _find_format(home_of(recognised.weights))
    name = recognised.structure.format
    if name is None:
        return inside
    return replace(inside or _FORMATS["dcp"], name=name, is_trainers=True, is_dcp_alone=False)


def format_of(path: str) -> str | None:
    """Return the name of the format that `recognise` finds, or None if the path is not a checkpoint."""
    row = recognise(path)
    return None if row is None else row.name


def open_checkpoint(
    source: str,
    *,
    format: str | None = None,
    revision: str | None = None,
    variant: str | None = None,
    headers_only: bool = False,
) -> Checkpoint:
    """Open a checkpoint, as `shardkit.formats.open` describes."""
    if format is not None and format not in _FORMATS:
        raise UsageError(
            f"unknown format {escape(format)!r}{suggestion(format, _FORMATS)}",
            hint=f"formats are: {', '.join(sorted(_FORMATS))}",
        )
    source, revision = stores.settled(source, revision)
    if format == _HUB.name or revision is not None or variant is not None or not storage.lexists(source):
        opened = _open_hub(source, revision=revision, variant=variant, headers_only=headers_only)
    else:
        opened = _open_local(source, format)
    tensors = count(len(opened.catalog.tensors), "tensor")
    _log.debug("opened %s: %s, %s", escape(opened.path), escape(opened.writer), tensors)
    return opened


@storage.listed_once()  # all ranks of a job list a directory with files of all ranks
def _open_local(source: str, format: str | None) -> Checkpoint:
    directory = home_of(directory_of(source))
    if storage.isdir(directory):
        try:
            storage.listdir(directory)
        except OSError as error:
            raise ResourceError(
                f"{escape(directory)} cannot be listed: {error.strerror}", hint="it must be readable by you"
            ) from None
    if format is not None:
        return _open(_FORMATS[format], directory)
    row, recognised = _find_format(directory)
    if recognised is not None:
        weights = home_of(recognised.weights)
        inside, _ = _find_format(weights)
        if inside is None:
            raise _no_checkpoint_error(recognised.weights)
        return plain_dcp.checkpoint_of_structure(_open(inside, weights), recognised, directory)
    if row is None:
        raise _no_checkpoint_error(source)
    return _open(row, directory)


def _open_hub(source: str, *, revision: str | None, variant: str | None, headers_only: bool) -> Checkpoint:
    """Open a Hub model from wherever it is; a path that exists is never looked up on the Hub."""
    # Imported here, as other formats do not need these modules.
    from shardkit.formats.hub.directory import as_checkpoint, open_model
    from shardkit.formats.hub.repo import fetch_model, named_repo

    if storage.lexists(source):
        if revision is not None:
            raise UsageError(
                f"{escape(source)} is not a repo of the Hub: it has no revision {escape(revision)!r}",
                hint="leave --revision out, or give a repo id",
            )
        return as_checkpoint(source, open_model(source, variant=variant))
    repo = named_repo(source, revision)
    if repo is not None:
        try:
            model = fetch_model(repo.id, revision=repo.revision, variant=variant, headers_only=headers_only)
        except ShardkitError as error:
            raise with_path_hint(source, error) from None
        return as_checkpoint(model.directory, model)
    raise missing_path(source, hint=f"check the path, or {NAME_A_REPO}")


def stray_weights(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Yield (name, description) of each file in a checkpoint's directory that has weights and was not read.

    Files that the format itself reports as skipped, and assets of the model, are left out. Files are recognised by
    name; no file with weights is opened.
    """
    home = checkpoint.path
    if checkpoint.hub is not None or not storage.isdir(home):  # a Hub model names them itself
        return
    skipped_names, read = (
        {name for name, _ in checkpoint.remarks.skipped},
        {file.path for file in checkpoint.catalog.files},
    )
    stray_names = [
        name
        for name in list_weights(home)
        if os.path.join(home, name) not in read
        and skipped_names.isdisjoint((*name.split("/"), *folders_above(name), name))
    ]
    if stray_names:  # under another name, or by a link
        assets = (path for folder in checkpoint.contents.assets for path in list_assets(folder)[0].values())
        # Some names are those of entries.
        skipped = filter(storage.lexists, (os.path.join(home, name) for name in skipped_names))
        known_paths = {storage.realpath(path) for path in (*read, *assets, *skipped)}
        stray_names = [
            name for name in stray_names if storage.realpath(os.path.join(home, name)) not in known_paths
        ]
    yield from weights_beside(stray_names, ())


def directory_of(path: str) -> str:
    """Return the directory for a file that stands for it, such as `.metadata`; return any other path unchanged."""
    if storage.isdir(path) or not has_any((os.path.basename(path),), *_PARTS):
        return path
    return os.path.dirname(path) or os.curdir


def _find_format(path: str) -> tuple[Format | None, plain_dcp.RecognisedDirectory | None]:
    """Return (format, None), or (None, the trainer's structure) for a directory around a checkpoint."""
    if not storage.isdir(path):
        return next((row for row in (_HUB, _FULL_FILE) if _opener(row).matches(path)), None), None
    names = listing(path)
    row = next((row for row in _EXACT if _matches(row, path, names)), None)
    if row is not None:
        return row, None
    structure = plain_dcp.find_structure(path)
    if structure is not None:
        return None, structure
    return next((row for row in _BY_NAMES if _matches(row, path, names)), None), None


def _matches(row: Format, path: str, names: frozenset[str]) -> bool:
    return has_any(names | {folder_name(path)}, *row.gate) and _opener(row).matches(path)


def _opener(row: Format) -> Opener:
    openers: dict[str, Opener] = import_module(f"shardkit.formats.{row.module}").OPENERS
    return openers[row.name]


def _open(row: Format, path: str) -> Checkpoint:
    return replace(_opener(row).open(path), path=path)


def _no_checkpoint_error(path: str) -> SourceError:
    """Return the error for a path without a checkpoint: it lists the marker files, and what the directory holds."""
    if not storage.isdir(path):
        refuse_pointers({path: path})
        form = unread_format([os.path.basename(path)])
        return SourceError(f"{escape(path)}: {form or _NO_CHECKPOINT}", hint=_GIVE)
    names = listing(path)
    if not names:
        return empty_directory_error(path)
    if has_any(names, *_HUB_FILES) and not has_any(names, "*.distcp"):
        return _no_hub_model_error(names, path)
    shown = ", ".join(map(escape, sorted(names)[:_MAX_SHOWN])) + (", ..." if len(names) > _MAX_SHOWN else "")
    why = why_unfinished(path) or unread_format(names)
    looked_for = [] if why else [f"looked for: {row.what}" for row in _FORMATS.values()]
    return SourceError(
        f"{escape(path)} is not a checkpoint{f': {why}' if why else ''}",
        problems=[f"it holds: {shown}", *looked_for],
        hint="give the directory that the trainer's save made",
    )


def why_unfinished(path: str) -> str | None:
    """Return the evidence that a directory is a save that did not finish, or None."""
    names = listing(path)
    if ".metadata.tmp" in names:
        return "the save did not finish: .metadata.tmp was never renamed"
    if has_any(names, "*.distcp"):
        return "the save did not finish, or .metadata was not copied: there are .distcp files without it"
    if any(map(is_data_folder, names)):
        return "the save did not finish: .metadata is missing, which is written last"
    return None


def _no_hub_model_error(names: frozenset[str], path: str) -> SourceError:
    """Return the reason why files that look like a Hub model's cannot be opened, as an error."""
    try:
        choose_weights(path, names)
    except SourceError as error:
        return error
    return SourceError(f"{escape(path)} is not a checkpoint: its files cannot be opened")
