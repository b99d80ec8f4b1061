"""What one rank looks up for all: listings of stores, since hundreds of ranks that list at once are turned away, and
headers of safetensors files and what describes a DCP directory, which each rank would open once more for it."""

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
    """Have the first rank look at a source, and the others know what it has found; every rank calls it.

    Paths elsewhere than in a store, without safetensors files, and without `.metadata`, cost one `agreed` and nothing
    else. So do pre-sharded directories: their ranks open no `.metadata`.

    Args:
        paths: of this rank: what it will look at.
        look: opens them. If that fails, each rank will see for itself.
        revision, variant: of a repo. What of it is not in the cache is not looked at: the others would wait for the
            download.

    Raises:
        ResourceError: a rank died, or did not come within the process group's timeout.
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
        exchanged.mine = any(map(is_looked_at, source_paths))
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


def is_looked_at(path: object) -> bool:
    """True for a source of which one rank looks something up for all."""
    if not isinstance(path, (str, os.PathLike)):
        return False
    path = os.fspath(path)
    return location_of(path).is_listed_once or any(map(_describes_others, _levels(path)))


def _describes_others(names: Collection[str]) -> bool:
    return has_any(names, "*.safetensors") or (METADATA in names and not has_any(names, "*.chunks.json"))


def _levels(path: str) -> Iterator[Collection[str]]:
    """Yield the names in a directory, and in each directory there: trainers put some around a checkpoint."""
    names = listing(path)
    yield names
    for name in names:
        if "." not in name:
            yield listing(os.path.join(path, name))
