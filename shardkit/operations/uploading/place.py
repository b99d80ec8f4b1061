"""Where an output lies in a store.

    sharded checkpoint    OUT/.metadata            the marker, which names what lies in data-<hash>
                          OUT/data-<hash>/...      everything else
    Hub model             OUT/model.safetensors.index.json    the marker, which names files with the hash in their names
                          OUT/...                             everything else

The marker is written last, by one request that succeeds only if nobody was faster: that is the commit.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardkit.core.text import escape, listed
from shardkit.errors import UsageError
from shardkit.files import storage, stores
from shardkit.files.location import location_of
from shardkit.files.place.store import StoredOutput
from shardkit.files.remote.writers import writer_of
from shardkit.formats.owned import Made, OutputKind, refusal


def check_target(
    output: str,
    source: str | None,
    kind: OutputKind,
    *,
    overwrite: bool,
    made: Made | None = None,
    looks: bool = True,
) -> StoredOutput:
    """Return a place in a store that may be written.

    Args:
        output: as the user gave it.
        source: what is read, or None if it lies in a cache of its own.
        kind: of what is written.
        overwrite: an existing output of the same kind may be replaced.
        made: as for `owned.find_foreign`.
        looks: False puts the question off whose the files are that lie there.

    Raises:
        UsageError: an output is there, or something else; it is the source, lies in it or around it; the store can only
            be read.
        ResourceError: the store does not answer.
    """
    shown = escape(output)
    if not location_of(output).is_writable:
        raise UsageError(
            f"{shown}: this store is read only so far",
            hint="write to s3://, gs:// or az://, or to a local directory",
        )
    path = stores.plain(output)
    if source is not None:
        check_apart(path, source, shown)
    found = writer_of(path).head(f"{path}/{kind.value}")
    if found is not None and not overwrite:
        raise UsageError(f"{shown} exists", hint="choose another name, or replace it: --overwrite")
    stores.forget()
    # Without `overwrite` only what is equal may lie there: `check_beside` looks.
    refused = refusal(path, shown, kind, made, may_be_begun=not overwrite) if looks else None
    if refused is not None:
        raise refused
    return StoredOutput(path=path, marker=kind.value, etag=None if found is None else found.etag)


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


def check_apart(path: str, source: str, shown: str) -> None:
    """Refuse a destination that is the source, lies in it or around it.

    Raises:
        UsageError: it does.
    """
    mine, theirs = (f"{each.rstrip('/')}/" for each in (path, storage.realpath(source)))
    if mine.startswith(theirs) or theirs.startswith(mine):
        relation = "is" if mine == theirs else "lies inside" if mine.startswith(theirs) else "contains"
        raise UsageError(
            f"the destination {shown} {relation} the source", hint="choose a destination apart from it"
        )
