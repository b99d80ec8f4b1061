"""What lies in a store beside an output and is no part of it, and its removal."""

from __future__ import annotations

import os
from dataclasses import dataclass

from shardkit.core.threads import at_once
from shardkit.files.home import data_prefixes, is_data_folder
from shardkit.files.place.store import PROBE
from shardkit.files.place.store_notes import is_shared_folder
from shardkit.files.remote.contract import Underway
from shardkit.files.remote.writers import writer_of
from shardkit.formats.dcp import METADATA
from shardkit.formats.owned import HUB_INDEX, MARKED_WEIGHTS

MARKERS = (METADATA, HUB_INDEX)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredStatus:
    """What lies in a store for an output, and is not part of it."""

    num_files: int
    """Whole files that no marker names: of a run that has not ended, or of an output that was replaced."""
    file_bytes: int
    prefixes: tuple[str, ...]
    """How the paths of these files begin: of a folder, or of the weights of one Hub model."""
    num_uploads: int
    """Files that are on their way."""
    sent_bytes: int
    """Of their parts."""


def uncommitted(path: str) -> StoredStatus:
    """Tell what lies at a place in a store beside the output, and is no part of it.

    Raises:
        ResourceError: the store does not answer.
    """
    files, uploads = _look(path)
    names = "\n".join(name.removeprefix(f"{path}/") for name, _ in files)
    store = writer_of(path)
    parts = at_once(lambda each: store.sent_parts(each.path, each.upload) or {}, uploads)
    return StoredStatus(
        num_files=len(files),
        file_bytes=sum(size for _, size in files),
        prefixes=tuple(f"{path}/{name}" for name in data_prefixes(names.encode())),
        num_uploads=len(uploads),
        sent_bytes=sum(part.size for sent in parts for part in sent.values()),
    )


def remove_uncommitted(path: str) -> None:
    """End uploads, and remove files that no marker names. Runs that are still at work end with an error.

    Raises:
        ResourceError: the store does not answer.
    """
    store = writer_of(path)
    at_once(lambda each: store.abort(each.path, each.upload), _look(path)[1])
    files, _ = _look(path)  # something may have been committed meanwhile
    at_once(store.delete, [each for each, _ in files])


def _look(path: str) -> tuple[list[tuple[str, int]], list[Underway]]:
    """Return path and size of each file that no marker names, and the uploads under way."""
    store = writer_of(path)
    markers = at_once(store.get, [os.path.join(path, name) for name in MARKERS])
    named = b"".join(found[0] for found in markers if found is not None)
    objects = [(each.removeprefix(path + "/"), size) for each, size in store.objects(path)]
    whole = {name.partition("/")[0] for name, _ in objects if is_marker_of_folder(name)}
    files = [
        (f"{path}/{name}", size)
        for name, size in objects
        if (top := data_name(name)) and top not in whole and top.encode() not in named
    ]
    under_way = [each for each in store.uploads(path) if upload_name(each.path.removeprefix(path + "/"))]
    return files, under_way


def is_marker_of_folder(name: str) -> bool:
    """True for the `.metadata` of a save that another one was faster than: its folder is a whole checkpoint.

    Args:
        name: relative to the output.
    """
    folder, _, below = name.partition("/")
    return is_data_folder(folder) and below == METADATA


def data_name(name: str) -> str:
    """Return the name at the top of what a run writes before it commits; "" for anything else.

    Args:
        name: relative to the output.
    """
    top, _, below = name.partition("/")
    is_ours = is_data_folder(top) if below else MARKED_WEIGHTS.fullmatch(top) or top.startswith(PROBE)
    return top if is_ours else ""


def upload_name(name: str) -> str:
    """Return the name at the top of what a run or a part sends in parts before it commits; "" for anything else.

    Args:
        name: relative to the output.
    """
    top = name.partition("/")[0]
    return top if is_shared_folder(top) else data_name(name)
