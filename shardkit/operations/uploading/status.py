"""What runs have left in a store that nobody has committed, and giving it up."""

from __future__ import annotations

import os
from dataclasses import dataclass

from shardkit.files import stores
from shardkit.files.home import is_data_folder
from shardkit.files.remote.writers import writer_of
from shardkit.formats.dcp import METADATA
from shardkit.operations.uploading.place import HUB_INDEX, MARKED_WEIGHTS, PROBE


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredStatus:
    """What lies in a store for an output, and is not part of it."""

    num_files: int
    """Whole files that no marker names: of a run that has not ended, or of an output that was replaced."""
    file_bytes: int
    num_uploads: int
    """Files that are on their way."""
    sent_bytes: int
    """Of their parts."""


def status_in_store(output: str, *, abort: bool) -> tuple[bool, StoredStatus]:
    """Tell whether an output is there, and what else lies there; or remove the rest.

    Args:
        output: a place in a store.
        abort: end the uploads, and remove the files. Runs that are still at work end with an error.

    Raises:
        ResourceError: the store does not answer.
    """
    path = stores.plain(output)
    store = writer_of(path)
    markers = [found for name in (METADATA, HUB_INDEX) if (found := store.get(os.path.join(path, name)))]
    named = b"".join(content for content, _ in markers)
    left = [
        (each, size)
        for each, size in store.objects(path)
        if (top := data_name(each.removeprefix(path + "/"))) and top.encode() not in named
    ]
    under_way = [each for each in store.uploads(path) if data_name(each.path.removeprefix(path + "/"))]
    sent = [
        part.size for each in under_way for part in (store.sent_parts(each.path, each.upload) or {}).values()
    ]
    if abort:
        for each in under_way:
            store.abort(each.path, each.upload)
        for each_path, _ in left:
            store.delete(each_path)
    return bool(markers), StoredStatus(
        num_files=len(left),
        file_bytes=sum(size for _, size in left),
        num_uploads=len(under_way),
        sent_bytes=sum(sent),
    )


def data_name(name: str) -> str:
    """Return the name at the top of what a run writes before it commits; "" for anything else.

    Args:
        name: relative to the output.
    """
    top, _, below = name.partition("/")
    is_ours = is_data_folder(top) if below else MARKED_WEIGHTS.fullmatch(top) or top.startswith(PROBE)
    return top if is_ours else ""
