"""Read the descriptions of very many `torch.save` records quickly, by comparing them with a template.

A record is a zip with stored entries, somewhere inside a `.distcp`. Only its directory and the small entries are read
(two `pread` calls for the records that torch writes). The tensor is read only to check its CRC-32. Compression and
big-endian data are refused.

A checkpoint of 1,024 ranks has hundreds of thousands of records. In all records of one dtype, shape and
length, the bytes around the data are the same, except for the CRC-32 of the data and an id made from it. So
the first record is read entry by entry and becomes a template, with which the others are compared: one after the other
(`RecordScanner`), or many at once with numpy (`BulkScanner`). A record that differs is read entry by entry too.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from shardkit.core.text import escape
from shardkit.files import storage
from shardkit.files.digest import crc32
from shardkit.formats.torchsave.archive import Pread, ZipEntry, ZipReader, read_directory
from shardkit.formats.torchsave.classes import unreadable_error
from shardkit.formats.torchsave.file import TensorNames, TensorRef, UnreadableTensor
from shardkit.formats.torchsave.record import TensorRecord, parse_tensor
from shardkit.pickles.policies import Inert

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

_DATA, _ID = "data/0", ".data/serialization_id"
_STORAGE = "data/"
_NAMES = frozenset(
    {"data.pkl", "byteorder", "version", _ID} | {".format_version", ".storage_alignment"}  # not in torch 2.2
)
_MAX_STORAGES = 16  # of a tensor whose class wraps others; torchao's 8-bit states have 3
_OF_A_CLASS = (
    *(b"_rebuild_from_type", b"_in_reduce_ex", b"_rebuild_parameter_with_state", b"_rebuild_qtensor"),
    *(b"X\4\0\0\0conjq", b"X\3\0\0\0negq"),  # keys of a lazy view, which go into the memo
)
"""Marks in a pickle that its tensor is not a plain one."""
_DESCRIPTOR = b"PK\x07\x08"
_NOT_RECORDED = bytes(4)  # the field of a CRC-32 that is not recorded
_WINDOW = 4096  # bytes read at once: the end of a record and the beginning of the next
_WORD = 8  # bytes that numpy compares at once


class Template(NamedTuple):
    """The bytes around the data that all records of one kind share."""

    head: bytes
    """The bytes before the data."""
    tail_at: int
    """Start of the tail, which is the bytes after the data, relative to the record. The positions below are relative to
    the tail."""
    fixed: tuple[tuple[int, bytes], ...]
    """(position, bytes) of all parts of the tail that do not change between records."""
    crcs: tuple[int, ...]
    """Positions of the data's CRC-32: after the data and in the directory."""
    id_range: tuple[int, int]
    """Position and length of the id; the length is 0 without an id."""
    id_crcs: tuple[int, ...]
    """Positions of the id's CRC-32."""
    record: TensorRecord
    """The description, with `data_start` relative to the record."""

    @property
    def tail_nbytes(self) -> int:
        """Number of bytes after the data."""
        start, text = self.fixed[-1]
        return start + len(text)


def read_entries(
    pread: Pread, offset: int, length: int, *, where: str = "record", check_crc: bool = False
) -> tuple[TensorRecord, dict[str, ZipEntry]]:
    """Read a record entry by entry, and return its tensor's description and its zip entries.

    Args:
        pread: reads the file.
        offset: the record's first byte.
        length: bytes of the record.
        where: name of the file in messages, escaped.
        check_crc: also read the data and compare its CRC-32, if one is recorded.

    Raises:
        SourceError: damaged, cut short, or a tensor whose raw bytes are not its values.
        UnreadableClass: an object of a class whose values cannot be read from a file.
        IntegrityError: the CRC-32 of an entry is wrong.
        ResourceError: the device fails.
    """
    reader = ZipReader(pread, offset, length, f"{where}, record at byte {offset}")
    entries = read_directory(reader, _is_known_name, max_entries=len(_NAMES) + _MAX_STORAGES)
    for name in ("data.pkl", _DATA):
        if name not in entries:
            reader.refuse(f"it has no entry {name}: not one tensor")
    small = {name: reader.content(name, entry) for name, entry in entries.items() if name in _NAMES}
    if small.get("byteorder", b"little") != b"little":
        reader.refuse(
            f"its byte order is {escape(small['byteorder'].decode('ascii', 'replace'))!r}, not little"
        )
    reader.check_version(small.get("version", b"3"))
    is_plain = not any(mark in small["data.pkl"] for mark in _OF_A_CLASS)
    record = (_plain_record if is_plain else _wrapped_value)(reader, small["data.pkl"], entries)
    for name in filter(_is_storage, entries) if check_crc else ():
        if entries[name].crc and entries[name].nbytes:
            reader.check_crc(name, entries[name])
    return record, entries


