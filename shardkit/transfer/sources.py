"""Reading source files: shared by threads, few open at a time, with detection of changes.

`bands` reads a tensor of many chunks band by band; `same_bytes` compares two tensors.
"""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import dropwhile, islice
from typing import TYPE_CHECKING, NamedTuple

from shardkit.core.catalog import BlockCodec, Catalog, Computed, Decoded, SourceFile, TensorEntry
from shardkit.core.regions import (
    Region,
    Shape,
    blocks,
    full_region,
    intersect,
    relative_to,
    runs,
    shifted,
    window,
)
from shardkit.core.text import escape
from shardkit.errors import IntegrityError, ResourceError
from shardkit.files import storage
from shardkit.files.digest import crc32
from shardkit.files.location import location_of
from shardkit.files.storage import BLOCK
from shardkit.files.strict_json import stamp_at, stamp_of
from shardkit.transfer.checks import UNREAD, EntryReading, SourceCheck, decoded_reading
from shardkit.transfer.codecs.boxes import fill_computed

if TYPE_CHECKING:
    import numpy


MAX_BORROWED = 64
"""Limit on the descriptors that one reader borrows."""
_MIN_OPEN, _MAX_OPEN = 32, 4096
READ_NBYTES = 8 << 20
"""Maximum bytes per system call. Network storage needs at least one request per call. The CRC-32 is computed after the
call, from the cache that cores share; pieces of 1 MiB, which fit in a core's own cache, would save only 4 % of the
processor time for reading and comparing warm data."""
DROPPED_NBYTES = 16 << 10
"""Limit on the gap between two parts of one read; a larger one costs more than another call."""
MOST_PARTS = 512
"""Limit on the parts of one system call; gaps also count towards IOV_MAX, 1,024."""
_SAME_NBYTES = 1 << 20  # bytes of each tensor to compare at a time


def is_far(catalog: Catalog) -> bool:
    """True if some of a catalog's files are in a store, where each read is a request."""
    return any(location_of(file.path).plans_reads for file in catalog.files)


