"""Pointing the chunks of a DCP catalog at their bytes, very many at once; what is in any way special is left over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardkit.core.catalog import Catalog
from shardkit.core.dtypes import DType
from shardkit.core.regions import Shape
from shardkit.formats.torchsave.scan import BulkScanner, RecordScanner, Template

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

MIN_BULK = 4096
"""Chunks from which on it pays."""
_MIN_COLUMNS = 64  # chunks of a tensor from which on columns are quicker than one by one
_MIN_ROWS = 16  # of a file
_MOST_AT_ONCE = 1024  # records: 2 MB of what is around their data


class BulkPointer:
    """Replaces records by the bytes inside, file by file, where they are spelled like one that was read in full.

    Args:
        catalog: its chunks' extents are records, and become bytes.
        scanner: reads those that are left over, and so knows more and more of them.
    """

    def __init__(self, catalog: Catalog, scanner: RecordScanner) -> None:
        import numpy as np

        self._scanner, self._bulk = scanner, BulkScanner()
        self._starts: Array = np.frombuffer(catalog.chunks.start, dtype=np.int64)
        self._nbytes: Array = np.frombuffer(catalog.chunks.nbytes, dtype=np.int64)
        self._kinds: dict[tuple[DType, Shape, int], int] = {}
        self._kind_of: Array = np.empty(len(catalog.chunks), dtype=np.int32)
        for entry in catalog.tensors.values():
            self._number_kinds(catalog, entry.dtype, entry.chunk_ids)
        self._templates: list[Template | None] = [None] * len(self._kinds)
        self._unknown = {number: kind for kind, number in self._kinds.items()}
        self._is_known = np.zeros(len(self._kinds), dtype=bool)
        self._shifts, self._sizes, self._data_at, self._data = np.zeros((4, len(self._kinds)), dtype=np.int64)

    def _number_kinds(self, catalog: Catalog, dtype: DType, rows: range) -> None:
        """Give each chunk of a tensor the number of its dtype, sizes and length."""
        import numpy as np

        table, kinds = catalog.chunks, self._kinds
        if len(rows) < _MIN_COLUMNS:
            for row in rows:
                kind = (dtype, table.region(row).sizes, table.nbytes[row])
                self._kind_of[row] = kinds.setdefault(kind, len(kinds))
            return
        boxes = np.frombuffer(table.boxes(rows), dtype=np.int64).reshape(len(rows), -1)
        lengths = self._nbytes[rows.start : rows.stop, None]
        columns = np.hstack([boxes[:, boxes.shape[1] // 2 :], lengths])
        firsts = [0, *((columns[1:] != columns[:-1]).any(axis=1).nonzero()[0] + 1).tolist()]
        for first, stop in zip(firsts, [*firsts[1:], len(rows)], strict=True):
            *sizes, length = columns[first].tolist()
            kind = (dtype, tuple(sizes), length)
            self._kind_of[rows.start + first : rows.start + stop] = kinds.setdefault(kind, len(kinds))

    def point(self, fd: int, rows: list[int]) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Point chunks of an open file at their bytes; return those left over, and where the data of the others lies.

        That is (first byte, bytes, CRC-32) of each, 0 where none is recorded.

        Args:
            fd: the file.
            rows: its chunks, in the order of their bytes.
        """
        import numpy as np

        self._look_up()
        every = np.array(rows, dtype=np.int64)
        is_left = ~self._is_known[self._kind_of[every]]
        chosen = np.flatnonzero(~is_left)
        stored = list[tuple[int, int, int]]()
        if len(chosen) < _MIN_ROWS:
            return rows, stored
        for first in range(0, len(chosen), _MOST_AT_ONCE):
            part = chosen[first : first + _MOST_AT_ONCE]
            these = every[part]
            kinds, offsets = self._kind_of[these], self._starts[these]
            templates = [template for kind in kinds.tolist() if (template := self._templates[kind])]
            found = self._bulk.compare(fd, templates, offsets, self._nbytes[these])
            is_left[part] = ~found.is_alike
            these, kinds, crcs = these[found.is_alike], kinds[found.is_alike], found.crcs[found.is_alike]
            places = self._starts[these] + self._data_at[kinds]
            stored += zip(places.tolist(), self._data[kinds].tolist(), crcs.tolist(), strict=True)
            self._starts[these] += self._shifts[kinds]
            self._nbytes[these] = self._sizes[kinds]
        return every[is_left].tolist(), stored

    def _look_up(self) -> None:
        """Take up the kinds that the scanner has read since, where they are what `.metadata` says."""
        for number, (dtype, sizes, length) in list(self._unknown.items()):
            template = self._scanner.known((dtype, sizes), length)
            if template is None:
                continue
            del self._unknown[number]
            record = template.record
            if record.dtype is dtype and record.shape == sizes and record.is_contiguous:
                self._templates[number], self._is_known[number] = template, True
                self._shifts[number], self._sizes[number] = record.start, record.nbytes
                self._data_at[number], self._data[number] = record.data_start, record.data_nbytes
