"""Filling pieces from very many small chunks: window by window of the output, not chunk by chunk.

A tensor of a thousand ranks is a thousand reads of a few KB from as many files, and so is the next tensor.
But one file holds its parts of neighbouring tensors close together. So a window of the output spans as many
tensors as memory allows. One call (`preadv`) reads everything that a file has for the window and drops what
lies between, and one call writes the window.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from shardkit.files import storage
from shardkit.files.digest import crc32
from shardkit.transfer.images import Piece
from shardkit.transfer.plan import FlatSource
from shardkit.transfer.sources import Reader
from shardkit.transfer.stream import WRITTEN_GAP, Controls, Segment, segments_of, write_all

if TYPE_CHECKING:
    from shardkit.core.catalog import Ints

_MAX_GAP = 16 << 10  # bytes that are read and dropped; as expensive as another call
# Parts that one call reads. With the gaps between them they are twice as many buffers, and Linux takes 1,024.
_MOST_AT_ONCE = 500


class _Part(NamedTuple):
    """Data of a piece that lies in the window."""

    piece: Piece
    source: FlatSource
    first: int
    """First element, in the whole tensor."""
    at: int
    """First byte in the window."""
    nbytes: int
    suffix_nbytes: int
    """Bytes kept free after it for the piece's suffix; -1 where the piece goes on in the next window."""


