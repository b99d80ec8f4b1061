"""Comparing a source with the CRC-32s that its own files record, while its bytes move.

A zip of torch has a CRC-32 for each entry, and an entry is a storage: several tensors may view it, and
threads, bands and ranks each read a part of it. So every run of bytes that is read gives (entry, first byte,
end, CRC-32). A run that is a whole entry is compared at once. Every other run has to be on a chain of runs
that make up the entry, whatever order they came in (`chains`). What such chains lack is read at the end, if
it is little. Otherwise the bytes of the run count as unchecked, with the reason.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, groupby
from operator import sub
from typing import Any, NamedTuple, TypeGuard

from shardkit.core.catalog import Catalog, Computed
from shardkit.core.text import count, escape, few
from shardkit.errors import IntegrityError
from shardkit.files.digest import crc32, crc32_combine
from shardkit.transfer.chains import (
    Difference,
    Entries,
    Entry,
    Evidence,
    Run,
    Span,
    Verdict,
    covered,
    gaps,
    joined,
    judge,
)

NOT_RECORDED = "no CRC-32 is recorded"
NO_CHECKSUMS = "safetensors have no CRC-32"
IN_PART = "only a part was needed"
OVERLAPPING = "read in parts that overlap"
SHORT_RUNS = "read in very short pieces"
NOT_READ = "blocks shared with the output, not read"

OFF = (
    "the source was not compared with the checksums in it (--check-source off): damaged bytes would have been taken "
    "as they are"
)
"""The warning for a person who switched comparing off."""

_MAX_MORE = 0.05  # share of the wanted bytes: most that is read beside them to complete entries
_FREE_NBYTES = 128 << 10  # the same in bytes: what Linux reads ahead of its own accord
_SHORT_NBYTES = 4096
_MAX_KEPT = 1 << 18  # runs that wait for others
_MAX_NAMED = 3
_UNREAD, _EQUAL, _DIFFERENT, _UNRECORDED = range(4)
_IS_COMPARED = bytes(state in (_EQUAL, _DIFFERENT) for state in range(256))
_IS_UNRECORDED = bytes(state == _UNRECORDED for state in range(256))


class Rest(NamedTuple):
    """What is missing of an entry."""

    entry: int
    gaps: list[Span]
    """Each part that has to be read so that all runs are on chains."""

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(stop - start for start, stop in self.gaps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unchecked:
    """Parts of a source that could not be compared, for one reason."""

    reason: str
    num_entries: int
    """Storages in torch's files, tensors elsewhere."""
    entry_bytes: int
    """Bytes of them that were read and not compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedSource:
    """How much of a source was compared with what is recorded."""

    checked_bytes: int = 0
    unchecked: tuple[Unchecked, ...] = ()

    @classmethod
    def of_all(cls, parts: Iterable[CheckedSource]) -> CheckedSource:
        """Return the sum of what several readers found, each of its own part."""
        counts, checked = _Counts(), 0
        for part in parts:
            checked += part.checked_bytes
            for unchecked in part.unchecked:
                counts.add(unchecked.reason, unchecked.entry_bytes, unchecked.num_entries)
        return cls(checked_bytes=checked, unchecked=counts.listed())


class SourceCheck:
    """Collects what all threads read of a catalog's files.

    Args:
        catalog: a catalog of raw extents.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog, self._lock = catalog, threading.Lock()
        self.entries = Entries(catalog)
        self._states = bytearray(len(self.entries))
        self._held: dict[int, dict[Span, int]] = {}
        """By entry that was read in parts: the CRC-32 of each run."""
        self._num_held, self._max_held = 0, _MAX_KEPT
        self._verdicts: dict[int, Verdict] = {}
        self._dropped: dict[int, int] = {}
        """By entry: bytes of the runs for which there was no room."""
        self._different: dict[int, Difference] = {}
        self._fqns: dict[int, str] = {}
        self._seen_bytes = 0
        self._first_readers: dict[int, int] = {}
        self._not_mine: set[int] = set()
        self._left: set[int] = set()

    def runs(self) -> Runs:
        """Return where one thread reports its reads."""
        return Runs(self)

    def fqn_of(self, entry: int) -> str:
        """Return a tensor that some of an entry was read for; empty where none is known."""
        return self._fqns.get(entry, "")

    # What was read

    def add(self, runs: Sequence[Run]) -> Evidence:
        """Take what was read, and return it. May be called from any thread."""
        right, others = array("q"), list[Run]()
        with self._lock:
            for run, start, stop, recorded in self.entries.of_runs(runs):
                if run.start != start or run.stop != stop:
                    self._keep(run)
                    others.append(run)
                    continue
                self._compare(run, recorded)
                if run.crc == recorded and recorded:
                    right.append(run.entry)
                else:
                    others.append(run)
        return Evidence(right, others)

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
        elif run.fqn:  # a difference that came from a note has no tensor's name
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
        """Forget the runs that are proved by now; False if too few are for another try to pay."""
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
        """Judge the runs of an entry that was read in parts; None if no CRC-32 is recorded."""
        described = self.entries[entry]
        if described.crc and entry not in self._verdicts:
            verdict = self._verdicts[entry] = judge(self._held[entry], described)
            if verdict.wrong is not None:
                self._differ(entry, verdict.wrong, "")
        return self._verdicts.get(entry)

    # What is missing

    def missing(self) -> list[Rest]:
        """Return the entries to complete: nearly complete ones first, up to 5 % of what was read."""
        budget, chosen = max(_MAX_MORE * self._seen_bytes, _FREE_NBYTES), list[Rest]()
        for nbytes, rest in sorted((rest.nbytes, rest) for rest in self._rests()):
            budget -= nbytes
            if budget < 0:
                break
            chosen.append(rest)
        return chosen

    def missing_of_each(self) -> list[Rest]:
        """Return the entries that lack at most 5 % of themselves, or a page. All readers decide alike."""
        return [
            rest
            for rest in self._rests()
            if rest.nbytes <= max(_MAX_MORE * _length(self.entries[rest.entry]), _SHORT_NBYTES)
        ]

    def _rests(self) -> Iterator[Rest]:
        for entry, held in self._held.items():
            verdict = self._verdict(entry)
            if verdict is not None and verdict.loose and self.entries.file_of(entry) is not None:
                yield Rest(entry, gaps(held, *self.entries[entry][:2]))

    def complete(self, rest: Rest, crcs: Sequence[int]) -> None:
        """Take the CRC-32 of each part that was missing of an entry."""
        for (start, stop), crc in zip(rest.gaps, crcs, strict=True):
            self._keep(Run(rest.entry, start, stop, crc, self.fqn_of(rest.entry)), is_bounded=False)

    # What several ranks read

    def parts(self) -> dict[str, list[int]]:
        """Return the runs that are parts of entries, as plain data for others who read of the same files.

        By file, four numbers for each run: the entry's first byte, the run's first byte and end, its CRC-32.
        """
        told: dict[str, list[int]] = {}
        for entry, held in self._held.items():
            file = self.entries.file_of(entry)
            if file is not None:
                numbers = told.setdefault(self._catalog.files[file].name, [])
                for (start, stop), crc in held.items():
                    numbers += (self.entries[entry].start, start, stop, crc)
        return told

    def take_parts(self, told: Sequence[Mapping[str, list[int]]], place: int) -> None:
        """Take the runs that others read of entries that were read in part here.

        Args:
            told: `parts` of everybody, this one's included.
            place: place of this one among them.
        """
        entries = {}
        for entry in self._held:
            file = self.entries.file_of(entry)
            if file is not None:
                entries[self._catalog.files[file].name, self.entries[entry].start] = entry
        for reader, parts in enumerate(told):
            for name, numbers in parts.items():
                for begin, start, stop, crc in zip(*[iter(numbers)] * 4, strict=True):
                    entry = entries.get((name, begin), -1)
                    if entry >= 0:
                        self._first_readers.setdefault(entry, reader)
                        self._keep(Run(entry, start, stop, crc, self.fqn_of(entry)), is_bounded=False)
        self._not_mine = self._left | {
            entry for entry, reader in self._first_readers.items() if reader != place
        }

    def leave_chunks(self, rows: Iterable[int]) -> None:
        """Let others count the entries that are whole chunks, which they read too."""
        self._left.update(self._whole_chunks(rows))

    def share_chunks(self, rows: Iterable[int]) -> None:
        """Tell others of the entries that are whole chunks too: those of them that read one count it once."""
        for entry in self._whole_chunks(rows):
            start, stop, crc = self.entries[entry]
            self._held.setdefault(entry, {})[start, stop] = crc

    def _whole_chunks(self, rows: Iterable[int]) -> Iterator[int]:
        """Yield the entries that are chunks and were read in one run."""
        table = self._catalog.chunks
        for row in rows:
            entry, start = self.entries.holding_chunk(row), table.start[row]
            if entry is not None and self.entries[entry][:2] == (start, start + table.nbytes[row]):
                if self._states[entry] in (_EQUAL, _UNRECORDED):
                    yield entry

    def is_first_reader(self, entry: int) -> bool:
        """True if no reader before this one read something of an entry."""
        return entry not in self._not_mine

    # What differs

    def raise_differences(self, *, hint: str) -> None:
        """Refuse a source that is not what its own files record.

        Raises:
            IntegrityError: names tensor, file and place of every entry that differs.
        """
        problems = self.differences()
        IntegrityError.raise_for(
            problems,
            f"the source is damaged: {count(len(problems), 'stretch', 'stretches')} "
            f"{'does' if len(problems) == 1 else 'do'} not have the CRC-32 recorded in the file",
            hint=hint,
        )

    def differences(self) -> list[str]:
        """Return a line for each entry whose bytes are not the recorded ones."""
        for entry in self._held:
            self._verdict(entry)
        if not self._different:
            return []
        owners = self._owners()
        lines = []
        for entry in sorted(self._different):
            start, stop, crc, other = self._different[entry]
            names = owners.get(entry) or [self._fqns.get(entry, "a tensor")]
            shown = few([*map(escape, names)], _MAX_NAMED)
            told = "recorded is" if (start, stop) == self.entries[entry][:2] else "in another reading it is"
            where = f"{self.entries.name_of(entry)}: bytes {start} to {stop}"
            lines.append(f"{shown}: {where} have CRC-32 {crc:08x}, {told} {other:08x}")
        return lines

    def _owners(self) -> dict[int, list[str]]:
        """Return the tensors that lie in each entry that differs."""
        table, owners = self._catalog.chunks, dict[int, list[str]]()
        for fqn, tensor in self._catalog.tensors.items():
            for row in tensor.chunk_ids:
                if not self._catalog.files[table.file[row]].is_raw:
                    continue
                entry = self.entries.holding_chunk(row)
                if entry is not None and entry in self._different:
                    names = owners.setdefault(entry, [])
                    if not names or names[-1] != fqn:
                        names.append(fqn)
        return owners

    # How much was compared

    def summary(self, names: Iterable[str], *, looks_for_unread: bool = False) -> CheckedSource:
        """Return how much was compared.

        Args:
            names: the catalog's tensors that were wanted.
            looks_for_unread: whether bytes may have gone into the output without being read.
        """
        entries, counts, checked = self.entries, _Counts(), 0
        states = bytearray(self._states)
        for entry in (*self._not_mine, *self._held, *self._dropped):
            states[entry] = _UNREAD
        for first, table in zip(entries.firsts, entries.tables, strict=False):  # a million entries take 0.1 s
            part = states[first : first + len(table)]
            compared, unrecorded = part.translate(_IS_COMPARED), part.translate(_IS_UNRECORDED)
            checked += sum(compress(map(sub, table.stops, table.starts), compared))
            if number := sum(unrecorded):
                nbytes = sum(compress(map(sub, table.stops, table.starts), unrecorded))
                counts.add(NOT_RECORDED, nbytes, number)
        for entry in self._held.keys() | self._dropped.keys():
            checked += self._count_parts(entry, counts, looks_for_unread)
        has_others = min(entries.table_of, default=0) < 0 or any(f.is_proved for f in self._catalog.files)
        if looks_for_unread or has_others:
            checked += self._count_others(names, counts, looks_for_unread)
        return CheckedSource(checked_bytes=checked, unchecked=counts.listed())

    def _count_parts(self, entry: int, counts: _Counts, looks_for_unread: bool) -> int:
        """Count the unchecked bytes of an entry that was read in parts; return the checked ones."""
        held, dropped = self._held.get(entry, {}), self._dropped.get(entry, 0)
        start, stop, recorded = self.entries[entry]
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
        """Count chunks outside all entries, and unread ones; return the bytes that decoding proves."""
        table, files, proved = self._catalog.chunks, self._catalog.files, 0
        wanted, known = dict[int, int](), set[tuple[int, int]]()
        for row in (row for name in names for row in self._catalog.tensors[name].chunk_ids):
            file, start, nbytes = table.file[row], table.start[row], table.nbytes[row]
            has_table, is_proved = self.entries.table_at(files[file].path) >= 0, files[file].is_proved
            if not nbytes or (has_table and not looks_for_unread and not is_proved):
                continue
            if isinstance(files[file].made, Computed):  # counted where it is made from
                continue
            if (file, start) in known:  # a tied name
                continue
            known.add((file, start))
            if is_proved:
                proved += nbytes
            elif not has_table:
                has_none = files[file].path.endswith(".safetensors")
                counts.add(NO_CHECKSUMS if has_none else NOT_RECORDED, nbytes)
            elif looks_for_unread and files[file].is_raw:
                entry = self.entries.holding_chunk(row)
                if entry is not None and not self._is_proved(entry):
                    wanted[entry] = wanted.get(entry, 0) + nbytes
        for entry, nbytes in wanted.items():
            is_read = entry in self._dropped or covered(self._held.get(entry, ())) >= nbytes
            reason = (SHORT_RUNS if entry in self._dropped else IN_PART) if is_read else NOT_READ
            counts.add(reason if self.entries[entry].crc else NOT_RECORDED, nbytes)
        return proved

    # What an interrupted run read

    def dump(self, evidence: Evidence) -> dict[str, Any]:
        """Return the evidence as plain data, for processes that may not have looked at the same records.

        Returns:
            files: by label, three lists. The first has three numbers for each entry that was read whole and is right: bytes
                between the one before and it, its bytes, the recorded CRC-32. The second has six for every other run:
                the entry's first byte, its bytes, the recorded CRC-32; the run's first byte within it, its bytes, its CRC-32.
                The third has the tensor that each of these was read for.
            unrecorded: stands for the files of which nothing was recorded.
        """
        whole, files = set(evidence.right), dict[str, tuple[list[int], list[int], list[str]]]()
        for run, begin, end, recorded in self.entries.of_runs(joined(evidence.runs, self.entries.decoded)):
            entry, start, stop, crc, fqn = run
            if (begin, end) == (start, stop) and (crc == recorded or not recorded):
                whole.add(entry)
            else:
                _, parts, names = files.setdefault(self.entries.label_of(entry), ([], [], []))
                names.append(fqn)
                parts += (begin, end - begin, recorded, start - begin, stop - start, crc)
        # A million of them are small numbers, and in the order of their bytes.
        ends = dict[str, int]()
        for label, entries in groupby(sorted(whole), key=self.entries.label_of):
            rows, before = files.setdefault(label, ([], [], []))[0], ends.get(label, 0)
            for start, stop, recorded in self.entries.described(entries):
                rows += (start - before, stop - start, recorded)
                before = ends[label] = stop
        return {"files": files, "unrecorded": self.entries.unrecorded}

    def load(self, told: object) -> bool:
        """Take an earlier run's `dump`; False if it compared nothing, or with something else."""
        runs = self._runs_of(told)
        if runs is not None:
            self.add(runs)
        return runs is not None

    def _runs_of(self, told: object) -> list[Run] | None:
        """Return the runs of a `dump`; None if it is none, or something else was recorded by then."""
        files = told.get("files") if isinstance(told, Mapping) else None
        if not isinstance(told, Mapping) or not isinstance(files, Mapping):
            return None
        if told.get("unrecorded") != self.entries.unrecorded:
            return None
        runs = list[Run]()
        for label, lists in files.items():
            if not _are_lists(lists):
                return None
            for entry, offset, nbytes, crc, fqn in _rows_of(*lists):
                number = self.entries.number_of(label, entry)
                if number is None or not 0 <= offset < offset + nbytes <= entry.stop - entry.start:
                    return None
                runs.append(Run(number, entry.start + offset, entry.start + offset + nbytes, crc, fqn))
        self._states.extend(bytes(len(self.entries) - len(self._states)))
        return runs

    def has_doubts(self, told: Mapping[str, Any]) -> bool:
        """True if a `dump` that was loaded has to do with an entry that differs."""
        return any(run.entry in self._different for run in self._runs_of(told) or ())


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
    """What one thread reads. Neighbours are joined as they come.

    Args:
        check: collects what all threads read.
    """

    def __init__(self, check: SourceCheck) -> None:
        self._check, self._entries = check, check.entries
        self._table, self._entry, self._start, self._stop, self._limit = -1, -1, 0, 0, 0
        self._crc, self._fqn, self._has_crc = 0, "", False
        self._ended: list[Run] = []

    def add(self, file: int, start: int, data: memoryview | bytes, fqn: str) -> int | None:
        """Report bytes that were read; return their CRC-32, None if nothing is recorded."""
        return self._add(self._entries.table_of[file], start, data, fqn)

    def read(self, path: str, start: int, data: memoryview, fqn: str) -> None:
        """Report bytes of a file that were read to decode a tensor."""
        self._add(self._entries.table_at(path), start, data, fqn)

    def can_sum(self, file: int, start: int, stop: int) -> bool:
        """True if one run can hold these bytes, and their entry has a CRC-32: the reader may take it."""
        entry = self._entries.find(self._entries.table_of[file], start, stop)
        return entry is not None and entry[2]

    def add_summed(self, file: int, start: int, stop: int, crc: int, fqn: str) -> None:
        """Report bytes that were read and for which `can_sum` is true, with their CRC-32."""
        table = self._entries.table_of[file]
        if table != self._table or start != self._stop or stop > self._limit:
            self._begin(table, start, stop, fqn)
        self._join(crc, stop)

    def take_over(self, runs: Iterable[Run]) -> None:
        """Report runs that another thread read and this one uses too."""
        self._ended += runs

    def _add(self, table: int, start: int, data: memoryview | bytes, fqn: str) -> int | None:
        stop = start + len(data)
        if (table != self._table or start != self._stop or stop > self._limit) and not self._begin(
            table, start, stop, fqn
        ):
            # It lies in several entries: a byte entry of a checkpoint is a whole zip.
            view = memoryview(data)
            for begin, end in self._entries.find_all(table, start, stop):
                self._begin(table, begin, end, fqn)
                self._go_on(view[begin - start : end - start], end)
            return None
        return self._go_on(data, stop)

    def _begin(self, table: int, start: int, stop: int, fqn: str) -> bool:
        """Begin a run; False if no run can hold the range."""
        entry = self._entries.find(table, start, stop)
        self._end()
        if entry is not None:
            self._entry, self._limit, self._has_crc = entry
            self._table, self._start, self._stop, self._crc, self._fqn = table, start, start, 0, fqn
        return entry is not None

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
        """Return the runs that were read since the last call, and hand nothing over."""
        self._end()
        runs, self._ended = self._ended, []
        return runs

    def take(self) -> Evidence:
        """Hand over what was read since the last call, and return it."""
        ended = self.collect()
        return self._check.add(joined(ended, self._entries.decoded)) if ended else Evidence(array("q"), [])


