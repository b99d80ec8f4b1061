from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.core.mesh import REPLICATE, Axis, Mesh, Placement, Placements, parse_mesh
from shardkit.core.regions import Region, find_tiling_error, full_region
from shardkit.errors import LayoutError, MeshError

Shape = tuple[int, ...]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Mesh, Shape, Placements]:
    """Any mesh of up to three axes; each shard axis may cut any dim, two the same one too."""
    roles = draw(st.lists(st.sampled_from(("replicate", "shard")), min_size=1, max_size=3))
    mesh = Mesh(tuple(Axis(f"a{n}", draw(st.integers(1, 5)), role) for n, role in enumerate(roles)))
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    placements = tuple(
        Placement(draw(st.integers(0, len(shape) - 1)))
        if shape and axis.role == "shard" and draw(st.booleans())
        else REPLICATE
        for axis in mesh.axes
    )
    return mesh, shape, placements


@given(layouts())
def test_regions_of_all_shards_tile_the_tensor(case: tuple[Mesh, Shape, Placements]) -> None:
    mesh, shape, placements = case
    copies = 1
    for axis, placement in zip(mesh.axes, placements, strict=True):
        if axis.role == "shard" and placement.shard_dim is None:
            copies *= axis.size
    regions = [mesh.local_region(shape, placements, shard) for shard in range(mesh.num_shards)]
    full = [region for region in regions if region.num_elements]
    assert all(full.count(region) == copies for region in full)
    assert find_tiling_error(shape, list(dict.fromkeys(full))) is None


@given(layouts())
def test_owners_are_the_distinct_regions(case: tuple[Mesh, Shape, Placements]) -> None:
    mesh, shape, placements = case
    owners = list(mesh.owners(shape, placements))
    regions = [region for _, region in owners]
    assert len({region.offsets for region in regions}) == len(regions)
    assert find_tiling_error(shape, regions) is None
    for shard, region in owners:
        assert region == mesh.local_region(shape, placements, shard)
    everywhere = {mesh.local_region(shape, placements, shard) for shard in range(mesh.num_shards)}
    assert {r for r in everywhere if r.num_elements} == {r for r in regions if r.num_elements}


@given(layouts())
def test_ranks_and_coords_are_row_major(case: tuple[Mesh, Shape, Placements]) -> None:
    mesh = case[0]
    coords = [mesh.coord(rank) for rank in range(mesh.size)]
    assert coords == sorted(set(coords))
    readers = Counter(mesh.shard_of_rank(rank) for rank in range(mesh.size))
    assert readers == dict.fromkeys(range(mesh.num_shards), mesh.size // mesh.num_shards)


def test_trailing_shards_are_short_then_empty() -> None:
    mesh = parse_mesh(None, 4)
    regions = [mesh.local_region((5, 2), (Placement(0),), shard) for shard in range(4)]
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
    assert [mesh.shard_of_rank(rank) for rank in range(6)] == [0, 1, 2, 0, 1, 2]
    assert list(mesh.owners((), (REPLICATE, REPLICATE))) == [(0, full_region(()))]


@pytest.mark.parametrize(
    ("text", "world_size", "axes"),
    [
        (None, 3, (("dp_shard", 3, "shard"),)),
        ("dp_shard=4", None, (("dp_shard", 4, "shard"),)),
        ("dp_replicate=2, dp_shard=16", 32, (("dp_replicate", 2, "replicate"), ("dp_shard", 16, "shard"))),
        ("r:replicate=2,f:shard=8", None, (("r", 2, "replicate"), ("f", 8, "shard"))),
        ("dp_shard:shard=8", None, (("dp_shard", 8, "shard"),)),
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
        ("tp=2,dp_shard=4", None, "not supported yet"),
        ("dp_shard=2,dp_shard=2", None, "named twice"),
        ("dp_replicate=2", None, "shards nothing"),
        ("dp_shard=2,dp_replicate=2", None, "replicate axes come before"),
        ("a:shard=2,b:shard=2", None, "one shard axis"),
    ],
)
def test_refuses(text: str | None, world_size: int | None, message: str) -> None:
    with pytest.raises(MeshError, match=message):
        parse_mesh(text, world_size)


@pytest.mark.parametrize("text", ["R", "S(0)", "S(12)"])
def test_placements_are_read_as_they_are_written(text: str) -> None:
    assert str(Placement.parse(text)) == text


@pytest.mark.parametrize("text", ["", "S", "S(-1)", "P(sum)", "S(0", "r"])
def test_unknown_placements_are_refused(text: str) -> None:
    with pytest.raises(LayoutError, match="unknown placement"):
        Placement.parse(text)
