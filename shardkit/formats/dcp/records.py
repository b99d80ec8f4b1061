"""From records to bytes: open `torch.save` records of a DCP catalog and point at the data inside.

A record says for itself what it holds; where that is not what `.metadata` says, nothing is guessed.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from shardkit.core.catalog import Catalog, Checksums, SourceFile, TensorEntry, ignore_read, subset
from shardkit.core.text import escape
from shardkit.errors import IntegrityError, ResourceError, SourceError
from shardkit.files.digest import crc32
from shardkit.files.strict_json import open_regular, read_exactly, stamp_of
from shardkit.formats.dcp.decode import Packed, check_transforms, difference, packed_file, strided_file
from shardkit.formats.dcp.records_many import MIN_BULK, BulkPointer
from shardkit.formats.torchsave.record import TensorRecord
from shardkit.formats.torchsave.scan import RecordScanner

_READ_BYTES = 1 << 20
_AHEAD = 32  # records whose ends are asked for before they are read
_END_BYTES = 4096
_READ_AHEAD = 128 << 10  # what Linux reads ahead of its own accord

Transforms = Mapping[int, tuple[str, ...]]


def select_raw(catalog: Catalog, transforms: Transforms, names: Collection[str]) -> Catalog:
    """Return a catalog of some of the tensors whose extents are the chunks' bytes; encoding "raw".

    Their records are opened and compared with what the catalog says; no others are, and no data is read.
    A dense tensor that was not contiguous is stored as it lay, and a transformed record is not stored as
    bytes at all: such a chunk gets a file of its own that exists only after decoding (`SourceFile.decode`).

    Args:
        catalog: with encoding "torch-record".
        transforms: by chunk, where a record was put through extensions.
        names: in the order that the result is to have.

    Raises:
        SourceError: records that are damaged, or transformed in a way that cannot be undone here.
        IntegrityError: records that are intact, but not what `.metadata` says.
        ResourceError: a file may not be read.
    """
    chosen = subset(catalog, names)
    packed = _packed_chunks(catalog, transforms, chosen)
    check_transforms(packed)
    scan = _Scan(chosen, skip=packed)
    num_unrecorded = 0
    pointer = BulkPointer(chosen, scan.scanner) if len(chosen.chunks) >= MIN_BULK else None
    for number, fd, source, rows in scan.files():
        left, stored = rows, list[tuple[int, int, int]]()
        if pointer is not None:
            _ask_for_ends(fd, chosen, rows)
            left, stored = pointer.point(fd, rows)
        for row, record in scan.records_of_file(fd, source, left):
            _point(chosen, scan.tensor_of[row], row, record)
            stored.append((record.data_start, record.data_nbytes, record.crc32 or 0))
        num_unrecorded += sum(1 for _, nbytes, crc in stored if nbytes and not crc)
        chosen.files[number] = replace(source, checksums=Checksums.of(stored))
    scan.raise_problems()
    for row, chunk in packed.items():
        _attach(chosen, row, packed_file(scan.stamped(chosen.chunks.file[row]), chunk))
    chosen.encoding = "raw"
    if num_unrecorded:
        chosen.notes = (f"{num_unrecorded} of {len(chosen.chunks)} records have no CRC-32 to check them by",)
    return chosen


def check_records(catalog: Catalog, transforms: Transforms, names: Collection[str]) -> Iterator[str]:
    """Read the bytes of some tensors and yield a line for each record whose CRC-32 is not the recorded one.

    Records without a CRC-32 are passed over. Arguments and errors are those of `select_raw`.
    """
    chosen = subset(catalog, names)
    packed = _packed_chunks(catalog, transforms, chosen)
    check_transforms(packed)
    scan = _Scan(chosen, skip=packed)
    for _, fd, source, rows in scan.files():
        for row, record in scan.records_of_file(fd, source, rows):
            if record.crc32 is None:
                continue
            crc = _crc_of(fd, record, source.name)
            if crc != record.crc32:
                yield (
                    f"{escape(scan.tensor_of[row].fqn)}: {escape(source.name)}: bytes {record.data_start} to "
                    f"{record.data_start + record.data_nbytes} have CRC-32 {crc:08x}, "
                    f"recorded is {record.crc32:08x}"
                )
    scan.raise_problems()
    for row, chunk in packed.items():
        decode = packed_file(chosen.files[chosen.chunks.file[row]], chunk).decode
        assert decode is not None
        try:
            decode(ignore_read)
        except IntegrityError as error:
            yield error.message


def _packed_chunks(catalog: Catalog, transforms: Transforms, chosen: Catalog) -> dict[int, Packed]:
    """Return the chosen chunks whose records were transformed, by their rows in `chosen`."""
    if not transforms:
        return {}
    packed: dict[int, Packed] = {}
    table = chosen.chunks
    for fqn, entry in chosen.tensors.items():
        for before, row in zip(catalog.tensors[fqn].chunk_ids, entry.chunk_ids, strict=True):
            if before in transforms:
                packed[row] = Packed(
                    entry, table.region(row), table.start[row], table.nbytes[row], transforms[before]
                )
    return packed


def _crc_of(fd: int, record: TensorRecord, name: str) -> int:
    crc, stop = 0, record.data_start + record.data_nbytes
    for start in range(record.data_start, stop, _READ_BYTES):
        crc = crc32(read_exactly(fd, start, min(_READ_BYTES, stop - start), name), crc)
    return crc


class _Scan:
    """Opens the records of a catalog, file by file and front to back, and collects what is wrong with them."""

    def __init__(self, catalog: Catalog, *, skip: Collection[int]) -> None:
        self._catalog = catalog
        self.scanner = RecordScanner()
        self.tensor_of = [entry for entry in catalog.tensors.values() for _ in entry.chunk_ids]
        self._rows = _in_order(catalog)
        if skip:
            self._rows = [row for row in self._rows if row not in skip]
        self._damaged: list[str] = []
        self._different: list[str] = []

    def files(self) -> Iterator[tuple[int, int, SourceFile, list[int]]]:
        """Yield (number, descriptor, file, its chunks in the order of their bytes); one file is open at a time."""
        catalog = self._catalog
        for file, group in groupby(self._rows, key=catalog.chunks.file.__getitem__):
            source = catalog.files[file]
            with open_regular(source.path, source.name, follow=False) as (fd, _):
                source = catalog.files[file] = replace(source, stamp=stamp_of(fd))
                self.scanner.open(fd)
                yield file, fd, source, list(group)

    def records_of_file(
        self, fd: int, source: SourceFile, rows: Sequence[int]
    ) -> Iterator[tuple[int, TensorRecord]]:
        """Yield (chunk, record) of the chunks of an open file whose records are right."""
        table, where = self._catalog.chunks, escape(source.name)
        for number, row in enumerate(rows):
            if number % _AHEAD == 0:
                _ask_for_ends(fd, self._catalog, rows[number : number + _AHEAD])
            entry, sizes = self.tensor_of[row], table.region(row).sizes
            try:
                record = self.scanner.read(
                    (entry.dtype, sizes), table.start[row], table.nbytes[row], where=where
                )
            except ResourceError:
                raise
            except SourceError as error:
                self._damaged.append(f"{escape(entry.fqn)}: {error.message}")
                continue
            reason = difference(entry, sizes, record)
            if reason:
                self._different.append(f"{escape(entry.fqn)}: {where}: {reason}")
                continue
            yield row, record

    def stamped(self, file: int) -> SourceFile:
        """Return a file with its stamp, also where none of its records was opened."""
        source = self._catalog.files[file]
        if source.stamp is None:
            with open_regular(source.path, source.name, follow=False) as (fd, _):
                source = self._catalog.files[file] = replace(source, stamp=stamp_of(fd))
        return source

    def raise_problems(self) -> None:
        """Raise what was found, all of one kind at once."""
        hint = "the checkpoint is damaged, or its files are from different saves: use another copy"
        if self._damaged:
            count = len(self._damaged)
            raise SourceError(f"{count} records cannot be read", problems=self._damaged, hint=hint)
        if self._different:
            message = f"{len(self._different)} records are not what .metadata says"
            raise IntegrityError(message, problems=self._different, hint=hint)


def _in_order(catalog: Catalog) -> list[int]:
    """Return the chunks in the order of their bytes, file by file."""
    table = catalog.chunks
    if len(table) >= MIN_BULK:
        import numpy as np

        columns = np.frombuffer(table.start, dtype=np.int64), np.frombuffer(table.file, dtype=np.int32)
        order: list[int] = np.lexsort(columns).tolist()
        return order
    files, starts = table.file.tolist(), table.start.tolist()
    return sorted(range(len(files)), key=lambda row: (files[row], starts[row]))


def _ask_for_ends(fd: int, catalog: Catalog, rows: Sequence[int]) -> None:
    """Have the system fetch the ends of large records at once: one by one, each is a wait on a cold disk."""
    if hasattr(os, "posix_fadvise"):
        starts, lengths = catalog.chunks.start, catalog.chunks.nbytes
        for row in rows:
            if lengths[row] > _READ_AHEAD:
                at = starts[row] + lengths[row] - _END_BYTES
                os.posix_fadvise(fd, at, 2 * _END_BYTES, os.POSIX_FADV_WILLNEED)


def _point(catalog: Catalog, entry: TensorEntry, row: int, record: TensorRecord) -> None:
    """Replace the extent of a chunk, a record, by its bytes."""
    chunks = catalog.chunks
    if record.is_contiguous:
        chunks.start[row], chunks.nbytes[row] = record.start, record.nbytes
    else:
        _attach(catalog, row, strided_file(catalog.files[chunks.file[row]], entry, record))


def _attach(catalog: Catalog, row: int, file: SourceFile) -> None:
    """Let a chunk be the whole of a file of its own."""
    catalog.files.append(file)
    catalog.chunks.file[row], catalog.chunks.start[row] = len(catalog.files) - 1, 0
    catalog.chunks.nbytes[row] = file.size
