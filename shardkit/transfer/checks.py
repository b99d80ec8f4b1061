"""Comparing a source with the CRC-32 that its own files record, as its bytes move.

torch's zips have a CRC-32 for each entry, and an entry is a storage: several tensors may view it, and threads, bands
and ranks each read a part of it. So every run of bytes that is read gives (entry, offset, length, CRC-32). A run that is
the whole entry is compared at once. Of the others each has to be on a chain of runs that make up the entry, in whatever
order they came (`chains`). What such chains lack is read at the end, if it is little; otherwise the run's bytes are
counted as unchecked, with the reason.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from shardkit.core.catalog import Catalog, Checksums
from shardkit.core.text import count, escape
from shardkit.errors import IntegrityError
from shardkit.files.digest import crc32, crc32_combine
from shardkit.transfer.chains import Difference, Run, Span, Verdict, covered, gaps, joined, judge, overlaps

if TYPE_CHECKING:
    from shardkit.transfer.sources import SourceFiles

NOT_RECORDED = "no CRC-32 is recorded"
IN_PART = "only a part was needed"
OVERLAPPING = "read in parts that overlap"
SHORT_RUNS = "read in very short pieces"
NOT_READ = "blocks shared with the output, not read"

_MAX_MORE = 0.05  # of the bytes that are wanted: what may be read beside them to check an entry
_FREE_NBYTES = 128 << 10  # of the same: what Linux reads ahead of its own accord
_SHORT_NBYTES = 4096
_MAX_KEPT = 1 << 18  # runs that wait for others
_BUFFER_NBYTES = 1 << 20
_MAX_NAMED = 3
_UNSEEN, _EQUAL, _DIFFERENT, _UNRECORDED = range(4)


class Rest(NamedTuple):
    """What is missing of an entry."""

    entry: int
    gaps: list[Span]
    """Each part that has to be read so that all runs are on chains."""

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(stop - start for start, stop in self.gaps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unchecked:
    """Parts of a source that could not be compared, for one reason."""

    reason: str
    num_entries: int
    """Storages in torch's files, tensors elsewhere."""
    entry_bytes: int
    """What was read of them and not compared."""


