"""What a checkpoint directory is made of, for resharding: DCP directories, and files beside them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from shardkit import manifest
from shardkit.core.catalog import Catalog
from shardkit.core.dtypes import BY_NAME
from shardkit.core.regions import Region
from shardkit.core.text import escape
from shardkit.errors import SourceError
from shardkit.formats.dcp import is_dcp, open_dcp_lazily
from shardkit.formats.sharded.detect import layout_of, open_checkpoint

_MAX_DEPTH = 2  # checkpoint-2/optimizer_0/, step_2/distributed/
_MAX_ENTRIES = 20_000
_OWN = re.compile(r"(__\d+)?\.metadata|.*\.distcp|__\d+_\d+\.chunks\.json|" + re.escape(manifest.NAME))
_OF_A_RANK = re.compile(r"(?:^|[_-])rank[_-]?\d+\.|(?:rng_state|random_states)_\d+\.")
_OPTIMIZER = re.compile(r"(bf16_)?(zero_pp_)?optim")
_OTHER_DCP = ("bytecheckpoint", "megatron")  # `.metadata` of another kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The tensors and byte entries of one folder."""

    folder: str
    """Relative to the checkpoint; "" for the checkpoint itself."""
    catalog: Catalog
    """Raw extents; a byte entry is a tensor of bytes."""
    objects: tuple[str, ...]
    """Names of the byte entries."""
    paths: dict[str, tuple[str | int, ...]] | None
    """planner_data of the save."""
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A checkpoint, taken apart."""

    writer: str
    parts: tuple[Part, ...]
    siblings: tuple[str, ...]
    """Files that are copied as they are, relative to the checkpoint."""
    notes: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def take_apart(path: str) -> Parts:
    """Open every DCP directory of a checkpoint, or the one catalog of a checkpoint of another kind.

    Raises:
        SourceError, IntegrityError, ResourceError: as opening does.
    """
    layout = layout_of(path)
    folders = [] if layout in _OTHER_DCP or not os.path.isdir(path) else sorted(_dcp_folders(path))
    writer = open_checkpoint(path).writer
    if not folders:
        return _other(path)
    siblings, links = _siblings(path, set(folders))
    notes = [f"{len(links)} symbolic links are not copied: {', '.join(map(escape, links))}"] if links else []
    of_ranks = [name for name in siblings if _OF_A_RANK.search(os.path.basename(name))]
    if of_ranks:
        notes.append(
            f"{len(of_ranks)} files of single ranks are copied as they are, for the old world size: {_few(of_ranks)}"
        )
    states = [name for name in of_ranks if _OPTIMIZER.match(os.path.basename(name))]
    return Parts(
        writer=writer,
        parts=tuple(_open_part(path, folder) for folder in folders),
        siblings=tuple(siblings),
        notes=tuple(notes),
        warnings=(_no_optimizer(states),) if states else (),
    )


def _few(names: list[str]) -> str:
    return ", ".join([*map(escape, names[:3]), *["..."][: len(names) > 3]])


def _no_optimizer(states: list[str]) -> str:
    return (
        f"the optimizer's state was not resharded: {_few(states)} hold each rank's part without saying which; "
        "they fit the old world size only"
    )


def _dcp_folders(path: str, folder: str = "", depth: int = 0) -> Iterator[str]:
    here = os.path.join(path, folder)
    if is_dcp(here):
        yield folder
    if depth < _MAX_DEPTH:
        with os.scandir(here) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        for name in names:
            yield from _dcp_folders(path, os.path.join(folder, name), depth + 1)


def _siblings(path: str, folders: set[str]) -> tuple[list[str], list[str]]:
    """Return (files beside what is resharded, symbolic links), relative to the checkpoint."""
    found: list[str] = []
    links: list[str] = []
    for here, directories, names in os.walk(path):
        folder = os.path.relpath(here, path)
        folder = "" if folder == "." else folder
        for name in sorted((*names, *directories)):
            full, relative = os.path.join(here, name), os.path.join(folder, name)
            if os.path.islink(full):
                links.append(relative)
            elif os.path.isfile(full) and not (folder in folders and _OWN.fullmatch(name)):
                found.append(relative)
        directories.sort()
        if len(found) > _MAX_ENTRIES:
            raise SourceError(
                f"{escape(path)} holds more than {_MAX_ENTRIES} files beside the checkpoint",
                hint="give the checkpoint's own directory, not the run's",
            )
    return sorted(found), sorted(links)


def _open_part(path: str, folder: str) -> Part:
    opened = open_dcp_lazily(os.path.join(path, folder))
    catalog = opened.select(tuple(opened.catalog.tensors))
    placed = {name: place for name, place in opened.objects.items() if place is not None}
    if opened.transforms and placed:
        raise SourceError(
            "the byte entries of this checkpoint were saved through extensions, and cannot be carried over yet",
            problems=[escape(name) for name in placed],
            hint="load it with torch.distributed.checkpoint and save it without extensions",
        )
    files = {file.name: number for number, file in enumerate(catalog.files)}
    for name, place in placed.items():
        file = files[opened.catalog.files[place.file].name]
        chunk = (file, place.start, place.nbytes, Region((0,), (place.nbytes,)))
        catalog.add_tensor(name, BY_NAME["uint8"], (place.nbytes,), iter([chunk]))
    return Part(
        folder=folder,
        catalog=catalog,
        objects=tuple(placed),
        paths=opened.catalog.paths,
        notes=opened.catalog.notes,
    )


def _other(path: str) -> Parts:
    """A checkpoint that is no DCP directory becomes one, with all tensors that it has."""
    checkpoint = open_checkpoint(path)
    names = tuple(checkpoint.catalog.tensors)
    skipped = [f"{escape(name)} was not read: {escape(reason)}" for name, reason in checkpoint.skipped]
    part = Part(folder="", catalog=checkpoint.select(names), objects=(), paths=None, notes=checkpoint.notes)
    states = [name for name, _ in checkpoint.skipped if _OPTIMIZER.match(os.path.basename(name))]
    return Parts(
        writer=checkpoint.writer,
        parts=(part,),
        siblings=(),
        notes=tuple(skipped),
        warnings=(_no_optimizer(states),) if states else (),
    )