class Window:
    """A stretch of one file that is being put together: `put` pieces in the order of the file, then `flush`.

    Args:
        fd: the file, open for writing.
        name: its name, for messages.
        reader: reads the sources.
        buffer: holds the window.
        controls: what all threads follow.
        settles: as for `Stream`.
    """

    def __init__(
        self, fd: int, name: str, reader: Reader, buffer: bytearray, controls: Controls, *, settles: int
    ) -> None:
        self._fd, self._name, self._reader, self._controls = fd, name, reader, controls
        self._settles = settles
        self._view, self._size = memoryview(buffer), len(buffer)
        self._junk = memoryview(bytearray(_MAX_GAP))
        self._start, self._used, self._crc = 0, 0, 0
        self._parts: list[_Part] = []
        self.segments: list[Segment] = []
        """Segments of the pieces that were flushed."""
        self.data_crcs: list[int] = []
        """CRC-32s of their holes."""

    @property
    def stop(self) -> int:
        """The byte of the file after the last piece."""
        return self._start + self._used

    def put(self, piece: Piece, source: FlatSource) -> None:
        """Take a piece that is filled with bytes of `source` as they are."""
        gap = piece.start - self.stop
        if 0 < gap <= WRITTEN_GAP and self._used:
            self._put_bytes(bytes(gap))
        elif gap:
            self.flush()
            self._start = piece.start
        self._put_bytes(piece.frame.prefix)
        suffix_nbytes, done, itemsize = len(piece.frame.suffix(0)), 0, source.dtype.itemsize
        while True:
            nbytes = min(piece.nbytes - done, (self._size - self._used) // itemsize * itemsize)
            is_last = nbytes == piece.nbytes - done and self._used + nbytes + suffix_nbytes <= self._size
            if nbytes or is_last:
                kept = suffix_nbytes if is_last else -1
                self._parts.append(
                    _Part(piece, source, piece.first + done // itemsize, self._used, nbytes, kept)
                )
                self._used += nbytes + max(kept, 0)
            if is_last:
                return
            done += nbytes
            self.flush()

    def flush(self) -> None:
        """Read the missing parts of the window, and write it."""
        if self._parts:
            self._controls.turns.make(self._read)
        for part in self._parts:
            data = self._view[part.at : part.at + part.nbytes]
            if self._controls.digests:
                self._crc = crc32(data, self._crc)
            if part.suffix_nbytes >= 0:
                self._end(part)
            self._controls.advance(part.nbytes)
        if self._used:
            fqn = self._parts[-1].piece.fqn if self._parts else ""
            write_all(self._fd, self._view[: self._used], self._start, self._name, fqn)
            storage.settle(self._fd, self._settles, self.stop)
        self._start, self._used = self.stop, 0
        self._parts.clear()

    def _put_bytes(self, data: bytes) -> None:
        """Append literal bytes."""
        rest = memoryview(data)
        while rest:
            if self._used == self._size:
                self.flush()
            now = rest[: self._size - self._used]
            self._view[self._used : self._used + len(now)] = now
            self._used, rest = self._used + len(now), rest[len(now) :]

    def _end(self, part: _Part) -> None:
        """Put the suffix of a piece after its last part, now that its CRC-32 is known."""
        piece, crc = part.piece, self._crc
        suffix, at = piece.frame.suffix(crc), part.at + part.nbytes
        assert len(suffix) == part.suffix_nbytes, "a frame whose length depends on a CRC-32"
        self._view[at : at + len(suffix)] = suffix
        if self._controls.digests:
            self.segments += segments_of(piece.start, piece.frame, piece.nbytes, crc, suffix)
            self.data_crcs.append(crc)
        self._crc = 0

    def _read(self) -> int:
        """Fill all parts, file by file and front to back; return the number of calls."""
        import numpy as np

        file, place, nbytes, at, owner = self._places()
        stop = place + nbytes
        gap = place[1:] - stop[:-1]
        is_new = (file[1:] != file[:-1]) | (gap < 0) | (gap > _MAX_GAP)
        firsts = [0, *((is_new.nonzero()[0] + 1).tolist()), len(file)]
        files, places, ends, gaps = file.tolist(), place.tolist(), stop.tolist(), [0, *gap.tolist()]
        owners = owner.tolist()
        view, junk = self._view, self._junk
        parts = [view[a:b] for a, b in zip(at.tolist(), (at + nbytes).tolist(), strict=True)]
        entries = self._reader.find_whole(file, place, nbytes)
        entry, crcs, num_calls = entries.tolist(), [0] * len(file), 0

        def fqn_of(index: int) -> str:
            fqn: str = self._parts[owners[index]].piece.fqn
            return fqn

        for first, last in pairwise(firsts):
            for begin in range(first, last, _MOST_AT_ONCE):
                self._controls.check()
                end = min(begin + _MOST_AT_ONCE, last)
                buffers = [parts[begin]]
                for index in range(begin + 1, end):
                    if gaps[index]:
                        buffers.append(junk[: gaps[index]])
                    buffers.append(parts[index])
                wanted = ends[end - 1] - places[begin]
                is_read = self._read_at_once(files[begin], buffers, places[begin], wanted)
                for index in range(begin, end):
                    if not is_read:
                        entry[index] = -1
                        self._reader.read_into(files[index], parts[index], places[index], fqn_of(index))
                    elif entry[index] < 0:
                        self._reader.tell(files[index], places[index], parts[index], fqn_of(index))
                    else:  # while it is in the processor's cache
                        crcs[index] = crc32(parts[index])
                num_calls += 1
        told = np.flatnonzero(np.array(entry, dtype=np.int64) >= 0)
        if len(told):
            self._reader.tell_whole(
                entries[told], np.array(crcs, dtype=np.int64)[told], lambda at: fqn_of(int(told[at]))
            )
        return num_calls

    def _read_at_once(self, file: int, buffers: list[memoryview], start: int, wanted: int) -> bool:
        """Fill buffers from one stretch of a file; False if that fails or reads too little."""
        self._reader.open_records(file, start, start + wanted)
        try:
            return storage.preadv(self._reader.descriptor(file), buffers, start) == wanted
        except OSError:
            return False

    def _places(self) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """Return columns of everything to read: file, first byte, bytes, place in the window, part."""
        import numpy as np

        columns: list[tuple[Any, Any, Any, Any, Any]] = []
        for number, (_, source, first, at, nbytes, _) in enumerate(self._parts):
            if not nbytes:
                continue
            itemsize = source.dtype.itemsize
            stop = first + nbytes // itemsize
            rows = slice(bisect_right(source.starts, first) - 1, bisect_left(source.starts, stop))
            starts = np.frombuffer(source.starts, dtype=np.int64)[rows]
            begin = np.maximum(starts, first)
            end = np.minimum(np.frombuffer(source.stops, dtype=np.int64)[rows], stop)
            places = np.frombuffer(source.places, dtype=np.int64)[rows] + (begin - starts) * itemsize
            files = np.frombuffer(source.files, dtype=np.int32)[rows]
            targets = at + (begin - first) * itemsize
            columns.append((files, places, (end - begin) * itemsize, targets, starts * 0 + number))
        if not columns:
            none = np.zeros(0, dtype=np.int64)
            return none, none, none, none, none
        file, place, size, target, owner = (np.concatenate(column) for column in zip(*columns, strict=True))
        order = np.lexsort((place, file))
        return file[order], place[order], size[order], target[order], owner[order]
