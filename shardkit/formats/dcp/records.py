"""From records to bytes: open the `torch.save` records of a DCP catalog and point at the data inside.

A record is the zip that `torch.save` wrote for one chunk. It records dtype, shape and strides itself; if these differ
from what `.metadata` says, the checkpoint is refused.

Some chunks need decoding. A dense tensor that was not contiguous is stored with its strides, and a stream extension
(torch's `ZStandard`) compresses whole records. Such a chunk is "packed": it becomes a virtual file of its own, whose
bytes exist only once it is decoded (`SourceFile.derivation`).

Source: torch 2.13, torch/distributed/checkpoint/_extension.py.
"""

from __future__ import annotations

import io
import os
import stat
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from shardkit.core.catalog import (
    MIN_COLUMNS,
    MIN_TOTAL,
    UNSEEN,
    Catalog,
    Checksums,
    Decoded,
    FileStamp,
    OnRead,
    SourceFile,
    TensorEntry,
    subset,
)
from shardkit.core.dtypes import DType
from shardkit.core.regions import Region, Shape
from shardkit.core.text import escape
from shardkit.errors import IntegrityError, SourceError
from shardkit.files import storage
from shardkit.files.location import location_of
from shardkit.files.remote.contract import OtherVersion
from shardkit.files.strict_json import open_regular, read_exactly, stamp_of, status_of
from shardkit.formats.contract import EntryLocation
from shardkit.formats.torchsave.archive import crc_of_range
from shardkit.formats.torchsave.classes import UnreadableClass, padding_error, refuse_classes
from shardkit.formats.torchsave.record import TensorRecord, decoded_file, gather_strided, strided_file
from shardkit.formats.torchsave.scan import (
    BulkScanner,
    RecordScanner,
    Template,
    prefetch_records,
    read_entries,
)

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

_MIN_ROWS = 16  # chunks of a file; with fewer, comparing many at once costs more than it saves
_MOST_AT_ONCE = 1024  # records: the bytes around their data take 2 MB

_READ_BYTES = 1 << 20
_AHEAD = 32  # records whose ends the system fetches ahead
_END_BYTES = 4096
_READ_AHEAD = 128 << 10  # what Linux reads ahead of its own accord

_ZSTD = "stream.zstd"
_MAX_OVERHEAD = 1 << 16  # bytes of a record that are not its data; torch writes less than 2 KiB
_MAX_WINDOW = 1 << 27  # bytes that a decompressor may keep in memory; torch's default level needs 2 MiB

Transforms = Mapping[int, tuple[str, ...]]


def select_raw(
    catalog: Catalog, transforms: Transforms, names: Collection[str], *, opened: dict[str, int] | None = None
) -> Catalog:
    """Return a catalog of the named tensors whose extents are the chunks' bytes; its encoding is "raw".

    The records of these tensors are opened and compared with the catalog. No other record is opened, and no data is
    read.

    Args:
        catalog: with encoding "torch-record".
        transforms: by chunk, the extensions that encoded its record.
        names: in the order of the result.
        opened: descriptors of open files by path, as for `open_regular`; files in stores are not added to it.

    Raises:
        SourceError: records are damaged, or encoded by extensions that cannot be undone here.
        UnreadableClass: tensors are of classes whose values cannot be read from a file.
        IntegrityError: records are intact, but differ from `.metadata`.
        ResourceError: a file may not be read.
    """
    scan = _RecordOpener(catalog, transforms, names, opened)
    chosen, num_unrecorded = scan.chosen, 0
    pointer = _BulkPointer(chosen, scan.scanner) if len(chosen.chunks) >= MIN_TOTAL else None
    for number, fd, source, rows in scan.files():
        rows_left, checksums, stored = rows, None, list[tuple[int, int, int]]()
        if pointer is not None:
            _ask_for_ends(fd, chosen, rows)
            rows_left, checksums = pointer.point(fd, rows)
        for row, record in scan.records_of_file(fd, source, rows_left):
            _point_at_data(chosen, scan.tensor_of[row], row, record)
            stored.append((record.data_start, record.data_nbytes, record.crc32 or 0))
        if stored or checksums is None:
            stored_checksums = Checksums.of(stored)
            checksums = stored_checksums if checksums is None else checksums | stored_checksums
        num_unrecorded += checksums.crcs.count(0)
        chosen.files[number] = replace(source, checksums=checksums)
    scan.raise_problems()
    for row, chunk in scan.packed.items():
        _attach_file(chosen, row, packed_file(scan.stamped_file(chosen.chunks.file[row]), chunk))
    chosen.encoding = "raw"
    if num_unrecorded:
        chosen.notes = (f"{num_unrecorded} of {len(chosen.chunks)} records have no CRC-32 to check them by",)
    return chosen


