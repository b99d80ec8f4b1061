"""Removes what saves and runs have left in an output that is replaced by writing its marker: data that nobody names.

`.metadata` names its folders `data-...`, the index of a Hub model its weight files with a hash in their names. What
has such a name, and is not named, is of a save that was replaced or of a run that did not end. So is what parts share while
they write, once it is old. What runs have left beside a local output goes too. Nothing else is touched.

Internal: import from `shardkit`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from shardkit.core.result import Result
from shardkit.core.text import escape
from shardkit.errors import ResourceError, SourceError, UsageError
from shardkit.files import storage, stores
from shardkit.files.home import MAX_METADATA, is_data_folder
from shardkit.files.location import location_of
from shardkit.files.place.store_notes import is_shared_folder
from shardkit.files.remote.contract import Underway
from shardkit.files.remote.writers import writer_of
from shardkit.files.shared import shared_of, staging_at
from shardkit.files.strict_json import read_small
from shardkit.formats.dcp import METADATA
from shardkit.formats.dcp.metadata import parse_metadata
from shardkit.formats.hub.directory import read_index
from shardkit.formats.owned import HUB_INDEX, MARKED_WEIGHTS
from shardkit.operations.destination import absolute
from shardkit.operations.leftovers import Leftover, leftovers, remove, warn_before
from shardkit.operations.parts.foreign import foreign_in
from shardkit.operations.uploading.status import upload_name

_AGE = re.compile(r"(\d{1,9})\s*([smhd])?", re.ASCII)
_UNITS = {None: 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, slots=True, kw_only=True)
class Unused:
    """A folder or file that nothing names."""

    name: str
    """Relative to the output."""
    num_files: int
    file_bytes: int
    age_s: float
    """Time since the newest of its files was written, by the store's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GcResult(Result):
    """What was removed, or with `dry_run` would be."""

    path: str
    dry_run: bool
    marker: str | None
    """The file that names the data, ".metadata" or the index; None if nothing was committed."""
    kept: tuple[str, ...]
    """The folders and files that it names."""
    removed: tuple[Unused, ...]
    removed_bytes: int
    young: tuple[Unused, ...]
    """Left alone, as they are younger than `older_than_s`: a run may be writing them."""
    num_ended: int
    """Files on their way into the store that nobody has completed, whose uploads were ended, or with `dry_run` would be."""
    older_than_s: int
    runs: tuple[Leftover, ...] = ()
    """Directories beside a local output in which runs work, or worked until they were killed; those that were removed, or
    with `dry_run` would be, say so."""
    warnings: tuple[str, ...] = ()

    def headline(self) -> str:
        """Return which output it is about."""
        return f"{'dry run: nothing was removed from ' if self.dry_run else ''}{escape(self.path)}"


def gc(
    path: str | os.PathLike[str],
    *,
    older_than: str | int = "1d",
    uncommitted: bool = False,
    dry_run: bool = False,
    on_warning: Callable[[str], object] | None = None,
) -> GcResult:
    """Delete what is left in an output of replaced saves and of runs that died: data that no `.metadata` or index names.

    Files that were on their way into the store when a run or a save was killed are ended too. Beside a local output it
    removes the directories of runs of this host that are over, however old; never files that shardkit has not put there.

    A job that still reads the save that was replaced fails, and says that an object was removed.

    Args:
        path: an output in an object store or on a local disk; it need not be there yet.
        older_than: age of what is removed, such as "12h", "30m" or "1d", or seconds. What is younger may be of a run
            that is under way. Give a longer one if your runs wait longer.
        uncommitted: go on where there is no `.metadata` and no index; then everything that is old enough is removed.
        dry_run: say what would be removed.
        on_warning: told each warning, before anything is removed.

    Raises:
        UsageError: not an age; or nothing was committed there, and `uncommitted` is false.
        SourceError: there is nothing, or `.metadata` or the index is damaged: nothing tells what is in use.
        ResourceError: it cannot be listed, read or removed.
    """
    given, age = os.fspath(path), parse_age(older_than)
    stores.forget()
    uploads = _under_way(given)
    destination = ""
    if location_of(given).renames:
        destination = absolute(given)
        own = staging_at(destination, foreign_in)
        if own is not None:  # what a run works in stands for the output
            destination = own.destination
    runs = leftovers(destination) if destination else ()
    shared = shared_of(destination, foreign_in) if destination else []
    names = _list(given) if not (uploads or runs or shared) or storage.isdir(given) else []
    marker, kept = _named(given, names)
    data = [
        name
        for name in names
        if (is_data_folder(name) and not storage.lexists(os.path.join(given, name, METADATA)))
        or MARKED_WEIGHTS.fullmatch(name)
        or is_shared_folder(name)
    ]
    if marker is None and (data or uploads) and not uncommitted:
        raise UsageError(
            f"{escape(given)}: nothing was committed there, so nothing tells what is in use",
            problems=sorted({*map(escape, data), *map(escape, uploads)}),
            hint="a run that is started again may go on with it; --uncommitted removes it",
        )
    warnings = warn_before(runs, on_warning, also_unknown=False, staying=shared)
    unused = [name for name in data if name not in kept and not storage.islink(os.path.join(given, name))]
    entries = [entry for name in unused if (entry := _look(given, name)) is not None]
    old = [entry for entry in entries if entry.age_s >= age]
    if old and not dry_run:
        _remove(given, [entry.name for entry in old])
    stale = [upload for group in uploads.values() for upload in group if time.time() - upload.begun_s >= age]
    for upload in stale if not dry_run else ():
        writer_of(upload.path).abort(upload.path, upload.upload)
    if dry_run:
        runs = tuple(replace(run, is_removed=run.owner == "dead") for run in runs)
    else:
        runs = remove(destination, runs, also_unknown=False)
    return GcResult(
        path=given,
        dry_run=dry_run,
        marker=marker,
        kept=tuple(kept),
        removed=tuple(old),
        removed_bytes=sum(entry.file_bytes for entry in old),
        young=tuple(entry for entry in entries if entry.age_s < age),
        num_ended=len(stale),
        older_than_s=age,
        runs=runs,
        warnings=warnings,
    )


