"""Compare bytes with recorded checksums: the whole file if it has a digest, otherwise the parts that have one.

A *stretch* is a range of a file's bytes: a tensor's chunk, or an entry of a zip. A *record* is a tensor chunk or an object as
torch saves it, a zip; its CRC-32s cover only the data. The bytes around them are compared with the bytes that torch writes
for such a record: its *spelling*. The *skeleton* is such a record with a *hole* in place of the tensor's data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

from shardkit.core.catalog import SourceFile
from shardkit.core.text import escape
from shardkit.errors import SourceError
from shardkit.files import storage
from shardkit.files.digest import Archive, ByteReader, FileBytes, Scan, Stretch, crc32_combine
from shardkit.files.remote.contract import OtherVersion
from shardkit.files.strict_json import named_failures, open_regular
from shardkit.formats.torchsave.archive import ZipEntry, ZipReader, pread_of, read_directory
from shardkit.formats.torchsave.record import TensorRecord
from shardkit.formats.torchsave.scan import read_entries
from shardkit.formats.torchsave.writer import RecordSkeleton, pickle_record, record_skeleton
from shardkit.operations.verify.result import Report, in_threads

# APPNOTE.TXT 4.3.16: without a comment, which torch does not write, the last record has 22 bytes.
_ZIP_START, _ZIP_END, _ZIP_END_BYTES = b"PK", b"PK\5\6", 22


def check_files(files: Sequence[FileBytes], report: Report, jobs: int) -> None:
    """Compare everything in the files that has a recorded checksum, in threads."""
    tasks = [partial(check_file, file) for file in files]
    in_threads(report, tasks, jobs, label="verify", total_bytes=sum(file.read_bytes for file in files))


def check_file(file: FileBytes, report: Report) -> None:
    """Read everything in a file that has a recorded checksum, and report what is wrong."""
    with report.collect_errors(file.name):
        with open_regular(file.path, file.name, follow=file.follow) as (fd, size):
            source = ByteReader(fd, file.name, size, report.read, ahead=True)
            if file.has_digest and size == file.size:
                _check_all(file, source, report)
            else:
                recorded = [s for s in file.stretches if s.crc32 is not None]
                _check_stretches(file, source, recorded, report)
                _check_archives(file, fd, report)
        for stretch, packed in file.packed:
            _decode(file, stretch, packed, report)


def _scan(file: FileBytes, source: ByteReader, report: Report, *, sha256: bool) -> Scan:
    """Read a whole file and compare every chunk that has a recorded checksum."""
    ends = (end for s in file.stretches for end in (s.start, s.start + s.nbytes))
    scan = source.scan(ends, sha256=sha256)
    for stretch in file.stretches:
        if stretch.start + stretch.nbytes <= source.size:  # otherwise reported with the structure
            _compare(file, stretch, scan.crc(stretch.start, stretch.nbytes), report)
    return scan


def _check_all(file: FileBytes, source: ByteReader, report: Report) -> None:
    """Compare every chunk and the file as a whole, in one pass.

    A wrong checksum of the file is reported only if damaged chunks do not explain it: that is, if the file's checksum
    would still be wrong with every chunk's checksum as recorded.
    """
    scan = _scan(file, source, report, sha256=file.sha256 is not None)
    report.num_checked_files += 1
    if file.is_damaged:
        return
    if file.crc32 is not None and scan.crc32 != file.crc32 != _crc_as_recorded(file, scan, source.size):
        report.problem(
            "CRC-32 of the file: bytes outside the tensors' data were changed"
            if file.stretches
            else "CRC-32 of the file",
            file=file.name,
            expected=f"{file.crc32:08x}",
            found=f"{scan.crc32:08x}",
        )
    elif scan.sha256 != file.sha256 and file.crc32 in (None, scan.crc32):
        report.problem("sha256 of the file", file=file.name, expected=file.sha256, found=scan.sha256)


def _crc_as_recorded(file: FileBytes, scan: Scan, size: int) -> int:
    """Return the CRC-32 that the file would have if every chunk had its recorded CRC-32."""
    offset, crc = 0, 0
    for stretch in sorted(file.stretches, key=lambda s: s.start):
        if stretch.start < offset or stretch.start + stretch.nbytes > size:
            continue  # the bytes belong to another name, too; or they are beyond the end
        gap, nbytes = stretch.start - offset, stretch.nbytes
        meant = scan.crc(stretch.start, nbytes) if stretch.crc32 is None else stretch.crc32
        crc = crc32_combine(crc32_combine(crc, scan.crc(offset, gap), gap), meant, nbytes)
        offset = stretch.start + nbytes
    return int(crc32_combine(crc, scan.crc(offset, size - offset), size - offset))


def _check_stretches(
    file: FileBytes, source: ByteReader, stretches: Iterable[Stretch], report: Report
) -> None:
    """Read stretches of a file, and compare each with its recorded CRC-32."""
    for stretch in stretches:
        if stretch.start + stretch.nbytes <= source.size:  # otherwise reported when the size was compared
            _compare(file, stretch, source.crc(stretch.start, stretch.nbytes), report)


def _compare(file: FileBytes, stretch: Stretch, crc: int, report: Report) -> None:
    """Compare the CRC-32 of the bytes on disk, `crc`, with the recorded one, if there is one."""
    if stretch.crc32 is None:
        return
    report.num_checked_chunks += stretch.tensor is not None
    if crc != stretch.crc32:
        report.problem(
            f"CRC-32 of {stretch.what or 'the data'}",
            file=file.name,
            stretch=stretch,
            expected=f"{stretch.crc32:08x}",
            found=f"{crc:08x}",
        )


def _check_archives(file: FileBytes, fd: int, report: Report) -> None:
    """Compare zips with the checksums in them, and all other bytes with those that torch writes there.

    Bytes that differ from torch's are reported only if most records are as torch writes them. Otherwise another
    program, or another version of torch, has written them.
    """
    num_alike, unlike = 0, list[tuple[Archive, FirstDifference]]()
    for archive in file.archives:
        with named_failures(file.name):
            outcome = _check_archive(file, fd, archive, report)
        if isinstance(outcome, FirstDifference):
            unlike.append((archive, outcome))
        else:
            num_alike += outcome
    for archive, difference in unlike if file.is_spelled_as_torch or num_alike > len(unlike) else ():
        place = Stretch(archive.start, archive.nbytes, archive.name, None, None)
        report_difference("object", file, place, difference, report)


def _check_archive(file: FileBytes, fd: int, archive: Archive, report: Report) -> FirstDifference | bool:
    """Compare every entry of a zip with its CRC-32; return the result of `object_spelling`."""
    if not _is_zip(fd, archive):
        if storage.pread(fd, 1, archive.start) == b"\0":  # no format of objects begins with zero
            report.problem(
                "it begins with zeros",
                file=file.name,
                tensor=archive.name,
                start_byte=archive.start,
                num_bytes=archive.nbytes,
            )
        else:
            report.add_notes([f"{escape(archive.name)} has no checksum: its bytes are not a zip"])
        return False
    try:
        where = f"bytes {archive.start} to {archive.start + archive.nbytes}"
        reader = ZipReader(pread_of(fd), archive.start, archive.nbytes, where)
        entries = read_directory(reader)
        for name, entry in entries.items():
            if entry.crc:
                reader.check_crc(name, entry)
                report.read(entry.nbytes)
        return object_spelling(fd, archive.start, archive.nbytes, entries)
    except OtherVersion:
        raise
    except SourceError as error:
        report.error(error, file=file.name, tensor=archive.name)
        return False


def _is_zip(fd: int, archive: Archive) -> bool:
    """True if the beginning or the end looks like a zip's; the other may be damaged."""
    if storage.pread(fd, len(_ZIP_START), archive.start) == _ZIP_START:
        return True
    end = archive.start + archive.nbytes - _ZIP_END_BYTES
    return end >= archive.start and storage.pread(fd, len(_ZIP_END), end) == _ZIP_END


