"""Where an output lies in a store.

    sharded checkpoint    OUT/.metadata            the marker, which names what lies in data-<hash>
                          OUT/data-<hash>/...      everything else
    Hub model             OUT/model.safetensors.index.json    the marker, which names files with the hash in their names
                          OUT/...                             everything else

The marker is written last, by one request that succeeds only if nobody was faster: that is the commit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from shardkit.core.text import escape, listed
from shardkit.errors import UsageError
from shardkit.files import manifest, storage, stores
from shardkit.files.home import is_data_folder
from shardkit.files.remote.writers import WRITABLE, writer_of
from shardkit.files.shared_store import is_shared_folder
from shardkit.formats.dcp import METADATA
from shardkit.formats.hub.assets import is_asset, is_asset_folder

MARKED_WEIGHTS = re.compile(r"model-[0-9a-f]{8}-\d{5}-of-\d{5}\.safetensors")
HUB_INDEX = "model.safetensors.index.json"
PROBE = ".shardkit-probe-"
"""How the names of objects begin by which a store is tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A place that may be written."""

    path: str
    """Such as `s3://BUCKET/KEY`, without a "/" at its end."""
    marker: str
    """Name of the file that makes it an output."""
    etag: str | None
    """Of the marker that is to be replaced; None if there is none."""

    @property
    def is_flat(self) -> bool:
        """True if all files lie side by side, as those of a Hub model do."""
        return self.marker != METADATA

    def mark(self, plan_hash: str) -> str:
        """Return what the names of the data of a plan have in them, and the marker names."""
        return plan_hash[:8] if self.is_flat else f"data-{plan_hash[:16]}"

    def data(self, plan_hash: str) -> str:
        """Return the directory that the files of a plan go to."""
        return self.path if self.is_flat else os.path.join(self.path, self.mark(plan_hash))


def check_target(output: str, source: str | None, marker: str, *, overwrite: bool) -> Target:
    """Return a place in a store that may be written.

    Args:
        output: as the user gave it.
        source: what is read, or None if it lies in a cache of its own.
        marker: name of the file that makes it an output.
        overwrite: an existing output of the same kind may be replaced.

    Raises:
        UsageError: an output is there, or something else; it is the source, lies in it or around it; the store can only
            be read.
        ResourceError: the store does not answer.
    """
    shown = escape(output)
    if not output.startswith(WRITABLE):
        raise UsageError(
            f"{shown}: this store is read only so far",
            hint="write to s3://, gs:// or az://, or to a local directory",
        )
    path = stores.plain(output)
    if source is not None:
        _check_apart(path, storage.realpath(source), shown)
    found = writer_of(path).head(f"{path}/{marker}")
    if found is not None and not overwrite:
        raise UsageError(f"{shown} exists", hint="choose another name, or replace it: --overwrite")
    stores.forget()
    names = storage.listdir(path) if storage.isdir(path) else []
    folders = [name for name in names if storage.isdir(os.path.join(path, name))]
    others = [name for name in names if not _may_lie_there(name, name in folders, marker)]
    if others:
        raise UsageError(
            f"{shown} exists and holds what is no part of such an output: {listed(sorted(others))}; it is not replaced",
            hint="choose another name",
        )
    return Target(path=path, marker=marker, etag=None if found is None else found.etag)


def _may_lie_there(name: str, is_folder: bool, marker: str) -> bool:
    """True for what an output of this kind has at the top, or a run left there that did not end."""
    if name.startswith(PROBE) or name == marker or (is_folder and is_shared_folder(name)):
        return True
    if marker == METADATA:
        return is_folder and is_data_folder(name)
    if is_folder:
        return is_asset_folder(name)
    return bool(MARKED_WEIGHTS.fullmatch(name) or name in (manifest.NAME, ".gitattributes") or is_asset(name))


def check_one_folder(folders: Sequence[str]) -> None:
    """Refuse a checkpoint whose parts lie in folders: no single request makes all of them visible.

    Raises:
        UsageError: it is one.
    """
    if list(folders) != [""]:
        raise UsageError(
            f"this checkpoint lies in folders ({listed(list(folders))}), which a store cannot make visible all at once",
            hint="write it into a local directory, and copy that with the store's own tool",
        )


def _check_apart(path: str, source: str, shown: str) -> None:
    mine, theirs = path + "/", source + "/"
    if mine.startswith(theirs) or theirs.startswith(mine):
        relation = "is" if mine == theirs else "lies inside" if mine.startswith(theirs) else "contains"
        raise UsageError(
            f"the destination {shown} {relation} the source", hint="choose a destination apart from it"
        )