OFF = (
    "the source was not compared with the checksums in it (--check-source off): damaged bytes would have been taken "
    "as they are"
)
"""What a person is warned of where it is switched off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedSource:
    """How much of a source was compared with what is recorded."""

    checked_bytes: int = 0
    unchecked: tuple[Unchecked, ...] = ()

    @classmethod
    def of_all(cls, parts: Iterable[CheckedSource]) -> CheckedSource:
        """Return what several found, each of its own part."""
        counts, checked = _Counts(), 0
        for part in parts:
            checked += part.checked_bytes
            for each in part.unchecked:
                counts.add(each.reason, each.entry_bytes, each.num_entries)
        return cls(checked_bytes=checked, unchecked=counts.listed())


class SourceCheck:
    """Collects what all threads read of a catalog's files.

    Args:
        catalog: of raw extents.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog, self._lock = catalog, threading.Lock()
        tables: dict[str, Checksums] = {}
        for file in catalog.files:
            if file.checksums is not None:
                held = tables.get(file.path)
                tables[file.path] = file.checksums if held is None else held | file.checksums
        self._paths = list(tables)
        self._tables = list(tables.values())
        self._numbers = {path: number for number, path in enumerate(self._paths)}
        self._table_of = [self._numbers.get(file.path, -1) for file in catalog.files]
        self._firsts = array("q", [0])
        for table in self._tables:
            self._firsts.append(self._firsts[-1] + len(table))
        self._states = bytearray(self._firsts[-1])
        self._held: dict[int, dict[Span, int]] = {}
        self._num_held, self._max_held = 0, _MAX_KEPT
        self._verdicts: dict[int, Verdict] = {}
        self._dropped: dict[int, int] = {}
        self._different: dict[int, Difference] = {}
        self._fqns: dict[int, str] = {}
        self._marks = self._find_marks()
        self._plain_files: dict[int, int] = {}
        for index, at in enumerate(self._table_of):
            if not catalog.files[index].decode:
                self._plain_files.setdefault(at, index)
        self._tables_digest: int | None = None
        self._seen_bytes = 0
        self._first_readers: dict[int, int] = {}
        self._not_mine: set[int] = set()
        self._left: set[int] = set()

    def runs(self) -> Runs:
        """Return what one thread tells of its reads."""
        return Runs(self)

    def table_of(self, file: int) -> int:
        """Return the number of the table of what a file records; -1 where it records nothing."""
        return self._table_of[file]

    def table_at(self, path: str) -> int:
        """Return the same, given a file's path."""
        return self._numbers.get(path, -1)

    def find(self, number: int, start: int, stop: int) -> tuple[int, int, bool] | None:
        """Return (number, where a run has to end, whether it has a CRC-32) of the entry that holds a range of a file.

        Args:
            number: of the file's table.
            start, stop: the range; None where one run cannot hold it.
        """
        if number < 0:
            return None
        table = self._tables[number]
        row = bisect_right(table.starts, start) - 1
        if row < 0 or stop > table.stops[row]:
            return None
        entry, limit = self._firsts[number] + row, table.stops[row]
        marks = self._marks.get(entry)
        if marks is not None:
            place = bisect_right(marks, start)
            limit = min(limit, marks[place]) if place < len(marks) else limit
            if stop > limit:
                return None
        return entry, limit, table.crcs[row] != 0

    def find_all(self, number: int, start: int, stop: int) -> Iterator[Span]:
        """Yield each part of a range of a file that one run can hold."""
        table = self._tables[number] if number >= 0 else None
        if table is not None:
            first = max(bisect_right(table.starts, start) - 1, 0)
            for row in range(first, bisect_left(table.starts, stop)):
                begin, end = max(start, table.starts[row]), min(stop, table.stops[row])
                marks = self._marks.get(self._firsts[number] + row, ())
                cuts = marks[bisect_right(marks, begin) : bisect_left(marks, end)]
                if begin < end:
                    yield from pairwise((begin, *cuts, end))

    def mark(self, file: int, places: Iterable[int]) -> None:
        """End runs of a file at some bytes: others read from there, or up to there."""
        number = self._table_of[file]
        for place in places:
            found = self.find(number, place, place)
            if found is not None:
                with self._lock:
                    marks = self._marks.setdefault(found[0], [])
                    at = bisect_left(marks, place)
                    if marks[at : at + 1] != [place]:
                        marks.insert(at, place)

    def _find_marks(self) -> dict[int, list[int]]:
        """Return by entry where the chunks in it begin and end that overlap: each is then read in parts that all share."""
        table, spans = self._catalog.chunks, dict[int, list[Span]]()
        ends = list[tuple[int, int, int]]()
        numbers = [
            -1 if file.decode else number
            for file, number in zip(self._catalog.files, self._table_of, strict=True)
        ]
        for index, start, nbytes in zip(table.file, table.start, table.nbytes, strict=True):
            if nbytes and numbers[index] >= 0:
                spans.setdefault(numbers[index], []).append((start, start + nbytes))
        for file in self._catalog.files:
            if file.decoded_from is not None and file.path in self._numbers:
                spans.setdefault(self._numbers[file.path], []).append(file.decoded_from)
                ends.append((self._numbers[file.path], *file.decoded_from))
        found = dict[int, list[int]]()
        for number, each in spans.items():
            for (start, stop), marks in overlaps(each).items():
                place = self._entry_at(number, start, stop)
                if place is not None:
                    found.setdefault(place, []).extend(marks)
        for number, start, stop in ends:  # what was decoded once may be used for several files, by itself
            place = self._entry_at(number, start, stop)
            if place is not None:
                found[place] = sorted({*found.get(place, ()), start, stop})
        return found

    def extent(self, entry: int) -> tuple[int, int]:
        """Return first byte and end of an entry."""
        return self._entry(entry)[:2]

    def _entry_at(self, number: int, start: int, stop: int) -> int | None:
        """Return the entry that holds a range of a file; None where none does as a whole."""
        if number < 0:
            return None
        table = self._tables[number]
        row = bisect_right(table.starts, start) - 1
        return None if row < 0 or stop > table.stops[row] else self._firsts[number] + row

    def add(self, runs: Iterable[Run]) -> None:
        """Take what was read; may be called from any thread."""
        with self._lock:
            for run in runs:
                start, stop, recorded = self._entry(run.entry)
                if run.start == start and run.stop == stop:
                    self._compare(run, recorded)
                else:
                    self._keep(run)

    def _entry(self, entry: int) -> tuple[int, int, int]:
        """Return first byte, end and recorded CRC-32 of an entry."""
        number = bisect_right(self._firsts, entry) - 1
        table, row = self._tables[number], entry - self._firsts[number]
        return table.starts[row], table.stops[row], table.crcs[row]

    def _compare(self, run: Run, recorded: int) -> None:
        """Take a run that is a whole entry."""
        if not self._states[run.entry]:
            self._seen_bytes += run.stop - run.start
        if not recorded:
            self._states[run.entry] = _UNRECORDED
        elif recorded != run.crc:
            self._differ(run.entry, Difference(run.start, run.stop, run.crc, recorded), run.fqn)
        elif self._states[run.entry] != _DIFFERENT:
            self._states[run.entry] = _EQUAL
        elif run.fqn:  # what the journal told has no name
            self._fqns.setdefault(run.entry, run.fqn)

    def _differ(self, entry: int, difference: Difference, fqn: str) -> None:
        self._states[entry] = _DIFFERENT
        self._different.setdefault(entry, difference)
        if fqn:
            self._fqns.setdefault(entry, fqn)

    def _keep(self, run: Run, *, is_bounded: bool = True) -> None:
        """Put a part of an entry beside the others."""
        entry, start, stop, crc, fqn = run
        if fqn:
            self._fqns.setdefault(entry, fqn)
        known = self._held.setdefault(entry, {}).get((start, stop))
        if known is not None:
            if known != crc:
                self._differ(entry, Difference(start, stop, crc, known), fqn)
            return
        self._seen_bytes += stop - start
        if is_bounded and self._num_held >= self._max_held and not self._has_made_room():
            self._dropped[entry] = self._dropped.get(entry, 0) + stop - start
            return
        self._held.setdefault(entry, {})[start, stop] = crc
        self._num_held += 1
        self._verdicts.pop(entry, None)

    def _has_made_room(self) -> bool:
        """Forget the runs that are proved by now; False where there are so few that trying again and again would cost."""
        if self._max_held < _MAX_KEPT:
            return False
        for entry in list(self._held):
            verdict = self._verdict(entry)
            if verdict is not None and verdict.has_chain and not verdict.loose and not verdict.wrong:
                self._num_held -= len(self._held.pop(entry))
                self._verdicts.pop(entry)
                self._states[entry] = self._states[entry] or _EQUAL
        if self._num_held > _MAX_KEPT // 2:
            self._max_held = 0
        return self._max_held > 0

    def _verdict(self, entry: int) -> Verdict | None:
        """Return what the runs of an entry tell that is not read as a whole; None where nothing is recorded."""
        start, stop, recorded = self._entry(entry)
        if recorded and entry not in self._verdicts:
            verdict = self._verdicts[entry] = judge(self._held[entry], start, stop, recorded)
            if verdict.wrong is not None:
                self._differ(entry, verdict.wrong, "")
        return self._verdicts.get(entry)

    def read_rest(self, sources: SourceFiles) -> None:
        """Read what is missing of entries of which nearly all was read, and compare them.

        Raises:
            IntegrityError, ResourceError: as `Reader.read_into`.
        """
        for rest in self.missing():
            self.complete(rest, self.read_gaps(rest, sources))

    def missing(self) -> list[Rest]:
        """Return the entries that are worth completing: the nearly complete ones first, up to 5 % of what was read."""
        budget, chosen = max(_MAX_MORE * self._seen_bytes, _FREE_NBYTES), list[Rest]()
        for nbytes, rest in sorted((rest.nbytes, rest) for rest in self._rests()):
            budget -= nbytes
            if budget < 0:
                break
            chosen.append(rest)
        return chosen

    def missing_of_each(self) -> list[Rest]:
        """Return the entries that lack 5 % of themselves or a page at most: all who read of one decide the same."""
        return [
            rest
            for rest in self._rests()
            if rest.nbytes <= max(_MAX_MORE * _length(self.extent(rest.entry)), _SHORT_NBYTES)
        ]

    def _rests(self) -> Iterator[Rest]:
        for entry, held in self._held.items():
            verdict = self._verdict(entry)
            if verdict is not None and verdict.loose and self._file_of(entry) is not None:
                yield Rest(entry, gaps(held, *self.extent(entry)))

    def parts(self) -> dict[str, list[int]]:
        """Return the runs that are parts of entries, as plain data for others who read of the same files.

        By file, four numbers for each run: the entry's first byte, the run's first byte and end, its CRC-32.
        """
        told: dict[str, list[int]] = {}
        for entry, held in self._held.items():
            file = self._file_of(entry)
            if file is not None:
                numbers, first = told.setdefault(self._catalog.files[file].name, []), self.extent(entry)[0]
                for (start, stop), crc in held.items():
                    numbers += (first, start, stop, crc)
        return told

    def take_parts(self, told: Sequence[Mapping[str, list[int]]], place: int) -> None:
        """Take what others read of the entries of which something was read here.

        Args:
            told: `parts` of everybody, this one's too.
            place: of this one among them.
        """
        entries = {}
        for entry in self._held:
            file = self._file_of(entry)
            if file is not None:
                entries[self._catalog.files[file].name, self.extent(entry)[0]] = entry
        for reader, each in enumerate(told):
            for name, numbers in each.items():
                for begin, start, stop, crc in zip(*[iter(numbers)] * 4, strict=True):
                    entry = entries.get((name, begin), -1)
                    if entry >= 0:
                        self._first_readers.setdefault(entry, reader)
                        self._keep(Run(entry, start, stop, crc, self._fqns.get(entry, "")), is_bounded=False)
        self._not_mine = self._left | {
            entry for entry, reader in self._first_readers.items() if reader != place
        }

    def leave_chunks(self, rows: Iterable[int]) -> None:
        """Let others count the entries that are chunks which they read too."""
        table = self._catalog.chunks
        for row in rows:
            start, stop = table.start[row], table.start[row] + table.nbytes[row]
            entry = self._entry_at(self._table_of[table.file[row]], start, stop)
            if entry is not None and self.extent(entry) == (start, stop) and self._states[entry]:
                self._left.add(entry)

    def is_first_reader(self, entry: int) -> bool:
        """True where nobody before this one among all read something of an entry."""
        return entry not in self._not_mine

    def key(self, entry: int) -> str:
        """Return what stands for an entry with everybody who reads of the same files."""
        return f"{self._name(entry)} {self._entry(entry)[0]}"

    def read_gaps(self, rest: Rest, sources: SourceFiles) -> list[int]:
        """Return the CRC-32 of each part that is missing of an entry.

        Raises:
            IntegrityError, ResourceError: as `Reader.read_into`.
        """
        file, crcs = self._file_of(rest.entry), list[int]()
        assert file is not None
        fqn, buffer = self._fqns.get(rest.entry, ""), memoryview(bytearray(min(rest.nbytes, _BUFFER_NBYTES)))
        with sources.reader(compares=False) as reader:
            for start, stop in rest.gaps:
                crc = 0
                for at in range(start, stop, len(buffer)):
                    part = buffer[: stop - at]
                    reader.read_into(file, part, at, fqn)
                    crc = crc32(part, crc)
                crcs.append(crc)
        return crcs

    def complete(self, rest: Rest, crcs: Sequence[int]) -> None:
        """Take the CRC-32 of each part that was missing of an entry."""
        for (start, stop), crc in zip(rest.gaps, crcs, strict=True):
            self._keep(Run(rest.entry, start, stop, crc, self._fqns.get(rest.entry, "")), is_bounded=False)

    def _file_of(self, entry: int) -> int | None:
        """Return the file that an entry lies in, as it is."""
        return self._plain_files.get(bisect_right(self._firsts, entry) - 1)

    def raise_differences(self, *, hint: str) -> None:
        """Refuse a source that is not what its own files record.

        Raises:
            IntegrityError: naming tensor, file and place of every entry that differs.
        """
        problems = self.differences()
        if problems:
            raise IntegrityError(
                f"the source is damaged: {count(len(problems), 'stretch', 'stretches')} "
                f"{'does' if len(problems) == 1 else 'do'} not have the CRC-32 recorded in the file",
                problems=problems,
                hint=hint,
            )

    def differences(self) -> list[str]:
        """Return a line for each entry whose bytes are not those that were recorded."""
        for entry in self._held:
            self._verdict(entry)
        if not self._different:
            return []
        owners = self._owners()
        lines = []
        for entry in sorted(self._different):
            start, stop, crc, other = self._different[entry]
            found = owners.get(entry) or [self._fqns.get(entry, "a tensor")]
            shown = ", ".join(map(escape, found[:_MAX_NAMED]))
            more = f" and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
            told = "recorded is" if (start, stop) == self.extent(entry) else "in another reading it is"
            lines.append(
                f"{shown}{more}: {self._name(entry)}: bytes {start} to {stop} have CRC-32 {crc:08x}, {told} {other:08x}"
            )
        return lines

    def _owners(self) -> dict[int, list[str]]:
        """Return the tensors that lie in each entry that differs."""
        table, found = self._catalog.chunks, dict[int, list[str]]()
        for fqn, entry in self._catalog.tensors.items():
            for row in entry.chunk_ids:
                if self._catalog.files[table.file[row]].decode:
                    continue
                start, stop = table.start[row], table.start[row] + table.nbytes[row]
                place = self._entry_at(self._table_of[table.file[row]], start, stop)
                if place is not None and place in self._different:
                    names = found.setdefault(place, [])
                    if not names or names[-1] != fqn:
                        names.append(fqn)
        return found

    def _name(self, entry: int) -> str:
        file = self._file_of(entry)
        path = self._paths[bisect_right(self._firsts, entry) - 1]
        return escape(path if file is None else self._catalog.files[file].name)

    def summary(self, names: Iterable[str], *, looks_for_unread: bool = False) -> CheckedSource:
        """Return how much was compared.

        Args:
            names: the catalog's tensors that were wanted.
            looks_for_unread: whether bytes may have gone into the output without being read.
        """
        counts = _Counts()
        checked = 0
        for number, table in enumerate(self._tables):
            first = self._firsts[number]
            states = self._states[first : first + len(table)]
            if not any(states):
                continue
            for row, state in enumerate(states):
                entry, nbytes = first + row, table.stops[row] - table.starts[row]
                if not state or entry in self._not_mine or entry in self._held or entry in self._dropped:
                    continue
                if state == _UNRECORDED:
                    counts.add(NOT_RECORDED, nbytes)
                else:
                    checked += nbytes
        for entry in self._held.keys() | self._dropped.keys():
            checked += self._count_parts(entry, counts, looks_for_unread)
        if (
            looks_for_unread
            or min(self._table_of, default=0) < 0
            or any(f.is_proved for f in self._catalog.files)
        ):
            checked += self._count_others(names, counts, looks_for_unread)
        return CheckedSource(checked_bytes=checked, unchecked=counts.listed())

    def _count_parts(self, entry: int, counts: _Counts, looks_for_unread: bool) -> int:
        """Count what is unchecked of an entry that was not read as a whole, or not only so; return what is checked."""
        held, dropped = self._held.get(entry, {}), self._dropped.get(entry, 0)
        start, stop, recorded = self._entry(entry)
        verdict = self._verdict(entry) if held else None
        loose = held if verdict is None else verdict.loose
        has_chain = self._is_proved(entry)
        nbytes = min(covered(loose) + dropped, stop - start)
        if entry in self._not_mine:
            return 0
        if not recorded:
            counts.add(NOT_RECORDED, stop - start if self._states[entry] else nbytes)
            return 0
        if nbytes and (has_chain or not looks_for_unread):  # otherwise counted with what was not read
            is_whole = has_chain or covered(held) == stop - start
            counts.add(SHORT_RUNS if dropped else OVERLAPPING if is_whole else IN_PART, nbytes)
        return stop - start - nbytes if has_chain else 0

    def _is_proved(self, entry: int) -> bool:
        """True for an entry that some runs make up."""
        verdict = self._verdict(entry) if entry in self._held else None
        return self._states[entry] > 0 or (verdict is not None and verdict.has_chain)

    def _count_others(self, names: Iterable[str], counts: _Counts, looks_for_unread: bool) -> int:
        """Count chunks outside all entries, and those that nobody read; return the bytes that decoding proves."""
        table, files, proved = self._catalog.chunks, self._catalog.files, 0
        wanted, known = dict[int, int](), set[tuple[int, int]]()
        for row in self._rows(names):
            file, start, nbytes = table.file[row], table.start[row], table.nbytes[row]
            if not nbytes or (
                self._table_of[file] >= 0 and not looks_for_unread and not files[file].is_proved
            ):
                continue
            if (file, start) in known:  # of tied names
                continue
            known.add((file, start))
            if files[file].is_proved:
                proved += nbytes
            elif self._table_of[file] < 0:
                counts.add(NOT_RECORDED, nbytes)
            elif looks_for_unread and not files[file].decode:
                place = self._entry_at(self._table_of[file], start, start + nbytes)
                if place is not None and not self._is_proved(place):
                    wanted[place] = wanted.get(place, 0) + nbytes
        for entry, nbytes in wanted.items():
            is_read = entry in self._dropped or covered(self._held.get(entry, ())) >= nbytes
            reason = (SHORT_RUNS if entry in self._dropped else IN_PART) if is_read else NOT_READ
            counts.add(reason if self._entry(entry)[2] else NOT_RECORDED, nbytes)
        return proved

    def _rows(self, names: Iterable[str]) -> Iterator[int]:
        for name in names:
            yield from self._catalog.tensors[name].chunk_ids

    def _digest(self) -> int:
        """Stand for all entries and what is recorded of them: a manifest may come or go between two runs."""
        if self._tables_digest is None:
            digest = 0
            for table in self._tables:
                for column in (table.starts, table.stops, table.crcs):
                    digest = crc32(column, digest)
            self._tables_digest = int(digest)
        return self._tables_digest

    def dump(self, runs: Iterable[Run]) -> dict[str, Any]:
        """Return runs as plain data: what the numbers are about, numbers of whole entries that are right, and the parts of others."""
        whole, parts, last = list[int](), list[int](), 0
        for entry, start, stop, crc, _ in sorted(self.joined(runs)):
            begin, end, recorded = self._entry(entry)
            if (begin, end) == (start, stop) and (crc == recorded or not recorded):
                whole.append(entry - last)  # a million of them are small numbers
                last = entry
            else:
                parts += (entry, start - begin, stop - start, crc)
        return {"tables": self._digest(), "whole": whole, "parts": parts}

    def load(self, told: object) -> bool:
        """Take what an earlier run told by `dump`; False where it did not check, or compared with something else."""
        whole, parts = (told.get("whole"), told.get("parts")) if isinstance(told, Mapping) else (None, None)
        if isinstance(told, Mapping) and told.get("tables") != self._digest():
            return False
        if not _are_ints(whole) or not _are_ints(parts) or len(parts) % 4:
            return False
        runs, entry = list[Run](), 0
        for step in whole:
            entry += step
            if not 0 <= entry < len(self._states):
                return False
            start, stop, recorded = self._entry(entry)
            runs.append(Run(entry, start, stop, recorded, ""))
        for entry, offset, nbytes, crc in zip(*[iter(parts)] * 4, strict=True):
            begin, end = self.extent(entry) if 0 <= entry < len(self._states) else (0, 0)
            if not 0 <= offset < offset + nbytes <= end - begin:
                return False
            runs.append(Run(entry, begin + offset, begin + offset + nbytes, crc, ""))
        self.add(runs)
        return True

    def joined(self, runs: Iterable[Run]) -> list[Run]:
        """Return runs in the order of entries and bytes, each with its neighbours where nobody begins or ends between."""
        return joined(runs, self._marks)