def parse_age(text: str | int) -> int:
    """Return seconds from text: "90s", "30m", "12h", "1d", or a number of seconds.

    Raises:
        UsageError: the text is not an age.
    """
    match = _AGE.fullmatch(str(text).strip())
    if match is None:
        raise UsageError(
            f"not an age: {escape(str(text))!r}", hint="write a number with a unit, such as 30m, 12h or 1d"
        )
    return int(match[1]) * _UNITS[match[2]]


def _list(path: str) -> list[str]:
    if not storage.lexists(path):
        raise SourceError(
            f"{escape(path)}: no such directory", hint="give the directory that a run has written"
        )
    try:
        return sorted(storage.listdir(path))
    except OSError as error:
        raise ResourceError(f"{escape(path)} cannot be listed: {error.strerror}") from None


def _under_way(path: str) -> dict[str, list[Underway]]:
    """Return the uploads that nobody has completed, by the name at the top of an output."""
    uploads, location = dict[str, list[Underway]](), location_of(path)
    for upload in writer_of(path).uploads(path) if location.sends and location.is_writable else ():
        name = upload_name(upload.path.removeprefix(storage.absolute(path) + "/"))
        if name:
            uploads.setdefault(name, []).append(upload)
    return uploads


def _named(path: str, names: list[str]) -> tuple[str | None, list[str]]:
    """Return the marker of an output, and the names at its top that are in use."""
    if METADATA in names:
        data = read_small(os.path.join(path, METADATA), METADATA, MAX_METADATA, follow=False)
        files = parse_metadata(data, where=METADATA).files
        marker = METADATA
    elif HUB_INDEX in names:
        files = tuple(read_index(os.path.join(path, HUB_INDEX), HUB_INDEX).files)
        marker = HUB_INDEX
    else:
        return None, []
    used = {name.partition("/")[0] for name in files}
    return marker, [name for name in names if name in used]


def _look(path: str, name: str) -> Unused | None:
    """Return the folder or file of a name; None for an empty folder of a store, which does not exist."""
    here = os.path.join(path, name)
    files = [storage.lstat(file) for file in _files(here)]
    if not files and not location_of(path).has_directories:
        return None
    newest = max(status.st_mtime for status in files or [storage.lstat(here)])
    return Unused(
        name=name,
        num_files=len(files),
        file_bytes=sum(status.st_size for status in files),
        age_s=round(time.time() - newest, 3),
    )


def _files(path: str) -> Iterator[str]:
    if not storage.isdir(path):
        yield path
    for here, _, names in storage.walk(path):
        yield from (os.path.join(here, name) for name in names)


def _remove(path: str, names: list[str]) -> None:
    """Remove folders and files, unless one has come into use since they were looked at."""
    stores.forget()
    used = sorted({*names} & {*_named(path, _list(path))[1]})
    if used:
        raise ResourceError(
            f"{escape(path)}: something was committed meanwhile, nothing was removed",
            problems=[f"{escape(name)} is in use now" for name in used],
            hint="run it again when no run is under way there",
        )
    stuck = []
    for name in names:
        here = os.path.join(path, name)
        try:
            if not storage.isdir(here):
                storage.unlink(here)
            elif not storage.remove_tree(here):
                stuck.append(f"{escape(name)}: it may not be removed")
        except OSError as error:
            stuck.append(f"{escape(name)}: {error.strerror}")
    stores.forget()
    ResourceError.raise_for(
        stuck, f"{escape(path)}: not all could be removed", hint="give yourself permission to remove them"
    )
