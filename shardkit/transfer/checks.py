"""Comparing a source with the CRC-32s in its own files, while its bytes are read.

A zip of torch records a CRC-32 for each entry, and an entry is a storage: several tensors may view it, and threads, parts
and ranks each read some of it. Reads are listed as (entry, first byte, end, CRC-32). These lists are plain data: notes of
finished files contain them, ranks exchange them, and they are all that `judge` needs. Readings that tile an entry are
compared with its recorded CRC-32. All other entries count as unchecked, with a reason.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, pairwise
from operator import itemgetter
from typing import NamedTuple, TypedDict, TypeGuard

from shardkit.core.catalog import Catalog, Checksums, SourceFile
from shardkit.core.text import count, escape, few
from shardkit.errors import IntegrityError
from shardkit.files.digest import combine, crc32, crc32_combine

NOT_RECORDED = "no CRC-32 is recorded"
NO_CHECKSUMS = "safetensors have no CRC-32"
IN_PART = "only a part was needed"
OVERLAPPING = "read in parts that overlap"
SHORT_READINGS = "read in very short pieces"
NOT_READ = "blocks shared with the output, not read"

OFF = (
    "the source was not compared with the checksums in it (--check-source off): damaged bytes would not have been "
    "noticed"
)
"""The warning if the user disabled comparing."""

UNREAD, _SHORT = -1, -2
_WITHOUT_CRC = {UNREAD: NOT_READ, _SHORT: SHORT_READINGS}
"""Placeholder for a CRC-32 -> why it was not computed."""

_MAX_MORE = 1 << 18  # readings beyond one per entry
_MAX_NAMED = 3
_FILE_AND_ENTRY, _ENTRY_OF = itemgetter(0, 1), itemgetter(1)
_TENSOR_OF, _START_OF = itemgetter(2), itemgetter(3)


class Entry(NamedTuple):
    """A stretch of a file with a recorded CRC-32."""

    start: int
    stop: int
    crc: int
    """As recorded; 0 if none is recorded."""


class EntryReading(NamedTuple):
    """Contiguous bytes of an entry that were read for one tensor."""

    file: str
    """Label of the file; see `Entries`."""
    entry: Entry
    tensor: str
    start: int
    """First byte in the file. Without a recorded CRC-32 the whole entry counts as read."""
    stop: int
    crc: int
    """CRC-32 of these bytes, or a key of `_WITHOUT_CRC`."""


class Readings(TypedDict):
    """A list of readings as plain data. Numbers are in arrays, which JSON does not have: see `as_json`."""

    whole: dict[str, Sequence[int]]
    """By file, the three numbers of `Entry`, for each entry that was read whole and is intact, or has no CRC-32."""
    parts: dict[str, dict[str, Sequence[int]]]
    """Other readings by file and tensor, six numbers each: those of `Entry`, then first byte, end and CRC-32."""


class Damage(NamedTuple):
    """An entry with bytes that differ from the recorded CRC-32."""

    file: str
    entry: Entry
    line: str
    """The error message: tensors, file, position, both CRC-32s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unchecked:
    """Parts of a source that were not compared, for one reason."""

    reason: str
    num_entries: int
    """Number of storages in torch's files, of tensors in other files."""
    entry_bytes: int
    """Bytes of them that were read but not compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedSource:
    """How much of a source was compared with recorded checksums."""

    checked_bytes: int = 0
    unchecked: tuple[Unchecked, ...] = ()

    @classmethod
    def of_all(cls, sources: Iterable[CheckedSource]) -> CheckedSource:
        """Return the sum over several sources."""
        counts, checked = _Counts(), 0
        for source in sources:
            checked += source.checked_bytes
            for part in source.unchecked:
                counts.add(part.reason, part.entry_bytes, part.num_entries)
        return cls(checked_bytes=checked, unchecked=counts.listed())


class Verdict(NamedTuple):
    """The result of judging the readings of a source."""

    damaged: list[Damage]
    checked: CheckedSource

    def raise_damaged(self, *, hint: str) -> None:
        """Refuse a damaged source.

        Raises:
            IntegrityError: an entry is damaged; lists tensors, file and position of all of them.
        """
        num_ranges = len(self.damaged)
        IntegrityError.raise_for(
            [damage.line for damage in self.damaged],
            f"the source is corrupt: {count(num_ranges, 'byte range')} "
            f"{'fails its' if num_ranges == 1 else 'fail their'} CRC-32",
            hint=hint,
        )


# Judging


def judge(lists: Iterable[Readings]) -> Verdict:
    """Compare all readings of a source with the recorded CRC-32s, and readings of the same bytes with each other.

    An entry is checked if its readings tile it. It is damaged if their combined CRC-32, or that of a single reading of the
    whole entry, differs from the recorded one, or if two readings of the same bytes differ.
    """
    by_file = dict[str, tuple[list[Sequence[int]], list[dict[str, Sequence[int]]]]]()
    for each in lists:
        for file, numbers in each["whole"].items():
            by_file.setdefault(file, ([], []))[0].append(numbers)
        for file, of_tensors in each["parts"].items():
            by_file.setdefault(file, ([], []))[1].append(of_tensors)
    damaged, counts, checked = list[Damage](), _Counts(), 0
    for file, (wholes, parts) in sorted(by_file.items()):
        whole = {entry for numbers in wholes for entry in _entries_of(numbers)}
        in_parts = dict[Entry, list[_Span]]()
        for of_tensors in parts:
            for entry, part in _parts_of(of_tensors):
                in_parts.setdefault(entry, []).append(part)
        has_crcs = bool(in_parts) or any(entry.crc for entry in whole)
        for entry in whole - in_parts.keys():
            if entry.crc:
                checked += entry.stop - entry.start
            else:
                is_bare = file.endswith(".safetensors") and not has_crcs
                counts.add(NO_CHECKSUMS if is_bare else NOT_RECORDED, entry.stop - entry.start)
        for entry, of_entry in sorted(in_parts.items()):
            if entry in whole:
                of_entry.append((*entry, ""))
            difference, reason = _compare(entry, of_entry)
            if difference is not None:
                damaged.append(_damage(file, entry, of_entry, *difference))
            elif reason:
                counts.add(reason, _covered(of_entry))
            else:
                checked += entry.stop - entry.start
    return Verdict(damaged, CheckedSource(checked_bytes=checked, unchecked=counts.listed()))


def have_read(readings: Readings, entries: Collection[tuple[str, Entry]]) -> bool:
    """True if there is a reading of one of these (file, entry) pairs."""
    return any(
        (file, entry) in entries
        for file, numbers in readings["whole"].items()
        for entry in _entries_of(numbers)
    ) or any(
        (file, entry) in entries
        for file, of_tensors in readings["parts"].items()
        for entry, _ in _parts_of(of_tensors)
    )


_Span = tuple[int, int, int, str]
"""(first byte, end, CRC-32, tensor) of a reading of an entry."""


def _entries_of(numbers: Iterable[int]) -> Iterator[Entry]:
    return map(Entry, *[iter(numbers)] * 3)


def _parts_of(of_tensors: Mapping[str, Sequence[int]]) -> Iterator[tuple[Entry, _Span]]:
    """Yield the partial readings of a file."""
    for tensor, numbers in of_tensors.items():
        for begin, end, recorded, start, stop, crc in zip(*[iter(numbers)] * 6, strict=True):
            yield Entry(begin, end, recorded), (start, stop, crc, tensor)


class _Difference(NamedTuple):
    start: int
    stop: int
    crc: int
    reference: int
    """The recorded CRC-32 for a whole entry, otherwise that of another reading."""


def _compare(entry: Entry, parts: Iterable[_Span]) -> tuple[_Difference | None, str]:
    """Compare the readings of an entry; return the difference, and the reason if the entry is unchecked."""
    crcs, reason = dict[tuple[int, int], int](), ""
    for start, stop, crc, _ in parts:
        if crc < 0:
            reason = _WITHOUT_CRC[crc]
        elif (earlier := crcs.setdefault((start, stop), crc)) != crc:
            return _Difference(start, stop, crc, earlier), ""
    whole = crcs.get((entry.start, entry.stop), entry.crc)
    ordered = sorted(crcs.items())
    starts, stops = [span[0] for span, _ in ordered], [span[1] for span, _ in ordered]
    if [*starts, entry.stop] == [entry.start, *stops]:
        whole = combine((crc, stop - start) for (start, stop), crc in ordered)
    elif not reason:
        reason = OVERLAPPING if _covered(parts) == entry.stop - entry.start else IN_PART
    if whole != entry.crc:
        return _Difference(entry.start, entry.stop, whole, entry.crc), ""
    return None, reason


def _damage(
    file: str, entry: Entry, parts: Iterable[_Span], start: int, stop: int, crc: int, reference: int
) -> Damage:
    tensors = [*dict.fromkeys(escape(tensor) for *_, tensor in sorted(parts) if tensor)]
    source = "recorded is" if (start, stop) == entry[:2] else "in another reading it is"
    where = f"{few(tensors, _MAX_NAMED)}: {escape(file)}: bytes {start} to {stop}"
    return Damage(file, entry, f"{where} have CRC-32 {crc:08x}, {source} {reference:08x}")


def _covered(parts: Iterable[_Span]) -> int:
    """Return the number of distinct bytes in the readings of an entry."""
    nbytes = reached = 0
    for start, stop, *_ in sorted(parts):
        nbytes += max(stop - max(start, reached), 0)
        reached = max(reached, stop)
    return nbytes


class _Counts:
    """Entries and bytes by reason."""

    def __init__(self) -> None:
        self._numbers: dict[str, list[int]] = {}

    def add(self, reason: str, nbytes: int, num_entries: int = 1) -> None:
        numbers = self._numbers.setdefault(reason, [0, 0])
        numbers[0] += num_entries
        numbers[1] += nbytes

    def listed(self) -> tuple[Unchecked, ...]:
        return tuple(
            Unchecked(reason=reason, num_entries=number, entry_bytes=nbytes)
            for reason, (number, nbytes) in sorted(self._numbers.items())
        )


# Lists


class PackedReadings:
    """Readings that take little room: 24 bytes for an entry that was read at once, as most are. There may be a million."""

    def __init__(self) -> None:
        self._whole: dict[str, array[int]] = {}
        self._partial = list[EntryReading]()

    def add(self, readings: Iterable[EntryReading]) -> None:
        """Add readings."""
        for reading in readings:
            if reading[3:] == reading.entry:
                self._whole.setdefault(reading.file, array("q")).extend(reading.entry)
            else:
                self._partial.append(reading)

    def merged(self) -> Readings:
        """Return all readings as plain data, merged as far as possible."""
        parts: dict[str, dict[str, array[int]]] = {}
        for file, entry, tensor, *span, crc in joined(self._partial):
            if (*span, crc) == entry:
                self._whole.setdefault(file, array("q")).extend(entry)
            else:
                parts.setdefault(file, {}).setdefault(tensor, array("q")).extend((*entry, *span, crc))
        whole: dict[str, Sequence[int]] = {
            file: array("q", chain.from_iterable(sorted({*_entries_of(numbers)})))
            for file, numbers in sorted(self._whole.items())
        }
        return Readings(whole=whole, parts={file: {**of_tensors} for file, of_tensors in parts.items()})


def pack(readings: Iterable[EntryReading]) -> Readings:
    """Return readings as plain data, merged as far as possible."""
    packed = PackedReadings()
    packed.add(readings)
    return packed.merged()


def as_json(readings: Readings) -> Readings:
    """Return readings as JSON can hold them: with lists."""
    return Readings(
        whole={file: [*numbers] for file, numbers in readings["whole"].items()},
        parts={
            file: {tensor: [*numbers] for tensor, numbers in of_tensors.items()}
            for file, of_tensors in readings["parts"].items()
        },
    )


def joined(readings: Iterable[EntryReading]) -> list[EntryReading]:
    """Sort readings, and merge contiguous ones of the same tensor.

    Overlapping readings of a tensor in an entry are kept, as each has to be judged. If there are far more readings than
    entries, those of each entry are replaced by one without a CRC-32.
    """
    result, num_entries = list[EntryReading](), 0
    for _, of_entry in groupby(sorted(set(readings)), key=_FILE_AND_ENTRY):
        num_entries += 1
        for _, of_tensor in groupby(of_entry, key=_TENSOR_OF):
            result += _joined(list(of_tensor))
    if len(result) - num_entries > _MAX_MORE:
        return [_hull(*of_entry) for _, of_entry in groupby(result, key=_FILE_AND_ENTRY)]
    return result


def _joined(readings: Sequence[EntryReading]) -> list[EntryReading]:
    """Merge contiguous readings of an entry for one tensor."""
    if any(before.stop > after.start for before, after in pairwise(readings)):
        return [*readings]
    result = [readings[0]]
    for reading in readings[1:]:
        last = result[-1]
        if last.stop == reading.start and min(last.crc, reading.crc) >= 0:
            crc = crc32_combine(last.crc, reading.crc, reading.stop - reading.start)
            result[-1] = last._replace(stop=reading.stop, crc=crc)
        else:
            result.append(reading)
    return result


def _hull(*readings: EntryReading) -> EntryReading:
    """Return a reading without a CRC-32 that spans several readings of an entry."""
    first, stop = min(readings, key=_START_OF), max(reading.stop for reading in readings)
    return first if len(readings) == 1 else first._replace(stop=stop, crc=_SHORT)


def are_readings(value: object) -> TypeGuard[Readings]:
    """True if data from a file has the form that `pack` returns."""
    if not isinstance(value, dict) or value.keys() != Readings.__annotations__.keys():
        return False
    whole, parts = value["whole"], value["parts"]
    if not isinstance(whole, dict) or not isinstance(parts, dict):
        return False
    return all(_are_rows(numbers, 3) for numbers in whole.values()) and all(
        isinstance(of_tensors, dict) and all(_are_rows(numbers, 6) for numbers in of_tensors.values())
        for of_tensors in parts.values()
    )


def _are_rows(value: object, length: int) -> bool:
    return (
        isinstance(value, list) and not len(value) % length and all(type(number) is int for number in value)
    )


# Collecting


class Entries:
    """The entries of a catalog's files.

    Files at the same path share entries. In a file without checksums, chunks are entries without CRC-32.

    Args:
        catalog: a catalog of raw extents.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._tables: dict[str, Checksums] = {}
        self._labels: dict[str, str] = {}
        names = set[str]()
        for number, file in enumerate(catalog.files):
            if file.checksums is not None:
                self._tables[file.path] = self._tables.get(file.path, file.checksums) | file.checksums
            if file.is_raw and file.path not in self._labels:
                self._labels[file.path] = file.name if file.name not in names else f"{file.name} ({number})"
                names.add(file.name)
        rows, table = dict[str, list[tuple[int, int, None]]](), catalog.chunks
        for number, start, nbytes in zip(table.file, table.start, table.nbytes, strict=True):
            file = catalog.files[number]
            if file.is_raw and file.path not in self._tables:
                rows.setdefault(file.path, []).append((start, nbytes, None))
        self._tables |= {path: Checksums.of(chunks) for path, chunks in rows.items()}
        self._unlisted_rows = {path: {*range(len(chunks))} for path, chunks in rows.items()}

    def label_of(self, path: str) -> str:
        """Return the name of a file in lists of all processes."""
        return self._labels.get(path, path)

    def around(self, path: str, start: int, stop: int) -> Entry | None:
        """Return the entry with a CRC-32 that has all bytes of a range; None if there is none."""
        table = self._tables.get(path)
        row = -1 if table is None else bisect_right(table.starts, start) - 1
        if table is None or row < 0 or stop > table.stops[row] or not table.crcs[row] or start == stop:
            return None
        return Entry(table.starts[row], table.stops[row], table.crcs[row])

    def not_listed(self, path: str, start: int, stop: int) -> Iterator[tuple[Entry, int, int]]:
        """Yield each entry that a range of a file overlaps, with the first byte and the end of the overlap.

        Entries without a CRC-32 are yielded only once: the first read counts for the whole entry.
        """
        table, rows = self._tables.get(path), self._unlisted_rows.get(path)
        if table is None or rows == set():
            return
        first = max(bisect_right(table.starts, start) - 1, 0)
        for row in range(first, bisect_left(table.starts, stop)):
            entry = Entry(table.starts[row], table.stops[row], table.crcs[row])
            begin, end = max(start, entry.start), min(stop, entry.stop)
            if begin < end and (rows is None or row in rows):
                if rows is not None:
                    rows.discard(row)
                yield entry, begin, end