class _Counts:
    """Entries and bytes by reason."""

    def __init__(self) -> None:
        self._found: dict[str, list[int]] = {}

    def add(self, reason: str, nbytes: int, number: int = 1) -> None:
        numbers = self._found.setdefault(reason, [0, 0])
        numbers[0] += number
        numbers[1] += nbytes

    def listed(self) -> tuple[Unchecked, ...]:
        return tuple(
            Unchecked(reason=reason, num_entries=number, entry_bytes=nbytes)
            for reason, (number, nbytes) in sorted(self._found.items())
        )


class Runs:
    """What one thread reads; neighbours are joined as they come.

    Args:
        check: collects what all threads read.
    """

    def __init__(self, check: SourceCheck) -> None:
        self._check = check
        self._table, self._entry, self._start, self._stop, self._limit = -1, -1, 0, 0, 0
        self._crc, self._fqn, self._has_crc = 0, "", False
        self._ended: list[Run] = []

    def add(self, file: int, start: int, data: memoryview | bytes, fqn: str) -> int | None:
        """Tell of bytes that were read; return their CRC-32, None where there is nothing to compare them with."""
        return self._add(self._check.table_of(file), start, data, fqn)

    def read(self, path: str, start: int, data: memoryview, fqn: str) -> None:
        """Tell of bytes of a file that were read to decode a tensor."""
        self._add(self._check.table_at(path), start, data, fqn)

    def can_sum(self, file: int, start: int, stop: int) -> bool:
        """True for bytes that one run can hold, of an entry that has a CRC-32: whoever reads them may take theirs."""
        found = self._check.find(self._check.table_of(file), start, stop)
        return found is not None and found[2]

    def add_summed(self, file: int, start: int, stop: int, crc: int, fqn: str) -> None:
        """Tell of bytes that were read, for which `can_sum` is true, and of their CRC-32."""
        table = self._check.table_of(file)
        if table != self._table or start != self._stop or stop > self._limit:
            self._begin(table, start, stop, fqn)
        self._join(crc, stop)

    def take_over(self, runs: Iterable[Run]) -> None:
        """Tell of what another read, and this one uses too."""
        self._ended += runs

    def _add(self, table: int, start: int, data: memoryview | bytes, fqn: str) -> int | None:
        stop = start + len(data)
        if (table != self._table or start != self._stop or stop > self._limit) and not self._begin(
            table, start, stop, fqn
        ):
            view = memoryview(data)  # in several entries, as a byte entry is: a zip as a whole
            for begin, end in self._check.find_all(table, start, stop):
                self._begin(table, begin, end, fqn)
                self._go_on(view[begin - start : end - start], end)
            return None
        return self._go_on(data, stop)

    def _begin(self, table: int, start: int, stop: int, fqn: str) -> bool:
        """Begin a run; False where none can hold the range."""
        found = self._check.find(table, start, stop)
        self._end()
        if found is not None:
            self._entry, self._limit, self._has_crc = found
            self._table, self._start, self._stop, self._crc, self._fqn = table, start, start, 0, fqn
        return found is not None

    def _go_on(self, data: memoryview | bytes, stop: int) -> int | None:
        if not self._has_crc:
            self._stop = stop
            return None
        crc = crc32(data)
        self._join(crc, stop)
        return crc

    def _join(self, crc: int, stop: int) -> None:
        first, self._stop = self._stop, stop
        self._crc = crc if first == self._start else crc32_combine(self._crc, crc, stop - first)

    def _end(self) -> None:
        if self._entry >= 0 and self._stop > self._start:
            self._ended.append(Run(self._entry, self._start, self._stop, self._crc, self._fqn))
        self._table = self._entry = -1

    def collect(self) -> list[Run]:
        """Return what was read since the last time, and hand nothing over."""
        self._end()
        runs, self._ended = self._ended, []
        return runs

    def take(self) -> list[Run]:
        """Hand over what was read since the last time, and return it."""
        self._end()
        if not self._ended:
            return []
        runs = self._check.joined(self._ended)
        self._ended = []
        self._check.add(runs)
        return runs


def _length(extent: tuple[int, int]) -> int:
    return extent[1] - extent[0]


def _are_ints(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int for value in values)
