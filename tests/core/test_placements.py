"""What ranks hold, against torch's own cutting and its own arithmetic of offsets."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from shardkit.core.placements import Placement, cuts, held_regions, stock_region
from shardkit.core.regions import Region
from shardkit.errors import LayoutError

MESHES = [(2, 2), (4, 2), (2, 2, 2), (1, 4), (3, 2)]
SIZES = [1, 2, 3, 5, 7, 8, 9, 12, 16, 17]


def chunk(tensor: torch.Tensor, num_parts: int, index: int, dim: int) -> torch.Tensor:
    """What `torch.chunk` and `fully_shard` give a rank; nothing where there are too few rows."""
    parts = torch.chunk(tensor, num_parts, dim)
    return parts[index] if index < len(parts) else tensor.narrow(dim, 0, 0)


def memory(
    whole: torch.Tensor, placements: list[Placement], sizes: tuple[int, ...], coord: tuple[int, ...]
) -> torch.Tensor:
    """The elements of `whole` that a rank holds by our regions, put where they begin."""
    parts = held_regions(tuple(whole.shape), cuts(placements, sizes), coord)
    stops = [tuple(c + s for c, s in zip(part.corner, part.region.sizes, strict=True)) for part in parts]
    found = torch.full(tuple(map(max, zip(*stops, strict=True))), -1, dtype=whole.dtype)
    for (offsets, lengths), corner in parts:
        box = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
        place = tuple(slice(c, c + n) for c, n in zip(corner, lengths, strict=True))
        found[place] = whole[box]
    return found


@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize("dim", [0, 1])
def test_fsdp_cuts_what_tensor_parallelism_has_cut(sizes: tuple[int, ...], dim: int) -> None:
    """The last axis is tp, the one before it cuts dim 0 of its local tensor, one further left copies."""
    tp = sizes[-1]
    placements = [Placement() for _ in sizes[:-2]] + [Placement(0, tp if dim == 0 else 1), Placement(dim)]
    for rows in SIZES:
        whole = torch.arange(rows * 7).reshape(rows, 7)
        for coord in product(*map(range, sizes)):
            expected = chunk(chunk(whole, tp, coord[-1], dim), sizes[-2], coord[-2], 0)
            assert torch.equal(memory(whole, placements, sizes, coord), expected), (rows, coord)


@pytest.mark.parametrize("sizes", MESHES)
def test_packed_dims_are_cut_block_by_block(sizes: tuple[int, ...]) -> None:
    """Fused experts: [E, gate and up, H] under packed_colwise, experts cut by FSDP; dim 0 too, as of a fused Linear."""
    tp, dp = sizes[-1], sizes[-2]
    copies = [Placement() for _ in sizes[:-2]]
    for experts, width in product((1, 4, 5), (tp, 3 * tp, 7)):
        whole = torch.arange(experts * 2 * width * 3).reshape(experts, 2 * width, 3)
        linear = whole[0]
        for coord in product(*map(range, sizes)):
            gate, up = (chunk(half, tp, coord[-1], 1) for half in torch.chunk(whole, 2, 1))
            expected = chunk(torch.cat((gate, up), 1), dp, coord[-2], 0)
            found = memory(whole, [*copies, Placement(0), Placement(1, 2)], sizes, coord)
            assert torch.equal(found, expected) or not found.numel() == expected.numel() == 0, coord
            both = torch.cat([chunk(half, tp, coord[-1], 0) for half in torch.chunk(linear, 2, 0)])
            placements = [*copies, Placement(0, tp), Placement(0, 2)]
            if tp > 1:
                assert torch.equal(memory(linear, placements, sizes, coord), chunk(both, dp, coord[-2], 0))


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[Placement]]:
    mesh = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    shape = tuple(draw(st.lists(st.integers(1, 17), min_size=1, max_size=3)))
    placements = [
        Placement(draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 4)))
        if draw(st.booleans())
        else Placement()
        for _ in mesh
    ]
    return tuple(mesh), shape, placements


@settings(deadline=None)
@given(cases())
def test_stock_regions_are_those_of_torch(
    case: tuple[tuple[int, ...], tuple[int, ...], list[Placement]],
) -> None:
    mesh, shape, placements = case
    theirs = [
        Replicate()
        if each.shard_dim is None
        else Shard(each.shard_dim)
        if each.split_factor == 1
        else _StridedShard(each.shard_dim, split_factor=each.split_factor)
        for each in placements
    ]
    for coord in product(*map(range, mesh)):
        sizes, offsets = _compute_local_shape_and_global_offset(shape, mesh, list(coord), theirs)
        region = stock_region(shape, placements, mesh, coord)
        assert region.sizes == tuple(sizes)
        assert region.offsets == tuple(offsets)


@settings(deadline=None)
@given(cases())
def test_what_is_not_strided_is_what_stock_torch_takes_it_for(
    case: tuple[tuple[int, ...], tuple[int, ...], list[Placement]],
) -> None:
    mesh, shape, placements = case
    placements = [Placement(each.shard_dim) for each in placements]
    for coord in product(*map(range, mesh)):
        ((region, _),) = held_regions(shape, cuts(placements, mesh), coord)
        assert region == stock_region(shape, placements, mesh, coord)


def test_where_stock_torch_takes_memory_for_another_region() -> None:
    """torch 2.13: 9 rows, tp=2 and then dp=4: the last dp rank of tp rank 1 holds row 8, and its offset says row 9."""
    placements = [Placement(0, 2), Placement(0)]
    assert held_regions((9,), cuts(placements, (4, 2)), (3, 1))[0].region == Region((8,), (1,))
    assert stock_region((9,), placements, (4, 2), (3, 1)) == Region((9,), (0,))


@pytest.mark.parametrize("text", ["R", "S(0)", "S(12)", "SS(0,2)", "SS(1,16)"])
def test_placements_are_read_as_they_are_written(text: str) -> None:
    assert str(Placement.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "S", "S(-1)", "P(sum)", "S(0", "r", "SS(0)", "SS(0,1)", "SS(0,0)", "SS(0,-2)"]
)
def test_unknown_placements_are_refused(text: str) -> None:
    with pytest.raises(LayoutError, match="unknown placement"):
        Placement.parse(text)