def _is_storage(name: str) -> bool:
    return name.startswith(_STORAGE) and name[len(_STORAGE) :].isdigit()


def _is_known_name(name: str) -> bool:
    return name in _NAMES or _is_storage(name)


def _plain_record(reader: ZipReader, pickle: bytes, entries: Mapping[str, ZipEntry]) -> TensorRecord:
    """Return the description of a record with one plain tensor."""
    other_storages = [name for name in entries if _is_storage(name) and name != _DATA]
    if other_storages:
        reader.refuse(f"entry {escape(f'{reader.prefix}/{other_storages[0]}')!r} is unknown or given twice")
    tensor, data = parse_tensor(pickle, f"{reader.where}, data.pkl"), entries[_DATA]
    if tensor.data_nbytes != data.nbytes:
        reader.refuse(f"its data has {data.nbytes} bytes, its storage {tensor.data_nbytes}")
    if tensor.reach > data.nbytes:
        reader.refuse(f"its tensor reaches to byte {tensor.reach} of a storage of {data.nbytes}")
    return tensor.at_offset(reader.offset + data.start, data.crc)


def _wrapped_value(reader: ZipReader, pickle: bytes, entries: Mapping[str, ZipEntry]) -> TensorRecord:
    """Return the description of the value in a record with an object whose class wraps a tensor."""
    storages = {
        name[len(_STORAGE) :]: entry._replace(start=reader.offset + entry.start)
        for name, entry in entries.items()
        if _is_storage(name)
    }
    names = TensorNames(storages)
    value = Inert(pickle, names.look_up, names.storage).run(f"{reader.where}, data.pkl")
    if isinstance(value, UnreadableTensor) and value.value is not None:
        raise unreadable_error(str(value.value), value.name, where=reader.where, entries=storages)
    if not isinstance(value, TensorRef):
        reader.refuse("data.pkl holds something other than one tensor")
    return replace(value, other_storages=tuple(entry for key, entry in storages.items() if key != value.key))


def prefetch_records(fd: int, extents: Iterable[tuple[int, int]]) -> None:
    """For a file in a store, begin to fetch the bytes around the data of these records, several requests at once.

    Args:
        fd: the file.
        extents: (first byte, bytes) of each record.
    """
    around = (
        part
        for start, nbytes in extents
        for part in ((start, start + _WINDOW), (start + nbytes - _WINDOW, start + nbytes))
    )
    storage.will_read(fd, around, is_soon=True)


