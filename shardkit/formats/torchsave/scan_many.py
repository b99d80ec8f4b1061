"""Comparing the records of a file with known ones all at once, with numpy: `torch_record_scan` for very many.

The files of a thousand ranks hold the same records in the same order. So what is to be read of a file, and what it
is to be compared with, is worked out once for each such order (`_Order`); then a file costs one read for each
record, of the end of one and the beginning of the next, and a few operations on all of these together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from shardkit.files import storage
from shardkit.files.digest import crc32
from shardkit.formats.torchsave.scan import Spelling

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

_WORD = 8


class Compared(NamedTuple):
    """What the bytes around the data say, of each record."""

    is_alike: Array
    """Whether all of them are those of the known one."""
    crcs: Array
    """CRC-32 of the data as recorded, where they are; 0: not recorded."""


class BulkScanner:
    """Compares the records of one file after the other."""

    def __init__(self) -> None:
        self._key: object = None
        self._order: _Order | None = None

    def compare(self, fd: int, spellings: Sequence[Spelling], offsets: Array, lengths: Array) -> Compared:
        """Compare records of an open file with what they are thought to be spelled like.

        A record that cannot be read is not alike.

        Args:
            fd: the file.
            spellings: of each record, in the order of their bytes.
            offsets: first byte of each.
            lengths: bytes of each.
        """
        follows = offsets[1:] == offsets[:-1] + lengths[:-1]
        key = (tuple(map(id, spellings)), follows.tobytes())
        if self._order is None or key != self._key:
            self._key, self._order = key, _Order(spellings, follows.tolist())
        return self._order.compare(fd, offsets)


class _Order:
    """What is common to files whose records are spelled alike one by one."""

    def __init__(self, spellings: Sequence[Spelling], follows: Sequence[bool]) -> None:
        import numpy as np

        self._spellings = spellings  # keeps their ids their own
        tails = [spelling.tail_nbytes for spelling in spellings]
        widths = [-(-(len(s.head) + tail) // _WORD) * _WORD for s, tail in zip(spellings, tails, strict=True)]
        starts = np.cumsum([0, *widths])
        self._buffer = bytearray(int(starts[-1]))
        self._words = np.frombuffer(self._buffer, dtype="<u8")
        self._row_starts = starts[:-1] // _WORD
        expected, mask = bytearray(len(self._buffer)), bytearray(len(self._buffer))
        self._crc_at: list[list[int]] = [[], []]
        self._ids: list[tuple[int, int, int, int]] = []  # (row, first byte, end, where its CRC-32 stands)
        for row, (spelling, start) in enumerate(zip(spellings, starts.tolist(), strict=False)):
            tail = start + len(spelling.head)
            for at, text in ((start, spelling.head), *((tail + at, text) for at, text in spelling.fixed)):
                expected[at : at + len(text)] = text
                mask[at : at + len(text)] = b"\xff" * len(text)
            self._crc_at[0].append(tail + spelling.crcs[0])
            self._crc_at[1].append(tail + spelling.crcs[-1])
            first = tail + spelling.id_range[0]
            self._ids += [(row, first, first + spelling.id_range[1], tail + at) for at in spelling.id_crcs]
        self._expected = np.frombuffer(bytes(expected), dtype="<u8")
        self._mask = np.frombuffer(bytes(mask), dtype="<u8")
        self._plan_reads(starts.tolist(), tails, follows)

    def _plan_reads(self, starts: Sequence[int], tails: Sequence[int], follows: Sequence[bool]) -> None:
        """Set what is read: for each call the record it counts from, the distance, buffers and bytes."""
        import numpy as np

        view, last = memoryview(self._buffer), len(self._spellings) - 1
        heads = [view[at : at + len(s.head)] for at, s in zip(starts, self._spellings, strict=False)]
        rows, distances, self._buffers, self._wanted = [], [], list[list[memoryview]](), list[int]()
        self._touched: list[tuple[int, ...]] = []
        for row, spelling in enumerate(self._spellings):
            if row == 0 or not follows[row - 1]:
                rows.append(row)
                distances.append(0)
                self._buffers.append([heads[row]])
                self._touched.append((row,))
            tail = starts[row] + len(spelling.head)
            rows.append(row)
            distances.append(spelling.tail_at)
            joined = row < last and follows[row]
            self._buffers.append([view[tail : tail + tails[row]], *([heads[row + 1]] if joined else [])])
            self._touched.append((row, row + 1) if joined else (row,))
        self._rows, self._distances = np.array(rows), np.array(distances)
        self._wanted = [sum(map(len, buffers)) for buffers in self._buffers]

    def compare(self, fd: int, offsets: Array) -> Compared:
        """Read what is around the data of each record, and compare it."""
        import numpy as np

        unread = self._read(fd, (offsets[self._rows] + self._distances).tolist())
        differs = (self._words ^ self._expected) & self._mask
        is_alike = np.bitwise_or.reduceat(differs, self._row_starts) == 0
        any_word: Any = np.ndarray((len(self._buffer) - 3,), "<u4", self._buffer, 0, (1,))
        crcs, others = any_word[self._crc_at[0]], any_word[self._crc_at[1]]
        is_alike &= crcs == others
        is_alike[unread] = False
        if self._ids:
            recorded = any_word[[at for _, _, _, at in self._ids]].tolist()
            view = memoryview(self._buffer)
            for (row, start, stop, _), crc in zip(self._ids, recorded, strict=True):
                if crc and crc32(view[start:stop]) != crc:
                    is_alike[row] = False
        return Compared(is_alike, crcs)

    def _read(self, fd: int, places: list[int]) -> list[int]:
        """Fill the buffers; return the records of which something could not be read."""
        preadv, unread = storage.preadv, list[int]()
        for number, (place, buffers, wanted) in enumerate(
            zip(places, self._buffers, self._wanted, strict=True)
        ):
            try:
                if preadv(fd, buffers, place) == wanted:
                    continue
            except OSError:
                pass
            unread += self._touched[number]
        return unread