def _decode(file: FileBytes, stretch: Stretch, packed: SourceFile, report: Report) -> None:
    """Check a chunk that was saved through an extension, such as compressed, by decoding it: this fails if it is damaged."""
    try:
        packed.decoded()
    except OtherVersion:
        raise
    except SourceError as error:
        report.problem(error.message, file=file.name, stretch=stretch)
        return
    report.num_checked_chunks += 1
    report.read(stretch.nbytes)


_PICKLE, _SERIALIZATION_ID = "data.pkl", ".data/serialization_id"
_FREE = (_PICKLE, _SERIALIZATION_ID)
"""Entries that may differ for tensors of equal dtype and shape (strides, a flag, an id). They have checksums."""
_DATA = "data/0"
_NOT_RECORDED = bytes(4)  # the field of a CRC-32 after torch.serialization.set_crc32_options(False)
_DESCRIPTOR = b"PK\x07\x08"
_OBJECT_NAMES = {_PICKLE, ".format_version", ".storage_alignment", "byteorder", "version", _SERIALIZATION_ID}
_MAX_OBJECT_BYTES = 1 << 20


class FirstDifference(NamedTuple):
    """The first byte of a record that differs from what torch writes."""

    start: int
    """Position in the file."""
    expected: int
    actual: int


def report_difference(
    what: str, file: FileBytes, place: Stretch, difference: FirstDifference, report: Report
) -> None:
    """Report a wrong byte of a record, outside of its data. `what` is "data" or "object"."""
    report.problem(
        f"a byte of the record around the {what}",
        file=file.name,
        stretch=place._replace(start=difference.start, nbytes=1),
        expected=f"{difference.expected:02x}",
        found=f"{difference.actual:02x}",
    )


