"""Decide which files at an output's destination may be replaced: shardkit's own may, a person's never.

Names decide. A file is ours (shardkit's) if the manifest of the output there lists it, edited or not. Without a manifest,
the files of the format are ours: those of a DCP directory, or weights, config, tokenizer and processor files of a Hub
model. People edit cards, licences and code; these are ours only if they equal what the run writes. What systems leave
behind (`.DS_Store`, `__pycache__`) is nobody's and does not matter. Everything else is foreign: it is a person's, and
blocks `--overwrite`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from functools import partial
from typing import NamedTuple

from shardkit.core.catalog import FileStamp
from shardkit.core.text import escape, in_shell
from shardkit.errors import ResourceError, ShardkitError
from shardkit.files import manifest, storage
from shardkit.files.home import folders_above, is_data_folder
from shardkit.files.location import location_of
from shardkit.files.output.bucket import is_job_folder
from shardkit.files.output.contract import OutputExists
from shardkit.files.strict_json import read_small
from shardkit.formats.dcp import METADATA
from shardkit.formats.hub.adapter import ADAPTER_CONFIG
from shardkit.formats.hub.assets import (
    is_asset,
    is_asset_folder,
    is_tokenizer_folder,
    module_folders,
)

HUB_INDEX = "model.safetensors.index.json"
MARKED_WEIGHTS = re.compile(r"model-[0-9a-f]{8}-\d{5}-of-\d{5}\.safetensors")
"""Names of weight files in a store. A hash in them keeps two outputs from sharing a name."""
_WEIGHTS = re.compile(
    r"pytorch_lora_weights\.safetensors|(adapter_|diffusion_pytorch_)?model(\.[\w-]+?)?(-\d{5,6}-of-\d{5,6})?(\.\w+)?\.safetensors"
    r"(\.index(\.[\w-]+)?\.json)?|" + MARKED_WEIGHTS.pattern,
    re.ASCII,
)
# What desktops, network file systems, notebooks, Python, git and `hf download` leave in a directory.
_NOBODYS = (
    *(".DS_Store", "._*", "Thumbs.db", "desktop.ini", ".nfs*", ".fuse_hidden*", ".gitattributes"),
    *(".ipynb_checkpoints", "__pycache__"),
)
_CACHE, _OF_HUGGING_FACE = ".cache", ".cache/huggingface"
_TEXTS = ("*.md", "*.py", "readme*", "license*", "licence*", "notice*", "use_policy*")
_MAX_TEXT, _MAX_KNOWN = 64 << 20, 16

RunFiles = Mapping[str, Callable[[], bytes]]
"""Files that the run writes beside the weights: name -> function that returns the content. A name that ends with "/" is
an empty folder."""


class OutputKind(Enum):
    """The kind of an output; the value is the name of the file that completes it in a store."""

    SHARDED = METADATA
    HUB = HUB_INDEX


class Owner(Enum):
    """The owner of a file."""

    OURS = "ours"
    OURS_UNCHANGED = "ours if it is what the run writes"
    NOBODYS = "nobody's"
    PERSONS = "a person's"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Which files of a directory are ours."""

    kind: OutputKind
    listed: Collection[str]
    """Names that manifests list, relative to the directory."""
    by_format: bool
    """True if files of the format are ours too: the directory is an output, and no manifest lists all of its files."""
    folders: Collection[str]
    """Folders that may hold files of ours, relative to the directory."""
    run_names: Collection[str] = ()
    """Names of files that the run writes beside the weights."""
    is_stored: bool
    """True if the directory is in a store, where a file is replaced only by one of the same name."""


def owner_of(name: str, claim: Claim) -> Owner:
    """Return the owner of a file. Pure.

    Args:
        name: relative to the directory, with "/".
        claim: which files of the directory are ours.
    """
    if is_system_leftover(name):
        return Owner.NOBODYS
    is_ours = name in claim.listed or name == manifest.NAME or (claim.by_format and _has_format(name, claim))
    if not is_ours:
        return Owner.PERSONS
    return Owner.OURS_UNCHANGED if is_text(name) else Owner.OURS


def is_system_leftover(name: str) -> bool:
    """True for a file or folder that a system leaves behind, or that is inside such a folder."""
    if f"{name}/".startswith(f"{_OF_HUGGING_FACE}/"):
        return True
    return any(fnmatchcase(part, pattern) for part in name.split("/") for pattern in _NOBODYS)


def is_model_file(name: str, folders: Collection[str] = ()) -> bool:
    """True for any file of a Hub model: weights, index, config, tokenizer, processor, card, licence and code.

    Args:
        name: relative to the model's directory.
        folders: those of modules with weights of their own.
    """
    folder, _, base = name.rpartition("/")
    modules = [module for module in folders if not is_tokenizer_folder(module)]
    if folder and any(f"{folder}/".startswith(f"{module}/") for module in modules):
        return is_asset(base) or is_asset(name) or base.endswith((".json", ".safetensors", ".bin"))
    return _WEIGHTS.fullmatch(name) is not None or name == ADAPTER_CONFIG or is_asset(name)