def stamp_unread(file: SourceFile) -> FileStamp:
    """Return the stamp of a file without opening it, unless it cannot be read: then opening raises the error.

    Otherwise each of many processes would open every file.
    """
    try:
        status = status_of(file.path)
    except OSError:
        status = None
    if status is not None and stat.S_ISREG(status.st_mode):
        return FileStamp.of(status)
    with open_regular(file.path, file.name, follow=False) as (fd, _):  # says what is wrong
        return stamp_of(fd)


def open_late(catalog: Catalog, names: Collection[str]) -> Catalog:
    """Return a catalog of the named tensors with closed records; its `late` opens each record when it is read.

    Args:
        catalog: with encoding "torch-record", and no record encoded by an extension.
        names: in the order of the result.
    """
    chosen = subset(catalog, names)
    table, rows = chosen.chunks, dict[int, dict[int, list[int]]]()
    for row in _rows_in_order(chosen):
        rows.setdefault(table.file[row], {}).setdefault(table.start[row], []).append(row)
    for file, of_file in rows.items():
        checksums = Checksums.of((start, table.nbytes[row], UNSEEN) for start, (row, *_) in of_file.items())
        chosen.files[file] = replace(chosen.files[file], checksums=checksums)
    chosen.late = _LateDcpRecords(catalog, chosen, rows)
    return chosen


class _LateDcpRecords:
    """Opens the records of DCP files when they are read; see `LateRecords`.

    Args:
        closed: the catalog with encoding "torch-record", to which errors refer.
        catalog: from `open_late`. Opening a record updates its chunks, and the checksums of its files.
        rows: its chunks, by file and first byte of their record, in the order of the bytes.
    """

    def __init__(
        self, closed: Catalog, catalog: Catalog, rows: Mapping[int, Mapping[int, list[int]]]
    ) -> None:
        self._closed, self._catalog = closed, catalog
        self._starts = {file: list(of_file) for file, of_file in rows.items()}
        self._rows = {file: list(of_file.values()) for file, of_file in rows.items()}
        table = catalog.chunks
        self._places = list(zip(table.file, table.start, strict=True))
        self._entries = [entry for entry in catalog.tensors.values() if entry.num_chunks]
        self._firsts = [entry.first_chunk for entry in self._entries]
        self._is_open, self._locks = set[tuple[int, int]](), dict[tuple[int, int], threading.Lock]()
        self._thread, self._appending = threading.local(), threading.Lock()

    def open(self, fqn: str, descriptor: Callable[[int], int], /) -> None:
        """See `LateRecords`."""
        for row in self._catalog.tensors[fqn].chunk_ids:
            self.opened(*self._places[row], descriptor)

    def opened(self, file: int, start: int, descriptor: Callable[[int], int], /) -> tuple[int, int]:
        """See `LateRecords`."""
        index = bisect_right(self._starts[file], start) - 1
        rows, table, key = self._rows[file][index], self._catalog.chunks, (file, index)
        if key not in self._is_open:
            with self._locks.setdefault(key, threading.Lock()):
                if key not in self._is_open:
                    self._open_record(file, index, descriptor(file))
                    self._is_open.add(key)
        return table.file[rows[0]], table.start[rows[0]] + start - self._starts[file][index]

    def _open_record(self, file: int, index: int, fd: int) -> None:
        catalog, table, source = self._catalog, self._catalog.chunks, self._catalog.files[file]
        scanner = getattr(self._thread, "scanner", None)
        if scanner is None:
            scanner = self._thread.scanner = RecordScanner(0)
        scanner.open(fd)
        for row in self._rows[file][index]:
            entry, sizes = self._tensor_of(row), table.region(row).sizes
            place = table.start[row], table.nbytes[row]
            try:
                record = scanner.read((entry.dtype, sizes), *place, where=escape(source.name))
                if reason := record_difference(entry, sizes, record):
                    raise IntegrityError(f"{escape(entry.fqn)}: {escape(source.name)}: {reason}")
                if (padded := padding_error(record, entry.shape)) is not None:
                    raise padded
            except SourceError:
                select_raw(self._closed, {}, tuple(catalog.tensors))  # its error lists all wrong records
                raise
            with self._appending:
                _point_at_data(catalog, entry, row, record)
        checksums = source.checksums
        assert checksums is not None  # `open_late`
        checksums.starts[index] = record.data_start
        checksums.stops[index] = record.data_start + record.data_nbytes
        checksums.crcs[index] = record.crc32 or 0

    def _tensor_of(self, row: int) -> TensorEntry:
        return self._entries[bisect_right(self._firsts, row) - 1]


