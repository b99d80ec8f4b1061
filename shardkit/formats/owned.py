"""Whose a file is that lies where an output goes: shardkit's own is replaced, a person's never is.

Names decide. What the manifest of an output lists is ours, edited or not. Without a manifest ours is what the format has:
the files of a DCP directory, or the weights, config, tokenizer and processor files of a Hub model. People edit cards,
licences and code: these are ours only if they are what the run writes. Everything else is somebody's, except for what
systems leave behind.
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
"""Names of weight files in a store: those of two outputs differ."""
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

Made = Mapping[str, Callable[[], bytes]]
"""By name, what returns the content that a run puts there. A name that ends with "/" is a folder with nothing in it."""


class OutputKind(Enum):
    """What an output is; the value is the file that makes it one, in a store."""

    SHARDED = METADATA
    HUB = HUB_INDEX


class Whose(Enum):
    """To whom a file belongs."""

    OURS = "ours"
    OURS_UNCHANGED = "ours if it is what the run writes"
    NOBODYS = "nobody's"
    PERSONS = "a person's"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What is shardkit's in a directory, as far as something there says so."""

    kind: OutputKind
    listed: Collection[str]
    """Names below the directory that manifests list."""
    by_format: bool
    """What the format has is ours too: there is an output, and no manifest lists all of its files."""
    folders: Collection[str]
    """Where our files may lie, below the directory."""
    run_names: Collection[str] = ()
    """Names of what the run puts there too."""
    is_stored: bool
    """It lies in a store, where nothing is replaced but what has the same name."""


def whose(name: str, claim: Claim) -> Whose:
    """Say whose a file is. Pure.

    Args:
        name: below the directory, with "/".
        claim: what is ours there.
    """
    if is_nobodys(name):
        return Whose.NOBODYS
    is_ours = name in claim.listed or name == manifest.NAME or (claim.by_format and _has_format(name, claim))
    if not is_ours:
        return Whose.PERSONS
    return Whose.OURS_UNCHANGED if is_text(name) else Whose.OURS


def is_nobodys(name: str) -> bool:
    """True for a file or folder that a system leaves behind, or for one in such a folder."""
    if f"{name}/".startswith(f"{_OF_HUGGING_FACE}/"):
        return True
    return any(fnmatchcase(part, pattern) for part in name.split("/") for pattern in _NOBODYS)


def is_models_own(name: str, folders: Collection[str] = ()) -> bool:
    """True for a weight file, index, config, tokenizer or processor file of a Hub model, and for its card, licence and code.

    Args:
        name: below the model's directory.
        folders: of modules with weights of their own.
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
        return is_models_own(name, claim.folders) or name in claim.run_names
    return (not folder or is_data_folder(folder)) and (
        base == METADATA or base.endswith((".distcp", ".chunks.json"))
    )


def refusal(path: str, shown: str, kind: OutputKind, run_files: Made | None) -> OutputExists | None:
    """Return why a directory may not be replaced: something in it is neither ours nor nobody's; None if it may.

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


def content_of(path: str) -> Callable[[], bytes]:
    """Return what reads a file that a run copies, if it is a small one."""
    return partial(read_small, path, os.path.basename(path), _MAX_TEXT)


def _listdir(path: str) -> list[str]:
    try:
        return storage.listdir(path)
    except OSError:
        return []


def is_output(path: str, kind: OutputKind) -> bool:
    """True for a directory that looks like an output of a kind, by the names in it."""
    names = _listdir(path)
    if kind is OutputKind.HUB:
        return any(map(_WEIGHTS.fullmatch, names))
    return METADATA in names or manifest.NAME in names


def written_in(path: str) -> tuple[OutputKind, Made]:
    """Return the kind of an output of shardkit in a directory, and its files, which are read when they are compared."""
    kind, files = None, dict[str, Callable[[], bytes]]()
    with suppress(ShardkitError, OSError):
        kind = _said(os.path.join(path, manifest.NAME)).kind
    for here, folders, names in storage.walk(path):
        inside = "" if here == path else f"{os.path.relpath(here, path)}/"
        files |= {inside + name: content_of(os.path.join(here, name)) for name in names}
        if inside and not (folders or names):
            files[inside] = bytes
    return kind or (OutputKind.SHARDED if METADATA in files else OutputKind.HUB), files


def find_foreign(path: str, kind: OutputKind, run_files: Made | None) -> list[str]:
    """Return a line for each file or folder in a directory that is neither ours nor nobody's.

    Args:
        path: of a directory, or of one in a store.
        kind: of the output that is going to replace it.
        run_files: what the run puts there; None if that is not known yet, and no text is looked into.

    Raises:
        ResourceError: it cannot be listed or read.
    """
    if storage.lexists(path) and (storage.islink(path) or not storage.isdir(path)):
        return [escape(os.path.basename(path))]
    claim, foreign = _claim(path, kind, run_files or {}), list[str]()
    try:
        for here, folders, names in storage.walk(path, onerror=_unless_gone):
            inside = os.path.relpath(here, path)
            inside = "" if inside == os.curdir else f"{inside}/"
            passed = [folder for folder in sorted(folders) if is_nobodys(f"{inside}{folder}")]
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
        raise ResourceError(f"{escape(path)} cannot be looked through: {error.strerror}") from error
    return foreign


