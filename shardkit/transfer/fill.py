"""Filling holes: streamed and gathered ones while an image is written, scattered ones before.

`plan` decides how each hole is filled. `Filler` writes a stretch of one image front to back: literal bytes, data,
literal bytes with the data's digest. `Scatter` distributes a tensor that is cut along a later dim than the first, or
that has to be decoded: it reads the source once, in contiguous blocks, and writes the overlap of each block with each
hole. An overlap is one write if the source chunk spans the hole's trailing dims, otherwise one write per run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from shardkit.core.catalog import Catalog
from shardkit.core.dtypes import DType
from shardkit.core.regions import (
    Region,
    blocks,
    flat_offset,
    intersect,
    is_contiguous,
    relative_to,
    runs,
    shifted,
    window,
)
from shardkit.core.text import KIB
from shardkit.files import storage
from shardkit.files.digest import combine, crc32, crc32_combine, zeros
from shardkit.files.storage import BLOCK, shared_part
from shardkit.transfer.checks import EntryReading
from shardkit.transfer.codecs.convert import Converter, make_converter
from shardkit.transfer.images import Hole, Image
from shardkit.transfer.plan import FlatSource, Move, Task, TransferPlan
from shardkit.transfer.sources import Reader, SourceFiles, bands, bytes_in_blocks
from shardkit.transfer.stream import Controls, Segment, Stream, read_back, segments_of, write_all

# The latency of a network file system is about the time to transfer this much.
_MIN_PART = 64 * KIB
_MIN_CLONED = 16 * BLOCK  # below this a copy is cheaper than a system call

OpenTarget = Callable[[int], AbstractContextManager[tuple[int, str]]]
"""Opens an image by number, and yields (descriptor, name)."""


@dataclass(slots=True)
class TaskOutput:
    """The result of a task."""

    segments: list[Segment] = field(default_factory=list)
    """All segments except gaps, in file order."""
    data_crcs: list[int] = field(default_factory=list)
    """CRC-32 of each hole's bytes, in file order."""
    read: list[EntryReading] = field(default_factory=list)
    """Its readings, to be compared with the source's checksums."""


