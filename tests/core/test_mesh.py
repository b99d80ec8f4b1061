from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.core.mesh import Axis, Mesh, Role, parse_mesh
from shardkit.core.placements import REPLICATE, Placement, Placements
from shardkit.core.regions import Region, find_tiling_error, full_region
from shardkit.errors import MeshError

Shape = tuple[int, ...]
ROLES: tuple[Role, ...] = ("replicate", "shard", "tensor")


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Mesh, Shape, Placements]:
    """Any mesh of up to three axes; each may cut any dim, two the same one too, in blocks as well."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    mesh = Mesh(tuple(Axis(f"a{n}", size, draw(st.sampled_from(ROLES))) for n, size in enumerate(sizes)))
    if draw(st.booleans()):  # the same ranks in another order, with a gap where copies lie
        stride, steps = draw(st.integers(1, 2)), []
        for size in sizes:
            steps.append(((size, stride),))
            stride *= size
        mesh = Mesh(mesh.axes, tuple(steps))
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    placements = tuple(
        Placement(draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 3)))
        if shape and draw(st.booleans())
        else REPLICATE
        for _ in mesh.axes
    )
    return mesh, shape, placements


def world(mesh: Mesh) -> range:
    return range(max(size * stride for digits in mesh.digits for size, stride in digits))


@given(layouts())
def test_what_all_ranks_hold_makes_up_the_tensor(case: tuple[Mesh, Shape, Placements]) -> None:
    mesh, shape, placements = case
    copies = len(world(mesh)) // prod(
        axis.size
        for axis, placement in zip(mesh.axes, placements, strict=True)
        if placement.shard_dim is not None
    )
    every = [part.region for rank in world(mesh) for part in mesh.held(shape, placements, rank)]
    full = [region for region in every if region.num_elements]
    assert all(full.count(region) == copies for region in full)
    assert find_tiling_error(shape, list(dict.fromkeys(full))) is None


@given(layouts())
def test_the_parts_of_a_rank_make_up_its_memory(case: tuple[Mesh, Shape, Placements]) -> None:
    mesh, shape, placements = case
    for rank in world(mesh):
        parts = mesh.held(shape, placements, rank)
        if any(part.region.num_elements == 0 for part in parts):
            assert len(parts) == 1
            continue
        memory = [Region(corner, region.sizes) for region, corner in parts]
        sizes = tuple(map(max, zip(*(region.stops for region in memory), strict=True))) if shape else ()
        assert find_tiling_error(sizes, memory) is None
        assert [part.corner for part in parts] == sorted(part.corner for part in parts)


@given(layouts())
def test_owners_are_the_lowest_ranks_that_hold_each_region(case: tuple[Mesh, Shape, Placements]) -> None:
    mesh, shape, placements = case
    owners = list(mesh.owners(shape, placements))
    regions = [region for _, region in owners]
    assert regions == sorted(regions)
    assert len({region.offsets for region in regions}) == len(regions)
    assert find_tiling_error(shape, regions) is None
    for rank, region in owners:
        assert region in [part.region for part in mesh.held(shape, placements, rank)]
        lower = [part.region for each in range(rank) for part in mesh.held(shape, placements, each)]
        assert region not in lower
    every = {part.region for rank in world(mesh) for part in mesh.held(shape, placements, rank)}
    assert {r for r in every if r.num_elements} == {r for r in regions if r.num_elements}


@given(layouts())
def test_ranks_and_coords_are_row_major(case: tuple[Mesh, Shape, Placements]) -> None:
    mesh = Mesh(case[0].axes)
    assert [mesh.coord(rank) for rank in range(mesh.size)] == list(product(*map(range, mesh.shape)))


def test_trailing_shards_are_short_then_empty() -> None:
    mesh = parse_mesh(None, 4)
    regions = [part.region for rank in range(4) for part in mesh.held((5, 2), (Placement(0),), rank)]
    assert regions == [
        Region((0, 0), (2, 2)),
        Region((2, 0), (2, 2)),
        Region((4, 0), (1, 2)),
        Region((5, 0), (0, 2)),
    ]
    owners = list(mesh.owners((2, 2), (Placement(0),)))
    assert owners[2:] == [(2, Region((2, 0), (0, 2)))]  # ranks 2 and 3 share an empty chunk


def test_replicas_read_one_file() -> None:
    mesh = parse_mesh("dp_replicate=2,dp_shard=3", None)
    assert mesh.num_shards == 3
    assert [rank for rank, _ in mesh.owners((3,), (REPLICATE, Placement(0)))] == [0, 1, 2]
    assert list(mesh.owners((), (REPLICATE, REPLICATE))) == [(0, full_region(()))]


def test_experts_are_another_view_of_the_same_ranks() -> None:
    mesh = parse_mesh("dp_replicate=2,dp_shard=4,tp=2,ep=4", None)
    assert (mesh.size, mesh.num_shards, str(mesh)) == (16, 8, "dp_replicate=2,dp_shard=4,tp=2,ep=4")
    assert mesh.experts is not None
    assert str(mesh.experts) == "dp_replicate=2,efsdp=2,ep=4"
    assert mesh.experts.size == mesh.size
    # transformers: ranks r and r + ep hold the same experts, cut over efsdp
    placements = (REPLICATE, Placement(0, 4), Placement(0))
    owners = dict(mesh.experts.owners((8, 3), placements))
    assert {rank: region.offsets[0] for rank, region in owners.items()} == {
        0: 0,
        4: 1,
        1: 2,
        5: 3,
        2: 4,
        6: 5,
        3: 6,
        7: 7,
    }


@pytest.mark.parametrize(
    ("text", "world_size", "axes"),
    [
        (None, 3, (("dp_shard", 3, "shard"),)),
        ("dp_shard=4", None, (("dp_shard", 4, "shard"),)),
        ("dp_replicate=2, dp_shard=16", 32, (("dp_replicate", 2, "replicate"), ("dp_shard", 16, "shard"))),
        ("r:replicate=2,f:shard=8", None, (("r", 2, "replicate"), ("f", 8, "shard"))),
        ("dp_shard:shard=8", None, (("dp_shard", 8, "shard"),)),
        ("dp_shard=4,tp=2", 8, (("dp_shard", 4, "shard"), ("tp", 2, "tensor"))),
        ("tp=4", None, (("tp", 4, "tensor"),)),
        ("fsdp:shard=4,t:tensor=2", None, (("fsdp", 4, "shard"), ("t", 2, "tensor"))),
        ("ep=2,dp_shard=4", 4, (("dp_shard", 4, "shard"),)),
        ("dp_shard=4,cp=2", 8, (("dp_shard", 8, "shard"),)),
        ("cp=4", None, (("dp_shard", 4, "shard"),)),
        ("dp_replicate=2,cp=4", 8, (("dp_replicate", 2, "replicate"), ("dp_shard", 4, "shard"))),
        ("fsdp:shard=2,cp=2,tp=2", 8, (("fsdp", 4, "shard"), ("tp", 2, "tensor"))),
    ],
)
def test_parses(text: str | None, world_size: int | None, axes: tuple[tuple[str, int, str], ...]) -> None:
    mesh = parse_mesh(text, world_size)
    assert tuple((axis.name, axis.size, axis.role) for axis in mesh.axes) == axes


@pytest.mark.parametrize(
    ("text", "world_size", "message"),
    [
        (None, None, "no mesh given"),
        (None, 0, "at least 1"),
        ("dp_shard=4", 8, "has 4 ranks, --world-size says 8"),
        ("", None, "not a mesh axis"),
        ("dp_shard", None, "not a mesh axis"),
        ("dp_shard=-1", None, "not a mesh axis"),
        ("dp_shard=4,", None, "not a mesh axis"),
        ("dp_shard=\x1b[1m", None, "not a mesh axis"),
        ("dp_shard=0", None, "at least 1"),
        ("dp_shrad=4", None, "closest name: dp_shard"),
        ("fsdp=4", None, "no known role"),
        ("dp_shard:replicate=4", None, "has the role shard"),
        ("tp=2,dp_shard=4", None, "comes last"),
        ("cp=2,dp_shard=4", None, "right after dp_shard"),
        ("dp_shard=4,tp=2,cp=2", None, "right after dp_shard"),
        ("dp_shard=4,cp=2,cp=2", None, "named twice"),
        ("cp:replicate=2,dp_shard=4", None, "has the role shard"),
        ("dp_shard=4,tp=2,cp=0", None, "at least 1"),
        ("dp_shard=4,pp=2", None, "comes first"),
        ("pp:shard=2,dp_shard=4", None, "has no role"),
        ("pp=2", None, "shards nothing"),
        ("pp=2,dp_shard=3,ep=2", None, "ep=2 does not divide its ranks"),
        ("efsdp=2,ep=2", None, "follows from the others"),
        ("dp_replicate=2,tp=2", None, "shards nothing"),
        ("ep=2", None, "shards nothing"),
        ("dp_shard=4,ep=3", None, "ep=3 does not divide its ranks"),
        ("dp_shard=4,tp=4,ep=2", None, "ep=2 is not a multiple of tp=4"),
        ("dp_shard=2,t:tensor=2,u:tensor=2", None, "over one axis"),
        ("ep=2,ep=2,dp_shard=4", None, "named twice"),
        ("dp_shard=2,dp_shard=2", None, "named twice"),
        ("dp_replicate=2", None, "shards nothing"),
        ("dp_shard=2,dp_replicate=2", None, "replicate axes come before"),
        ("a:shard=2,b:shard=2", None, "one shard axis"),
    ],
)
def test_refuses(text: str | None, world_size: int | None, message: str) -> None:
    with pytest.raises(MeshError, match=message):
        parse_mesh(text, world_size)