def check_records(catalog: Catalog, transforms: Transforms, names: Collection[str]) -> Iterator[str]:
    """Read the bytes of the named tensors, and yield a line for each record with another CRC-32 than recorded.

    Records without a CRC-32 are skipped. Arguments and errors are those of `select_raw`.
    """
    scan = _RecordOpener(catalog, transforms, names)
    for _, fd, source, rows in scan.files():
        for row, record in scan.records_of_file(fd, source, rows):
            if record.crc32 is None:
                continue
            crc = crc_of_range(fd, record.data_start, record.data_nbytes, source.name)
            if crc != record.crc32:
                yield (
                    f"{escape(scan.tensor_of[row].fqn)}: {escape(source.name)}: bytes {record.data_start} to "
                    f"{record.data_start + record.data_nbytes} have CRC-32 {crc:08x}, "
                    f"their record says {record.crc32:08x}"
                )
    scan.raise_problems()
    for row, chunk in scan.packed.items():
        packed = packed_file(scan.chosen.files[scan.chosen.chunks.file[row]], chunk)
        try:
            packed.decoded()
        except IntegrityError as error:
            yield error.message


def record_difference(entry: TensorEntry, sizes: Shape, record: TensorRecord) -> str | None:
    """Return how a record differs from what `.metadata` says of its chunk, or None.

    Args:
        entry: the chunk's tensor.
        sizes: the chunk's, in elements.
        record: dtype, shape and places that the record contains.
    """
    if record.dtype != entry.dtype:
        return f"stored as {record.dtype.name}, .metadata says {entry.dtype.name}"
    # Shapes of chunks without elements may differ: on an FSDP x TP mesh torch stores a part of [4, 0] as [0, 0].
    if record.shape != sizes and (record.nbytes or 0 not in sizes):
        return f"stored with shape {list(record.shape)}, .metadata says {list(sizes)}"
    return None


def _point_at_data(catalog: Catalog, entry: TensorEntry, row: int, record: TensorRecord) -> None:
    """Replace the extent of a chunk, which is its record, by the bytes of its data."""
    chunks = catalog.chunks
    if record.is_contiguous:
        chunks.start[row], chunks.nbytes[row] = record.start, record.nbytes
    else:
        _attach_file(catalog, row, strided_file(catalog.files[chunks.file[row]], entry, record))


def _attach_file(catalog: Catalog, row: int, file: SourceFile) -> None:
    """Add a file to the catalog, and make the chunk all of its bytes."""
    catalog.files.append(file)
    catalog.chunks.file[row], catalog.chunks.start[row] = len(catalog.files) - 1, 0
    catalog.chunks.nbytes[row] = file.size


