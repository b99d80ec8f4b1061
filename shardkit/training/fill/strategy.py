"""Decide which ranks read: every rank for itself, or source ranks for all; and fill shards accordingly."""

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
from shardkit.training.fill.replicas import copy_to_replicas, divide_reads, regions_of
from shardkit.training.fill.samples import keep_files_open, take_samples, versions
from shardkit.training.ranks.agree import agreed, log_once, run_where_possible, shown_once, world
from shardkit.training.ranks.local import LocalShard

_FITTING = "comparing the source with the model"
_COMPARING = "comparing the ranks' sources"

Strategy = Literal["auto", "direct", "broadcast"]
SourceRank = Literal["global", "node", "replica"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """The arguments of `finalize` about reading.

    Raises:
        UsageError: the strategy or the source rank is unknown.
    """

    strategy: Strategy = "auto"
    """"direct": every rank reads its own shards. "broadcast": source ranks read and send. "auto": direct if
    possible."""
    source_rank: SourceRank = "global"
    """The ranks that share one source rank: all, those of a node, or those of a replica."""
    check_source: bool = True
    """Compare the data with the checksums in the source."""

    def __post_init__(self) -> None:
        for name, choices in (("strategy", get_args(Strategy)), ("source_rank", get_args(SourceRank))):
            value = getattr(self, name)
            if value not in choices:
                raise UsageError(f"{name} must be one of {', '.join(choices)}, not {escape(str(value))!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FillPlan:
    """The decision of all ranks about reading a source."""

    supply: Supply
    """The weights that this rank can read."""
    sources: Sequence[int] | None
    """The source rank of every rank; None if each reads for itself."""
    check_source: bool
    """Compare the data with the checksums in the source."""
    located: Weights | None = None
    """The supply's weights with the chunks that this rank reads, if they are known already."""


@contextlib.contextmanager
def plan_fill(shards: Sequence[LocalShard], supply: Supply, options: ReadOptions) -> Iterator[FillPlan]:
    """Decide which ranks read, before any of them does. Files that are opened for it stay open in the context.

    Every rank calls it.

    Args:
        shards: this rank's shards, with memory.
        supply: the weights that fill them.
        options: the user's options; equal on all ranks.

    Raises:
        ShardkitError: as `choose_sources`, or if the source does not fit.
    """
    with keep_files_open(supply) as supply:
        sources, located = choose_sources(shards, supply, options), None
        if sources is None and options.strategy == "auto" and world()[1] > 1:
            located, error, able = _locate(shards, supply)
            if len(able) < world()[1]:  # the able ranks read for the others
                supply = supply if error is None else replace(supply, weights=None, unavailable=str(error))
                sources = choose_sources(shards, supply, options)
        yield FillPlan(supply=supply, sources=sources, check_source=options.check_source, located=located)


def _locate(
    shards: Sequence[LocalShard], supply: Supply
) -> tuple[Weights | None, BaseException | None, list[int]]:
    """Find the chunks that this rank reads; every rank calls it.

    Returns:
        (the weights with these chunks or None, this rank's error or None, the ranks without an error).
    """
    weights = supply.weights
    assert weights is not None
    with agreed(_FITTING):
        parts = match(shards, supply)
    regions = regions_of(divide_reads(parts)[0])
    return run_where_possible(
        lambda: weights.located(regions),
        lambda error: isinstance(error, (SourceError, ResourceError)),
        phase="opening the source",
    )


def fill_shards(shards: Sequence[LocalShard], plan: FillPlan) -> Filled:
    """Fill shards by a plan: this rank reads them, or its source rank sends them. Every rank calls it.

    Args:
        shards: this rank's shards, with memory.
        plan: the plan, from `plan_fill`.

    Returns:
        The counts of filled elements and read bytes.

    Raises:
        ShardkitError: on all ranks, if any rank cannot read, or its data does not have the recorded checksum; the error
            names these ranks.
    """
    if plan.sources is not None:
        return fill_broadcast(shards, plan.supply, plan.sources, check_source=plan.check_source)
    weights = plan.located or plan.supply.weights
    assert weights is not None
    with agreed(_FITTING):
        parts = match(shards, replace(plan.supply, weights=weights))
    mine, shared = divide_reads(parts)
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


class _RankView(NamedTuple):
    """The source as one rank sees it."""

    identity: str | None
    """Identity of the weights; None if the rank cannot open them."""
    reason: str | None
    """Why the rank cannot open them, or None."""
    is_version: bool
    """True if the identity is of versions in a store, and no bytes were compared."""
    group: str
    """Name of the group of ranks that share one source rank."""
    options: str
    """The rank's `ReadOptions` as text."""


def choose_sources(shards: Sequence[LocalShard], supply: Supply, options: ReadOptions) -> list[int] | None:
    """Return the source rank of every rank, or None if each reads for itself; every rank calls it.

    A source rank is the first of its group that can open the source. The decision and its reason are logged once.

    Args:
        shards: this rank's shards, from which its replica of an HSDP mesh is determined.
        supply: this rank's supply, in `keep_files_open`.
        options: the user's options; equal on all ranks.

    Raises:
        UsageError: on all ranks: their options differ.
        SourceError: on all ranks: too few of them can open the source for these options, or source ranks see
            different weights.
    """
    group = ""
    if options.source_rank != "global":
        group = _node() if options.source_rank == "node" else _replica(shards)
    options_text = f"{options.strategy}, {options.source_rank}, check_source={options.check_source}"
    for compares_bytes in (False, True):
        with agreed(_COMPARING) as exchanged:
            exchanged.mine = [*_identity(supply, options, compares_bytes=compares_bytes), group, options_text]
        sights = [_RankView(*answer) for answer in exchanged.of_all]
        # Copies of the same weights, as in two regions of a store, have different versions.
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
def _refuse_other_options(sights: Sequence[_RankView]) -> None:
    if any(answer.options != sights[0].options for answer in sights):
        raise UsageError(
            "the ranks do not have the same strategy, source_rank and check_source",
            problems=[f"rank {rank}: {answer.options}" for rank, answer in enumerate(sights)],
        )


def _identity(
    supply: Supply, options: ReadOptions, *, compares_bytes: bool
) -> tuple[str | None, str | None, bool]:
    """Return (identity of this rank's weights or None, why they cannot be read, `is_version`), see `_RankView`."""
    weights = supply.weights
    if weights is None:
        return None, supply.unavailable, False
    if world()[1] == 1 or (options.strategy, options.source_rank) == ("broadcast", "global"):
        return weights.identity, None, False  # only one rank reads
    if weights.has_all_checksums and options.check_source:
        return weights.identity, None, False  # each rank compares all its data with checksums
    try:
        version = None if compares_bytes else versions(weights)
        return f"{weights.identity} {version or take_samples(weights)}", None, version is not None
    except ResourceError as error:
        return None, str(error), False


@shown_once()
def _all_read(sights: Sequence[_RankView], strategy: Strategy) -> bool:
    """True if all ranks can read the same weights. Otherwise False, or an error if no rank may read for others."""
    blind = [rank for rank, answer in enumerate(sights) if answer.identity is None]
    differing_ranks = [
        rank for rank, answer in enumerate(sights) if answer.identity not in (None, sights[0].identity)
    ]
    if not blind and not differing_ranks:
        log_once(f"weights: direct: all {len(sights)} ranks see the same weights")
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
    log_once(
        f"weights: broadcast, not direct: {problems[0]}", logging.WARNING if differing_ranks else logging.INFO
    )
    return False


@shown_once()
def _sources(sights: Sequence[_RankView], source_rank: SourceRank) -> list[int]:
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
    """Return one line with the reason why a rank cannot open the source."""
    return (reason or "cannot open the source").splitlines()[0]


def _node() -> str:
    """Return a name for this rank's node: the host's name, and the node's number if torchrun has set it."""
    return f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}"


def _replica(shards: Sequence[LocalShard]) -> str:
    """Return this rank's coordinates on the axes that replicate every sharded tensor (`dp_replicate`), as text."""
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
