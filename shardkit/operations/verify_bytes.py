"""Bytes against recorded CRC-32s: whole files where there is a digest of the file, stretches of them where not."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardkit.core.catalog import SourceFile
from shardkit.core.regions import Region
from shardkit.core.text import escape
from shardkit.errors import IntegrityError, ResourceError, ShardkitError, SourceError
from shardkit.formats.strict import open_regular
from shardkit.formats.torch_zip import ZipReader, read_directory
from shardkit.operations.verify_manifest import Described
from shardkit.operations.verify_result import Report
from shardkit.transfer import storage
from shardkit.transfer.digest import crc32, crc32_combine

_BLOCK_BYTES = 1 << 20
_MAX_ENTRIES = 1 << 20


class Stretch(NamedTuple):
    """The bytes of one chunk."""

    start: int
    nbytes: int
    tensor: str
    region: Region | None
    crc32: int | None
    """As recorded; None where it was not."""


class Archive(NamedTuple):
    """A zip of `torch.save` in a file: a byte entry, or a legacy weight file as a whole."""

    start: int
    nbytes: int
    name: str
    """What it holds, for messages."""


@dataclass(slots=True, kw_only=True)
class FileBytes:
    """A file, and what is recorded of its bytes."""

    name: str
    """Relative to the checkpoint."""
    path: str
    follow: bool = False
    """It may be a symbolic link, as all are in the Hub's cache."""
    size: int
    crc32: int | None = None
    """Of the whole file."""
    stretches: list[Stretch] = field(default_factory=list)
    archives: list[Archive] = field(default_factory=list)
    packed: list[tuple[Stretch, SourceFile]] = field(default_factory=list)
    """Chunks that exist only after decoding, which checks them."""

    @property
    def read_bytes(self) -> int:
        """Bytes that a full check reads."""
        other = sum(s.nbytes for s, _ in self.packed)
        if self.crc32 is not None:
            return self.size + other
        recorded = sum(s.nbytes for s in self.stretches if s.crc32 is not None)
        return recorded + sum(a.nbytes for a in self.archives) + other


def files_of_manifest(described: Described, report: Report) -> dict[str, FileBytes]:
    """Return the files that a manifest lists and that have the right size, by their names in its directory."""
    files = {}
    for name, crc in described.crcs.items():
        path, where = os.path.join(described.directory, name), os.path.join(described.folder, name)
        follow = described.kind == "hub"
        files[name] = FileBytes(name=where, path=path, follow=follow, size=os.stat(path).st_size, crc32=crc)
        report.files.add(where)
    return files


def check_whole(file: FileBytes, report: Report) -> None:
    """Read all of a file that has a recorded checksum.

    Raises:
        ResourceError: the system cannot read it.
    """
    try:
        with open_regular(file.path, file.name, follow=file.follow) as (fd, size):
            source = _Bytes(fd, file.name, size, report, ahead=True)
            if file.crc32 is not None and size == file.size:
                _check_all(file, source, report)
            else:
                recorded = [s for s in file.stretches if s.crc32 is not None]
                _check_stretches(file, source, recorded, report)
                for archive in file.archives:
                    _check_archive(file, fd, archive, report)
    except ResourceError:
        raise
    except SourceError as error:
        report.error(error, file=file.name)
    for stretch, packed in file.packed:
        _decode(file, stretch, packed, report)


def check_some(file: FileBytes, chosen: Sequence[Stretch], report: Report) -> None:
    """Read some chunks of a file; arguments and errors as for `check_whole`."""
    try:
        with open_regular(file.path, file.name, follow=file.follow) as (fd, size):
            source = _Bytes(fd, file.name, size, report, ahead=False)
            _check_stretches(file, source, sorted(chosen, key=lambda s: s.start), report)
    except ResourceError:
        raise
    except SourceError as error:
        report.error(error, file=file.name)


def choose(files: Sequence[FileBytes], num_bytes: int, seed: int) -> list[tuple[FileBytes, list[Stretch]]]:
    """Choose chunks that have a checksum, at random, until they have `num_bytes`; in the order of the files."""
    pool = [
        (number, stretch)
        for number, file in enumerate(files)
        for stretch in file.stretches
        if stretch.crc32 is not None and stretch.nbytes
    ]
    random.Random(seed).shuffle(pool)
    chosen: dict[int, list[Stretch]] = {}
    for number, stretch in pool:
        if num_bytes <= 0:
            break
        chosen.setdefault(number, []).append(stretch)
        num_bytes -= stretch.nbytes
    return [(files[number], chosen[number]) for number in sorted(chosen)]