class _RecordOpener:
    """Opens the records of some tensors, file by file and front to back, and collects their problems."""

    def __init__(
        self,
        catalog: Catalog,
        transforms: Transforms,
        names: Collection[str],
        opened: dict[str, int] | None = None,
    ) -> None:
        self.chosen, self._opened = subset(catalog, names), opened
        self.packed = _packed_chunks(catalog, transforms, self.chosen)
        """Packed chunks of `chosen`, which `files` leaves out."""
        check_transforms(self.packed)
        self.scanner = RecordScanner()
        self.tensor_of = [entry for entry in self.chosen.tensors.values() for _ in entry.chunk_ids]
        self._rows = _rows_in_order(self.chosen)
        if self.packed:
            self._rows = [row for row in self._rows if row not in self.packed]
        self._damaged: list[str] = []
        self._different: list[str] = []
        self._of_classes: dict[str, UnreadableClass] = {}

    def files(self) -> Iterator[tuple[int, int, SourceFile, list[int]]]:
        """Yield (number, descriptor, file, its chunks in the order of their bytes).

        On a disk one file is open at a time. In a store the next ones are open too, and their bytes are being fetched.
        """
        groups = groupby(self._rows, key=self.chosen.chunks.file.__getitem__)
        waiting = ((file, list(group)) for file, group in groups)
        begun = deque[tuple[int, list[int], ExitStack, int]]()
        with ExitStack() as all_of_them:
            while True:
                for file, rows in waiting:
                    opened = all_of_them.enter_context(ExitStack())
                    begun.append((file, rows, opened, self._open(file, rows, opened)))
                    if len(begun) > location_of(self.chosen.files[file].path).num_ahead:
                        break
                if not begun:
                    return
                file, rows, opened, fd = begun.popleft()
                with opened:
                    source = self.chosen.files[file] = replace(self.chosen.files[file], stamp=stamp_of(fd))
                    self.scanner.open(fd)
                    yield file, fd, source, rows

    def _open(self, file: int, rows: Sequence[int], opened: ExitStack) -> int:
        """Open a file. If it is in a store, fetch the bytes around the data of all its records at once."""
        source, table = self.chosen.files[file], self.chosen.chunks
        is_planned = location_of(source.path).plans_reads
        kept = None if is_planned else self._opened
        fd, _ = opened.enter_context(open_regular(source.path, source.name, follow=False, opened=kept))
        if is_planned:
            prefetch_records(fd, ((table.start[row], table.nbytes[row]) for row in rows))
        return fd

    def records_of_file(
        self, fd: int, source: SourceFile, rows: Sequence[int]
    ) -> Iterator[tuple[int, TensorRecord]]:
        """Yield (chunk, record) for each chunk of an open file whose record is right; collect the problems of others."""
        table, where = self.chosen.chunks, escape(source.name)
        for number, row in enumerate(rows):
            if number % _AHEAD == 0:
                _ask_for_ends(fd, self.chosen, rows[number : number + _AHEAD])
            entry, sizes = self.tensor_of[row], table.region(row).sizes
            kind, start, nbytes = (entry.dtype, sizes), table.start[row], table.nbytes[row]
            try:
                record = self.scanner.read(kind, start, nbytes, where=where)
            except OtherVersion:
                raise
            except UnreadableClass as error:
                self._of_classes.setdefault(entry.fqn, error)
                continue
            except SourceError as error:
                self._damaged.append(f"{escape(entry.fqn)}: {error.message}")
                continue
            reason = record_difference(entry, sizes, record)
            if reason:
                self._different.append(f"{escape(entry.fqn)}: {where}: {reason}")
                continue
            if (padded := padding_error(record, entry.shape)) is not None:
                self._of_classes.setdefault(entry.fqn, padded)
                continue
            yield row, record

    def stamped_file(self, file: int) -> SourceFile:
        """Return a file with its stamp, even if none of its records was opened."""
        source = self.chosen.files[file]
        if source.stamp is None:
            source = self.chosen.files[file] = replace(source, stamp=stamp_unread(source))
        return source

    def raise_problems(self) -> None:
        """Raise an error with all problems of one kind, if there are any."""
        hint = "the checkpoint is damaged, or its files are from different saves: use another copy"
        SourceError.raise_for(self._damaged, f"{len(self._damaged)} records cannot be read", hint=hint)
        message = f"{len(self._different)} records differ from .metadata"
        IntegrityError.raise_for(self._different, message, hint=hint)
        refuse_classes(self._of_classes, self.chosen.directory)


def _rows_in_order(catalog: Catalog) -> list[int]:
    """Return the chunks in the order of their bytes, file by file."""
    table = catalog.chunks
    if len(table) >= MIN_TOTAL:
        import numpy as np

        columns = np.frombuffer(table.start, dtype=np.int64), np.frombuffer(table.file, dtype=np.int32)
        order: list[int] = np.lexsort(columns).tolist()
        return order
    return sorted(range(len(table)), key=lambda row: (table.file[row], table.start[row]))