class Filler:
    """Writes tasks; each thread has its own.

    Args:
        plan: of the job.
        sources: of the plan's catalog.
        controls: shared by all threads.
        buffer_bytes: size of the output buffer, and of the conversion buffer if one is needed.
        band_bytes: bytes of a gathered tensor at a time, unless a codec computes larger blocks; a thread needs twice as
            many.
        share_extents: clone whole blocks of large unconverted ranges if the file system supports it.
    """

    def __init__(
        self,
        plan: TransferPlan,
        sources: SourceFiles,
        controls: Controls,
        *,
        buffer_bytes: int,
        band_bytes: int,
        share_extents: bool,
    ) -> None:
        self._plan, self._controls, self._shares = plan, controls, share_extents
        self._late = plan.catalog.late
        self._reader, self._silent_reader = sources.reader(), sources.reader(compares=False)
        self._digests, self._check, self._advance = controls.digests, controls.check, controls.advance
        self._buffer, self._raw, self._band_bytes = bytearray(buffer_bytes), bytearray(), band_bytes
        self._converters: dict[tuple[DType, DType], Converter] = {}
        self._fd = -1
        self._clones: list[tuple[Move, int, str]] = []
        """Blocks to clone: source, position in the image, and the tensor for messages."""

    def write(self, task: Task, image: Image, fd: int) -> TaskOutput:
        """Write the pieces of a task into an open image."""
        self._fd = fd
        self._clones.clear()
        stretch = TaskOutput()
        stream = Stream(fd, image.name, task.begin, self._buffer)
        with self._reader, self._silent_reader:
            for index, piece in enumerate(image.pieces(task.start, task.stop), task.start):
                start, frame, fqn, first, nbytes, dtype = piece
                stream.fqn = fqn
                stream.put_at(start, frame.prefix)
                source = self._plan.streamed.get(fqn)
                if source is not None:
                    crc = self._stream(stream, source, first, nbytes, dtype)
                elif fqn in self._plan.gathered:
                    if self._late is not None:
                        self._late.open(fqn, self._reader.descriptor)
                    crc = self._gather(stream, image.hole(index), self._plan.catalog.tensors[fqn].dtype)
                else:  # written before, in another order or computed, so the digest has to be read back
                    place = stream.position
                    stream.step_over(nbytes)
                    crc = read_back(fd, place, nbytes, self._buffer) if self._digests else 0
                suffix = frame.suffix(crc)
                stream.put(suffix)
                if self._digests:
                    stretch.segments += segments_of(start, frame, nbytes, crc, suffix)
                    stretch.data_crcs.append(crc)
            stream.flush()
            self._share(image.name)
            stretch.read = self._reader.take_readings()
        return stretch

    def _stream(self, stream: Stream, source: FlatSource, first: int, nbytes: int, dtype: DType) -> int:
        """Fill the hole at the stream's position; return the CRC-32 of its bytes, 0 without digests."""
        crc = 0
        for move in source.moves(first, first + nbytes // dtype.itemsize):
            if self._late is not None:
                file, start = self._late.opened(move.file, move.start, self._reader.descriptor)
                move = Move(file, start, move.nbytes)
            if source.dtype is not dtype:
                crc = self._convert(stream, move, source.dtype, dtype, crc)
            elif self._shares and move.nbytes >= _MIN_CLONED and (move.start - stream.position) % BLOCK == 0:
                crc = self._clone(stream, move, crc)
            else:
                crc = self._copy(stream, move.file, move.start, move.nbytes, crc)
        self._advance(nbytes)
        return crc

    def _copy(self, stream: Stream, file: int, start: int, nbytes: int, crc: int) -> int:
        self._check()
        if nbytes <= BLOCK and not (self._late is not None and self._reader.is_decoded(file)):
            data = self._reader.read_small(file, start, nbytes, stream.fqn)
            stream.put(data)
            return crc32(data, crc) if self._digests else 0
        done = 0
        while done < nbytes:
            self._check()
            part = stream.room(nbytes - done)
            if not part:
                stream.flush()
                continue
            part_crc = self._reader.read_into(file, part, start + done, stream.fqn)
            if self._digests:
                crc = _extended_crc(crc, part, part_crc)
            done += len(part)
        return crc

    def _convert(self, stream: Stream, move: Move, source: DType, target: DType, crc: int) -> int:
        self._raw = self._raw or bytearray(len(self._buffer))
        done, most = 0, len(self._raw) // source.itemsize * source.itemsize
        while done < move.nbytes:
            self._check()
            raw = memoryview(self._raw)[: min(move.nbytes - done, most)]
            self._reader.read_into(move.file, raw, move.start + done, stream.fqn)
            crc = self._put(stream, raw, source, target, crc)
            done += len(raw)
        return crc

    def _gather(self, stream: Stream, hole: Hole, source: DType) -> int:
        # A tensor that is cut along a later dim is read whole once, and compared then.
        reader, crc = self._silent_reader if hole.fqn in self._plan.scattered else self._reader, 0
        nbytes = bytes_in_blocks(self._plan.catalog, hole.fqn, self._band_bytes)
        for band in bands(self._plan.catalog, hole.fqn, hole.region, reader, nbytes):
            self._check()
            if source is hole.dtype and len(band) >= len(self._buffer):
                stream.write(band)
                crc = crc32(band, crc) if self._digests else 0
            else:
                crc = self._put(stream, band, source, hole.dtype, crc)
        self._advance(hole.nbytes)
        return crc

    def _put(self, stream: Stream, data: memoryview, source: DType, target: DType, crc: int) -> int:
        """Append source elements in the hole's dtype; return the updated CRC-32."""
        converter = None if source is target else self._converter(source, target)
        wide, narrow = source.itemsize, target.itemsize
        done, most = 0, len(self._buffer) // max(wide, narrow)
        while done < len(data) // wide:
            count = min(len(data) // wide - done, most)
            part, raw = stream.whole_room(count * narrow), data[done * wide : (done + count) * wide]
            if converter is None:
                part[:] = raw
            elif converter(raw, part):
                self._controls.infinite(stream.fqn, target)
            crc = crc32(part, crc) if self._digests else 0
            done += count
        return crc

    def _converter(self, source: DType, target: DType) -> Converter:
        converter = self._converters.get((source, target))
        if converter is None:
            converter = self._converters[source, target] = make_converter(source, target)
        return converter

    def _clone(self, stream: Stream, move: Move, crc: int) -> int:
        """Schedule the whole blocks of a range for `_share`, and copy the ends."""
        file, start, nbytes = move
        head, body = shared_part(start, nbytes)
        tail = head + body
        if head:
            crc = self._copy(stream, file, start, head, crc)
        self._clones.append((Move(file, start + head, body), stream.position, stream.fqn))
        stream.step_over(body)
        if self._digests:
            crc = self._digest(file, start + head, body, stream.fqn, crc)
        return self._copy(stream, file, start + tail, nbytes - tail, crc) if tail < nbytes else crc

    def _share(self, name: str) -> None:
        """Clone the scheduled blocks; copy those that the file system refuses to clone (by a quota or limit)."""
        refused = []
        with self._controls.cloning:
            for clone in reversed(self._clones):  # the other threads read the same files front to back
                (file, start, nbytes), position, fqn = clone
                self._check()
                try:
                    storage.clone_range(self._reader.descriptor(file), start, self._fd, position, nbytes)
                except OSError:
                    refused.append(clone)
                    continue
                if not self._digests:  # otherwise they were read for the digest
                    self._reader.list_unread(file, start, nbytes, fqn)
        for (file, start, nbytes), position, fqn in refused:
            stream = Stream(self._fd, name, position, self._buffer)
            stream.fqn = fqn
            self._copy(stream, file, start, nbytes, 0)
            stream.flush()

    def _digest(self, file: int, start: int, nbytes: int, fqn: str, crc: int) -> int:
        """Update a CRC-32 with source bytes that are not copied; the output buffer must be empty."""
        view, done = memoryview(self._buffer), 0
        while done < nbytes:
            self._check()
            part = view[: nbytes - done]
            crc = _extended_crc(crc, part, self._reader.read_into(file, part, start + done, fqn))
            done += len(part)
        return crc


def _extended_crc(crc: int, part: memoryview, part_crc: int | None) -> int:
    """Update a CRC-32 with a part, using the part's CRC-32 if reading has computed it."""
    return crc32(part, crc) if part_crc is None else crc32_combine(crc, part_crc, len(part))


class CrcPiece(NamedTuple):
    """The CRC-32 of a range of a tensor's row-major bytes."""

    start: int
    stop: int
    crc: int


def crc_of(pieces: Iterable[CrcPiece], nbytes: int) -> tuple[int | None, bool]:
    """Return the CRC-32 of a whole tensor from pieces, some of which may have been read twice.

    Returns:
        The CRC-32, or None if the pieces do not cover all bytes without overlap; and whether two readings of the same
        bytes differ.
    """
    reached, differ = {0: 0}, False
    for start, stop, crc in sorted(set(pieces)):
        if start in reached and stop > start:
            combined = int(crc32_combine(reached[start], crc, stop - start))
            differ = differ or reached.setdefault(stop, combined) != combined
    return reached.get(nbytes), differ


def _everything(block: Region) -> list[tuple[int, int]]:
    return [(0, block.num_elements)]


def _needed(block: Region, holes: Sequence[tuple[int, Hole]], least: int) -> list[tuple[int, int]]:
    """Return (first element, end) of each run of a block that holes need; the whole block if runs are short or overlap.

    Args:
        block: of the tensor.
        holes: (image, hole) of each.
        least: minimum elements of a run that is worth reading separately.
    """
    used = set[tuple[int, int]]()
    for _, hole in holes:
        part = intersect(hole.region, block)
        if part is None:
            continue
        for run in runs(relative_to(part, block.offsets), block.sizes):
            if run.length < min(least, block.num_elements):
                return _everything(block)
            used.add((run.source, run.source + run.length))
    spans = sorted(used)
    if any(before[1] > after[0] for before, after in pairwise(spans)):
        return _everything(block)
    return spans


class Scatter:
    """Writes scattered tensors to their holes. All threads share it.

    Args:
        catalog: of the tensors.
        sources: of the catalog.
        open_target: opens an image.
        controls: shared by all threads.
        band_bytes: bytes to read at a time; with conversions and copies a thread needs up to four times as many.
    """

    def __init__(
        self,
        catalog: Catalog,
        sources: SourceFiles,
        open_target: OpenTarget,
        controls: Controls,
        *,
        band_bytes: int,
    ) -> None:
        self._catalog, self._sources, self._open = catalog, sources, open_target
        self._controls, self._band_bytes = controls, band_bytes

    def run(
        self, fqn: str, target: DType, holes: Sequence[tuple[int, Hole]], *, reads_all: bool
    ) -> tuple[list[CrcPiece] | None, list[EntryReading]]:
        """Fill the given holes of a tensor.

        Without holes to fill (a resumed run), the tensor is only read, for its digest and to compare it with the source's
        checksums.

        Args:
            fqn: name in the catalog.
            target: dtype of the holes.
            holes: (image, hole) of each.
            reads_all: read the whole tensor. Otherwise elements outside of these holes are left to the processes that need
                them, unless reading all is cheaper because the parts in between are short.

        Returns:
            CRC-32s of the ranges that were read, of the tensor's bytes in the dtype `target`, in order, or None if the source's
            chunks are not runs of the tensor; and the readings to compare. CRC-32s are 0 without digests.
        """
        entry, table, pieces = self._catalog.tensors[fqn], self._catalog.chunks, list[CrcPiece]()
        if not (holes or self._controls.digests or self._sources.check):
            return [CrcPiece(0, entry.num_elements * target.itemsize, 0)], []
        itemsize = entry.dtype.itemsize
        regions = table.regions(entry.chunk_ids)
        are_runs = all(is_contiguous(region, entry.shape) for region in regions)
        with self._sources.reader() as reader:
            for region, chunk in sorted(zip(regions, entry.chunk_ids, strict=True)):
                # A computed tensor may need all of its factors for every piece.
                least = (
                    _MIN_PART // itemsize
                    if self._sources.derivation(table.file[chunk]) is None
                    else region.num_elements
                )
                for block in blocks(region.sizes, max(self._band_bytes // itemsize, 1)):
                    here = shifted(block, region.offsets)
                    spans = _everything(here) if reads_all else _needed(here, holes, least)
                    start = table.start[chunk] + flat_offset(block.offsets, region.sizes) * itemsize
                    band = self._read(reader, table.file[chunk], start, fqn, here, spans, target)
                    self._deal_out(band, here, holes)
                    if are_runs:
                        first = flat_offset(here.offsets, entry.shape)
                        pieces += self._crcs(band, spans, first, target.itemsize)
            crc, _ = crc_of(pieces, entry.num_elements * target.itemsize)
            if crc is not None:
                pieces = [CrcPiece(0, entry.num_elements * target.itemsize, crc)]
            return pieces if are_runs else None, reader.take_readings()

    def _read(
        self,
        reader: Reader,
        file: int,
        start: int,
        fqn: str,
        block: Region,
        spans: Sequence[tuple[int, int]],
        target: DType,
    ) -> bytearray:
        """Return a block in the dtype of the holes, with some elements read and the rest zero."""
        source = self._catalog.tensors[fqn].dtype
        converter = make_converter(source, target) if target is not source else None
        result = bytearray(block.num_elements * target.itemsize if spans else 0)
        raw = memoryview(result) if converter is None else None
        for first, stop in spans:
            self._controls.check()
            into = slice(first * target.itemsize, stop * target.itemsize)
            view = memoryview(bytearray((stop - first) * source.itemsize)) if raw is None else raw[into]
            reader.read_into(file, view, start + first * source.itemsize, fqn)
            if converter is not None and converter(view, memoryview(result)[into]):
                self._controls.infinite(fqn, target)
        return result

    def _crcs(
        self, band: bytearray, spans: Sequence[tuple[int, int]], first: int, itemsize: int
    ) -> Iterator[CrcPiece]:
        """Yield the CRC-32 of each span of a block that begins at an element of the tensor."""
        for start, stop in spans:
            data = memoryview(band)[start * itemsize : stop * itemsize]
            crc = crc32(data) if self._controls.digests else 0
            yield CrcPiece((first + start) * itemsize, (first + stop) * itemsize, crc)

    def _deal_out(self, band: bytearray, block: Region, holes: Sequence[tuple[int, Hole]]) -> None:
        if not band:
            return
        import numpy  # a tenth of a second that most runs do not need

        for image, hole in holes:
            part = intersect(hole.region, block)
            if part is None:
                continue
            elements = numpy.frombuffer(band, dtype=f"V{hole.dtype.itemsize}").reshape(block.sizes)
            values = elements[window(relative_to(part, block.offsets))]
            data = numpy.ascontiguousarray(values).view(numpy.uint8).reshape(-1).data
            self._write(image, hole, relative_to(part, hole.region.offsets), data)
            self._controls.advance(len(data))

    def _write(self, image: int, hole: Hole, target: Region, data: memoryview) -> None:
        itemsize, done = hole.dtype.itemsize, 0
        with self._open(image) as (fd, name):
            for run in runs(target, hole.region.sizes):
                length = run.length * itemsize
                write_all(fd, data[done : done + length], hole.start + run.source * itemsize, name, hole.fqn)
                done += length


def image_crc(size: int, segments: list[Segment]) -> int:
    """Return the CRC-32 of a whole file from its segments; gaps between them are zeros."""
    pieces: list[tuple[int, int]] = []
    end = 0
    for start, nbytes, crc in sorted(segments):
        assert start >= end, f"two pieces of one file overlap at byte {start}"
        pieces += [(zeros(start - end), start - end), (crc, nbytes)]
        end = start + nbytes
    return combine([*pieces, (zeros(size - end), size - end)])