def _unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _may_lie_in_store(folder: str, claim: Claim) -> bool:
    """True for a folder that stays where it is when an output is replaced, and that nobody names any more."""
    return is_job_folder(folder) or (claim.kind is OutputKind.SHARDED and is_data_folder(folder))


def _foreign_files(path: str, names: Sequence[str], claim: Claim, run_files: Made | None) -> Iterator[str]:
    for name in names:
        to = whose(name, claim)
        if to is Whose.PERSONS:
            yield escape(name)
        elif (
            to is Whose.OURS_UNCHANGED
            and run_files is not None
            and not _is_made(os.path.join(path, name), run_files.get(name))
        ):
            yield f"{escape(name)}: it is not what this run writes there"


def _is_made(place: str, make: Callable[[], bytes] | None) -> bool:
    """True if a text is what a run puts there."""
    try:
        return make is not None and content_of(place)() == make()
    except (ShardkitError, OSError) as error:  # a link that leads nowhere, a pipe: nothing of ours
        _raise_failed(error, place)
        return False


def _raise_failed(error: ShardkitError | OSError, path: str) -> None:
    """Raise the error of a disk that fails for now: what it does not give is not somebody else's for that.

    Raises:
        ResourceError: a file that is there, and that this user may read, cannot be read.
    """
    if not (storage.isfile(path) and storage.access(path, os.R_OK)):
        return
    if isinstance(error, ResourceError):
        raise error
    if isinstance(error, OSError):
        raise ResourceError(f"{escape(path)} cannot be read: {error.strerror}") from error


def _claim(path: str, kind: OutputKind, run_files: Made) -> Claim:
    """Look into a directory for what says which files are ours."""
    names, is_stored = _listdir(path), not location_of(path).renames
    listed, lists_all = _listed(path, kind)
    if kind is OutputKind.HUB:
        is_output = any(map(_WEIGHTS.fullmatch, names))
        folders = {name for name in names if is_asset_folder(name)}
        with suppress(ShardkitError):
            folders |= set(module_folders(path))
    else:
        is_output = METADATA in names
        folders = set() if is_stored else {name for name in names if is_data_folder(name)}
        for folder in sorted(folders):
            listed |= {f"{folder}/{name}" for name in _listed(os.path.join(path, folder), kind)[0]}
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


def _listed(path: str, kind: OutputKind) -> tuple[set[str], bool]:
    """Return the files that the manifests of a directory and its folders list; and whether they are a whole output."""
    try:
        summary = _said(os.path.join(path, manifest.NAME))
    except (ShardkitError, OSError) as error:
        _raise_failed(error, os.path.join(path, manifest.NAME))
        return set(), False
    if summary.kind is not kind:
        return set(), False
    files = {*summary.files}
    for folder in summary.folders:
        inside = _listed(os.path.join(path, folder), kind)[0]
        files |= {f"{folder}/{name}" for name in (*inside, manifest.NAME)}
    return files, summary.lists_all


class _Said(NamedTuple):
    """What a manifest says of whose files are."""

    kind: OutputKind | None
    """Of the output that it was written with; None for a list of somebody's files, which claims nothing."""
    files: Collection[str]
    folders: Sequence[str]
    """Those with manifests of their own."""
    lists_all: bool
    """False for one of an early version, which listed the weights alone."""


_summaries: dict[FileStamp, _Said] = {}
"""What manifests say that were read lately: a run asks three times, and that of many tensors takes a second."""


def _said(path: str) -> _Said:
    """Return the content of a manifest.

    Raises:
        ShardkitError, OSError: it is not there, damaged, or may not be read.
    """
    stamp = FileStamp.of(storage.stat(path))
    if stamp not in _summaries:
        content = manifest.read(os.path.dirname(path))
        if len(_summaries) >= _MAX_KNOWN:
            _summaries.clear()
        _summaries[stamp] = _Said(None, (), (), False) if content is None else _summed_up(content)
    return _summaries[stamp]


def _summed_up(content: manifest.Manifest) -> _Said:
    files = {file.name for file in manifest.every_file(content)}
    if isinstance(content, manifest.HubModel):
        return _Said(OutputKind.HUB, files, (), content.others is not None)
    if isinstance(content, manifest.FileList):
        is_ours = content.folders is not None or content.writer == "shardkit"
        return _Said(OutputKind.SHARDED if is_ours else None, files, content.folders or (), True)
    return _Said(OutputKind.SHARDED, {*files, METADATA}, (), True)
