"""What one rank looks up for all: listings of stores, since hundreds of ranks that list at once are turned away, and
headers of safetensors files, which each rank would open once more for it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable

from shardkit.errors import ShardkitError
from shardkit.files import home, stores
from shardkit.formats.contract import has_any, listing
from shardkit.formats.hub import shared_headers
from shardkit.training.ranks.agree import agreed, broadcast_json, world


def share_listings(paths: Iterable[object], look: Callable[[], object], *, phase: str) -> None:
    """Have the first rank look at a source, and the others know what it has found; every rank calls it.

    Paths elsewhere than in a store, and without safetensors files, cost two messages and nothing else.

    Args:
        paths: of this rank: what it will look at.
        look: opens them. If that fails, each rank will see for itself.
        phase: for the message if a rank died.

    Raises:
        ResourceError: a rank died, or did not come within the process group's timeout.
    """
    rank, size = world()
    if size == 1:
        return
    is_told = rank == 0 and any(map(is_looked_at, paths))
    with agreed(phase), contextlib.suppress(ShardkitError, OSError), shared_headers.noted() as headers:
        if is_told:
            look()
    said = [stores.known(), home.known(), list(headers.items())] if is_told else None
    told = broadcast_json(said, 0, phase=phase)
    if told is not None and rank != 0:
        stores.learn(told[0])
        home.learn(told[1])
        shared_headers.learn(told[2])


def is_looked_at(path: object) -> bool:
    """True for a source of which one rank looks something up for all."""
    if not isinstance(path, (str, os.PathLike)):
        return False
    path = os.fspath(path)
    return stores.is_remote(path) or has_any(listing(path), "*.safetensors")
