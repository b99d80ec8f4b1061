"""Whether what was read of an entry is what was recorded: by chains of runs, from its first byte to its end.

Threads, bands, ranks and an interrupted run read an entry in whatever parts they need, and some bytes of it several times.
A run is proved by a chain, in which each run begins where the one before it ends and the CRC-32 of all together is the
recorded one: had any run of it seen another byte than was saved, that would differ. So a chain proves its own runs, and no
others: what is right in one reading may be damaged in another, of a rank's own copy, or of an hour later.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Collection, Iterable, Mapping
from itertools import groupby, pairwise
from typing import NamedTuple

from shardkit.files.digest import crc32_combine

Span = tuple[int, int]
"""(first byte, end) in the file."""


class Run(NamedTuple):
    """Neighbouring bytes of an entry that were read."""

    entry: int
    """Number of the entry, over all files."""
    start: int
    """First byte in the file."""
    stop: int
    crc: int
    fqn: str
    """The tensor that some of it was read for."""


class Difference(NamedTuple):
    """Bytes that are not what they were."""

    start: int
    stop: int
    crc: int
    other: int
    """The recorded CRC-32; where the bytes are no whole entry, that of another reading."""


class Verdict(NamedTuple):
    """What the runs of an entry tell."""

    has_chain: bool
    """Some runs make up the entry."""
    loose: list[Span]
    """Runs on no chain, in order."""
    wrong: Difference | None


def judge(held: Mapping[Span, int], start: int, stop: int, recorded: int) -> Verdict:
    """Return what runs tell of an entry.

    Args:
        held: CRC-32 of each run.
        start, stop: the entry's first byte and end.
        recorded: its CRC-32.
    """
    ordered, crcs, wrong = sorted(held.items()), {start: 0}, None
    for (first, end), crc in ordered:  # every run that ends where one begins comes before it
        if first in crcs:
            whole = crc32_combine(crcs[first], crc, end - first)
            other = crcs.setdefault(end, whole)
            if whole != other:
                wrong = Difference(start, end, whole, other)
    if crcs.get(stop, recorded) != recorded or (wrong is not None and wrong.stop == stop):
        whole = crcs[stop] if crcs[stop] != recorded or wrong is None else wrong.crc
        wrong = Difference(start, stop, whole, recorded)
    lead_on = {stop}
    for (first, end), _ in reversed(ordered):
        if end in lead_on:
            lead_on.add(first)
    loose = [span for span, _ in ordered if span[0] not in crcs or span[1] not in lead_on]
    return Verdict(stop in crcs, loose, wrong)


def gaps(held: Iterable[Span], start: int, stop: int) -> list[Span]:
    """Return what has to be read of an entry beside some runs so that each of them is on a chain."""
    ordered, found = sorted(held), set[Span]()
    reached = [start]
    for first, end in ordered:
        before = reached[bisect_right(reached, first) - 1]
        if before < first:
            found.add((before, first))
        for place in (first, end):
            if reached[bisect_right(reached, place) - 1] != place:
                insort(reached, place)
    lead_on = [-stop]  # in descending order, so that whatever comes next is appended
    for first, end in sorted({*ordered, *found}, reverse=True):
        after = -lead_on[bisect_right(lead_on, -end) - 1]
        if after > end:
            found.add((end, after))
            insort(lead_on, -end)
        if lead_on[-1] != -first:
            insort(lead_on, -first)
    return sorted(found)


def joined(runs: Iterable[Run], marks: Mapping[int, Collection[int]]) -> list[Run]:
    """Return runs in the order of entries and bytes, each with its neighbours.

    Runs of an entry of which some overlap stay as they are, equal ones once: each has to be proved.

    Args:
        runs: in any order.
        marks: by entry, where runs are not joined.
    """
    found = list[Run]()
    distinct = {run[:4]: run for run in runs}
    for entry, group in groupby(sorted(distinct.values()), key=lambda run: run.entry):
        each = list(group)
        if any(run.stop > after.start for run, after in pairwise(each)):
            found += each
            continue
        kept, last = marks.get(entry, ()), each[0]
        for run in each[1:]:
            if last.stop == run.start and run.start not in kept:
                crc = crc32_combine(last.crc, run.crc, run.stop - run.start)
                last = Run(entry, last.start, run.stop, crc, last.fqn)
            else:
                found.append(last)
                last = run
        found.append(last)
    return found


def covered(spans: Iterable[Span]) -> int:
    """Return how many bytes lie in some spans."""
    nbytes, at = 0, 0
    for start, stop in sorted(spans):
        nbytes += max(stop - max(start, at), 0)
        at = max(at, stop)
    return nbytes


def overlaps(spans: Iterable[Span]) -> dict[Span, list[int]]:
    """Return by first byte and end of each group of spans that overlap, and are not all equal, where they begin and end."""
    found: dict[Span, list[int]] = {}
    begin, end, marks = 0, 0, set[int]()

    def close() -> None:
        if len(marks) > 2:
            found[begin, end] = sorted(marks)

    for start, stop in sorted(spans):
        if start >= end:
            close()
            begin, end, marks = start, stop, set()
        end = max(end, stop)
        marks |= {start, stop}
    close()
    return found