def decoded_reading(source: SourceFile, content: memoryview, tensor: str) -> EntryReading:
    """Return a reading for decoded bytes whose reads were not listed; decoding may have verified them."""
    entry = Entry(0, len(content), crc32(content) if source.is_proved else 0)
    return EntryReading(source.name, entry, tensor, *entry)


class ThreadReadings:
    """Lists the reads of one thread, merging contiguous ones.

    Args:
        entries: of the files that the thread reads.
    """

    def __init__(self, entries: Entries) -> None:
        self._entries = entries
        self._readings = list[EntryReading]()
        self._num_before_joining = _MAX_MORE

    def add(self, path: str, start: int, data: memoryview | bytes, tensor: str) -> int | None:
        """List a read of a file; return the CRC-32 of the bytes, or None if none is recorded for them."""
        stop, label = start + len(data), self._entries.label_of(path)
        whole = self._entries.around(path, start, stop)
        if whole is not None:  # nearly always: a thousand ranks have hundreds of thousands of entries
            crc = int(crc32(data))
            self._append(EntryReading(label, whole, tensor, start, stop, crc))
            return crc
        view = memoryview(data)
        for entry, begin, end in self._entries.not_listed(path, start, stop):
            crc = crc32(view[begin - start : end - start]) if entry.crc else 0
            self._append(EntryReading(label, entry, tensor, begin, end, crc))
        return None

    def can_sum(self, path: str, start: int, stop: int) -> bool:
        """True if the bytes belong to a single entry with a CRC-32, so that the caller may compute theirs."""
        return self._entries.around(path, start, stop) is not None

    def add_summed(self, path: str, start: int, stop: int, crc: int, tensor: str) -> None:
        """List a read with a known CRC-32; requires `can_sum`, or that `crc` is `UNREAD`."""
        for entry, begin, end in self._entries.not_listed(path, start, stop):
            self._append(EntryReading(self._entries.label_of(path), entry, tensor, begin, end, crc))

    def extend(self, readings: Iterable[EntryReading]) -> None:
        """List reads of another thread whose data this one uses too."""
        self._readings += readings

    def take(self) -> list[EntryReading]:
        """Return the readings since the last call."""
        readings, self._readings = self._readings, []
        return readings

    def _append(self, reading: EntryReading) -> None:
        if not reading.entry.crc:
            reading = EntryReading(*reading[:3], *reading.entry)
        last = self._readings[-1] if self._readings else None
        if last is not None and last.stop == reading.start and last[:3] == reading[:3]:
            self._readings[-1:] = _joined([last, reading])
        elif last != reading:
            self._readings.append(reading)
        if len(self._readings) > self._num_before_joining:
            self._readings = joined(self._readings)
            self._num_before_joining = len(self._readings) + _MAX_MORE


class SourceCheck:
    """Collects the readings of a catalog's files. Its methods may be called from any thread.

    Args:
        catalog: a catalog of raw extents.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._entries = Entries(catalog)
        self._by_output: dict[str, Readings] = {}
        self._more = list[EntryReading]()
        self._verdict: Verdict | None = None

    def readings(self) -> ThreadReadings:
        """Return a list for the reads of one thread."""
        return ThreadReadings(self._entries)

    def add(self, readings: Iterable[EntryReading]) -> None:
        """Add readings."""
        self._more.extend(readings)
        self._verdict = None

    def put(self, output: str, readings: Readings) -> None:
        """Replace the readings of an output file."""
        if self._by_output.get(output) is not readings:
            self._by_output[output], self._verdict = readings, None

    def packed(self) -> list[Readings]:
        """Return all readings as plain data."""
        return [*self._by_output.values(), pack(self._more)]

    def judge(self) -> Verdict:
        """Compare all readings with the recorded CRC-32s."""
        if self._verdict is None:
            self._verdict = judge(self.packed())
        return self._verdict
