"""Comparing a source with the CRC-32 that its own files record, as its bytes move.

torch's zips have a CRC-32 for each entry, and an entry is a storage: several tensors may view it, and threads, bands
and ranks each read a part of it. So every run of bytes that is read gives (entry, offset, length, CRC-32); runs that
tile an entry are combined, in whatever order they came. What nobody wanted of an entry is read at the end, if it is
little; otherwise the entry is counted as unchecked, with the reason.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from shardkit.core.catalog import Catalog, Checksums
from shardkit.core.text import count, escape
from shardkit.errors import IntegrityError
from shardkit.transfer.digest import crc32, crc32_combine

if TYPE_CHECKING:
    from shardkit.transfer.sources import SourceFiles

NOT_RECORDED = "no CRC-32 is recorded"
IN_PART = "only a part was needed"
SHORT_RUNS = "read in very short pieces"
NOT_READ = "blocks shared with the output, not read"

_MAX_MORE = 0.05  # of the bytes that are wanted: what may be read beside them to check an entry
_FREE_NBYTES = 128 << 10  # of the same: what Linux reads ahead of its own accord
_SHORT_NBYTES = 4096
_MAX_SHORT = 4096  # runs of one stretch that may be short
_MAX_KEPT = 1 << 18  # runs that wait for others
_BUFFER_NBYTES = 1 << 20
_MAX_NAMED = 3
_UNSEEN, _EQUAL, _DIFFERENT, _UNRECORDED = range(4)


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


class Rest(NamedTuple):
    """What is missing of an entry."""

    entry: int
    gaps: list[tuple[int, int]]
    """(first byte, end) in the file, of each part that nobody read."""

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
    """What was read of them."""


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
        self._kept: dict[int, list[Run]] = {}
        self._num_kept, self._dropped = 0, set[int]()
        self._different: dict[int, Run] = {}
        self._tables_digest: int | None = None
        self._seen_bytes = 0
        self._first_readers: dict[int, int] = {}
        self._not_mine: set[int] = set()
        self._left: set[int] = set()

    def runs(self) -> Runs:
        """Return what one thread tells of its reads."""
        return Runs(self)

    def find(self, file: int, start: int, stop: int) -> tuple[int, int, int, bool] | None:
        """Return (number, first byte, end, whether it has a CRC-32) of the entry that holds bytes of a file."""
        return self._find(self._table_of[file], start, stop)

    def find_at(self, path: str, start: int, stop: int) -> tuple[int, int, int, bool] | None:
        """Return the same, given a file's path."""
        return self._find(self._numbers.get(path, -1), start, stop)

    def find_all(self, file: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield (first byte, end) of each part of a range of a file that lies in one entry."""
        table = self._tables[self._table_of[file]] if self._table_of[file] >= 0 else None
        if table is not None:
            first = max(bisect_right(table.starts, start) - 1, 0)
            for row in range(first, bisect_left(table.starts, stop)):
                begin, end = max(start, table.starts[row]), min(stop, table.stops[row])
                if begin < end:
                    yield begin, end

    def extent(self, entry: int) -> tuple[int, int]:
        """Return first byte and end of an entry."""
        return self._entry(entry)[:2]

    def _find(self, number: int, start: int, stop: int) -> tuple[int, int, int, bool] | None:
        if number < 0:
            return None
        table = self._tables[number]
        row = bisect_right(table.starts, start) - 1
        if row < 0 or stop > table.stops[row]:
            return None
        return self._firsts[number] + row, table.starts[row], table.stops[row], table.crcs[row] != 0

    def add(self, runs: Iterable[Run]) -> None:
        """Take what was read; may be called from any thread."""
        with self._lock:
            for run in runs:
                if self._states[run.entry]:
                    continue
                start, stop, _ = self._entry(run.entry)
                if run.start == start and run.stop == stop:
                    self._forget(run.entry)
                    self._compare(run)
                else:
                    self._keep(run, start, stop)

    def _entry(self, entry: int) -> tuple[int, int, int]:
        """Return first byte, end and recorded CRC-32 of an entry."""
        number = bisect_right(self._firsts, entry) - 1
        table, row = self._tables[number], entry - self._firsts[number]
        return table.starts[row], table.stops[row], table.crcs[row]

    def _forget(self, entry: int) -> None:
        for run in self._kept.pop(entry, ()):
            self._num_kept -= 1
            self._seen_bytes -= run.stop - run.start

    def _compare(self, run: Run) -> None:
        recorded = self._entry(run.entry)[2]
        self._seen_bytes += run.stop - run.start
        if not recorded:
            self._states[run.entry] = _UNRECORDED
        elif recorded == run.crc:
            self._states[run.entry] = _EQUAL
        else:
            self._states[run.entry] = _DIFFERENT
            self._different[run.entry] = run

    def _keep(self, run: Run, start: int, stop: int) -> None:
        """Put a part of an entry beside the others, joined with those that end or begin where it does."""
        held = self._kept.setdefault(run.entry, [])
        if any(other.start <= run.start and run.stop <= other.stop for other in held):  # a replica
            return
        place = bisect_left(held, run[1:3], key=itemgetter(1, 2))
        before = next((other for other in held[:place] if other.stop == run.start), None)
        after = next((other for other in held[place:] if other.start == run.stop), None)
        if self._num_kept >= _MAX_KEPT and before is None and after is None:
            self._dropped.add(run.entry)
            return
        for other, joined in ((before, True), (after, False)):
            if other is not None:
                held.remove(other)
                self._num_kept -= 1
                self._seen_bytes -= other.stop - other.start
                run = _join(other, run) if joined else _join(run, other)
        if run.start == start and run.stop == stop:
            self._forget(run.entry)
            self._compare(run)
            return
        held.insert(bisect_left(held, run[1:3], key=itemgetter(1, 2)), run)
        self._num_kept += 1
        self._seen_bytes += run.stop - run.start

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
        for entry, held in self._kept.items():
            start, stop, crc = self._entry(entry)
            if crc and self._file_of(entry) is not None:
                yield Rest(entry, _gaps(held, start, stop))

    def parts(self) -> dict[str, list[int]]:
        """Return what was read of entries that are not complete, as plain data for others who read of the same files.

        By file, four numbers for each run: the entry's first byte, the run's first byte and end, its CRC-32.
        """
        told: dict[str, list[int]] = {}
        for entry, held in self._kept.items():
            file = self._file_of(entry)
            if file is not None:
                numbers = told.setdefault(self._catalog.files[file].name, [])
                for run in held:
                    numbers += (self._entry(entry)[0], run.start, run.stop, run.crc)
        return told

    def take_parts(self, told: Sequence[Mapping[str, list[int]]], place: int) -> None:
        """Take what others read of the entries of which something was read here.

        Args:
            told: `parts` of everybody, this one's too.
            place: of this one among them.
        """
        entries = {}
        for entry in self._kept:
            file = self._file_of(entry)
            if file is not None:
                entries[self._catalog.files[file].name, self._entry(entry)[0]] = entry
        own = self._kept
        self._kept, self._num_kept = {}, 0
        self._seen_bytes -= sum(run.stop - run.start for held in own.values() for run in held)
        known: dict[tuple[int, int, int], int] = {}
        for reader, each in enumerate(told):
            for name, numbers in each.items():
                for begin, start, stop, crc in zip(*[iter(numbers)] * 4, strict=True):
                    entry = entries.get((name, begin), -1)
                    if entry < 0:
                        continue
                    self._first_readers.setdefault(entry, reader)
                    run = Run(entry, start, stop, crc, own[entry][0].fqn)
                    if known.setdefault((entry, start, stop), crc) != crc:  # they do not see the same bytes
                        self._states[entry], self._different[entry] = _DIFFERENT, run
                    self.add([run])
        self._not_mine = self._left | {
            entry for entry, reader in self._first_readers.items() if reader != place
        }

    def leave_chunks(self, rows: Iterable[int]) -> None:
        """Let others count the entries that are chunks which they read too."""
        table = self._catalog.chunks
        for row in rows:
            start, stop = table.start[row], table.start[row] + table.nbytes[row]
            found = self.find(table.file[row], start, stop)
            if found is not None and (found[1], found[2]) == (start, stop) and self._states[found[0]]:
                self._left.add(found[0])

    def is_first_reader(self, entry: int) -> bool:
        """True where nobody before this one among all read something of an entry."""
        return entry not in self._not_mine

    def key(self, entry: int) -> str:
        """Return what stands for an entry with everybody who reads of the same files."""
        return f"{self._name(entry)} {self._entry(entry)[0]}"

    def read_gaps(self, rest: Rest, sources: SourceFiles) -> list[int]:
        """Return the CRC-32 of each part of an entry that nobody read.

        Raises:
            IntegrityError, ResourceError: as `Reader.read_into`.
        """
        file, crcs = self._file_of(rest.entry), list[int]()
        assert file is not None
        fqn, buffer = self._kept[rest.entry][0].fqn, memoryview(bytearray(min(rest.nbytes, _BUFFER_NBYTES)))
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
        """Compare an entry, given the CRC-32 of each part of it that nobody read."""
        held = self._kept[rest.entry]
        found = {run.start: run for run in reversed(held)}
        for (start, stop), crc in zip(rest.gaps, crcs, strict=True):
            found[start] = Run(rest.entry, start, stop, crc, held[0].fqn)
        start, stop, _ = self._entry(rest.entry)
        run = found[start]
        while run.stop < stop:
            run = _join(run, found[run.stop])
        self._forget(rest.entry)
        self._compare(run)

    def _file_of(self, entry: int) -> int | None:
        """Return the file that an entry lies in, as it is."""
        number = bisect_right(self._firsts, entry) - 1
        plain = (
            index
            for index, at in enumerate(self._table_of)
            if at == number and not self._catalog.files[index].decode
        )
        return next(plain, None)

    def raise_differences(self, *, hint: str) -> None:
        """Refuse a source that is not what its own files record.

        Raises:
            IntegrityError: naming tensor, file and place of every entry that differs.
        """
        if self._different:
            problems = self.differences()
            raise IntegrityError(
                f"the source is damaged: {count(len(problems), 'stretch', 'stretches')} "
                f"{'does' if len(problems) == 1 else 'do'} not have the CRC-32 recorded in the file",
                problems=problems,
                hint=hint,
            )

    def differences(self) -> list[str]:
        """Return a line for each entry whose bytes are not those that were recorded."""
        if not self._different:
            return []
        owners = self._owners()
        lines = []
        for entry in sorted(self._different):
            run = self._different[entry]
            start, stop, recorded = self._entry(entry)
            name = self._name(entry)
            found = owners.get(entry) or [run.fqn]
            shown = ", ".join(map(escape, found[:_MAX_NAMED]))
            more = f" and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
            lines.append(
                f"{shown}{more}: {name}: bytes {start} to {stop} have CRC-32 {run.crc:08x}, "
                f"recorded is {recorded:08x}"
            )
        return lines

    def _owners(self) -> dict[int, list[str]]:
        """Return the tensors that lie in each entry that differs."""
        table, found = self._catalog.chunks, dict[int, list[str]]()
        for fqn, entry in self._catalog.tensors.items():
            for row in entry.chunk_ids:
                if self._catalog.files[table.file[row]].decode:
                    continue
                place = self.find(table.file[row], table.start[row], table.start[row] + table.nbytes[row])
                if place is not None and place[0] in self._different:
                    names = found.setdefault(place[0], [])
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
                if first + row in self._not_mine:
                    continue
                if state in (_EQUAL, _DIFFERENT):
                    checked += table.stops[row] - table.starts[row]
                elif state == _UNRECORDED:
                    counts.add(NOT_RECORDED, table.stops[row] - table.starts[row])
        for entry, held in self._kept.items():
            if entry in self._not_mine or looks_for_unread:  # the ends of what was not read otherwise
                continue
            reason = SHORT_RUNS if entry in self._dropped else IN_PART
            counts.add(reason if self._entry(entry)[2] else NOT_RECORDED, _covered(held))
        for entry in self._dropped - self._kept.keys():
            if not self._states[entry] and not looks_for_unread:
                counts.add(SHORT_RUNS, 0)
        if (
            looks_for_unread
            or min(self._table_of, default=0) < 0
            or any(f.is_proved for f in self._catalog.files)
        ):
            checked += self._count_others(names, counts, looks_for_unread)
        return CheckedSource(checked_bytes=checked, unchecked=counts.listed())

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
                place = self.find(file, start, start + nbytes)
                if place is not None and not self._states[place[0]]:
                    wanted[place[0]] = wanted.get(place[0], 0) + nbytes
        for entry, nbytes in wanted.items():
            is_read = entry in self._dropped or _covered(self._kept.get(entry, ())) >= nbytes
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
        for entry, start, stop, crc, _ in sorted(joined(runs)):
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
            if not 0 <= entry < len(self._states):
                return False
            begin = self._entry(entry)[0]
            runs.append(Run(entry, begin + offset, begin + offset + nbytes, crc, ""))
        self.add(runs)
        return True

    def drop(self, entries: Iterable[int]) -> None:
        """Remember that runs of entries were too short to be kept."""
        with self._lock:
            self._dropped.update(entries)


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
        self._file, self._entry, self._start, self._stop, self._limit = -1, -1, 0, 0, 0
        self._crc, self._fqn, self._has_crc = 0, "", False
        self._ended: list[Run] = []

    def add(self, file: int, start: int, data: memoryview | bytes, fqn: str) -> int | None:
        """Tell of bytes that were read; return their CRC-32, None where there is nothing to compare them with."""
        stop = start + len(data)
        if file != self._file or start != self._stop or stop > self._limit:
            found = self._check.find(file, start, stop)
            if found is None:
                self._add_across(file, start, stop, data, fqn)
                return None
            self._begin(found, file, start, fqn)
        return self._go_on(data, stop)

    def can_sum(self, file: int, start: int, stop: int) -> bool:
        """True for bytes that lie in one entry that has a CRC-32: whoever reads them may take theirs."""
        found = self._check.find(file, start, stop)
        return found is not None and found[3]

    def add_summed(self, file: int, start: int, stop: int, crc: int, fqn: str) -> None:
        """Tell of bytes that were read, for which `can_sum` is true, and of their CRC-32."""
        if file != self._file or start != self._stop or stop > self._limit:
            self._begin(self._check.find(file, start, stop), file, start, fqn)
        self._join(crc, stop)

    def _add_across(self, file: int, start: int, stop: int, data: memoryview | bytes, fqn: str) -> None:
        """Tell of bytes that lie in several entries: a byte entry is a zip as a whole."""
        view = memoryview(data)
        for begin, end in self._check.find_all(file, start, stop):
            if (file, begin) != (self._file, self._stop) or end > self._limit:
                self._begin(self._check.find(file, begin, end), file, begin, fqn)
            self._go_on(view[begin - start : end - start], end)

    def read(self, path: str, start: int, data: memoryview, fqn: str) -> None:
        """Tell of bytes of a file that were read to decode a tensor."""
        stop = start + len(data)
        self._begin(self._check.find_at(path, start, stop), -1, start, fqn)
        self._go_on(data, stop)

    def _begin(self, found: tuple[int, int, int, bool] | None, file: int, start: int, fqn: str) -> None:
        self._end()
        if found is not None:
            self._entry, _, self._limit, self._has_crc = found
            self._file, self._start, self._stop, self._crc, self._fqn = file, start, start, 0, fqn

    def _go_on(self, data: memoryview | bytes, stop: int) -> int | None:
        if self._entry < 0:
            return None
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
        self._file = self._entry = -1

    def take(self) -> list[Run]:
        """Hand over what was read since the last time, and return it."""
        self._end()
        if not self._ended:
            return []
        runs = joined(self._ended)
        self._ended = []
        if len(runs) > _MAX_SHORT:
            runs = self._without_short(runs)
        self._check.add(runs)
        return runs

    def _without_short(self, runs: list[Run]) -> list[Run]:
        """Leave out short runs, unless they are entries; read in very many pieces, one costs more than its bytes."""
        kept, left_out = list[Run](), list[int]()
        for run in runs:
            if run.stop - run.start >= _SHORT_NBYTES or self._check.extent(run.entry) == (
                run.start,
                run.stop,
            ):
                kept.append(run)
            else:
                left_out.append(run.entry)
        if left_out:
            self._check.drop(left_out)
        return kept


def joined(runs: Iterable[Run]) -> list[Run]:
    """Return runs in the order of entries and bytes, each with its neighbours; what was read twice once."""
    found = list[Run]()
    for run in sorted(runs, key=lambda run: (run.entry, run.start, -run.stop)):
        last = found[-1] if found else None
        if last is None or last.entry != run.entry or last.stop < run.start:
            found.append(run)
        elif last.stop == run.start:
            found[-1] = _join(last, run)
        elif last.stop < run.stop:
            found.append(run)
    return found


def _join(a: Run, b: Run) -> Run:
    return Run(a.entry, a.start, b.stop, crc32_combine(a.crc, b.crc, b.stop - b.start), a.fqn or b.fqn)


def _gaps(held: Sequence[Run], start: int, stop: int) -> list[tuple[int, int]]:
    """Return what has to be read beside some runs so that runs tile an entry; runs that overlap others are not used."""
    gaps, at = list[tuple[int, int]](), start
    for run in held:
        if run.start >= at:
            if run.start > at:
                gaps.append((at, run.start))
            at = run.stop
    if at < stop:
        gaps.append((at, stop))
    return gaps


def _length(extent: tuple[int, int]) -> int:
    return extent[1] - extent[0]


def _covered(held: Sequence[Run]) -> int:
    nbytes, at = 0, 0
    for run in held:
        nbytes += max(run.stop - max(run.start, at), 0)
        at = max(at, run.stop)
    return nbytes


def _are_ints(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int for value in values)
