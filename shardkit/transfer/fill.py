"""Writing one stretch of one image: literal bytes, data, literal bytes with the data's digest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from shardkit.core.dtypes import DType
from shardkit.core.units import MIB
from shardkit.transfer.cloner import Cloner, CloneRange
from shardkit.transfer.convert import Converter
from shardkit.transfer.digest import combine, crc32, crc32_combine, zeros
from shardkit.transfer.gather import bands
from shardkit.transfer.images import Hole, Image, Piece
from shardkit.transfer.plan import Move, Task, TransferPlan
from shardkit.transfer.reflink import BLOCK, shared_part
from shardkit.transfer.sources import Reader, SourceFiles
from shardkit.transfer.stream import Stream, read_back, write_all

_MIN_CLONED = 16 * BLOCK  # below this a copy is cheaper than a system call


@dataclass(slots=True)
class Stretch:
    """What a task wrote."""

    segments: list[tuple[int, int, int]] = field(default_factory=list)
    """(first byte, bytes, CRC-32) of everything but the gaps, in file order."""
    data_crcs: list[int] = field(default_factory=list)
    """CRC-32 of each hole's bytes, in file order."""
    clones: int | None = None
    """The cloner's ticket for what was left to it."""


class Filler:
    """Writes tasks; one for each thread.

    Args:
        plan: what goes where.
        sources: how to read.
        buffer_bytes: size of the output buffer, and of the conversion buffer where one is needed.
        band_bytes: bytes of a gathered tensor held at a time; a thread holds twice that.
        digests: take CRC-32s; without, records say "not recorded".
        cloner: takes the whole blocks of large ranges that are copied as they lie; None where extents
            cannot be shared.
        check: called between reads; raises to stop.
        advance: told the bytes that filled holes.
    """

    def __init__(
        self,
        plan: TransferPlan,
        sources: SourceFiles,
        *,
        buffer_bytes: int,
        band_bytes: int,
        digests: bool,
        cloner: Cloner | None,
        check: Callable[[], None],
        advance: Callable[[int], None],
    ) -> None:
        self._plan, self._sources = plan, sources
        self._reader = sources.reader()
        self._digests, self._cloner = digests, cloner
        self._check, self._advance, self._band_bytes = check, advance, band_bytes
        self._buffer, self._raw = bytearray(buffer_bytes), bytearray()
        self._converters: dict[tuple[DType, DType], Converter] = {}
        self._fd, self._clones = -1, list[CloneRange]()

    def write(self, task: Task, image: Image, fd: int) -> Stretch:
        """Write the pieces of a task into an open image."""
        self._fd = fd
        stretch, stream = Stretch(), Stream(fd, image.name, 0, self._buffer)
        self._clones.clear()
        with self._reader:
            for piece in image.pieces(task.start, task.stop):
                self._write_piece(piece, stream, stretch)
            stream.flush()
            if self._cloner is not None and self._clones:
                stretch.clones = self._cloner.submit(fd, tuple(self._clones), self._reader.descriptor)
        return stretch

    def _write_piece(self, piece: Piece, stream: Stream, stretch: Stretch) -> None:
        stream.fqn = piece.hole.fqn
        stream.put_at(piece.start, piece.prefix)
        crc = self._fill(stream, piece.hole)
        suffix = piece.tail.suffix(crc)
        stream.put(suffix)
        if self._digests:
            start, nbytes = piece.hole.start, piece.hole.nbytes
            stretch.segments += (
                (piece.start, len(piece.prefix), piece.prefix_crc),
                (start, nbytes, crc),
                (start + nbytes, len(suffix), crc32(suffix)),
            )
            stretch.data_crcs.append(crc)

    def _fill(self, stream: Stream, hole: Hole) -> int:
        """Fill the hole at the stream's position; return the CRC-32 of its bytes, 0 without digests."""
        if hole.fqn in self._plan.scattered:  # dealt out before; its bytes passed by in another order
            stream.step_over(hole.nbytes)
            return read_back(self._fd, hole.start, hole.nbytes, self._buffer) if self._digests else 0
        source, crc = self._plan.catalog.tensors[hole.fqn].dtype, 0
        if hole.fqn in self._plan.gathered:
            crc = self._gather(stream, hole, source)
            self._advance(hole.nbytes)
            return crc
        for move in self._plan.moves(hole):
            if source is not hole.dtype:
                crc = self._convert(stream, move, hole, source, crc)
            elif self._cloner is not None and self._is_cloned(move, stream.position):
                crc = self._clone(stream, move, hole, crc)
            else:
                crc = self._copy(stream, move.file, move.start, move.nbytes, hole, crc)
        self._advance(hole.nbytes)
        return crc

    def _copy(self, stream: Stream, file: int, start: int, nbytes: int, hole: Hole, crc: int) -> int:
        done = 0
        while done < nbytes:
            self._check()
            part = stream.room(nbytes - done)
            self._reader.read_into(file, part, start + done, hole.fqn)
            if self._digests:
                crc = crc32(part, crc)
            done += len(part)
        return crc

    def _convert(self, stream: Stream, move: Move, hole: Hole, source: DType, crc: int) -> int:
        if not self._raw:
            self._raw = bytearray(len(self._buffer))
        done, most = 0, len(self._raw) // source.itemsize * source.itemsize
        while done < move.nbytes:
            self._check()
            raw = memoryview(self._raw)[: min(move.nbytes - done, most)]
            self._reader.read_into(move.file, raw, move.start + done, hole.fqn)
            crc = self._put(stream, raw, hole, source, crc)
            done += len(raw)
        return crc

    def _gather(self, stream: Stream, hole: Hole, source: DType) -> int:
        crc = 0
        for band in bands(hole, self._plan.catalog, self._reader, self._band_bytes):
            self._check()
            crc = self._put(stream, band, hole, source, crc)
        return crc

    def _put(self, stream: Stream, data: memoryview, hole: Hole, source: DType, crc: int) -> int:
        """Append source elements as what the hole holds; go on with its CRC-32."""
        converter = None if source is hole.dtype else self._converter(source, hole.dtype)
        wide, narrow = source.itemsize, hole.dtype.itemsize
        done, most = 0, len(self._buffer) // max(wide, narrow)
        while done < len(data) // wide:
            count = min(len(data) // wide - done, most)
            part, raw = stream.whole_room(count * narrow), data[done * wide : (done + count) * wide]
            if converter is None:
                part[:] = raw
            else:
                converter(raw, part)
            crc = crc32(part, crc) if self._digests else 0
            done += count
        return crc

    def _converter(self, source: DType, target: DType) -> Converter:
        converter = self._converters.get((source, target))
        if converter is None:
            converter = self._converters[source, target] = Converter(source, target)
        return converter

    def _is_cloned(self, move: Move, position: int) -> bool:
        return (
            move.nbytes >= _MIN_CLONED
            and (move.start - position) % BLOCK == 0
            and not self._sources.is_decoded(move.file)
        )

    def _clone(self, stream: Stream, move: Move, hole: Hole, crc: int) -> int:
        """Leave the whole blocks of a range to be shared and copy its two ragged ends."""
        head, body = shared_part(move.start, move.nbytes)
        tail = head + body
        crc = self._copy(stream, move.file, move.start, head, hole, crc)
        self._clones.append(CloneRange(move.file, move.start + head, body, stream.position, hole.fqn))
        stream.step_over(body)
        if self._digests:
            seen = read_back(self._reader.descriptor(move.file), move.start + head, body, self._buffer)
            crc = crc32_combine(crc, seen, body)
        return self._copy(stream, move.file, move.start + tail, move.nbytes - tail, hole, crc)


def copy_range(reader: Reader, fd: int, name: str, piece: CloneRange) -> None:
    """Copy a range that could not be shared after all: quota, limits on sharing, ..."""
    done, buffer = 0, memoryview(bytearray(min(piece.nbytes, MIB)))
    while done < piece.nbytes:
        part = buffer[: piece.nbytes - done]
        reader.read_into(piece.file, part, piece.start + done, piece.fqn)
        write_all(fd, part, piece.target_start + done, name, piece.fqn)
        done += len(part)


def image_crc(size: int, segments: list[tuple[int, int, int]]) -> int:
    """Return the CRC-32 of a whole file from its segments; what lies between them is zeros."""
    pieces: list[tuple[int, int]] = []
    at = 0
    for start, nbytes, crc in sorted(segments):
        assert start >= at, f"two pieces of one file overlap at byte {start}"
        pieces += [(zeros(start - at), start - at), (crc, nbytes)]
        at = start + nbytes
    return combine([*pieces, (zeros(size - at), size - at)])
