"""Files in the directory of a run, or of parts, that shardkit has not put there: they are named, and never removed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator
from functools import cache

from shardkit.core.text import escape, listed
from shardkit.errors import ResourceError, ShardkitError, SourceError
from shardkit.files import manifest, storage
from shardkit.files.shared import ASIDE, GONE, OLD, TAKEN, runs_of
from shardkit.files.staging import OWNER, Owner, nothing
from shardkit.formats.dcp import METADATA, chunk_list
from shardkit.formats.hub.assets import is_asset
from shardkit.formats.hub.base import SAVED_ASSETS
from shardkit.formats.owned import OutputKind, is_nobodys, is_output
from shardkit.operations.parts.agreement import SAVE, Agreement

_RECORD, _OF_EARLIER = "plan.json", "journal.jsonl"
_AT_THE_TOP = (OWNER, _RECORD, "committed.json", _OF_EARLIER)
_OF_ANY = re.compile(
    rf"{GONE}[^/]*/.+"  # an old output that was looked through
    rf"|{TAKEN}[^/]*/committed\.json",
    re.ASCII | re.DOTALL,
)
"""What lies in folders of runs and of parts, whatever else is there."""
_OF_SHARED = re.compile(r"done/\d+\.json|parts/\d+-of-\d+\.json", re.ASCII)
"""What else lies where there is a record."""
_OF_RUNS = re.compile(
    r"\.metadata(\..*)?|shardkit\.json|.*\.(distcp|chunks\.json|safetensors|safetensors\.index\.json|part)",
    re.DOTALL,
)
"""Names of files that runs of every version write, whatever the job."""


def foreign_in(path: str) -> list[str]:
    """Return the files of a staging directory that shardkit has not put there, relative to it."""
    of_parts, kind = _of_parts(path)
    is_shared = storage.lexists(os.path.join(path, _RECORD))  # whether it can be read or not
    # In `data` an old output lies in directories of one process alone. Without any of these, what stayed there is a person's.
    is_ours = is_shared or any(storage.lexists(os.path.join(path, name)) for name in (OWNER, _OF_EARLIER))

    @cache
    def lists(top: str) -> Callable[[str], bool]:
        # What appeared at the destination and is no such output was replaced before anybody could look: all of it stays.
        is_persons = (
            top.endswith(f"/{OLD}") and kind is not None and not is_output(os.path.join(path, top), kind)
        )
        return (lambda _: False) if is_persons else _listed(os.path.join(path, top))

    def is_known(name: str) -> bool:
        top, _, below = name.partition("/")
        is_data, (taken, _, rest) = top == "data", below.partition("/")
        if top.startswith(TAKEN) and taken in ("data", OLD):
            top, below, is_data = f"{top}/{taken}", rest, taken == "data"
        if is_nobodys(name) or name in _AT_THE_TOP or _OF_ANY.fullmatch(name):
            return True
        if top == "work":  # its name says whose it was
            return Owner.parse(below.partition("/")[0]) is not None
        if below and (is_data or top.startswith(TAKEN)):
            is_old = not is_data or (is_ours and not of_parts)
            return below in of_parts or (is_old and lists(top)(below))
        if below and top == ASIDE:
            # What goes back to its place is not removed.
            return storage.lexists(os.path.join(path, "data")) or lists(top)(below)
        return is_shared and _OF_SHARED.fullmatch(name) is not None

    return [name for name in files_in(path) if not is_known(name)]


def _of_parts(path: str) -> tuple[set[str], OutputKind | None]:
    """Return the names of the files that parts share there, with what describes them, and what output they make.

    There are none if none do, or none is known.
    """
    place = os.path.join(path, _RECORD)
    try:
        agreement = Agreement.read(place)
    except ShardkitError:
        return set(), None
    names = {name for name, _ in agreement.files}
    kind = OutputKind.HUB if agreement.command.verb == "consolidate" else OutputKind.SHARDED
    is_save = agreement.command.verb == SAVE
    return set() if is_save else names | _described(names) | set(agreement.beside), kind


def files_in(path: str) -> Iterator[str]:
    """Yield all files in a directory, relative to it; links to directories too."""
    for here, folders, names in storage.walk(path):
        links = [name for name in folders if storage.islink(os.path.join(here, name))]
        yield from sorted(os.path.relpath(os.path.join(here, name), path) for name in (*names, *links))


def _described(written: Collection[str]) -> set[str]:
    """Return the names of what a run writes beside its files of tensors."""
    folders = {os.path.dirname(name) for name in written} | {""}
    beside = {os.path.join(folder, name) for folder in folders for name in (METADATA, manifest.NAME)}
    indices = {"model.safetensors.index.json", "adapter_model.safetensors.index.json"}
    return beside | indices | {chunk_list.name_for(name) for name in written}


def _listed(directory: str) -> Callable[[str], bool]:
    """Return what is true for a file of an output that was replaced, as far as its manifest or its own name says."""
    try:
        said = manifest.read(directory)
    except ShardkitError:
        said = None
    if said is None:  # a save that did not come as far as its manifest

        def is_listed(name: str) -> bool:
            return is_asset(name.removeprefix(f"{SAVED_ASSETS}/"))
    else:
        known = {file.name for file in manifest.every_file(said)}

        def is_listed(name: str) -> bool:
            return is_asset(name) or name in known

    return lambda name: bool(_OF_RUNS.fullmatch(os.path.basename(name))) or is_listed(name)


def stays(path: str, foreign: Collection[str]) -> str:
    """Return the warning that files of a directory stay, given its path and theirs."""
    return f"{escape(path)}: not shardkit's, so this stays: {listed([*map(escape, foreign)])}"


def name_foreign(destination: str) -> Iterator[str]:
    """Yield a warning for each directory of a dead run with files that shardkit has not put there.

    They stay when a run removes it, or goes on in it.

    Args:
        destination: absolute.
    """
    for path in (run.path for run in runs_of(destination, nothing) if run.is_over):
        try:
            Agreement.read(os.path.join(path, _RECORD))
        except ResourceError:  # a disk that fails: nothing says which files are shardkit's
            continue
        except SourceError:
            pass
        if foreign := foreign_in(path):
            yield stays(path, foreign)