class _RecentBlocks:
    """A cache of recently read blocks of source files, by file and number; shared by threads.

    There are two generations: when the young one is full, the old one is dropped. Races between threads can only lose
    blocks, which are then read again.
    """

    def __init__(self, max_bytes: int) -> None:
        self._most = max(max_bytes // (2 * BLOCK), 1)
        self._young: dict[tuple[int, int], bytes] = {}
        self._old: dict[tuple[int, int], bytes] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def get(self, key: tuple[int, int]) -> bytes | None:
        block = self._young.get(key)
        if block is None:
            block = self._old.get(key)
            if block is not None:
                self.add(key, block)
        return block

    def add(self, key: tuple[int, int], block: bytes) -> None:
        if len(self._young) >= self._most:
            self._old, self._young = self._young, {}
        self._young[key] = block


class SourceFiles:
    """The files of a catalog, opened on first use. A context manager.

    `finish` raises an error if a file has changed or differs from its checksums.

    Args:
        files: the catalog's files.
        recent_bytes: size of the cache of small reads.
        check: collects readings.
        opened: descriptors by path; those that are used are removed from it, and closed at the end.
    """

    def __init__(
        self,
        files: Sequence[SourceFile],
        recent_bytes: int = 0,
        *,
        check: SourceCheck | None = None,
        opened: dict[str, int] | None = None,
    ) -> None:
        self.check = check
        self.recent = _RecentBlocks(recent_bytes)
        self._files = files
        self._lock = threading.Lock()
        self._open: dict[int, int] = {}
        self._users: dict[int, int] = {}
        self._stamps = {file: source.stamp for file, source in enumerate(files) if source.stamp}
        self._decoded: dict[int, tuple[memoryview, list[EntryReading]]] = {}
        self._expected: Mapping[int, Sequence[tuple[int, int]]] = {}
        self._num_places = 1
        self._opened = {} if opened is None else opened
        # Half of this process's limit, which is usually at least 256.
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2 - len(self._opened)
        self._max_open = min(max(limit, _MIN_OPEN), _MAX_OPEN)

    def __enter__(self) -> SourceFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._open.values():
            storage.close_fd(fd)
        self._open.clear()
        self._decoded.clear()
        self.recent = _RecentBlocks(0)

    def expect(self, ranges: Mapping[int, Sequence[tuple[int, int]]], num_places: int) -> None:
        """Announce the reads of files in a store, before reading.

        Args:
            ranges: (first byte, byte after the last), in any order, by file; the files in the order of reading.
            num_places: number of places in all files from which data are read in turn.
        """
        self._expected, self._num_places = ranges, num_places

    def will_need(self, file: int, start: int, nbytes: int) -> None:
        """Ask the system to prefetch a part of a file on disk; errors in opening are left to the actual read.

        Files in a store (`plans_reads`) are prefetched by `storage.will_read` instead.
        """
        if self.derivation(file) is None and not location_of(self.path(file)).plans_reads:
            with suppress(ResourceError, IntegrityError):
                storage.will_need(self.borrow(file), start, nbytes)  # raises nothing; `borrow` may
                self.give_back(file)

    def derivation(self, file: int) -> Decoded | Computed | None:
        """Return how a file's bytes are obtained; None if they are stored as such."""
        return self._files[file].derivation

    def reader(self, *, compares: bool = True) -> Reader:
        """Return a reader for one thread; call its `release` after each stretch.

        Args:
            compares: list readings for `check`.
        """
        return Reader(self, self.check if compares else None)

    def path(self, file: int) -> str:
        """Return the path of a file."""
        return self._files[file].path

    def name(self, file: int) -> str:
        """Return a file's name, safe to print."""
        return escape(self._files[file].name)

    def borrow(self, file: int) -> int:
        """Lend an open descriptor of a file on disk, until `give_back`."""
        with self._lock:
            fd = self._open.get(file, -1)
            if fd < 0:
                self._make_room()
                fd = self._open[file] = self._open_checked(file)
            if file not in self._users:
                self._begin_next(file)
            self._users[file] = self._users.get(file, 0) + 1
            return fd

    def give_back(self, file: int) -> None:
        """End a loan."""
        with self._lock:
            self._users[file] -= 1

    def _make_room(self) -> None:
        """If too many files are open, close the idle one that was opened last.

        Each tensor is read from the files of all ranks in turn. The least recently used file is needed next, so the files
        that were opened first stay open.
        """
        if len(self._open) >= self._max_open:
            idle = next((file for file in reversed(self._open) if not self._users.get(file)), None)
            if idle is not None:
                storage.close_fd(self._open.pop(idle))

    def _open_checked(self, file: int, *, is_soon: bool = False) -> int:
        source = self._files[file]
        try:
            fd = self._opened.pop(source.path, -1)
            if fd < 0:
                fd = storage.open_fd(source.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise ResourceError(f"cannot open {escape(source.name)}: {error.strerror}") from error
        stamp = stamp_of(fd)
        if stamp.size != source.size or self._stamps.setdefault(file, stamp) != stamp:
            storage.close_fd(fd)
            raise changed([source.name])
        if file in self._expected:
            storage.will_read(fd, self._expected[file], num_places=self._num_places, is_soon=is_soon)
        return fd

    def _begin_next(self, file: int) -> None:
        """Open the next files in a store, and begin to fetch their data.

        Errors in opening are left to the actual read.
        """
        num_ahead = location_of(self._files[file].path).num_ahead
        if file not in self._expected or not num_ahead:
            return
        following = islice(dropwhile(lambda number: number != file, self._expected), 1, 1 + num_ahead)
        for number in [
            number
            for number in following
            if number not in self._open and location_of(self._files[number].path).num_ahead
        ]:
            if len(self._open) < self._max_open:
                with suppress(ResourceError, IntegrityError):
                    self._open[number] = self._open_checked(number, is_soon=True)

    def decoded(self, file: int, fqn: str) -> tuple[memoryview, list[EntryReading]]:
        """Decode a file for a tensor; return its bytes, and the readings for them."""
        with self._lock:
            decoded = self._decoded.get(file)
            if decoded is None:
                source, readings = self._files[file], None if self.check is None else self.check.readings()
                assert isinstance(source.derivation, Decoded)
                if file in self._stamps and stamp_at(source.path) != self._stamps[file]:
                    raise changed([source.name])

                def on_read(path: str, start: int, data: memoryview) -> None:
                    if readings is not None:
                        readings.add(path, start, data, fqn)

                self._decoded.clear()  # one tensor at a time: decoding may have had to copy it
                content = source.derivation.decode(on_read)
                listed = (
                    [] if readings is None else readings.take() or [decoded_reading(source, content, fqn)]
                )
                decoded = self._decoded[file] = content, listed
            return decoded

    def finish(self, *, hint: str) -> None:
        """Refuse a source that changed, or differs from its checksums.

        Args:
            hint: what to do about damaged bytes.

        Raises:
            IntegrityError: lists all files that changed, or all damaged entries.
        """
        self.check_unchanged()
        if self.check is not None:
            self.check.judge().raise_damaged(hint=hint)

    def check_unchanged(self) -> None:
        """Check that no file has changed since its description was read, or since it was first opened.

        Raises:
            IntegrityError: lists all files that changed.
        """
        names = [
            self._files[file].name
            for file, stamp in self._stamps.items()
            if stamp_at(self._files[file].path) != stamp
        ]
        if names:
            raise changed(names)


class Neighbour(NamedTuple):
    """A range of a file, and the memory for it."""

    buffer: memoryview
    start: int
    """First byte in the file."""
    fqn: str
    """For messages."""


class Reader:
    """Reads source files for one thread, and keeps them open between reads.

    Args:
        sources: the files.
        check: on exit, receives readings that were not taken with `take_readings`.
    """

    def __init__(self, sources: SourceFiles, check: SourceCheck | None = None) -> None:
        self._sources, self._recent, self._check = sources, sources.recent, check
        self._readings = None if check is None else check.readings()
        self._borrowed: dict[int, int] = {}
        self._decoded_readings: list[EntryReading] | None = None

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
        if self._check is not None:
            self._check.add(self.take_readings())

    def take_readings(self) -> list[EntryReading]:
        """Return the readings since the last call."""
        self._decoded_readings = None
        return [] if self._readings is None else self._readings.take()

    def list_unread(self, file: int, start: int, nbytes: int, fqn: str) -> None:
        """List bytes of a file that belong to a tensor and are not read."""
        if self._readings is not None:
            self._readings.add_summed(self._sources.path(file), start, start + nbytes, UNREAD, fqn)

    def _list(self, file: int, start: int, data: memoryview | bytes, fqn: str) -> int | None:
        """List a read; return the CRC-32 if it was computed."""
        return (
            None if self._readings is None else self._readings.add(self._sources.path(file), start, data, fqn)
        )

    def release(self) -> None:
        """Return the borrowed descriptors."""
        for file in self._borrowed:
            self._sources.give_back(file)
        self._borrowed.clear()

    def is_decoded(self, file: int) -> bool:
        """True if the file's bytes are decoded or computed."""
        return self._sources.derivation(file) is not None

    def descriptor(self, file: int) -> int:
        """Return an open descriptor of a file on disk."""
        fd = self._borrowed.get(file)
        if fd is None:
            if len(self._borrowed) >= MAX_BORROWED:
                self.release()
            fd = self._borrowed[file] = self._sources.borrow(file)
        return fd

    def read_small(self, file: int, start: int, nbytes: int, fqn: str) -> bytes:
        """Return at most BLOCK bytes of a file on disk, for tensor `fqn`.

        Whole blocks are read and cached for a while: one block may contain the end of one shard's record and the start of
        the next, or many shards of a small tensor.

        Raises:
            IntegrityError, ResourceError: as `read_into`.
        """
        number, skip = divmod(start, BLOCK)
        block = self._recent.get((file, number)) or self._read_block(file, number)
        data = block[skip : skip + nbytes]
        if skip + nbytes > BLOCK:
            number += 1
            block = self._recent.get((file, number)) or self._read_block(file, number)
            data += block[: skip + nbytes - BLOCK]
        if len(data) < nbytes:  # an error, or a short read: let `read_into` report it
            view = memoryview(bytearray(nbytes))
            self.read_into(file, view, start, fqn)
            return bytes(view)
        self._list(file, start, data, fqn)
        return data

    def _read_block(self, file: int, number: int) -> bytes:
        """Return a block, shorter at the end of the file; empty if it cannot be read."""
        fd = self._borrowed.get(file)
        try:
            block = storage.pread(self.descriptor(file) if fd is None else fd, BLOCK, number * BLOCK)
        except OSError:
            return b""
        if block:
            self._recent.add((file, number), block)
        return block

    def read_into(self, file: int, buffer: memoryview, start: int, fqn: str) -> int | None:
        """Fill `buffer` from byte `start` of a file, for tensor `fqn`.

        Returns:
            CRC-32 of the bytes, if it was computed to compare them.

        Raises:
            IntegrityError: the file is too short, or is not the described one.
            ResourceError: reading failed.
        """
        fd, size = self._borrowed.get(file), len(buffer)
        if fd is None:
            derivation = self._sources.derivation(file)
            if isinstance(derivation, Computed):
                fill_computed(derivation, self, start, buffer, fqn)
                return None
            if derivation is not None:
                content, readings = self._sources.decoded(file, fqn)
                buffer[:] = content[start : start + size]
                if self._readings is not None and self._decoded_readings is not readings:
                    self._decoded_readings = readings
                    self._readings.extend(readings)
                return None
            fd = self.descriptor(file)
        if self._readings is None or size <= READ_NBYTES:
            self._fill(fd, file, buffer, start, fqn)
            return self._list(file, start, buffer, fqn)
        path = self._sources.path(file)
        if not self._readings.can_sum(path, start, start + size):
            for offset in range(0, size, READ_NBYTES):
                self.read_into(file, buffer[offset : offset + READ_NBYTES], start + offset, fqn)
            return None
        crc = 0
        for offset in range(0, size, READ_NBYTES):
            part = buffer[offset : offset + READ_NBYTES]
            self._fill(fd, file, part, start + offset, fqn)
            crc = crc32(part, crc)
        self._readings.add_summed(path, start, start + size, crc, fqn)
        return crc

    def read_neighbours(self, file: int, parts: Sequence[Neighbour]) -> None:
        """Fill several buffers by one system call.

        Args:
            file: its number.
            parts: in the file's order, at most `MOST_PARTS`, and at most `DROPPED_NBYTES` between two of them.

        Raises:
            IntegrityError, ResourceError: as `read_into`.
        """
        if len(parts) > 1 and not self.is_decoded(file) and self._read_at_once(file, parts):
            for part in parts:
                self._list(file, part.start, part.buffer, part.fqn)
            return
        for part in parts:
            self.read_into(file, part.buffer, part.start, part.fqn)

    def _read_at_once(self, file: int, parts: Sequence[Neighbour]) -> bool:
        """Fill buffers by one call; False on an error or a short read: the caller then reads each part separately."""
        views, end, discarded = list[memoryview](), parts[0].start, memoryview(bytearray(DROPPED_NBYTES))
        for part in parts:
            if part.start > end:
                views.append(discarded[: part.start - end])
            views.append(part.buffer)
            end = part.start + len(part.buffer)
        try:
            return storage.preadv(self.descriptor(file), views, parts[0].start) == end - parts[0].start
        except OSError:
            return False

    def _fill(self, fd: int, file: int, buffer: memoryview, start: int, fqn: str) -> None:
        done, size = 0, len(buffer)
        while done < size:
            try:
                count = storage.preadv(fd, [buffer[done:] if done else buffer], start + done)
            except OSError as error:
                where = f"{self._sources.name(file)} at byte {start + done} for {escape(fqn)}"
                raise ResourceError(f"cannot read {where}: {error.strerror}") from error
            if count == 0:
                raise IntegrityError(
                    f"{self._sources.name(file)} ends at byte {start + done} while {escape(fqn)} is read from it, "
                    f"which needs {size - done} more",
                    hint="the file changed during the run; start again once it is complete",
                )
            done += count


def changed(names: Sequence[str]) -> IntegrityError:
    """Return the error for changed files."""
    return IntegrityError(
        f"{len(names)} source file{'s' * (len(names) > 1)} changed while being read",
        problems=[escape(name) for name in names],
        hint="start again once the source no longer changes; nothing from this run is kept",
    )


def bands(catalog: Catalog, fqn: str, region: Region, reader: Reader, max_bytes: int) -> Iterator[memoryview]:
    """Yield the bytes of a region in order, in the stored dtype; each view is valid until the next one.

    For tensors whose chunks are not runs of them, such as columns of a weight that tensor parallelism cut. The overlap of
    every chunk with the band is read and copied to its place in memory. If the region is a run of the tensor, the
    overlap is one run of the chunk, for any grid of chunks. Otherwise it consists of many runs, and short gaps between
    them are read too.

    Args:
        catalog: with the tensor.
        fqn: the tensor.
        region: of the tensor.
        reader: reads the catalog's files.
        max_bytes: maximum size of a band. Overlaps, and gaps, may each take the same amount of memory again.
    """
    entry, table = catalog.tensors[fqn], catalog.chunks
    itemsize = entry.dtype.itemsize
    chunks = list(zip(entry.chunk_ids, table.regions(entry.chunk_ids), strict=True))
    band_bytes, part_bytes = bytearray(), bytearray()
    if not region.sizes:
        view = memoryview(bytearray(itemsize))
        reader.read_into(table.file[entry.first_chunk], view, table.start[entry.first_chunk], fqn)
        yield view
        return
    for block in blocks(region.sizes, max(max_bytes // itemsize, 1)):
        if not band_bytes:  # the first is the largest
            band_bytes = bytearray(block.num_elements * itemsize)
            part_bytes = bytearray(len(band_bytes))
        band = shifted(block, region.offsets)
        view = memoryview(band_bytes)[: block.num_elements * itemsize]
        elements = _as_array(view, block.sizes, itemsize)
        for row, chunk in chunks:
            part = intersect(band, chunk)
            if part is None:
                continue
            is_all = part == band
            read = view if is_all else memoryview(part_bytes)[: part.num_elements * itemsize]
            spans = (
                (table.start[row] + run.source * itemsize, run.target * itemsize, run.length * itemsize)
                for run in runs(relative_to(part, chunk.offsets), chunk.sizes)
            )
            for group in _neighbours(spans, max_bytes):
                _read_group(reader, table.file[row], read, group, fqn)
            if is_all:
                break
            *rows, columns = window(relative_to(part, band.offsets))
            inside = (*rows, slice(columns.start * itemsize, columns.stop * itemsize))
            elements[inside] = _as_array(read, part.sizes, itemsize)
        yield view


def bytes_in_blocks(catalog: Catalog, fqn: str, max_bytes: int) -> int:
    """Return the size of bands that no codec computes a block of twice for: at most `max_bytes`, but at least a block."""
    entry, table = catalog.tensors[fqn], catalog.chunks
    derivations = (catalog.files[table.file[row]].derivation for row in entry.chunk_ids)
    codecs = (each.codec for each in derivations if isinstance(each, Computed))
    block = max((each.block_elements for each in codecs if isinstance(each, BlockCodec)), default=0)
    nbytes = block * entry.dtype.itemsize
    return max(max_bytes // nbytes, 1) * nbytes if nbytes else max_bytes


_ReadSpan = tuple[int, int, int]
"""(first byte in the file, first byte in memory, bytes)."""


def _neighbours(spans: Iterable[_ReadSpan], max_bytes: int) -> Iterator[list[_ReadSpan]]:
    """Group spans that are read by one call."""
    group: list[_ReadSpan] = []
    for span in spans:
        place, _, nbytes = span
        if group and not (
            0 <= place - group[-1][0] - group[-1][2] <= DROPPED_NBYTES
            and place + nbytes - group[0][0] <= max_bytes
        ):
            yield group
            group = []
        group.append(span)
    if group:
        yield group


def _read_group(reader: Reader, file: int, target: memoryview, group: Sequence[_ReadSpan], fqn: str) -> None:
    """Read spans of a file into memory."""
    first, offset, nbytes = group[0]
    if len(group) == 1:
        reader.read_into(file, target[offset : offset + nbytes], first, fqn)
        return
    read = memoryview(bytearray(group[-1][0] + group[-1][2] - first))
    reader.read_into(file, read, first, fqn)
    for place, offset, nbytes in group:
        target[offset : offset + nbytes] = read[place - first : place - first + nbytes]


def _as_array(view: memoryview, sizes: Shape, itemsize: int) -> numpy.ndarray:
    """View bytes as a box whose last dim counts bytes, so that numpy copies whole rows of any dtype."""
    import numpy  # a tenth of a second that most runs do not need

    return numpy.frombuffer(view, dtype=numpy.uint8).reshape(*sizes[:-1], sizes[-1] * itemsize)


def same_bytes(catalog: Catalog, a: str, b: str) -> bool:
    """True if two tensors of a catalog of raw bytes are equal. Reading stops at the first difference.

    Tensors of different dtypes or shapes are not equal.

    Raises:
        IntegrityError, ResourceError: a file cannot be read as described.
        SourceError: records that are still closed cannot be opened.
    """
    if catalog.open_records is not None:
        catalog = catalog.open_records((a, b))
    first, second = catalog.tensors[a], catalog.tensors[b]
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    first_chunks, second_chunks = _chunks(catalog, first), _chunks(catalog, second)
    with SourceFiles(catalog.files) as files, files.reader() as reader:
        # Tied tensors nearly always have the same chunks.
        if [region for region, _ in first_chunks] == [region for region, _ in second_chunks]:
            pairs = zip(first_chunks, second_chunks, strict=True)
            return all(_same_chunks(reader, catalog, row, twin, first) for (_, row), (_, twin) in pairs)
        whole = full_region(first.shape)
        lefts, rights = (bands(catalog, fqn, whole, reader, _SAME_NBYTES) for fqn in (a, b))
        # As bytes: memoryviews are compared element by element.
        return all(bytes(one) == bytes(two) for one, two in zip(lefts, rights, strict=True))


def _chunks(catalog: Catalog, entry: TensorEntry) -> list[tuple[Region, int]]:
    """Return (region, row) of every chunk with elements, in the order of the regions."""
    regions = catalog.chunks.regions(entry.chunk_ids)
    return sorted(
        (region, row) for region, row in zip(regions, entry.chunk_ids, strict=True) if region.num_elements
    )


def _same_chunks(reader: Reader, catalog: Catalog, a: int, b: int, entry: TensorEntry) -> bool:
    table = catalog.chunks
    if (table.file[a], table.start[a]) == (table.file[b], table.start[b]):
        return True
    first, second = bytearray(_SAME_NBYTES), bytearray(_SAME_NBYTES)
    total = table.region(a).num_elements * entry.dtype.itemsize
    for start in range(0, total, _SAME_NBYTES):
        size = min(_SAME_NBYTES, total - start)
        for row, buffer in ((a, first), (b, second)):
            reader.read_into(table.file[row], memoryview(buffer)[:size], table.start[row] + start, entry.fqn)
        if first[:size] != second[:size]:
            return False
    return True