class _Bytes:
    """An open file, read front to back in blocks."""

    def __init__(self, fd: int, name: str, size: int, report: Report, *, ahead: bool) -> None:
        self._fd, self._name, self.size, self._report, self._ahead = fd, name, size, report, ahead
        self._buffer = memoryview(bytearray(_BLOCK_BYTES))
        self._at, self._held = 0, 0

    def crc(self, start: int, nbytes: int) -> int:
        """Return the CRC-32 of a range."""
        crc = 0
        while nbytes:
            skip = start - self._at
            if not 0 <= skip < self._held:
                self._fill(start, _BLOCK_BYTES if self._ahead else min(nbytes, _BLOCK_BYTES))
                skip = 0
            part = self._buffer[skip : min(self._held, skip + nbytes)]
            crc = crc32(part, crc)
            self._report.read(len(part))
            start, nbytes = start + len(part), nbytes - len(part)
        return crc

    def _fill(self, start: int, nbytes: int) -> None:
        try:
            self._held = storage.preadv(self._fd, [self._buffer[:nbytes]], start)
        except OSError as error:
            raise ResourceError(
                f"{escape(self._name)}: reading at byte {start}: {error.strerror}",
                hint="the disk may be failing: copy what can be read, and use another copy of the rest",
            ) from error
        self._at = start
        if not self._held:
            raise SourceError(f"it ended at byte {start} while it was read")


def _check_all(file: FileBytes, source: _Bytes, report: Report) -> None:
    """Compare every chunk and the file as a whole, in one pass.

    What the file's checksum says is reported unless damaged chunks explain it: with theirs as recorded, the
    file would be whole.
    """
    at, found, explained = 0, 0, 0
    for stretch in sorted(file.stretches, key=lambda s: s.start):
        if stretch.start < at or stretch.start + stretch.nbytes > source.size:
            continue  # shared with another name; or no such place, which was reported when it was looked at
        gap, nbytes = stretch.start - at, stretch.nbytes
        between, own = source.crc(at, gap), source.crc(stretch.start, nbytes)
        _compare(file, stretch, own, report)
        meant = own if stretch.crc32 is None else stretch.crc32
        found = crc32_combine(crc32_combine(found, between, gap), own, nbytes)
        explained = crc32_combine(crc32_combine(explained, between, gap), meant, nbytes)
        at = stretch.start + nbytes
    rest = source.size - at
    between = source.crc(at, rest)
    found, explained = crc32_combine(found, between, rest), crc32_combine(explained, between, rest)
    report.num_checked_files += 1
    if found != file.crc32 != explained:
        report.problem(
            "CRC-32 of the file: bytes outside the tensors' data are not what was written",
            file=file.name,
            expected=f"{file.crc32:08x}",
            found=f"{found:08x}",
        )


def _check_stretches(file: FileBytes, source: _Bytes, stretches: Iterable[Stretch], report: Report) -> None:
    for stretch in stretches:
        if stretch.start + stretch.nbytes <= source.size:  # else reported when the size was compared
            _compare(file, stretch, source.crc(stretch.start, stretch.nbytes), report)


def _compare(file: FileBytes, stretch: Stretch, found: int, report: Report) -> None:
    if stretch.crc32 is None:
        return
    report.num_checked_chunks += 1
    if found != stretch.crc32:
        report.problem(
            "CRC-32 of the data",
            file=file.name,
            tensor=stretch.tensor,
            region=stretch.region,
            start_byte=stretch.start,
            num_bytes=stretch.nbytes,
            expected=f"{stretch.crc32:08x}",
            found=f"{found:08x}",
        )


def _check_archive(file: FileBytes, fd: int, archive: Archive, report: Report) -> None:
    """Compare every entry of a zip with its CRC-32."""
    if storage.pread(fd, 2, archive.start) != b"PK":
        report.add_notes([f"{escape(archive.name)} has no checksum: its bytes are no zip"])
        return
    try:
        where = f"bytes {archive.start} to {archive.start + archive.nbytes}"
        reader = ZipReader(lambda at, n: storage.pread(fd, n, at), archive.start, archive.nbytes, where)
        for name, entry in read_directory(reader, lambda _: True, max_entries=_MAX_ENTRIES).items():
            if entry.crc:
                reader.check_crc(name, entry)
                report.read(entry.nbytes)
    except ResourceError:
        raise
    except SourceError as error:
        report.error(error, file=file.name, tensor=archive.name)


def _decode(file: FileBytes, stretch: Stretch, packed: SourceFile, report: Report) -> None:
    assert packed.decode is not None
    try:
        packed.decode()
        report.num_checked_chunks += 1
        report.read(stretch.nbytes)
    except ResourceError:
        raise
    except (SourceError, IntegrityError) as error:
        _packed_problem(file, stretch, error, report)


def _packed_problem(file: FileBytes, stretch: Stretch, error: ShardkitError, report: Report) -> None:
    report.problem(
        error.message,
        file=file.name,
        tensor=stretch.tensor,
        region=stretch.region,
        start_byte=stretch.start,
        num_bytes=stretch.nbytes,
    )
