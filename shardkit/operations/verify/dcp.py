"""Open every record of a DCP directory, and compare it with `.metadata` and the chunk lists.

A *record* is the bytes of one tensor chunk as torch saves it: a zip. A *chunk list* is shardkit's file beside a shard
file (`*.chunks.json`); each of its *lines* has the place and CRC-32 of one chunk. `.metadata` is torch's index of the
directory. A *stretch* is a range of bytes with its recorded CRC-32, if any, which `bytes` compares later. The *spelling* of
a record is its bytes around the tensor's data.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any, NamedTuple

from shardkit.core.catalog import SourceFile, TensorEntry
from shardkit.core.regions import Region
from shardkit.core.text import count, escape, listed
from shardkit.errors import ResourceError, SourceError
from shardkit.files import manifest, storage
from shardkit.files.digest import Archive, FileBytes, Stretch
from shardkit.files.home import path_in
from shardkit.files.remote.contract import OtherVersion
from shardkit.files.strict_json import named_failures, open_regular
from shardkit.formats.contract import DamagedFiles, DcpFolder
from shardkit.formats.dcp import METADATA
from shardkit.formats.dcp.chunk_list import ListedChunk
from shardkit.formats.dcp.directory import open_dcp, unused_shards
from shardkit.formats.dcp.objects import object_lines
from shardkit.formats.dcp.records import PackedChunk, check_transforms, packed_file, record_difference
from shardkit.formats.torchsave.archive import ZipEntry
from shardkit.formats.torchsave.classes import UnreadableClass
from shardkit.formats.torchsave.record import TensorRecord
from shardkit.formats.torchsave.scan import RecordScanner, prefetch_records
from shardkit.keys.moments import NamedShape
from shardkit.keys.trainer_state import optimizer_names
from shardkit.operations.verify.bytes import FirstDifference, report_difference, spelling
from shardkit.operations.verify.manifest import CheckedManifest, check_tensors
from shardkit.operations.verify.result import Report, report_damaged


def verify_dcp(
    directory: str,
    folder: str,
    described: CheckedManifest | None,
    report: Report,
    *,
    opened: DcpFolder | None = None,
    stored: list[NamedShape],
    objects: list[str],
) -> list[FileBytes]:
    """Check the structure of a DCP directory, and return its files with their recorded checksums.

    Args:
        directory: path of the directory.
        folder: the same, relative to the checkpoint.
        described: shardkit's manifest of the directory, or None.
        report: gets the problems.
        opened: the opened directory, if it is open already.
        stored: gets the directory's tensors.
        objects: gets the names of its other entries.
    """
    if described is not None and described.is_metadata_damaged:
        return _files_by_lists(folder, described, report)
    try:
        opened = opened or open_dcp(directory)
    except ResourceError as error:
        report.unreadable(error, file=os.path.join(folder, METADATA))
        return _files_by_lists(folder, described, report)
    except OtherVersion:  # an object in the bucket was replaced meanwhile: a report would mix two checkpoints
        raise
    except DamagedFiles as error:
        is_known = (lambda _: False) if described is None else described.has_reported
        report_damaged(error, directory, report, folder=folder, is_known=is_known)
        return _files_by_lists(folder, described, report)
    except SourceError as error:
        # Without it, each rank may have an `__R.metadata`.
        has_metadata = storage.lexists(path_in(directory, METADATA))
        is_about_it = METADATA in error.message and has_metadata
        report.error(error, file=os.path.join(folder, METADATA) if is_about_it else None)
        if not has_metadata and error.hint:
            report.add_notes([error.hint])
        return _files_by_lists(folder, described, report)
    report.num_tensors += len(opened.catalog.tensors)
    stored += (NamedShape(e.fqn, e.dtype.name, e.shape) for e in opened.catalog.tensors.values())
    objects += opened.objects
    report.add_doubts(opened.doubts)
    # Each file of another save gets a warning from `_stale_warnings`.
    report.add_notes(note for note in opened.catalog.notes if note not in opened.leftovers)
    # A directory with objects alone is refused as a checkpoint (`as_checkpoint`), and that error lists them already.
    if opened.catalog.tensors:
        lines = object_lines(opened)
        report.add_doubts(lines.lost)
        report.add_notes(lines.notes)
    report.warnings += _stale_warnings(directory, folder, opened)
    if described is not None:
        check_tensors(described, opened.catalog, report)
    return _Folder(folder, opened, described, report).files()


def _stale_warnings(directory: str, folder: str, opened: DcpFolder) -> Iterator[str]:
    """Yield a warning for each file that is left over from another save."""
    for name in unused_shards(directory, {file.name for file in opened.catalog.files}):
        yield f"{escape(os.path.join(folder, name))}: not of this checkpoint"
    has_index = storage.lexists(path_in(directory, METADATA))
    for name in sorted(storage.listdir(directory)) if has_index else ():
        if name.startswith("__") and name.endswith(METADATA):
            yield f"{escape(os.path.join(folder, name))}: not of this checkpoint"


def _files_by_lists(folder: str, described: CheckedManifest | None, report: Report) -> list[FileBytes]:
    """Return the files as described by the chunk lists and the manifest, if `.metadata` cannot be read.

    So their bytes can still be compared. Without a manifest nothing is known about them.
    """
    if described is None:
        return []
    names: set[str] = set()
    files: list[FileBytes] = []
    for shard in described.content.files:
        if shard.name not in described.files:
            continue
        where, path = os.path.join(folder, shard.name), os.path.join(described.directory, shard.name)
        file = FileBytes(name=where, path=path, size=shard.size, crc32=manifest.crc_of(shard))
        files.append(file)
        report.files.add(where)
        listed = described.lists.get(shard.name)
        for chunk in listed.chunks if listed is not None else ():
            crc, nbytes = chunk.crc32, chunk.data_nbytes
            file.stretches.append(Stretch(chunk.data_start, nbytes, chunk.fqn, chunk.region, crc))
            report.chunk(nbytes)
            names.add(chunk.fqn)
    report.num_tensors += len(names)
    return files


class _ChunkRow(NamedTuple):
    """One chunk of the catalog."""

    entry: TensorEntry
    region: Region
    start: int
    nbytes: int
    row: int
    """Its number in the catalog's table of chunks."""

    @property
    def stretch(self) -> Stretch:
        """The chunk's bytes, according to `.metadata`."""
        return Stretch(self.start, self.nbytes, self.entry.fqn, self.region, None)


