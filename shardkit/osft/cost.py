"""What the factors of a run take, and how good they are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardkit.core.factored import Target
from shardkit.osft.job import FactoredJob
from shardkit.osft.svd import num_operations, svd_nbytes

OPERATIONS_PER_S = 20e9
"""Of one core, on the safe side: a virtual core at 2.5 GHz does 30e9 with 512 to 2048 directions. A weight that is nearly
singular takes some five times as long."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True, kw_only=True)
class OsftKind:
    """Targets of one size and rank, at like places in the model."""

    name: str
    """Path with * for numbers: "model.layers.*.mlp.up_proj"."""
    num_targets: int
    rows: int
    columns: int
    rank: int
    """k: directions that are frozen."""
    factor_bytes: int
    """Of all of them."""
    num_operations: int
    """Floating point operations for all of them."""
    memory_bytes: int
    """What the decomposition of one takes at its peak."""
    expected_s: float
    """For all of them, on one core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OsftResult:
    """What the factors of a run cost, and how good they are; those of a part, while others lack some."""

    kinds: tuple[OsftKind, ...]
    num_workers: int
    """Processes that compute at a time."""
    memory_bytes: int
    """What all of these take at their peak, besides interpreters."""
    expected_s: float
    """For all targets, with these processes on a core each."""
    operations_per_s: float
    """What that is reckoned with."""
    record_bytes: int
    """Of factors in records beside the output, until it is there. With a store, of those on the local disk, in shardkit's
    cache directory; of a part, those that it has to compute, until it ends."""
    num_resumed: int
    """Weights that an interrupted run had computed."""
    max_error: float | None
    """The largest of all targets; None before they are computed, and where other parts have computed some."""
    max_orthogonality: float | None


def osft_result(job: FactoredJob, numbers: Sequence[int] | None, *, record_bytes: int) -> OsftResult:
    """Return the cost of the decomposition, and its quality if it has run.

    Args:
        job: what was, or would be computed.
        numbers: of the weights that are meant; None for all.
        record_bytes: as in the result.
    """
    targets = [weight.target for weight in job.records.weights]
    if numbers is not None:
        targets = [targets[number] for number in numbers]
    workers, seconds = job.num_workers, [_expected_s(target) for target in targets]
    measured = [job.measured[target.path] for target in targets if target.path in job.measured]
    is_known = 0 < len(measured) == len(targets)
    largest = sorted((svd_nbytes(target) for target in targets), reverse=True)[:workers]
    return OsftResult(
        kinds=tuple(kinds_of(targets)),
        num_workers=workers,
        memory_bytes=sum(largest),
        expected_s=round(max([sum(seconds) / workers, *seconds]), 3),
        operations_per_s=OPERATIONS_PER_S,
        record_bytes=record_bytes,
        num_resumed=sum(factors.is_resumed for factors in measured),
        max_error=max(factors.error for factors in measured) if is_known else None,
        max_orthogonality=max(factors.orthogonality for factors in measured) if is_known else None,
    )


def _expected_s(target: Target) -> float:
    return num_operations(target) / OPERATIONS_PER_S


def kinds_of(targets: Iterable[Target]) -> list[OsftKind]:
    """Return the kinds of targets, in the order of the model."""
    groups: dict[tuple[str, int, int, int], list[Target]] = {}
    for target in targets:
        name = _NUMBER.sub("*", target.path)
        groups.setdefault((name, target.rows, target.columns, target.rank), []).append(target)
    return [
        OsftKind(
            name=name,
            num_targets=len(alike),
            rows=rows,
            columns=columns,
            rank=rank,
            factor_bytes=sum(target.factors_nbytes for target in alike),
            num_operations=sum(num_operations(target) for target in alike),
            memory_bytes=svd_nbytes(alike[0]),
            expected_s=round(sum(map(_expected_s, alike)), 3),
        )
        for (name, rows, columns, rank), alike in groups.items()
    ]