def _ask_for_ends(fd: int, catalog: Catalog, rows: Sequence[int]) -> None:
    """Let the system fetch the ends of large records together: read one by one, each would wait for a cold disk."""
    starts, lengths = catalog.chunks.start, catalog.chunks.nbytes
    for row in rows:
        if lengths[row] > _READ_AHEAD:
            storage.will_need(fd, starts[row] + lengths[row] - _END_BYTES, 2 * _END_BYTES)


class _BulkPointer:
    """Points very many chunks at their bytes at once, if their records match a template, file by file.

    Most records of a save are equal but for data and CRC-32. A template is the bytes around the data that the scanner
    has learned from earlier records of the same kind (dtype, sizes and length).

    Args:
        catalog: its chunks' extents are records, and become the bytes inside.
        scanner: reads the other records one by one, and so learns the templates.
    """

    def __init__(self, catalog: Catalog, scanner: RecordScanner) -> None:
        import numpy as np

        self._scanner, self._bulk = scanner, BulkScanner()
        self._starts: Array = np.frombuffer(catalog.chunks.start, dtype=np.int64)
        self._nbytes: Array = np.frombuffer(catalog.chunks.nbytes, dtype=np.int64)
        self._kinds: dict[tuple[DType, Shape, int], int] = {}
        self._kind_of: Array = np.empty(len(catalog.chunks), dtype=np.int32)
        for entry in catalog.tensors.values():
            self._number_kinds(catalog, entry.dtype, entry.chunk_ids)
        self._templates: list[Template | None] = [None] * len(self._kinds)
        self._unknown = {number: kind for kind, number in self._kinds.items()}
        self._is_known = np.zeros(len(self._kinds), dtype=bool)
        self._shifts, self._sizes, self._data_at, self._data = np.zeros((4, len(self._kinds)), dtype=np.int64)

    def _number_kinds(self, catalog: Catalog, dtype: DType, rows: range) -> None:
        """Give each chunk of a tensor the number of its dtype, sizes and length."""
        import numpy as np

        table, kinds = catalog.chunks, self._kinds
        if len(rows) < MIN_COLUMNS:
            for row in rows:
                kind = (dtype, table.region(row).sizes, table.nbytes[row])
                self._kind_of[row] = kinds.setdefault(kind, len(kinds))
            return
        boxes = np.frombuffer(table.boxes(rows), dtype=np.int64).reshape(len(rows), -1)
        lengths = self._nbytes[rows.start : rows.stop, None]
        columns = np.hstack([boxes[:, boxes.shape[1] // 2 :], lengths])
        firsts = [0, *((columns[1:] != columns[:-1]).any(axis=1).nonzero()[0] + 1).tolist()]
        for first, stop in zip(firsts, [*firsts[1:], len(rows)], strict=True):
            *sizes, length = columns[first].tolist()
            kind = (dtype, tuple(sizes), length)
            self._kind_of[rows.start + first : rows.start + stop] = kinds.setdefault(kind, len(kinds))

    def point(self, fd: int, rows: list[int]) -> tuple[list[int], Checksums | None]:
        """Point chunks of an open file at their bytes.

        Args:
            fd: the file.
            rows: its chunks, in the order of their bytes.

        Returns:
            The chunks that match no template, and the checksums of the others; None if all are left.
        """
        import numpy as np

        self._add_templates()
        every = np.array(rows, dtype=np.int64)
        is_left = ~self._is_known[self._kind_of[every]]
        chosen = np.flatnonzero(~is_left)
        if len(chosen) < _MIN_ROWS:
            return rows, None
        columns: list[tuple[Array, Array, Array]] = []
        for first in range(0, len(chosen), _MOST_AT_ONCE):
            part = chosen[first : first + _MOST_AT_ONCE]
            these = every[part]
            kinds, offsets = self._kind_of[these], self._starts[these]
            templates = [template for kind in kinds.tolist() if (template := self._templates[kind])]
            is_alike, crcs = self._bulk.compare(fd, templates, offsets, self._nbytes[these])
            is_left[part] = ~is_alike
            these, kinds, crcs = these[is_alike], kinds[is_alike], crcs[is_alike]
            columns.append((self._starts[these] + self._data_at[kinds], self._data[kinds], crcs))
            self._starts[these] += self._shifts[kinds]
            self._nbytes[these] = self._sizes[kinds]
        starts, nbytes, recorded = map(np.concatenate, zip(*columns, strict=True))
        return every[is_left].tolist(), Checksums.of_columns(starts, nbytes, recorded)

    def _add_templates(self) -> None:
        """Add the templates that the scanner has learned since the last call, if they agree with `.metadata`."""
        for number, (dtype, sizes, length) in list(self._unknown.items()):
            template = self._scanner.template_of((dtype, sizes), length)
            if template is None:
                continue
            del self._unknown[number]
            record = template.record
            if record.dtype is dtype and record.shape == sizes and record.is_contiguous:
                self._templates[number], self._is_known[number] = template, True
                self._shifts[number], self._sizes[number] = record.start, record.nbytes
                self._data_at[number], self._data[number] = record.data_start, record.data_nbytes


class PackedChunk(NamedTuple):
    """A chunk whose record was encoded by extensions."""

    entry: TensorEntry
    region: Region
    start: int
    """First byte of the encoded record in its file."""
    nbytes: int
    transforms: tuple[str, ...]


def _packed_chunks(catalog: Catalog, transforms: Transforms, chosen: Catalog) -> dict[int, PackedChunk]:
    """Return the chosen chunks whose records were encoded by extensions, by their rows in `chosen`."""
    if not transforms:
        return {}
    packed: dict[int, PackedChunk] = {}
    table = chosen.chunks
    for fqn, entry in chosen.tensors.items():
        for before, row in zip(catalog.tensors[fqn].chunk_ids, entry.chunk_ids, strict=True):
            if before in transforms:
                place = table.start[row], table.nbytes[row]
                packed[row] = PackedChunk(entry, table.region(row), *place, transforms[before])
    return packed


def check_transforms(chunks: Mapping[int, PackedChunk]) -> None:
    """Refuse chunks whose extensions cannot be undone here, all tensors at once.

    Args:
        chunks: by their rows.

    Raises:
        SourceError: names the tensors, their extensions and what to install.
    """
    unknown: dict[str, str] = {}
    for chunk in chunks.values():
        if not _is_zstd(chunk.transforms):
            unknown[chunk.entry.fqn] = ", ".join(map(escape, chunk.transforms))
    SourceError.raise_for(
        [f"{escape(fqn)}: {names}" for fqn, names in unknown.items()],
        f"{len(unknown)} tensors were saved through extensions that cannot be undone",
        hint="load it with torch.distributed.checkpoint where the extension is known, and save it without",
    )
    if chunks and _find_zstd() is None:
        fqns = list(dict.fromkeys(escape(chunk.entry.fqn) for chunk in chunks.values()))
        raise SourceError(
            f"{len(fqns)} tensors are compressed with {_ZSTD}, and no module here can decompress it",
            problems=[f"{fqn}: {_ZSTD}" for fqn in fqns],
            hint="`pip install zstandard`",
        )


def packed_file(source: SourceFile, chunk: PackedChunk) -> SourceFile:
    """Return a virtual file that is one chunk. Decoding it decompresses the record and checks it, its CRC-32 too.

    Args:
        source: the file with the record.
        chunk: accepted by `check_transforms`.
    """
    nbytes = chunk.region.num_elements * chunk.entry.dtype.itemsize

    def decode(_: OnRead) -> memoryview:
        where = escape(source.name)
        try:
            data = _decompress(source, chunk.start, chunk.nbytes, nbytes + _MAX_OVERHEAD)
            record, _entries = read_entries(
                lambda start, nbytes: bytes(data[start : start + nbytes]),
                0,
                len(data),
                where=where,
                check_crc=True,
            )
            reason = record_difference(chunk.entry, chunk.region.sizes, record)
            if reason:
                raise IntegrityError(f"{where}: {reason}")
        except OtherVersion:
            raise
        except UnreadableClass as error:
            refuse_classes({chunk.entry.fqn: error}, os.path.dirname(source.path))
            raise
        except SourceError as error:
            raise type(error)(
                f"{escape(chunk.entry.fqn)}: {error.message}",
                hint="the checkpoint is damaged: use another copy",
            ) from None
        if record.is_contiguous:
            return data[record.start : record.start + record.nbytes]
        return gather_strided(data[record.data_start : record.data_start + record.data_nbytes], record)

    return decoded_file(source, chunk.entry, nbytes, Decoded(decode, is_proved=True))


def decode_object(source: SourceFile, fqn: str, place: EntryLocation, limit: int) -> memoryview:
    """Return the bytes of an entry that is not a tensor, as they were before extensions encoded them.

    Args:
        source: its file.
        fqn: its name.
        place: of the encoded bytes.
        limit: the most bytes that it may decode to.

    Raises:
        SourceError: extensions that cannot be undone here, or damaged data.
        IntegrityError: it decodes to more than `limit` bytes.
        ResourceError: the file may not be read.
    """
    if not _is_zstd(place.transforms) or _find_zstd() is None:
        names = ", ".join(map(escape, place.transforms))
        raise SourceError(
            f"{escape(fqn)} was saved through extensions that cannot be undone here: {names}",
            hint="for stream.zstd, pip install zstandard",
        )
    return _decompress(source, place.start, place.nbytes, limit)


def _is_zstd(transforms: Sequence[str]) -> bool:
    """True for "stream.zstd/1" alone, or a minor version of it; torch's own reader accepts the same."""
    if len(transforms) != 1:
        return False
    name, _, version = transforms[0].partition("/")
    return name == _ZSTD and version.partition(".")[0] == "1"


def _decompress(source: SourceFile, start: int, nbytes: int, limit: int) -> memoryview:
    """Return the decompressed record; it never needs much more memory than `limit` bytes, whatever the file contains."""
    zstd, out = _find_zstd(), bytearray()
    assert zstd is not None  # the callers have checked it
    pieces, damaged = zstd
    with open_regular(source.path, source.name, follow=False) as (fd, _):
        packed = _Range(fd, start, nbytes, source.name)
        try:
            for piece in pieces(packed):
                out += piece
                if len(out) > limit:
                    raise IntegrityError(
                        f"{escape(source.name)}: bytes {start} to {start + nbytes} decompress to more than the "
                        f"{limit} bytes allowed"
                    )
        except damaged as error:
            raise SourceError(
                f"{escape(source.name)}: zstd data at byte {start} is damaged: {escape(str(error))}"
            ) from None
    return memoryview(out)


class _Range(io.RawIOBase):
    """A byte range of an open file as a stream."""

    def __init__(self, fd: int, start: int, nbytes: int, name: str) -> None:
        self._fd, self._at, self._stop, self._name = fd, start, start + nbytes, name

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), self._stop - self._at)
        buffer[:count] = read_exactly(self._fd, self._at, count, self._name)
        self._at += count
        return count


_Pieces = Callable[[io.RawIOBase], Iterator[bytes]]


def _find_zstd() -> tuple[_Pieces, type[Exception]] | None:
    """Return a function that decompresses piece by piece, and its exception: Python's own (3.14) or zstandard's; or None."""
    for name, pieces in (("compression.zstd", _stdlib_pieces), ("zstandard", _package_pieces)):
        try:
            module = import_module(name)
        except ImportError:
            continue
        return lambda packed, pieces=pieces, module=module: pieces(packed, module), module.ZstdError
    return None


def _package_pieces(packed: io.RawIOBase, zstandard: Any) -> Iterator[bytes]:
    reader = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).stream_reader(packed)
    while piece := reader.read(_READ_BYTES):
        yield piece


def _stdlib_pieces(packed: io.RawIOBase, zstd: Any) -> Iterator[bytes]:
    options = {zstd.DecompressionParameter.window_log_max: _MAX_WINDOW.bit_length() - 1}
    decompressor = zstd.ZstdDecompressor(options=options)
    while not decompressor.eof:
        data = packed.read(_READ_BYTES) if decompressor.needs_input else b""
        if decompressor.needs_input and not data:
            raise zstd.ZstdError("it ends too early")
        yield decompressor.decompress(data, _READ_BYTES)
