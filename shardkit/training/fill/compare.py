"""Comparing a source with the CRC-32s in it, when several ranks have each read a part of it."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import asdict

from shardkit.core.text import count, format_size
from shardkit.training.ranks.agree import agreed, gather_json, world
from shardkit.transfer.checks import CheckedSource, SourceCheck, Unchecked
from shardkit.transfer.sources import SourceFiles

DAMAGED = "use another copy of the checkpoint; check_source=False takes the damaged bytes as they are"
_PHASE = "comparing the source with its checksums"
_log = logging.getLogger("shardkit")


def compare_together(check: SourceCheck, sources: SourceFiles, names: Iterable[str]) -> CheckedSource:
    """Combine what all ranks read of each entry, and compare it; every rank calls it.

    Args:
        check: knows what this rank read.
        sources: open; if little of an entry is missing, that is read.
        names: the catalog's tensors that any rank wanted.

    Returns:
        How much was compared, by all ranks together.

    Raises:
        IntegrityError: on all ranks: the source differs from its checksums, or changed; names the ranks that read it.
    """
    rank, size = world()
    told = gather_json(check.parts(), phase=_PHASE)
    rests, mine = [], {}
    with agreed(_PHASE):
        check.take_parts(told, rank)
        rests = check.missing_of_each()
        for rest in rests:
            if check.is_first_reader(rest.entry):
                mine[check.entries.key(rest.entry)] = sources.read_gaps(rest)
    gaps = {key: crcs for each in gather_json(mine, phase=_PHASE) for key, crcs in each.items()}
    with agreed(_PHASE):
        for rest in rests:
            crcs = gaps.get(check.entries.key(rest.entry))
            if crcs is not None and len(crcs) == len(rest.gaps):
                check.complete(rest, crcs)
        sources.check_unchanged()
        check.raise_differences(hint=DAMAGED)
    found = check.summary(names if rank == 0 else ())
    return found if size == 1 else together([found])


def together(found: Iterable[CheckedSource]) -> CheckedSource:
    """Return the sum of what all ranks found, each in what it read; every rank calls it."""
    told = gather_json([asdict(each) for each in found], phase=_PHASE)
    return CheckedSource.of_all(
        CheckedSource(
            checked_bytes=part["checked_bytes"],
            unchecked=tuple(Unchecked(**each) for each in part["unchecked"]),
        )
        for each_rank in told
        for part in each_rank
    )


def say_checked(found: CheckedSource, *, check_source: bool) -> None:
    """Log once for all ranks how much was compared, or warn that nothing was."""
    if world()[0] != 0:
        return
    if not check_source:
        _log.warning("weights: not compared with the checksums in the source (check_source=False)")
        return
    if found.checked_bytes:
        _log.info("weights: %s compared with the CRC-32s in the source", format_size(found.checked_bytes))
    for part in found.unchecked:
        _log.info(
            "weights: not compared: %s, %s: %s",
            count(part.num_entries, "tensor or storage", "tensors or storages"),
            format_size(part.entry_bytes),
            part.reason,
        )