def is_text(name: str) -> bool:
    """True for a file that people edit: a card, a licence, code."""
    base = name.rpartition("/")[2]
    return any(fnmatchcase(base.lower(), pattern) for pattern in _TEXTS)


def _has_format(name: str, claim: Claim) -> bool:
    folder, _, base = name.rpartition("/")
    if claim.kind is OutputKind.HUB:
        if claim.is_stored and _WEIGHTS.fullmatch(name):
            return name == HUB_INDEX or MARKED_WEIGHTS.fullmatch(name) is not None
        return is_model_file(name, claim.folders) or name in claim.run_names
    return (not folder or is_data_folder(folder)) and (
        base == METADATA or base.endswith((".distcp", ".chunks.json"))
    )


def replacement_refusal(
    path: str, shown: str, kind: OutputKind, run_files: RunFiles | None
) -> OutputExists | None:
    """Return the error for a directory that must not be replaced, as it holds foreign files; None if it may be replaced.

    Args:
        path, kind, run_files: as for `find_foreign`.
        shown: the directory's name in messages, safe to print.

    Raises:
        ResourceError: as `find_foreign`.
    """
    foreign = find_foreign(path, kind, run_files)
    if not foreign:
        return None
    names = [line.partition(":")[0] for line in foreign]
    what = "holds what shardkit did not write"
    if kind is OutputKind.HUB and not is_output(path, kind):
        what = "holds no weights of a Hub model"
    elif kind is OutputKind.SHARDED and any(map(_WEIGHTS.fullmatch, names)):
        what = "holds a Hub model"
    elif kind is OutputKind.SHARDED and not is_output(path, kind):
        what = "is not a sharded checkpoint"
    move = "move that somewhere else"
    if location_of(path).renames and storage.lexists(os.path.join(path, names[0])):
        name = names[0].rstrip("/")
        words = (f"{shown}/{name}", f"{shown}-{os.path.basename(name)}")
        move += f", as in `mv {' '.join(map(in_shell, words))}`"
    return OutputExists(
        f"{shown} exists and {what}: it is not replaced",
        problems=foreign,
        hint=f"{move}, or choose another name; no option removes it",
    )


def reader_of(path: str) -> Callable[[], bytes]:
    """Return a function that reads a file which the run copies; called for a large file, it raises."""
    return partial(read_small, path, os.path.basename(path), _MAX_TEXT)


def _listdir(path: str) -> list[str]:
    try:
        return storage.listdir(path)
    except OSError:
        return []


def is_output(path: str, kind: OutputKind) -> bool:
    """True if the names in a directory are those of an output of this kind."""
    names = _listdir(path)
    if kind is OutputKind.HUB:
        return any(map(_WEIGHTS.fullmatch, names))
    return METADATA in names or manifest.NAME in names


def output_in(path: str) -> tuple[OutputKind, RunFiles]:
    """Return the kind of shardkit's output in a directory, and its files, which are read only when they are compared."""
    kind, files = None, dict[str, Callable[[], bytes]]()
    with suppress(ShardkitError, OSError):
        kind = _summary_of(os.path.join(path, manifest.NAME)).kind
    for here, folders, names in storage.walk(path):
        inside = "" if here == path else f"{os.path.relpath(here, path)}/"
        files |= {inside + name: reader_of(os.path.join(here, name)) for name in names}
        if inside and not (folders or names):
            files[inside] = bytes
    return kind or (OutputKind.SHARDED if METADATA in files else OutputKind.HUB), files


def find_foreign(path: str, kind: OutputKind, run_files: RunFiles | None) -> list[str]:
    """Return a line for each foreign file or folder in a directory.

    Args:
        path: a directory on a disk or in a store.
        kind: of the output that will replace it.
        run_files: what the run writes beside the weights; None if not known yet: texts are not compared then.

    Raises:
        ResourceError: the directory cannot be listed, or a file cannot be read.
    """
    if storage.lexists(path) and (storage.islink(path) or not storage.isdir(path)):
        return [escape(os.path.basename(path))]
    claim, foreign = _find_claim(path, kind, run_files or {}), list[str]()
    try:
        for here, folders, names in storage.walk(path, onerror=_unless_gone):
            inside = os.path.relpath(here, path)
            inside = "" if inside == os.curdir else f"{inside}/"
            passed = [folder for folder in sorted(folders) if is_system_leftover(f"{inside}{folder}")]
            if claim.is_stored and not inside:
                passed += [folder for folder in folders if _may_lie_in_store(folder, claim)]
            other_folders = [
                folder
                for folder in sorted(folders)
                if folder not in passed
                and (f"{inside}{folder}" not in claim.folders or storage.islink(os.path.join(here, folder)))
            ]
            folders[:] = [
                folder for folder in folders if folder not in passed and folder not in other_folders
            ]
            foreign += [f"{escape(inside + folder)}/" for folder in other_folders]
            foreign += _foreign_files(path, [inside + name for name in sorted(names)], claim, run_files)
    except OSError as error:
        raise ResourceError(f"{escape(path)} cannot be searched: {error.strerror}") from error
    return foreign


