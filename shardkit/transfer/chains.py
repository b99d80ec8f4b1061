"""What makes up an entry: stretches of files with a recorded CRC-32, and the runs of bytes that prove one.

An entry is a stretch of a file whose CRC-32 something records, such as one storage in a zip of `torch.save`.
Threads, bands, ranks and an interrupted run read an entry in whatever parts they need, and some of its bytes
several times. A chain of runs proves them: each run begins where the one before it ends, the first begins
with the entry, the last ends with it, and the CRC-32 of them all is the recorded one. Had any run of the
chain seen a wrong byte, the CRC-32 would differ. A chain proves its own runs and no others: bytes that are
right in one reading may be damaged in another, such as a rank's own copy, or an hour later.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from operator import itemgetter
from typing import NamedTuple

from shardkit.core.catalog import Catalog, Checksums, Decoded
from shardkit.core.text import escape
from shardkit.files.digest import crc32, crc32_combine

Span = tuple[int, int]
"""(first byte, end) in the file."""


class Entry(NamedTuple):
    """A stretch of a file with a recorded CRC-32."""

    start: int
    stop: int
    crc: int
    """As recorded; 0 where nothing is."""


class Run(NamedTuple):
    """Neighbouring bytes of an entry that were read."""

    entry: int
    """Number of the entry, counted over all files."""
    start: int
    """First byte in the file."""
    stop: int
    crc: int
    fqn: str
    """The tensor that some of it was read for."""


class Evidence(NamedTuple):
    """What was read of entries."""

    right: array[int]
    """Numbers of the entries that were read whole, in one run that is as recorded; in any order, some several times."""
    runs: list[Run]
    """All else."""

    @classmethod
    def of_all(cls, parts: Iterable[Evidence]) -> Evidence:
        """Combine the evidence of several readers."""
        combined = cls(array("q"), [])
        for part in parts:
            combined.right.extend(part.right)
            combined.runs.extend(part.runs)
        return combined


_ENTRY_OF = itemgetter(0)


class Difference(NamedTuple):
    """Bytes that differ from what was recorded, or from another reading."""

    start: int
    stop: int
    crc: int
    other: int
    """The recorded CRC-32 where the bytes are a whole entry, else that of another reading."""


class Verdict(NamedTuple):
    """What the runs of an entry tell."""

    has_chain: bool
    """Some runs make up the entry."""
    loose: list[Span]
    """Runs that are on no chain, in order."""
    wrong: Difference | None


class Entries:
    """All entries of a catalog's files, numbered.

    Files at the same path share one table of entries.

    Args:
        catalog: a catalog of raw extents.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog, self._lock = catalog, threading.Lock()
        tables: dict[str, Checksums] = {}
        for file in catalog.files:
            if file.checksums is not None:
                held = tables.get(file.path)
                tables[file.path] = file.checksums if held is None else held | file.checksums
        self._paths = list(tables)
        self._others, self._file_of_other = Checksums.of(()), array("i")
        self.tables = [*tables.values(), self._others]
        """What each path records; and last, in no order, what other processes have found in files."""
        self._numbers = {path: number for number, path in enumerate(self._paths)}
        self.table_of = [self._numbers.get(file.path, -1) for file in catalog.files]
        """The number of each file's table; -1 where the file records nothing."""
        self.firsts = array("q", [0])
        """The number of each table's first entry."""
        for table in self.tables[:-1]:
            self.firsts.append(self.firsts[-1] + len(table))
        self._other_numbers: dict[tuple[int, Entry], int] = {}
        self._plain_files: dict[int, int] = {}
        for index, number in enumerate(self.table_of):
            if catalog.files[index].is_raw:
                self._plain_files.setdefault(number, index)
        decoded = (
            (self._numbers.get(file.path, -1), file.made.span)
            for file in catalog.files
            if isinstance(file.made, Decoded)
        )
        self.decoded = {self.holding(number, *span) for number, span in decoded if span is not None}
        """Entries of which parts are decoded."""
        self._labels = list[str]()
        self._files = self._label()
        self._table_labels = dict(zip(self.table_of, self._labels, strict=True))
        files = (number for number in sorted({*catalog.chunks.file}) if self.table_of[number] < 0)
        plain = (self._labels[number] for number in files if catalog.files[number].is_raw)
        self.unrecorded = int(crc32("\0".join(plain).encode()))
        """Stands for the files of which nothing is recorded: a manifest may appear between two runs."""

    def __len__(self) -> int:
        return self.firsts[-1] + len(self._others)

    def __getitem__(self, entry: int) -> Entry:
        number = bisect_right(self.firsts, entry) - 1
        table, row = self.tables[number], entry - self.firsts[number]
        return Entry(table.starts[row], table.stops[row], table.crcs[row])

    def number_of(self, label: str, entry: Entry) -> int | None:
        """Return the number of an entry that some process has found, and compared with; None if another one is known here.

        Several processes open the records of other tensors each: an entry that this one has not seen gets a number.

        Args:
            label: of its file.
            entry: as it was found there.
        """
        file = self._files.get(label)
        if file is None or not 0 <= entry.start < entry.stop <= self._catalog.files[file].size:
            return None
        if (table_number := self.table_of[file]) >= 0:
            table, starts = self.tables[table_number], self.tables[table_number].starts
            # Several begin there if the file was opened twice, with and without what a manifest records.
            rows = range(bisect_left(starts, entry.start), bisect_right(starts, entry.start))
            known = [Entry(starts[row], table.stops[row], table.crcs[row]) for row in rows]
            if entry in known:
                return self.firsts[table_number] + rows[known.index(entry)]
            if any(other.stop == entry.stop or (other.crc and entry.crc) for other in known):
                return None
        number = self._other_numbers.setdefault((file, entry), len(self))
        if number == len(self):
            columns = self._others.starts, self._others.stops, self._others.crcs
            for column, value in zip(columns, entry, strict=True):
                column.append(value)
            self._file_of_other.append(file)
        return number

    def of_runs(self, runs: Sequence[Run]) -> Iterator[tuple[Run, int, int, int]]:
        """Yield each run with its entry's start, stop and CRC-32. Fast for runs in the order of entries."""
        for run, described in zip(runs, self.described(map(_ENTRY_OF, runs)), strict=True):
            yield run, *described

    def described(self, entries: Iterable[int]) -> Iterator[tuple[int, int, int]]:
        """Yield each entry's start, stop and CRC-32. Fast for entries in their order."""
        first = end = 0
        for entry in entries:
            if not first <= entry < end:
                number = bisect_right(self.firsts, entry) - 1
                table, first = self.tables[number], self.firsts[number]
                end = first + len(table)
                starts, stops, crcs = table.starts, table.stops, table.crcs
            row = entry - first
            yield starts[row], stops[row], crcs[row]

    def table_at(self, path: str) -> int:
        """Return the number of a path's table; -1 where the file records nothing."""
        return self._numbers.get(path, -1)

    def find(self, number: int, start: int, stop: int) -> tuple[int, int, bool] | None:
        """Return the entry that holds a range of a file: (number, where a run has to end, has it a CRC-32).

        Args:
            number: number of the file's table.
            start: first byte of the range.
            stop: end of the range.

        Returns:
            None if no single run can hold the range.
        """
        if number < 0:
            return None
        table = self.tables[number]
        row = bisect_right(table.starts, start) - 1
        if row < 0 or stop > table.stops[row]:
            return None
        return self.firsts[number] + row, table.stops[row], table.crcs[row] != 0

    def find_all(self, number: int, start: int, stop: int) -> Iterator[Span]:
        """Yield each part of a range of a file that one run can hold."""
        table = self.tables[number] if number >= 0 else None
        if table is not None:
            first = max(bisect_right(table.starts, start) - 1, 0)
            for row in range(first, bisect_left(table.starts, stop)):
                begin, end = max(start, table.starts[row]), min(stop, table.stops[row])
                if begin < end:
                    yield begin, end

    def holding(self, number: int, start: int, stop: int) -> int | None:
        """Return the entry that holds a whole range of a file; None if none does."""
        entry = self.find(number, start, stop)
        return None if entry is None else entry[0]

    def holding_chunk(self, row: int) -> int | None:
        """Return the entry that holds a chunk of the catalog; None if none does."""
        table = self._catalog.chunks
        start = table.start[row]
        return self.holding(self.table_of[table.file[row]], start, start + table.nbytes[row])

    def file_of(self, entry: int) -> int | None:
        """Return the file that an entry lies in as it is; None if all files of that path are decoded."""
        if entry >= self.firsts[-1]:
            return self._file_of_other[entry - self.firsts[-1]]
        return self._plain_files.get(bisect_right(self.firsts, entry) - 1)

    def name_of(self, entry: int) -> str:
        """Return the name of an entry's file, safe to print."""
        file = self.file_of(entry)
        path = self._paths[bisect_right(self.firsts, entry) - 1] if file is None else ""
        return escape(path if file is None else self._catalog.files[file].name)

    def key(self, entry: int) -> str:
        """Return text that stands for an entry on every rank that reads the same files."""
        return f"{self.name_of(entry)} {self[entry].start}"

    def label_of(self, entry: int) -> str:
        """Return the name by which all processes know an entry's file."""
        if entry >= self.firsts[-1]:
            return self._labels[self._file_of_other[entry - self.firsts[-1]]]
        return self._table_labels[bisect_right(self.firsts, entry) - 1]

    def _label(self) -> dict[str, int]:
        """Give each file a label, those at one path the same; return the number of the first file of each."""
        firsts, of_path = dict[str, int](), dict[str, str]()
        for number, file in enumerate(self._catalog.files):
            label = of_path.get(file.path) if file.path else None
            if label is None:
                label = file.name if file.name not in firsts else f"{file.name} ({len(firsts)})"
                firsts[label], of_path[file.path] = number, label
            self._labels.append(label)
        return firsts


