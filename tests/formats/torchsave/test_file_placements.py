"""The region of a rank, against torch's own arithmetic."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.core.dtypes import BY_NAME
from shardkit.core.regions import find_tiling_error
from shardkit.formats.torchsave.file import (
    StoredPlacement,
    UnreadableTensor,
    _make_sharded_tensor,
    local_region,
)
from shardkit.pickles.policies import Fields


@st.composite
def cases(draw):
    """A mesh, a shape, placements, and for every dim in which order its axes cut it."""
    mesh = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    shape = tuple(draw(st.lists(st.integers(0, 13), min_size=1, max_size=3)))
    dims = [draw(st.none() | st.integers(0, len(shape) - 1)) for _ in mesh]
    order = {
        dim: draw(st.permutations([axis for axis, cut in enumerate(dims) if cut == dim]))
        for dim in sorted({dim for dim in dims if dim is not None})
    }
    return tuple(mesh), shape, dims, order


@given(cases())
def test_regions_tile_the_tensor(case):
    mesh, shape, dims, order = case
    placements = [StoredPlacement(dim) for dim in dims]
    regions = {local_region(shape, placements, mesh, coord, order) for coord in product(*map(range, mesh))}
    if all(dim is None for dim in dims):
        assert len(regions) == 1
    assert find_tiling_error(shape, [region for region in regions if region.num_elements]) is None


@settings(deadline=None)
@given(cases())
def test_as_torch(case):
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    mesh, shape, dims, _ = case
    placements = [StoredPlacement(dim) for dim in dims]
    theirs = [Replicate() if dim is None else Shard(dim) for dim in dims]
    for coord in product(*map(range, mesh)):
        sizes, offsets = _compute_local_shape_and_global_offset(shape, mesh, list(coord), theirs)
        region = local_region(shape, placements, mesh, coord)
        assert region.sizes == tuple(sizes)
        if prod(sizes):
            assert region.offsets == tuple(offsets)


@given(cases())
def test_split_factors_tell_the_order(case):
    """`_StridedShard` holds how many parts there are before its axis cuts, if those axes come later in the mesh."""
    mesh, shape, dims, order = case
    stored = []
    for axis, dim in enumerate(dims):
        before = [] if dim is None else order[dim][: order[dim].index(axis)]
        stored.append(StoredPlacement(dim, prod(mesh[other] for other in before if other > axis)))
    plain = [StoredPlacement(dim) for dim in dims]
    for coord in product(*map(range, mesh)):
        assert local_region(shape, stored, mesh, coord) == local_region(shape, plain, mesh, coord, order)


@pytest.mark.parametrize(
    ("placements", "mesh", "coord", "reason"),
    [
        ([StoredPlacement(0, 3), StoredPlacement(0)], (2, 2), (0, 0), "belongs to no order"),
        ([StoredPlacement(0, 2)], (2,), (0,), "belongs to no order"),
        ([StoredPlacement(2)], (2,), (0,), "cut along dim 2, but has 2 dims"),
        ([StoredPlacement(-1)], (2,), (0,), "cut along dim -1"),
        ([StoredPlacement(0)], (2,), (2,), "is not in a mesh"),
        ([StoredPlacement(0)], (2,), (-1,), "is not in a mesh"),
    ],
)
def test_what_cannot_be_placed(placements, mesh, coord, reason):
    with pytest.raises(ValueError, match=reason):
        local_region((8, 8), placements, mesh, coord)


def test_an_order_from_a_file_is_not_believed():
    with pytest.raises(ValueError, match="is not in a mesh"):
        local_region((8,), [StoredPlacement(0)], (2,), (0,), {0: [5]})


def test_a_sharded_tensor_whose_shards_are_none_is_unreadable() -> None:
    metadata = Fields("ShardedTensorMetadata", ())
    metadata.build({"size": (4,)})
    for shard in (7, {"tensor": 1}, [metadata]):
        made = Fields("ShardedTensor", (None, BY_NAME["float32"]))
        made.build(([shard], metadata))
        assert isinstance(_make_sharded_tensor(made), UnreadableTensor)