class RecordScanner:
    """Reads the descriptions of records one by one. Records of a file should be read in the order of their bytes.

    Args:
        window_nbytes: bytes of each read, so that it includes the beginning of the next record; 0 reads no bytes beyond
            the record.
    """

    def __init__(self, window_nbytes: int = _WINDOW) -> None:
        self._window_nbytes = window_nbytes
        self._templates: dict[Hashable, Template] = {}
        self._fd, self._at, self._window = -1, 0, b""

    def open(self, fd: int, start: int = 0, window: bytes = b"") -> None:
        """Switch to another file, from which the bytes `window` at `start` may have been read already."""
        self._fd, self._at, self._window = fd, start, window

    def template_of(self, kind: Hashable, length: int) -> Template | None:
        """Return the template of a kind and length; None if no such record has been read yet."""
        return self._templates.get((kind, length))

    def read(self, kind: Hashable, offset: int, length: int, *, where: str) -> TensorRecord:
        """Read the description of the record at a byte range of the open file.

        Args:
            kind: the expected dtype and shape; records of one kind and length are compared with each other.
            offset: the record's first byte.
            length: bytes of the record.
            where: name of the file in messages, escaped.

        Raises:
            SourceError, IntegrityError, ResourceError: as `read_entries`.
        """
        template = self._templates.get((kind, length))
        if template is not None:
            record = self._compare(template, offset, length)
            if record is not None:
                return record
        record, entries = read_entries(self._pread, offset, length, where=where)
        learned = self._learn(record, entries, offset, length)
        if learned is not None:
            self._templates[kind, length] = learned
        return record

    def _compare(self, template: Template, offset: int, length: int) -> TensorRecord | None:
        """Return the record, or None if it differs from the template."""
        if self._bytes(offset, len(template.head)) != template.head:
            return None
        tail = self._bytes(offset + template.tail_at, length - template.tail_at)
        for pos, text in template.fixed:
            if not tail.startswith(text, pos):
                return None
        crc = tail[template.crcs[0] : template.crcs[0] + 4]
        for pos in template.crcs[1:]:
            if tail[pos : pos + 4] != crc:
                return None
        if template.id_crcs:
            pos, nbytes = template.id_range
            id_crc = crc32(tail[pos : pos + nbytes]).to_bytes(4, "little")
            for pos in template.id_crcs:
                if tail[pos : pos + 4] not in (id_crc, _NOT_RECORDED):
                    return None
        return template.record.at_offset(offset, int.from_bytes(crc, "little"))

    def _learn(
        self, record: TensorRecord, entries: Mapping[str, ZipEntry], offset: int, length: int
    ) -> Template | None:
        """Make a template from a record; return None if too many bytes are around its data, or in an unusual order."""
        if record.other_storages or record.flipped or record.unpadded:
            return None
        data, ident = entries[_DATA], entries.get(_ID)
        tail_at = data.start + data.nbytes
        if data.start > _WINDOW or length - tail_at > _WINDOW or (ident and ident.start < tail_at):
            return None
        tail = self._bytes(offset + tail_at, length - tail_at)
        crcs = _crc_places(data, tail, tail_at)
        id_crcs = _crc_places(ident, tail, tail_at) if ident else ()
        id_range = (ident.start - tail_at, ident.nbytes) if ident else (0, 0)
        fixed, done = [], 0
        for start, nbytes in sorted([*((pos, 4) for pos in (*crcs, *id_crcs)), id_range]):
            fixed.append((done, tail[done:start]))
            done = start + nbytes
        return Template(
            head=self._bytes(offset, data.start),
            tail_at=tail_at,
            fixed=(*fixed, (done, tail[done:])),
            crcs=crcs,
            id_range=id_range,
            id_crcs=id_crcs,
            record=replace(record, data_start=data.start),
        )

    def _pread(self, start: int, nbytes: int) -> bytes:
        return storage.pread(self._fd, nbytes, start)

    def _bytes(self, start: int, nbytes: int) -> bytes:
        """Return bytes of the file from the last read, or read them: fewer at the end of the file, none on an error."""
        index = start - self._at
        if index < 0 or index + nbytes > len(self._window):
            try:
                self._window = storage.pread(self._fd, max(nbytes, self._window_nbytes), start)
            except OSError:  # the record is then read entry by entry, which raises the error
                self._window = b""
            self._at, index = start, 0
        return self._window[index : index + nbytes]


def _crc_places(entry: ZipEntry, tail: bytes, tail_at: int) -> tuple[int, ...]:
    """Return the positions of an entry's CRC-32 in the tail: after its content, and in the directory."""
    behind = entry.start + entry.nbytes - tail_at
    described = tail.startswith(_DESCRIPTOR, behind)
    return (*([behind + len(_DESCRIPTOR)] if described else []), entry.crc_at - tail_at)


class BulkScanner:
    """Compares the records of a file with their templates, many at once.

    The files of a thousand ranks hold similar records in the same order. The places to read, and the bytes to compare
    with, are computed once for each such order (`_Order`). For each file that takes one read per record, of its end and
    the beginning of the next, and a few numpy operations on all of them together.
    """

    def __init__(self) -> None:
        self._key: object = None
        self._order: _Order | None = None

    def compare(
        self, fd: int, templates: Sequence[Template], offsets: Array, lengths: Array
    ) -> tuple[Array, Array]:
        """Compare the bytes around the data of records of an open file with their templates.

        A record that cannot be read counts as different.

        Args:
            fd: the file.
            templates: of each record, in the order of their bytes.
            offsets: first byte of each record.
            lengths: bytes of each record.

        Returns:
            For each record, whether it matches its template; and the recorded CRC-32 of its data (0: not recorded),
            which is valid only if it matches.
        """
        follows = offsets[1:] == offsets[:-1] + lengths[:-1]
        key = (tuple(map(id, templates)), follows.tobytes())
        if self._order is None or key != self._key:
            self._key, self._order = key, _Order(templates, follows.tolist())
        return self._order.compare(fd, offsets)