class _Folder:
    """Checks a directory file by file, and each file from front to back."""

    def __init__(
        self, folder: str, opened: DcpFolder, described: CheckedManifest | None, report: Report
    ) -> None:
        self._folder, self._opened, self._described, self._report = folder, opened, described, report
        self._scanner = RecordScanner()
        self._num_alike, self._unlike = 0, list[tuple[FileBytes, _ChunkRow, FirstDifference]]()
        self._of_classes: dict[str, list[str]] = {}
        self._damaged: tuple[str, int] | None = None
        """The last record that cannot be read: its file and first byte."""
        chunks = opened.catalog.chunks
        self._entries = sorted(opened.catalog.tensors.values(), key=lambda entry: entry.first_chunk)
        self._firsts = [entry.first_chunk for entry in self._entries]
        files, starts = chunks.file.tolist(), chunks.start.tolist()
        self._rows = sorted(range(len(files)), key=lambda row: (files[row], starts[row]))

    def files(self) -> list[FileBytes]:
        """Check all files; return those with tensors or byte entries."""
        catalog, files = self._opened.catalog, dict[int, FileBytes]()
        for number, rows in groupby(self._rows, key=catalog.chunks.file.__getitem__):
            file = files[number] = self._file(catalog.files[number])
            with (
                self._report.collect_errors(file.name),
                open_regular(file.path, file.name, follow=False) as (fd, _),
                named_failures(file.name),
            ):
                self._scanner.open(fd)
                chunk_rows = [self._chunk_row(row) for row in rows]
                prefetch_records(fd, ((chunk.start, chunk.nbytes) for chunk in chunk_rows))
                self._check_file(catalog.files[number], file, iter(chunk_rows), fd)
        for fqn, location in self._opened.objects.items():
            if location is not None:
                if location.file not in files:
                    files[location.file] = self._file(catalog.files[location.file])
                files[location.file].archives.append(Archive(location.start, location.nbytes, fqn))
        if self._described is None:  # otherwise sizes of files are compared with the manifest's
            self._warn_of_trailing_bytes(files)
            self._report_lost_copies()
        is_spelled = self._num_alike > len(self._unlike)
        for file in files.values():
            file.is_spelled_as_torch = is_spelled
        self._report_unlike(is_spelled)
        self._report_classes()
        return list(files.values())

    def _report_lost_copies(self) -> None:
        """Report files that are missing or end before a copy of a chunk. Only the rank that saved it may read it there."""
        needed = dict[int, int]()
        for number, end in self._opened.copy_ends if self._opened.has_records else ():
            needed[number] = max(needed.get(number, 0), end)
        for number, end in needed.items():
            source = self._opened.catalog.files[number]
            try:
                size = storage.getsize(source.path)
            except FileNotFoundError:
                size = -1
            except OSError:  # reported where its other bytes are read
                continue
            if size < end:
                self._report.problem(
                    f"it has {size} bytes, and needs at least {end}" if size >= 0 else "no such file",
                    file=os.path.join(self._folder, source.name),
                    is_missing=size < 0,
                )

    def _warn_of_trailing_bytes(self, files: Mapping[int, FileBytes]) -> None:
        """Warn about bytes behind the last record of a file: nothing reads them, and torch writes none."""
        chunks = self._opened.catalog.chunks
        ends = dict.fromkeys(files, 0)
        for file, start, nbytes in zip(chunks.file, chunks.start, chunks.nbytes, strict=True):
            ends[file] = max(ends[file], start + nbytes)
        for location in filter(None, self._opened.objects.values()):
            ends[location.file] = max(ends[location.file], location.start + location.nbytes)
        for file, end in self._opened.copy_ends:
            ends[file] = max(ends.get(file, 0), end)
        self._report.warnings += [
            f"{escape(file.name)}: {count(file.size - ends[number], 'byte')} behind its last record, which "
            f"{METADATA} does not list"
            for number, file in files.items()
            if file.size > ends[number]
        ]

    def _file(self, source: SourceFile) -> FileBytes:
        """Return a file with the CRC-32 that the manifest records for the whole of it, and count it in the report."""
        name = os.path.join(self._folder, source.name)
        self._report.files.add(name)
        recorded = self._described.files.get(source.name) if self._described is not None else None
        crc = None if recorded is None else manifest.crc_of(recorded)
        return FileBytes(name=name, path=source.path, size=source.size, crc32=crc)

    def _chunk_row(self, row: int) -> _ChunkRow:
        """Return a row of the catalog's table, with its tensor."""
        table = self._opened.catalog.chunks
        entry = self._entries[bisect_right(self._firsts, row) - 1]
        return _ChunkRow(entry, table.region(row), table.start[row], table.nbytes[row], row)

    def _check_file(
        self, source: SourceFile, file: FileBytes, chunk_rows: Iterator[_ChunkRow], fd: int
    ) -> None:
        """Open the records of one file, and compare each with its line in the chunk list.

        Args:
            source: the file in the catalog.
            file: gets the stretches to compare later.
            chunk_rows: the file's chunks by their first byte. Names that are tied have the same first byte.
            fd: the open file.
        """
        described = self._described
        listed = described.lists.get(source.name) if described is not None else None
        lines = {line.record_start: line for line in listed.chunks} if listed is not None else {}
        aliases = listed.aliases if listed is not None else {}
        for start, group in groupby(chunk_rows, key=lambda chunk: chunk.start):
            same = list(group)
            records = [self._open(source, file, chunk) for chunk in same]
            line = lines.pop(start, None)
            record = next((record for record in records if record is not None), None)
            if line is not None:
                self._compare_line(line, aliases.get(line.fqn, ()), same, record, file)
            elif listed is not None:
                self._report.problem(
                    "it is not in the file's chunk list", file=file.name, stretch=same[0].stretch
                )
            if record is not None:
                self._add_data(file, same[0], record, line)
                if file.crc32 is None:
                    self._check_spelling(fd, file, same[0], record)
        for start, extra in sorted(lines.items(), key=lambda item: item[0]):
            stretch = Stretch(start, extra.record_nbytes, extra.fqn, extra.region, None)
            self._report.problem(
                f"the chunk list has it, {METADATA} does not", file=file.name, stretch=stretch, num_bytes=None
            )

    def _open(self, source: SourceFile, file: FileBytes, chunk: _ChunkRow) -> TensorRecord | None:
        """Return one record; None if it cannot be read, or if the format has no records."""
        if not self._opened.has_records:
            file.stretches.append(chunk.stretch)
            self._report.chunk(chunk.nbytes)
            return None
        if chunk.row in self._opened.transforms:
            self._add_packed(source, file, chunk)
            return None
        kind = (chunk.entry.dtype, chunk.region.sizes)
        try:
            record = self._scanner.read(kind, chunk.start, chunk.nbytes, where=escape(source.name))
        except OtherVersion:
            raise
        except UnreadableClass as error:
            self._of_classes.setdefault(error.why, []).append(chunk.entry.fqn)
            self._add_storages(file, chunk, error.entries.values(), is_whole=True)
            self._report.chunk(sum(entry.nbytes for entry in error.entries.values()))
            return None
        except SourceError as error:
            file.is_damaged, before = True, self._damaged
            self._damaged = file.name, chunk.start
            if self._damaged != before:  # tied names have one record, and it is one problem
                self._report.problem(error.message, file=file.name, stretch=chunk.stretch)
            return None
        reason = record_difference(chunk.entry, chunk.region.sizes, record)
        if reason:
            self._report.problem(reason, file=file.name, stretch=chunk.stretch)
            return None
        return record

    def _check_spelling(self, fd: int, file: FileBytes, chunk: _ChunkRow, record: TensorRecord) -> None:
        """Compare the bytes around a record's data with those that torch 2.13 writes; `_report_unlike` judges later.

        Called only for files without a CRC-32 of their own, which would cover these bytes.
        """
        if record.is_contiguous and record.data_nbytes == record.nbytes:
            outcome = spelling(fd, chunk.start, chunk.nbytes, record)
            if isinstance(outcome, FirstDifference):
                self._unlike.append((file, chunk, outcome))
            else:
                self._num_alike += outcome

    def _report_unlike(self, is_spelled: bool) -> None:
        """Report records that torch 2.13 would write differently; none if most differ, as another version wrote them."""
        for file, chunk, unlike in self._unlike if is_spelled else ():
            report_difference("data", file, chunk.stretch, unlike, self._report)

    def _add_packed(self, source: SourceFile, file: FileBytes, chunk: _ChunkRow) -> None:
        """Add a record that was saved through an extension; it is checked later, by decompressing it."""
        transforms = self._opened.transforms[chunk.row]
        packed = PackedChunk(chunk.entry, chunk.region, chunk.start, chunk.nbytes, transforms)
        self._report.chunk(chunk.nbytes)
        try:
            check_transforms({chunk.row: packed})
        except SourceError as error:
            self._report.add_notes([f"not checked: {error.message} ({'; '.join(error.problems)})"])
            return
        file.packed.append((chunk.stretch, packed_file(source, packed)))

    def _add_data(
        self, file: FileBytes, chunk: _ChunkRow, record: TensorRecord, line: ListedChunk | None
    ) -> None:
        """Add the data of a record, to be compared with its CRC-32: the chunk list's, or else the one in the record."""
        crc = line.crc32 if line is not None and line.crc32 is not None else record.crc32
        start, nbytes, fqn = record.data_start, record.data_nbytes, chunk.entry.fqn
        file.stretches.append(Stretch(start, nbytes, fqn, chunk.region, crc))
        self._add_storages(file, chunk, record.other_storages)
        self._report.chunk(nbytes)

    def _add_storages(
        self, file: FileBytes, chunk: _ChunkRow, entries: Iterable[ZipEntry], *, is_whole: bool = False
    ) -> None:
        """Add storages of a record, to be compared with their CRC-32s.

        Args:
            file: gets the storages.
            chunk: the record.
            entries: the storages' zip entries.
            is_whole: True if they are the tensor itself, which cannot be read; False if they are beside its data.
        """
        what = f"a storage in the record of {escape(chunk.entry.fqn)}"
        for number, entry in enumerate(entries):
            tensor = chunk.entry.fqn if is_whole and not number else None  # so that the chunk counts once
            crc = entry.crc or None
            file.stretches.append(Stretch(entry.start, entry.nbytes, tensor, None, crc, what))

    def _report_classes(self) -> None:
        """Report tensors of classes that can be checked but not read: a note for an optimizer's state, else a warning."""
        state = optimizer_names(self._entries, self._opened.objects)
        for why, names in self._of_classes.items():
            tensor_names = list(dict.fromkeys(names))
            what = f"{count(len(tensor_names), 'tensor is', 'tensors are')} of class {why}"
            if state.issuperset(tensor_names):
                self._report.add_notes(
                    [f"{what}: reshard cannot divide this state; with --no-optimizer it writes the rest"]
                )
            else:
                self._report.warnings.append(
                    f"{what}: undamaged, but consolidate, reshard and diff cannot read them: {listed(tensor_names)}"
                )

    def _compare_line(
        self,
        line: ListedChunk,
        aliases: tuple[str, ...],
        same: list[_ChunkRow],
        record: TensorRecord | None,
        file: FileBytes,
    ) -> None:
        """Compare a line of a chunk list with `.metadata` and with the record itself."""
        chunk = same[0]
        meant = (chunk.entry.dtype.name, chunk.entry.shape, tuple(chunk.region), chunk.nbytes)
        listed_values = (line.dtype.name, line.shape, tuple(line.region), line.record_nbytes)
        compared: list[tuple[str, Any, Any, Callable[[Any], str]]] = [
            ("names in the chunk list", {row.entry.fqn for row in same}, {line.fqn, *aliases}, _names),
            ("line in the chunk list", meant, listed_values, str),
        ]
        if record is not None:
            recorded, listed = ((each.data_start, each.data_nbytes) for each in (record, line))
            compared.append(("data in the chunk list", recorded, listed, _bytes))
        if record is not None and None not in (line.crc32, record.crc32):
            what = "CRC-32 in the record: the chunk list says that another was written"
            compared.append((what, line.crc32, record.crc32, "{:08x}".format))
        for message, expected, actual, show in compared:
            if expected != actual:
                self._report.problem(
                    message,
                    file=file.name,
                    stretch=chunk.stretch,
                    expected=show(expected),
                    found=show(actual),
                )


def _names(names: Iterable[str]) -> str:
    return ", ".join(map(escape, sorted(names)))


def _bytes(extent: tuple[int, int]) -> str:
    start, nbytes = extent
    return f"{count(nbytes, 'byte')} at {start}"
