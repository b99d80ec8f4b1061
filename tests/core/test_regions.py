from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.core.regions import (
    Region,
    blocks,
    contiguous_suffix,
    find_tiling_error,
    flat_offset,
    flat_offsets,
    flat_range_boxes,
    full_region,
    intersect,
    is_contiguous,
    relative_to,
    runs,
    split_dim,
)

Shape = tuple[int, ...]
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def boxes(draw: st.DrawFn, shape: Shape) -> Region:
    offsets = tuple(draw(st.integers(0, size)) for size in shape)
    return Region(
        offsets, tuple(draw(st.integers(0, size - o)) for o, size in zip(offsets, shape, strict=True))
    )


shapes_and_boxes = shapes.flatmap(lambda shape: st.tuples(st.just(shape), boxes(shape), boxes(shape)))


def window(region: Region) -> tuple[slice, ...]:
    return tuple(slice(o, s) for o, s in zip(region.offsets, region.stops, strict=True))


def numbered(shape: Shape) -> np.ndarray:
    return np.arange(int(np.prod(shape, dtype=int))).reshape(shape)


@given(shapes_and_boxes)
def test_intersection_holds_the_common_elements(case: tuple[Shape, Region, Region]) -> None:
    shape, a, b = case
    grid = numbered(shape)
    common = set(grid[window(a)].ravel().tolist()) & set(grid[window(b)].ravel().tolist())
    found = intersect(a, b)
    assert found == intersect(b, a)
    assert (set(grid[window(found)].ravel().tolist()) if found else set()) == common


@given(shapes.flatmap(lambda shape: st.tuples(st.just(shape), st.lists(boxes(shape), max_size=3))))
def test_flat_offsets_are_those_of_each_corner(case: tuple[Shape, list[Region]]) -> None:
    shape, regions = case
    corners = [region.offsets for region in regions]
    assert flat_offsets(corners, shape) == [flat_offset(corner, shape) for corner in corners]


@given(shapes_and_boxes)
def test_relative_to_keeps_the_elements(case: tuple[Shape, Region, Region]) -> None:
    shape, outer, other = case
    inner = intersect(outer, other)
    if inner:
        grid = numbered(shape)
        assert (grid[window(outer)][window(relative_to(inner, outer.offsets))] == grid[window(inner)]).all()


@given(shapes_and_boxes)
def test_runs_are_numpys_elements(case: tuple[Shape, Region, Region]) -> None:
    shape, region, _ = case
    found = list(runs(region, shape))
    elements = [at for run in found for at in range(run.source, run.source + run.length)]
    assert elements == numbered(shape)[window(region)].ravel().tolist()
    assert [run.target for run in found] == [sum(r.length for r in found[:n]) for n in range(len(found))]


@given(shapes_and_boxes)
def test_contiguous_means_elements_side_by_side(case: tuple[Shape, Region, Region]) -> None:
    shape, region, _ = case
    elements = numbered(shape)[window(region)].ravel().tolist()
    assert is_contiguous(region, shape) == all(b - a == 1 for a, b in pairwise(elements))


def test_contiguous_suffix() -> None:
    assert contiguous_suffix((2, 3, 4), (5, 3, 4)) == 1
    assert contiguous_suffix((2, 3, 4), (2, 3, 4)) == 0
    assert contiguous_suffix((2, 3), (2, 4)) == 2


@given(shapes, st.integers(1, 40))
def test_blocks_tile_in_order_and_are_contiguous(shape: Shape, limit: int) -> None:
    found = list(blocks(shape, limit))
    assert find_tiling_error(shape, found) is None
    assert all(0 < block.num_elements <= limit and is_contiguous(block, shape) for block in found)
    grid = numbered(shape)
    order = [at for block in found for at in grid[window(block)].ravel().tolist()]
    assert order == list(range(grid.size))


def test_blocks_of_a_scalar() -> None:
    assert list(blocks((), 1)) == [Region((), ())]