def _unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _may_lie_in_store(folder: str, claim: Claim) -> bool:
    """True for a folder in a store that stays when its output is replaced; nothing refers to it any more."""
    return is_job_folder(folder) or (claim.kind is OutputKind.SHARDED and is_data_folder(folder))


def _foreign_files(
    path: str, names: Sequence[str], claim: Claim, run_files: RunFiles | None
) -> Iterator[str]:
    for name in names:
        to = owner_of(name, claim)
        if to is Owner.PERSONS:
            yield escape(name)
        elif (
            to is Owner.OURS_UNCHANGED
            and run_files is not None
            and not _is_run_content(os.path.join(path, name), run_files.get(name))
        ):
            yield f"{escape(name)}: it is not what this run writes there"


def _is_run_content(place: str, make: Callable[[], bytes] | None) -> bool:
    """True if the file at `place` equals what the run writes there."""
    try:
        return make is not None and reader_of(place)() == make()
    except (ShardkitError, OSError) as error:  # a link that leads nowhere, a pipe: nothing of ours
        _raise_failed(error, place)
        return False


def _raise_failed(error: ShardkitError | OSError, path: str) -> None:
    """Raise if reading failed because of the disk: an unreadable file must not count as foreign for that reason.

    Raises:
        ResourceError: the file exists, this user may read it, and reading failed.
    """
    if not (storage.isfile(path) and storage.access(path, os.R_OK)):
        return
    if isinstance(error, ResourceError):
        raise error
    if isinstance(error, OSError):
        raise ResourceError(f"{escape(path)} cannot be read: {error.strerror}") from error


def _find_claim(path: str, kind: OutputKind, run_files: RunFiles) -> Claim:
    """Return which files of a directory are ours, by its manifests and its names."""
    names, is_stored = _listdir(path), not location_of(path).renames
    listed, lists_all = _listed_files(path, kind)
    if kind is OutputKind.HUB:
        is_output = any(map(_WEIGHTS.fullmatch, names))
        folders = {name for name in names if is_asset_folder(name)}
        with suppress(ShardkitError):
            folders |= set(module_folders(path))
    else:
        is_output = METADATA in names
        folders = set() if is_stored else {name for name in names if is_data_folder(name)}
        for folder in sorted(folders):
            listed |= {f"{folder}/{name}" for name in _listed_files(os.path.join(path, folder), kind)[0]}
    folders |= {name.rstrip("/") for name in run_files if name.endswith("/")}
    parents = {parent for name in (*listed, *folders) for parent in folders_above(name)}
    return Claim(
        kind=kind,
        listed=listed,
        # In a store a later run without a manifest leaves the older one there, and weights of older outputs stay.
        by_format=(not lists_all or is_stored) and is_output,
        folders={_CACHE, *folders, *parents},
        run_names=run_files.keys(),
        is_stored=is_stored,
    )


def _listed_files(path: str, kind: OutputKind) -> tuple[set[str], bool]:
    """Return the files that the manifests of a directory and its folders list, and whether these are all of the output."""
    try:
        summary = _summary_of(os.path.join(path, manifest.NAME))
    except (ShardkitError, OSError) as error:
        _raise_failed(error, os.path.join(path, manifest.NAME))
        return set(), False
    if summary.kind is not kind:
        return set(), False
    files = {*summary.files}
    for folder in summary.folders:
        inside = _listed_files(os.path.join(path, folder), kind)[0]
        files |= {f"{folder}/{name}" for name in (*inside, manifest.NAME)}
    return files, summary.lists_all


class _ManifestSummary(NamedTuple):
    """The part of a manifest that decides which files are ours."""

    kind: OutputKind | None
    """Of the output that the manifest belongs to; None if it lists files of a source, which are not ours."""
    files: Collection[str]
    folders: Sequence[str]
    """Folders with manifests of their own."""
    lists_all: bool
    """False for a manifest of an early version, which listed the weights alone."""


_summaries: dict[FileStamp, _ManifestSummary] = {}
"""A cache by file stamp: a run needs each manifest three times, and one of many tensors takes a second to parse."""


def _summary_of(path: str) -> _ManifestSummary:
    """Return the summary of a manifest file, from the cache if the file has not changed.

    Raises:
        ShardkitError, OSError: the file is missing or damaged, or may not be read.
    """
    stamp = FileStamp.of(storage.stat(path))
    if stamp not in _summaries:
        content = manifest.read(os.path.dirname(path))
        if len(_summaries) >= _MAX_KNOWN:
            _summaries.clear()
        _summaries[stamp] = _ManifestSummary(None, (), (), False) if content is None else _summarise(content)
    return _summaries[stamp]


def _summarise(content: manifest.Manifest) -> _ManifestSummary:
    files = {file.name for file in manifest.every_file(content)}
    if isinstance(content, manifest.HubModel):
        return _ManifestSummary(OutputKind.HUB, files, (), content.others is not None)
    if isinstance(content, manifest.FileList):
        is_ours = content.folders is not None or content.writer == "shardkit"
        return _ManifestSummary(OutputKind.SHARDED if is_ours else None, files, content.folders or (), True)
    return _ManifestSummary(OutputKind.SHARDED, {*files, METADATA}, (), True)
