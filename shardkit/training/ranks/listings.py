"""Let one rank read listings, headers and metadata of a source, and send them to all others.

A store rejects requests if hundreds of ranks list it at once. Headers of safetensors files, and the metadata of a DCP
directory, would otherwise be read by each rank.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator

from shardkit.errors import ShardkitError
from shardkit.files import home, shared_reads, stores
from shardkit.files.location import location_of
from shardkit.formats.contract import has_any, listing
from shardkit.formats.dcp import METADATA
from shardkit.formats.hub.directory import open_model
from shardkit.formats.hub.repo import cached_model
from shardkit.training.ranks.agree import agreed, broadcast_json, world

_OPENING = "opening the source"


def share_listings(
    paths: Iterable[object],
    look: Callable[[], object],
    *,
    revision: str | None = None,
    variant: str | None = None,
) -> None:
    """Let rank 0 read a source's listings and headers, and send them to the others; every rank calls it.

    Nothing is sent for paths that are not in a store and have neither safetensors files nor `.metadata`, nor for
    pre-sharded directories, whose ranks do not read `.metadata`.

    Args:
        paths: the paths that this rank will open.
        look: opens them. If it fails, each rank reads for itself.
        revision, variant: revision and variant of a repo. Only cached files of a repo are read here, because the
            others would have to wait for a download.

    Raises:
        ResourceError: a rank died, or did not respond within the process group's timeout.
    """
    rank, size = world()
    if size == 1:
        return
    source_paths = (
        [os.fspath(path) for path in paths if isinstance(path, (str, os.PathLike))] if rank == 0 else []
    )
    with (
        agreed(_OPENING) as exchanged,
        contextlib.suppress(ShardkitError, OSError),
        shared_reads.recording() as notes,
    ):
        exchanged.mine = any(map(is_shared_source, source_paths))
        if exchanged.mine:
            look()
        for path in source_paths:
            if (folder := cached_model(path, revision, variant)) is not None:
                exchanged.mine = True
                open_model(folder, variant=variant)
    if not exchanged.of_all[0]:
        return
    listings = [stores.known(), home.known_homes(), notes.to_plain()] if rank == 0 else None
    store_listings, homes, reads = broadcast_json(listings, 0, phase=_OPENING)
    if rank != 0:
        stores.learn(store_listings)
        home.learn_homes(homes)
        shared_reads.learn(reads)


def is_shared_source(path: object) -> bool:
    """True for a source whose listings or headers one rank reads for all."""
    if not isinstance(path, (str, os.PathLike)):
        return False
    path = os.fspath(path)
    return location_of(path).is_listed_once or any(map(_has_shared_files, _levels(path)))


def _has_shared_files(names: Collection[str]) -> bool:
    return has_any(names, "*.safetensors") or (METADATA in names and not has_any(names, "*.chunks.json"))


def _levels(path: str) -> Iterator[Collection[str]]:
    """Yield the names in a directory, then those in each directory in it, which may be the checkpoint."""
    names = listing(path)
    yield names
    for name in names:
        if "." not in name:
            yield listing(os.path.join(path, name))