@given(st.integers(0, 60), st.integers(1, 40))
def test_split_dim_is_torch_chunk(size: int, num_parts: int) -> None:
    parts = [split_dim(size, num_parts, index) for index in range(num_parts)]
    assert sum(part for _, part in parts) == size
    assert [start for start, _ in parts] == [
        min(sum(n for _, n in parts[:i]), size) for i in range(num_parts)
    ]
    full = -(-size // num_parts)
    shorter = [part for _, part in parts if part != full]
    assert shorter == [0] * len(shorter) or (shorter[0] and not any(shorter[1:]))


@given(shapes.filter(lambda shape: 0 not in shape), st.data())
def test_a_grid_tiles_until_it_is_damaged(shape: Shape, data: st.DataObject) -> None:
    cuts = [sorted({0, size, *data.draw(st.sets(st.integers(0, size), max_size=2))}) for size in shape]
    grid = [
        Region(tuple(a for a, _ in cell), tuple(b - a for a, b in cell))
        for cell in product(*(list(pairwise(c)) for c in cuts))
    ]
    chunks = data.draw(st.permutations(grid))
    assert find_tiling_error(shape, chunks) is None
    assert "hold" in (find_tiling_error(shape, chunks[1:]) or "")
    assert "overlap" in (find_tiling_error(shape, [*chunks, chunks[0]]) or "")


def test_a_tiling_error_says_what_is_wrong() -> None:
    assert "dims" in (find_tiling_error((2, 2), [Region((0,), (2,))]) or "")
    assert "outside" in (find_tiling_error((2,), [Region((1,), (2,))]) or "")
    assert "outside" in (find_tiling_error((2,), [Region((-1,), (2,))]) or "")
    assert "hold 0 of 2" in (find_tiling_error((2,), []) or "")
    assert find_tiling_error((0, 3), []) is None
    assert find_tiling_error((2,), [Region((0,), (2,)), Region((2,), (0,))]) is None


@pytest.mark.parametrize("shape", [(), (3,), (2, 0)])
def test_the_full_region_tiles(shape: Shape) -> None:
    assert find_tiling_error(shape, [full_region(shape)]) is None


@pytest.mark.parametrize("dim", [0, 1])
def test_thousands_of_strips_are_checked_along_either_dim(dim: int) -> None:
    """Comparing all pairs would take minutes."""
    strips = [
        Region((n, 0) if dim == 0 else (0, n), (1, 4096) if dim == 0 else (4096, 1)) for n in range(4096)
    ]
    assert find_tiling_error((4096, 4096), strips) is None
    assert "overlap" in (find_tiling_error((4096, 4096), [*strips, strips[7]]) or "")


@given(shapes.flatmap(lambda shape: st.tuples(st.just(shape), st.data())))
def test_flat_ranges_are_boxes_in_order(case: tuple[Shape, st.DataObject]) -> None:
    shape, data = case
    total = int(np.prod(shape, dtype=int))
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    boxes = flat_range_boxes(shape, start, stop)
    grid = numbered(shape)
    assert [int(index) for box in boxes for index in grid[window(box)].ravel()] == list(range(start, stop))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)
    assert all(is_contiguous(box, shape) for box in boxes)


def test_a_flat_range_takes_as_few_boxes_as_it_can() -> None:
    assert flat_range_boxes((4, 6), 0, 24) == [Region((0, 0), (4, 6))]
    assert flat_range_boxes((4, 6), 6, 18) == [Region((1, 0), (2, 6))]
    assert flat_range_boxes((4, 6), 7, 10) == [Region((1, 1), (1, 3))]
    assert flat_range_boxes((4, 6), 4, 20) == [
        Region((0, 4), (1, 2)),
        Region((1, 0), (2, 6)),
        Region((3, 0), (1, 2)),
    ]
    assert flat_range_boxes((), 0, 1) == [Region((), ())]
    assert flat_range_boxes((3, 0), 0, 0) == []
