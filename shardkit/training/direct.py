"""Every rank fills its own shards straight from storage."""

from __future__ import annotations

from collections.abc import Sequence

from shardkit.core.regions import Region
from shardkit.training.agree import agreed
from shardkit.training.context import Weights
from shardkit.training.match import Wanted
from shardkit.training.reading import Filled, plan_reads, run_reads
from shardkit.training.replicas import copy_to_replicas, divide
from shardkit.transfer.sources import SourceFiles


def fill_direct(wanted: Sequence[Wanted], weights: Weights) -> Filled:
    """Fill shards from storage; every rank calls it. What several ranks hold is read once and sent to the others.

    Args:
        wanted: what this rank holds, from `match`.
        weights: opened by this rank.

    Returns:
        What this rank filled, by FQN.

    Raises:
        ShardkitError: on all ranks, when any cannot read; naming them.
    """
    mine, shared = divide(wanted)
    with agreed("reading shards from storage"):
        regions: dict[str, list[Region]] = {}
        for item in mine:
            if item.region.num_elements:
                regions.setdefault(item.entry.fqn, []).append(item.region)
        catalog = weights.located(regions).catalog
        with SourceFiles(catalog.files) as sources:
            reads = [
                read
                for item in mine
                for read in plan_reads(
                    catalog.tensors[item.entry.fqn], catalog, item.region, item.target, item.shard.fqn
                )
            ]
            filled = run_reads(reads, sources)
            sources.check_unchanged()
    copy_to_replicas(shared, filled)
    return filled