def spelling(fd: int, start: int, nbytes: int, record: TensorRecord) -> FirstDifference | bool:
    """Compare a record, except its data, with the bytes that torch writes for such a tensor. The data must be row-major.

    Args:
        fd: the file.
        start, nbytes: place of the record.
        record: the record, already read.

    Returns:
        True if they are equal, or else the first difference. False if parts have other lengths, so that something else
        than this version of torch wrote the record.
    """
    skeleton = record_skeleton(record.dtype, record.shape, record.stride, record.storage_offset)
    num_before, hole = len(skeleton.prefix), skeleton.data_nbytes
    if nbytes != skeleton.nbytes or record.data_start - start != num_before:
        return False
    head = storage.pread(fd, num_before, start)
    stored = bytearray(head + storage.pread(fd, skeleton.suffix_nbytes, start + num_before + hole))
    expected = skeleton.prefix + skeleton.suffix(record.crc32 or 0)
    if len(stored) != len(expected):
        return False  # the file was truncated meanwhile
    for name, content, crcs in _entries(skeleton):
        recorded = {bytes(stored[offset : offset + 4]) for offset in crcs} - {_NOT_RECORDED}
        for offset in crcs:
            if stored[offset : offset + 4] == _NOT_RECORDED or (name == _DATA and record.crc32 is None):
                stored[offset : offset + 4] = expected[offset : offset + 4]
        if name in _FREE and len(recorded) < 2:  # reading the record compared the content with this CRC-32
            for place in (content, *(slice(offset, offset + 4) for offset in crcs)):
                stored[place] = expected[place]
    return _first_difference(
        expected, stored, lambda byte: start + byte + (hole if byte >= num_before else 0)
    )


def object_spelling(
    fd: int, start: int, nbytes: int, entries: Mapping[str, ZipEntry]
) -> FirstDifference | bool:
    """Compare the record of an object with the bytes that torch writes for the same pickle.

    Args:
        fd: the file.
        start, nbytes: place of the record.
        entries: entries of its zip, whose checksums are right; positions count from the record's first byte.

    Returns:
        As `spelling`; also False for an object with tensors, or a very large one.
    """
    if entries.keys() != _OBJECT_NAMES or nbytes > _MAX_OBJECT_BYTES:
        return False
    stored, pickle = bytearray(storage.pread(fd, nbytes, start)), entries[_PICKLE]
    expected = pickle_record(bytes(stored[pickle.start : pickle.start + pickle.nbytes]))
    if len(stored) != len(expected):
        return False
    for name, entry in entries.items():
        stop = entry.start + entry.nbytes
        described = (stop + len(_DESCRIPTOR),) if expected.startswith(_DESCRIPTOR, stop) else ()
        crcs = (*described, entry.crc_at)
        if name == _SERIALIZATION_ID and len({bytes(stored[offset : offset + 4]) for offset in crcs}) == 1:
            for place in (slice(entry.start, stop), *(slice(offset, offset + 4) for offset in crcs)):
                stored[place] = expected[place]
    return _first_difference(expected, stored, lambda offset: start + offset)


def _first_difference(
    expected: bytes | bytearray, actual: bytearray, place: Callable[[int], int]
) -> FirstDifference | bool:
    """Return True for equal bytes, or else the first difference; `place` maps an index to a position in the file."""
    if actual == expected:
        return True
    index = next(index for index, pair in enumerate(zip(expected, actual, strict=True)) if pair[0] != pair[1])
    return FirstDifference(place(index), expected[index], actual[index])


@lru_cache(maxsize=4096)
def _entries(skeleton: RecordSkeleton) -> tuple[tuple[str, slice, tuple[int, ...]], ...]:
    """Return (name, content, positions of its CRC-32) of each zip entry of a record.

    Positions are those in prefix + suffix, that is, in the record without the data. So the content of the data entry is
    empty.
    """
    around, before, hole = skeleton.prefix + skeleton.suffix(0), len(skeleton.prefix), skeleton.data_nbytes

    def pread(start: int, nbytes: int) -> bytes:
        """Read from the record as it would be in a file, with zeros as the tensor's data."""
        stop = start + nbytes
        data = bytes(max(min(stop, before + hole) - max(start, before), 0))
        tail = around[before:]
        return (
            around[:before][start:stop]
            + data
            + tail[max(start - before - hole, 0) : max(stop - before - hole, 0)]
        )

    def place(offset: int) -> int:
        """Return an offset in the record as one in prefix + suffix."""
        return offset if offset < before else offset - hole

    _, entries = read_entries(pread, 0, skeleton.nbytes)
    places = []
    for name, entry in entries.items():
        start, stop = place(entry.start), place(entry.start + entry.nbytes)
        if name == _DATA:
            start = stop = before
        described = (stop + len(_DESCRIPTOR),) if around.startswith(_DESCRIPTOR, stop) else ()
        places.append((name, slice(start, stop), (*described, place(entry.crc_at))))
    return tuple(places)
