"""What a catalog says of its files."""

from __future__ import annotations

import numpy
from hypothesis import given
from hypothesis import strategies as st

from shardkit.core.catalog import Checksums


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2), st.integers(0, (1 << 32) - 1))))
def test_checksums_of_columns_are_those_of_rows(rows: list[tuple[int, int, int]]) -> None:
    columns = numpy.array(rows, dtype=numpy.int64).reshape(-1, 3).T
    found = Checksums.of_columns(columns[0], columns[1], columns[2].astype(numpy.uint32))
    assert list(found.rows()) == list(Checksums.of(rows).rows())
