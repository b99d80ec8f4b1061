"""Every rank fills its own shards straight from storage."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from shardkit.core.regions import Region, intersect
from shardkit.training.fill.compare import compare_together
from shardkit.training.fill.match import Wanted
from shardkit.training.fill.reading import Filled, plan_reads, run_reads
from shardkit.training.fill.replicas import copy_to_replicas, divide
from shardkit.training.ranks.agree import agreed
from shardkit.training.ranks.context import Weights
from shardkit.transfer.checks import SourceCheck
from shardkit.transfer.sources import SourceFiles


def fill_direct(wanted: Sequence[Wanted], weights: Weights, *, check_source: bool = True) -> Filled:
    """Fill shards from storage; every rank calls it. What several ranks hold is read once and sent to the others.

    Args:
        wanted: what this rank holds, from `match`.
        weights: opened by this rank.
        check_source: compare what is read with what the source records.

    Returns:
        What this rank filled, by FQN.

    Raises:
        ShardkitError: on all ranks, when any cannot read, or reads something other than was recorded; naming them.
    """
    mine, shared, repeated = divide(wanted)
    with contextlib.ExitStack() as stack:
        with agreed("reading shards from storage"):
            regions: dict[str, list[Region]] = {}
            for item in mine:
                if item.region.num_elements:
                    regions.setdefault(item.entry.fqn, []).append(item.region)
            catalog = weights.located(regions).catalog
            check = SourceCheck(catalog) if check_source else None
            sources = stack.enter_context(SourceFiles(catalog.files, check=check))
            reads = [
                read
                for item in mine
                for read in plan_reads(
                    catalog.tensors[item.entry.fqn], catalog, item.region, item.target, item.shard.fqn
                )
            ]
            filled = run_reads(reads, sources)
            if check is None:
                sources.check_unchanged()
        if check is not None:
            check.leave_chunks(
                row
                for item in repeated
                for row in catalog.tensors[item.entry.fqn].chunk_ids
                if _lies_in(catalog.chunks.region(row), item.region)
            )
            filled.checked = compare_together(check, sources, {item.entry.fqn for item in wanted})
    copy_to_replicas(shared, filled)
    return filled


def _lies_in(inner: Region, outer: Region) -> bool:
    return intersect(inner, outer) == inner
