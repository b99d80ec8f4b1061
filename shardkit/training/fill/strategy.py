"""Who reads for whom: every rank for itself, or source ranks for all; and filling so."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

from shardkit.core.text import escape
from shardkit.errors import ResourceError, SourceError, UsageError
from shardkit.training.fill.broadcast import fill_broadcast
from shardkit.training.fill.reading import (
    Filled,
    Supply,
    Weights,
    compare_together,
    match,
    plan_reads,
    run_reads,
    source_files,
)
from shardkit.training.fill.replicas import copy_to_replicas, divide, regions_of
from shardkit.training.fill.samples import kept_open, take_samples, versions
from shardkit.training.ranks.agree import agreed, look_where_possible, say, shown_once, world
from shardkit.training.ranks.local import LocalShard

_FITTING = "comparing the source with the model"
_COMPARING = "comparing the ranks' sources"

Strategy = Literal["auto", "direct", "broadcast"]
SourceRank = Literal["global", "node", "replica"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How shards are filled from a source; the arguments of `finalize`.

    Raises:
        UsageError: an unknown strategy or source rank.
    """

    strategy: Strategy = "auto"
    """"direct": every rank reads its own shards. "broadcast": source ranks read and send. "auto": direct if
    possible."""
    source_rank: SourceRank = "global"
    """Which ranks read for which others."""
    check_source: bool = True
    """Compare what is read with the checksums in the source."""

    def __post_init__(self) -> None:
        for name, choices in (("strategy", get_args(Strategy)), ("source_rank", get_args(SourceRank))):
            value = getattr(self, name)
            if value not in choices:
                raise UsageError(f"{name} must be one of {', '.join(choices)}, not {escape(str(value))!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FillPlan:
    """Who reads a source, as all ranks have agreed."""

    supply: Supply
    """What this rank can read."""
    sources: Sequence[int] | None
    """The source rank of every rank; None if each reads for itself."""
    check_source: bool
    """Compare what is read with the checksums in the source."""
    located: Weights | None = None
    """The supply's weights, if it is known already where lies what this rank reads."""


@contextlib.contextmanager
def plan_fill(shards: Sequence[LocalShard], supply: Supply, options: ReadOptions) -> Iterator[FillPlan]:
    """Decide who reads for whom, before any rank reads; what is opened for that stays open in the block.

    Every rank calls it.

    Args:
        shards: of this rank, materialised.
        supply: what fills them.
        options: what the caller wants; the same on all ranks.

    Raises:
        ShardkitError: as `choose_sources`, and where the source does not fit.
    """
    with kept_open(supply) as supply:
        sources, located = choose_sources(shards, supply, options), None
        if sources is None and options.strategy == "auto" and world()[1] > 1:
            located, error, able = _locate(shards, supply)
            if len(able) < world()[1]:  # these read for the others
                supply = supply if error is None else replace(supply, weights=None, unavailable=str(error))
                sources = choose_sources(shards, supply, options)
        yield FillPlan(supply=supply, sources=sources, check_source=options.check_source, located=located)


def _locate(
    shards: Sequence[LocalShard], supply: Supply
) -> tuple[Weights | None, BaseException | None, list[int]]:
    """Open what this rank reads; return it, or else why it cannot, and the ranks that can. Every rank calls it."""
    weights = supply.weights
    assert weights is not None
    with agreed(_FITTING):
        parts = match(shards, supply)
    regions = regions_of(divide(parts)[0])
    return look_where_possible(
        lambda: weights.located(regions),
        lambda error: isinstance(error, (SourceError, ResourceError)),
        phase="opening the source",
    )


def fill_shards(shards: Sequence[LocalShard], plan: FillPlan) -> Filled:
    """Fill shards as planned: this rank reads them, or its source rank sends them. Every rank calls it.

    Args:
        shards: of this rank, materialised.
        plan: from `plan_fill`.

    Returns:
        What this rank filled, by FQN.

    Raises:
        ShardkitError: on all ranks, if any rank cannot read, or reads other bytes than were recorded; names these.
    """
    if plan.sources is not None:
        return fill_broadcast(shards, plan.supply, plan.sources, check_source=plan.check_source)
    weights = plan.located or plan.supply.weights
    assert weights is not None
    with agreed(_FITTING):
        parts = match(shards, replace(plan.supply, weights=weights))
    mine, shared = divide(parts)
    with agreed("reading shards from storage"):
        weights = weights.located(regions_of(mine))
        catalog = weights.catalog
        with source_files(weights, check_source=plan.check_source) as files:
            reads = [
                read
                for shard, entry, region, target in mine
                for read in plan_reads(catalog.tensors[entry.fqn], catalog, region, target, shard.fqn)
            ]
            filled = run_reads(reads, files)
            files.check_unchanged()
    if plan.check_source:
        filled.checked = compare_together(files.check)
    copy_to_replicas(shared, filled)
    return filled


class _Sight(NamedTuple):
    """What a rank says of itself."""

    identity: str | None
    """Of the weights that it sees; None if it cannot open them."""
    reason: str | None
    """Why it cannot."""
    is_version: bool
    """The identity is of objects in a store, and no bytes were compared."""
    group: str
    """Ranks of the same group are served by one source."""
    options: str


def choose_sources(shards: Sequence[LocalShard], supply: Supply, options: ReadOptions) -> list[int] | None:
    """Return the source rank of every rank, or None if each reads for itself; every rank calls it.

    A source rank is the first of its group that can open the source. What was decided, and why,
    is logged once.

    Args:
        shards: of this rank; they tell the replicas of a mesh from each other.
        supply: whether this rank can open the source; in `kept_open`.
        options: what the caller wants; the same on all ranks.

    Raises:
        UsageError: on all ranks: they want different things.
        SourceError: on all ranks: too few of them can open the source for what is wanted, or source ranks see
            different weights.
    """
    group = ""
    if options.source_rank != "global":
        group = _node() if options.source_rank == "node" else _replica(shards)
    options_text = f"{options.strategy}, {options.source_rank}, check_source={options.check_source}"
    for compares_bytes in (False, True):
        with agreed(_COMPARING) as exchanged:
            exchanged.mine = [*_identity(supply, options, compares_bytes=compares_bytes), group, options_text]
        sights = [_Sight(*answer) for answer in exchanged.of_all]
        # In stores the same weights may be of several versions: in two regions.
        if (
            not any(answer.is_version for answer in sights)
            or len({answer.identity for answer in sights} - {None}) == 1
        ):
            break
    _refuse_other_options(sights)
    if options.strategy != "broadcast" and _all_read(sights, options.strategy):
        return None
    return _sources(sights, options.source_rank)


@shown_once()
def _refuse_other_options(sights: Sequence[_Sight]) -> None:
    if any(answer.options != sights[0].options for answer in sights):
        raise UsageError(
            "the ranks do not have the same strategy, source_rank and check_source",
            problems=[f"rank {rank}: {answer.options}" for rank, answer in enumerate(sights)],
        )


def _identity(
    supply: Supply, options: ReadOptions, *, compares_bytes: bool
) -> tuple[str | None, str | None, bool]:
    """Return what tells this rank's weights from others; or None, and why they cannot be read; see `_Sight`."""
    weights = supply.weights
    if weights is None:
        return None, supply.unavailable, False
    if world()[1] == 1 or (options.strategy, options.source_rank) == ("broadcast", "global"):
        return weights.identity, None, False  # nobody's weights are compared
    if weights.has_all_checksums and options.check_source:
        return weights.identity, None, False  # each rank compares all that it reads
    try:
        version = None if compares_bytes else versions(weights)
        return f"{weights.identity} {version or take_samples(weights)}", None, version is not None
    except ResourceError as error:
        return None, str(error), False


@shown_once()
def _all_read(sights: Sequence[_Sight], strategy: Strategy) -> bool:
    """True if all ranks can read the same weights; otherwise raise, unless some may read for the others."""
    blind = [rank for rank, answer in enumerate(sights) if answer.identity is None]
    differing_ranks = [
        rank for rank, answer in enumerate(sights) if answer.identity not in (None, sights[0].identity)
    ]
    if not blind and not differing_ranks:
        say(f"weights: direct: all {len(sights)} ranks see the same weights")
        return True
    problems = [f"rank {rank}: {_first_line(sights[rank].reason)}" for rank in blind]
    problems = problems or [f"rank {rank}: other weights than rank 0" for rank in differing_ranks]
    if strategy == "direct" or len(blind) == len(sights):
        raise SourceError(
            f"{len(problems)} of {len(sights)} ranks cannot read the source by themselves",
            problems=problems,
            hint="make it readable on every node, or use strategy='broadcast'"
            if len(blind) < len(sights)
            else None,
        )
    say(
        f"weights: broadcast, not direct: {problems[0]}", logging.WARNING if differing_ranks else logging.INFO
    )
    return False


@shown_once()
def _sources(sights: Sequence[_Sight], source_rank: SourceRank) -> list[int]:
    """Return the source rank of every rank: the first of its group that can open the source."""
    source_of: dict[str, int] = {}
    for rank, answer in enumerate(sights):
        if answer.identity is not None:
            source_of.setdefault(answer.group, rank)
    problems = [
        f"rank {rank}: {_first_line(answer.reason)}"
        for rank, answer in enumerate(sights)
        if answer.group not in source_of
    ]
    SourceError.raise_for(
        problems,
        f"no rank of some {source_rank} can open the source" if source_of else "no rank can open the source",
        hint="source_rank='global' needs only one rank that can" if source_of else None,
    )
    first = min(source_of.values())
    differing_ranks = [rank for rank in source_of.values() if sights[rank].identity != sights[first].identity]
    SourceError.raise_for(
        [f"rank {rank}: other weights than rank {first}" for rank in differing_ranks],
        "source ranks see different weights",
        hint="copy the same weights to every node, or use source_rank='global'",
    )
    return [source_of[answer.group] for answer in sights]


def _first_line(reason: str | None) -> str:
    """Return why a rank cannot open the source, in one line."""
    return (reason or "cannot open the source").splitlines()[0]


def _node() -> str:
    """Name this rank's node: torchrun numbers the nodes; without it the host's name tells them apart."""
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