def _length(extent: Sequence[int]) -> int:
    return extent[1] - extent[0]


def _rows_of(
    whole: Sequence[int], parts: Sequence[int], names: Sequence[str]
) -> Iterator[tuple[Entry, int, int, int, str]]:
    """Yield the runs of a file of a `dump`: entry, first byte within it, bytes, CRC-32, the tensor."""
    stop = 0
    for step, nbytes, recorded in zip(*[iter(whole)] * 3, strict=True):
        stop += step + nbytes
        yield Entry(stop - nbytes, stop, recorded), 0, nbytes, recorded, ""
    rows = zip(*[iter(parts)] * 6, strict=True)
    for (start, length, recorded, offset, nbytes, crc), fqn in zip(rows, names, strict=True):
        yield Entry(start, start + length, recorded), offset, nbytes, crc, fqn


def _are_lists(lists: object) -> bool:
    """True for the lists of a file of a `dump`."""
    if not isinstance(lists, list | tuple) or len(lists) != 3:
        return False
    whole, parts, names = lists
    if not (_are_ints(whole) and _are_ints(parts) and isinstance(names, list)):
        return False
    is_text = all(isinstance(name, str) for name in names)
    return is_text and not len(whole) % 3 and len(parts) == 6 * len(names)


def _are_ints(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int for value in values)
