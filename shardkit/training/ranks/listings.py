"""What lies in a store, listed by one rank for all: hundreds of ranks that list at once are turned away."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

from shardkit.errors import ShardkitError
from shardkit.files import home, stores
from shardkit.training.ranks.agree import agreed, broadcast_json, world


def share_listings(paths: Iterable[object], look: Callable[[], object], *, phase: str) -> None:
    """Have the first rank look at a source, and the others know what it has listed; every rank calls it.

    Paths elsewhere than in a store cost two messages and nothing else.

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
    is_told = rank == 0 and any(map(stores.is_remote, paths))
    with agreed(phase), contextlib.suppress(ShardkitError, OSError):
        if is_told:
            look()
    told = broadcast_json([stores.known(), home.known()] if is_told else None, 0, phase=phase)
    if told is not None and rank != 0:
        stores.learn(told[0])
        home.learn(told[1])
