"""Many chunks are planned in columns, to the same plan as one by one."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.core.catalog import Catalog, Decoded, SourceFile
from shardkit.core.dtypes import BY_NAME
from shardkit.core.regions import Region, Shape
from shardkit.transfer import plan
from shardkit.transfer.plan import flat_source

DTYPE = BY_NAME["float32"]


@st.composite
def catalogs(draw: st.DrawFn) -> Catalog:
    """A tensor cut into rows, or nearly so: empty chunks, out of order, cut along its columns, decoded."""
    width = draw(st.integers(0, 2))
    shape: Shape = (9, *[3] * width)
    cuts = [0, *sorted(draw(st.lists(st.integers(0, 9), max_size=6))), 9]
    regions = [Region((a, *[0] * width), (b - a, *[3] * width)) for a, b in pairwise(cuts)]
    if width and draw(st.integers(0, 3)) == 0:
        left, right = (0, 1), (1, 2)
        regions = [
            Region((*r.offsets[:-1], o), (*r.sizes[:-1], s)) for r in regions for o, s in (left, right)
        ]
    if draw(st.booleans()):
        draw(st.randoms()).shuffle(regions)
    catalog = Catalog(format="dcp", directory="")
    decoded = draw(st.integers(0, 3)) == 0
    for number in range(3):
        made = Decoded(lambda _: memoryview(b"")) if decoded and number == 2 else None
        catalog.files.append(SourceFile(name=f"{number}", path="", size=1 << 20, derivation=made))
    catalog.add_tensor("before", DTYPE, (1,), iter([(0, 5, 4, Region((0,), (1,)))]))
    catalog.add_tensor(
        "w", DTYPE, shape, iter([(n % 3, 100 * n, r.num_elements * 4, r) for n, r in enumerate(regions)])
    )
    return catalog


@settings(max_examples=300, deadline=None)
@given(catalogs())
def test_flat_in_columns_as_one_by_one(catalog: Catalog) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(plan, "MIN_COLUMNS", 1)
        monkeypatch.setattr(plan, "MIN_TOTAL", 1)
        in_columns = flat_source(catalog.tensors["w"], catalog)
        monkeypatch.setattr(plan, "MIN_COLUMNS", 1 << 40)
        assert in_columns == flat_source(catalog.tensors["w"], catalog)


def test_row_shards_are_planned_in_columns() -> None:
    catalog = Catalog(format="dcp", directory="")
    catalog.files.append(SourceFile(name="f", path="", size=1 << 20))
    rows = [Region((min(n, 70), 0), (1 if n < 70 else 0, 5)) for n in range(100)]
    catalog.add_tensor(
        "w", DTYPE, (70, 5), iter([(0, 20 * n, 20 * r.sizes[0], r) for n, r in enumerate(rows)])
    )
    found = plan._flat_rows(catalog.tensors["w"], catalog)
    assert found is not None
    assert (list(found.starts), list(found.places)) == (list(range(0, 350, 5)), list(range(0, 1400, 20)))