class _Order:
    """Buffers, masks and reads for all files whose records have the same templates in the same order."""

    def __init__(self, templates: Sequence[Template], follows: Sequence[bool]) -> None:
        import numpy as np

        self._templates = templates  # keeps them alive: `BulkScanner` compares their ids
        tails = [template.tail_nbytes for template in templates]
        widths = [-(-(len(t.head) + tail) // _WORD) * _WORD for t, tail in zip(templates, tails, strict=True)]
        starts = np.cumsum([0, *widths])
        self._buffer = bytearray(int(starts[-1]))
        self._words = np.frombuffer(self._buffer, dtype="<u8")
        self._row_starts = starts[:-1] // _WORD
        expected, mask = bytearray(len(self._buffer)), bytearray(len(self._buffer))
        self._crc_at: list[list[int]] = [[], []]
        ids: list[tuple[int, int, memoryview]] = []  # (row, position of its CRC-32, its bytes)
        view = memoryview(self._buffer)
        for row, (template, start) in enumerate(zip(templates, starts.tolist(), strict=False)):
            tail = start + len(template.head)
            for pos, text in ((start, template.head), *((tail + pos, text) for pos, text in template.fixed)):
                expected[pos : pos + len(text)] = text
                mask[pos : pos + len(text)] = b"\xff" * len(text)
            self._crc_at[0].append(tail + template.crcs[0])
            self._crc_at[1].append(tail + template.crcs[-1])
            first = tail + template.id_range[0]
            ident = view[first : first + template.id_range[1]]
            ids += [(row, tail + pos, ident) for pos in template.id_crcs]
        self._id_rows, self._id_crc_at = (np.array([row[n] for row in ids], dtype=np.int64) for n in (0, 1))
        self._ids = [ident for _, _, ident in ids]
        self._expected = np.frombuffer(bytes(expected), dtype="<u8")
        self._mask = np.frombuffer(bytes(mask), dtype="<u8")
        self._plan_reads(starts.tolist(), tails, follows)

    def _plan_reads(self, starts: Sequence[int], tails: Sequence[int], follows: Sequence[bool]) -> None:
        """Plan the reads; each has a record, a distance in bytes from its start, the buffers to fill, and their size."""
        import numpy as np

        view, last = memoryview(self._buffer), len(self._templates) - 1
        heads = [view[start : start + len(t.head)] for start, t in zip(starts, self._templates, strict=False)]
        rows, distances, self._buffers = [], [], list[list[memoryview]]()
        self._touched: list[tuple[int, ...]] = []
        for row, template in enumerate(self._templates):
            if row == 0 or not follows[row - 1]:
                rows.append(row)
                distances.append(0)
                self._buffers.append([heads[row]])
                self._touched.append((row,))
            tail = starts[row] + len(template.head)
            rows.append(row)
            distances.append(template.tail_at)
            joined = row < last and follows[row]
            self._buffers.append([view[tail : tail + tails[row]], *([heads[row + 1]] if joined else [])])
            self._touched.append((row, row + 1) if joined else (row,))
        self._rows, self._distances = np.array(rows), np.array(distances)
        self._read_nbytes = [sum(map(len, buffers)) for buffers in self._buffers]

    def compare(self, fd: int, offsets: Array) -> tuple[Array, Array]:
        """Read the bytes around the data of each record, and compare them; see `BulkScanner.compare`."""
        import numpy as np

        unread = self._read(fd, (offsets[self._rows] + self._distances).tolist())
        differs = (self._words ^ self._expected) & self._mask
        is_alike = np.bitwise_or.reduceat(differs, self._row_starts) == 0
        any_word: Any = np.ndarray((len(self._buffer) - 3,), "<u4", self._buffer, 0, (1,))
        crcs, second_crcs = any_word[self._crc_at[0]], any_word[self._crc_at[1]]
        is_alike &= crcs == second_crcs
        is_alike[unread] = False
        recorded = any_word[self._id_crc_at]
        computed = np.fromiter(map(crc32, self._ids), dtype=np.uint32, count=len(self._ids))
        is_alike[self._id_rows[(recorded != 0) & (recorded != computed)]] = False
        return is_alike, crcs

    def _read(self, fd: int, places: list[int]) -> list[int]:
        """Fill the buffers, and return the records that could not be read in full."""
        preadv, unread = storage.preadv, list[int]()
        reads = zip(places, self._buffers, self._read_nbytes, self._touched, strict=True)
        for place, buffers, nbytes, touched in reads:
            try:
                if preadv(fd, buffers, place) == nbytes:
                    continue
            except OSError:
                pass
            unread += touched
        return unread