def judge(held: Mapping[Span, int], entry: Entry) -> Verdict:
    """Return the verdict of runs about an entry.

    Args:
        held: CRC-32 of each run.
        entry: the entry; its CRC-32 is recorded.
    """
    start, stop, recorded = entry
    ordered, crcs, wrong = sorted(held.items()), {start: 0}, None
    for (first, end), crc in ordered:  # every run that ends where this one begins came before it
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
    """Return the parts of an entry that have to be read so that each of some runs is on a chain.

    Where runs overlap, that is all of it, in parts that begin and end wherever one of the runs does.
    """
    ordered = sorted(held)
    if any(before[1] > after[0] for before, after in pairwise(ordered)):
        return list(pairwise(sorted({start, stop, *(place for span in ordered for place in span)})))
    edges = [start, *(place for span in ordered for place in span), stop]
    return [(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end]


def joined(runs: Iterable[Run], decoded: Collection[int | None]) -> list[Run]:
    """Return runs in the order of entries and bytes, each joined with its neighbours.

    Where runs of an entry overlap, they all stay as they are, because each has to be proved. Equal ones come
    once.

    Args:
        runs: in any order.
        decoded: entries in which runs for other tensors stay apart: what is decoded once may serve several files.
    """
    merged = list[Run]()
    for entry, group in groupby(sorted(runs), key=_ENTRY_OF):
        own = list(group)
        if len(own) == 1:  # nearly every entry, and there may be a million
            merged += own
            continue
        own = list({run[:4]: run for run in own}.values())
        if any(run.stop > after.start for run, after in pairwise(own)):
            merged += own
            continue
        last = own[0]
        for run in own[1:]:
            if last.stop == run.start and (last.fqn == run.fqn or entry not in decoded):
                crc = crc32_combine(last.crc, run.crc, run.stop - run.start)
                last = Run(entry, last.start, run.stop, crc, last.fqn)
            else:
                merged.append(last)
                last = run
        merged.append(last)
    return merged


def covered(spans: Iterable[Span]) -> int:
    """Return the number of bytes that lie in some spans."""
    nbytes, reached = 0, 0
    for start, stop in sorted(spans):
        nbytes += max(stop - max(start, reached), 0)
        reached = max(reached, stop)
    return nbytes
