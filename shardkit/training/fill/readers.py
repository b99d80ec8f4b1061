"""Which ranks read and send to which others."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Literal, NamedTuple

from shardkit.errors import SourceError
from shardkit.training.ranks.agree import gather_json
from shardkit.training.ranks.context import Weights
from shardkit.training.ranks.local import LocalShard

SourceRank = Literal["global", "node", "replica"]


class Told(NamedTuple):
    """What a rank says of itself."""

    identity: str | None
    """Of the weights that it sees; None where it cannot open them."""
    reason: str | None
    """Why not."""
    group: str
    """Ranks with the same one are served by one source."""


def choose_sources(
    shards: Sequence[LocalShard], weights: Weights | None, unavailable: str | None, source_rank: SourceRank
) -> list[int]:
    """Return the source rank of every rank; the first of each group that can open the source. Every rank calls it.

    Args:
        shards: of this rank.
        weights: opened by this rank, or None.
        unavailable: why not.
        source_rank: "global", "node" or "replica".

    Raises:
        SourceError: on all ranks: a group without a rank that can open the source, or two that see other weights.
    """
    group = ""
    if source_rank != "global":
        group = _node() if source_rank == "node" else _replica(shards)
    mine = Told(None if weights is None else weights.identity, unavailable, group)
    told = [Told(*each) for each in gather_json(mine, phase="choosing source ranks")]
    found: dict[str, int] = {}
    for rank, each in enumerate(told):
        if each.identity is not None:
            found.setdefault(each.group, rank)
    problems = [
        f"rank {rank}: {(each.reason or 'cannot open the source').splitlines()[0]}"
        for rank, each in enumerate(told)
        if each.group not in found
    ]
    if problems:
        raise SourceError(
            f"no rank of some {source_rank} can open the source" if found else "no rank can open the source",
            problems=problems,
            hint="source_rank='global' needs one rank that can" if found else None,
        )
    first = told[min(found.values())].identity
    others = [rank for rank in found.values() if told[rank].identity != first]
    if others:
        raise SourceError(
            "source ranks see different weights",
            problems=[f"rank {rank}: other weights than rank {min(found.values())}" for rank in others],
            hint="copy the same weights to every node, or use source_rank='global'",
        )
    return [found[each.group] for each in told]


def _node() -> str:
    """torchrun numbers the nodes; without it the name of the host tells them apart."""
    return f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}"


def _replica(shards: Sequence[LocalShard]) -> str:
    """Return the place on the axes that replicate every sharded tensor: `dp_replicate` of an HSDP mesh."""
    widest = max(
        (shard.replicas.mesh for shard in shards if shard.replicas.mesh is not None),
        key=lambda mesh: mesh.size(),
        default=None,
    )
    coordinate = widest.get_coordinate() if widest is not None else None
    if coordinate is None:
        return ""
    axes = set(range(len(coordinate)))
    for shard in shards:
        if shard.replicas.mesh == widest:
            axes.intersection_update(shard.replicas.axes)
    return str([coordinate[axis] for axis in sorted(axes)])
