"""The device mesh: named axes, the role of each, and how placements cut a tensor over them.

A mesh is described by axis names and sizes, outermost first, as `init_device_mesh` takes them. Ranks that
differ only on replicate axes hold the same bytes. So files belong to a *shard coordinate*: the position on
the shard axes alone, numbered row-major.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from shardkit.core.regions import Region, Shape, split_dim
from shardkit.core.text import escape, suggestion
from shardkit.errors import LayoutError, MeshError

Role = Literal["replicate", "shard"]

# Names from torchtitan's and transformers' meshes. shardkit knows tp, ep and pp, so that it can refuse them by name:
# it does not support them yet.
ROLES: dict[str, Role] = {"dp_replicate": "replicate", "dp_shard": "shard"}
LATER_AXES = ("tp", "ep", "pp")

_MAX_RANKS = 1 << 17  # every rank is a file, and a typing error should not cost hours of planning

_AXIS = re.compile(r"([A-Za-z_]\w{0,63})(?::(replicate|shard))?=(\d{1,9})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the mesh."""

    name: str
    size: int
    role: Role


@dataclass(frozen=True, slots=True)
class Placement:
    """What one axis does to a tensor: it cuts `shard_dim`, or replicates where that is None."""

    shard_dim: int | None = None

    def __str__(self) -> str:
        return "R" if self.shard_dim is None else f"S({self.shard_dim})"

    @classmethod
    def parse(cls, text: str) -> Placement:
        """Return the placement that `str()` wrote.

        Raises:
            LayoutError: not a placement that shardkit knows.
        """
        match = re.fullmatch(r"R|S\(([0-9]{1,3})\)", text)
        if match is None:
            raise LayoutError(f"unknown placement {escape(text)!r}")
        return cls(None if match.group(1) is None else int(match.group(1)))


REPLICATE = Placement()
Placements = tuple[Placement, ...]
"""One placement for each mesh axis, in mesh order."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Axis names, sizes and roles, outermost first."""

    axes: tuple[Axis, ...]

    @property
    def size(self) -> int:
        """Number of ranks, the world size."""
        return prod(axis.size for axis in self.axes)

    @property
    def num_shards(self) -> int:
        """Number of shard coordinates, which is the number of files."""
        return prod(axis.size for axis in self.axes if axis.role == "shard")

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return tuple(axis.size for axis in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the axes."""
        return tuple(axis.name for axis in self.axes)

    def __str__(self) -> str:
        return ",".join(f"{axis.name}={axis.size}" for axis in self.axes)

    def coord(self, rank: int) -> tuple[int, ...]:
        """Return a rank's position on each axis (row-major, as torch numbers a mesh)."""
        return _unravel(rank, self.shape)

    def shard_of_rank(self, rank: int) -> int:
        """Return the shard coordinate of `rank`. It reads the file `__<coordinate>_0.distcp`."""
        shard = 0
        for axis, index in zip(self.axes, self.coord(rank), strict=True):
            if axis.role == "shard":
                shard = shard * axis.size + index
        return shard

    def local_region(self, shape: Shape, placements: Placements, shard: int) -> Region:
        """Return the part of a tensor that the ranks of a shard coordinate own.

        Args:
            shape: global shape in elements.
            placements: one for each axis, in mesh order.
            shard: shard coordinate, 0 <= shard < num_shards.

        Returns:
            Region in elements. An empty one starts at the end of its dim.

        Source: torch 2.13, torch.distributed.tensor._utils.compute_local_shape_and_global_offset.
        """
        offsets, sizes = [0] * len(shape), list(shape)
        for axis, index, placement in zip(self.axes, self._shard_position(shard), placements, strict=True):
            dim = placement.shard_dim
            if dim is None or axis.role == "replicate":
                continue
            offset, sizes[dim] = split_dim(sizes[dim], axis.size, index)
            offsets[dim] = offsets[dim] + offset if sizes[dim] else shape[dim]
        return Region(tuple(offsets), tuple(sizes))

    def owners(self, shape: Shape, placements: Placements) -> Iterator[tuple[int, Region]]:
        """Yield (shard coordinate, region) for every distinct region, at the first coordinate that holds it.

        A tensor that no axis cuts comes once, at coordinate 0. Trailing empty regions share their offsets, so
        they are one region and also come once, as `dcp.save` writes them.
        """
        dims = [p.shard_dim for a, p in zip(self.axes, placements, strict=True) if a.role == "shard"]
        if all(dim is None for dim in dims):
            yield 0, Region((0,) * len(shape), shape)
            return
        if len(dims) == 1 and dims[0] is not None:  # one shard axis: every FSDP and HSDP mesh
            yield from self._owners_along(shape, dims[0])
            return
        seen: set[Shape] = set()
        for shard in range(self.num_shards):
            region = self.local_region(shape, placements, shard)
            if region.offsets not in seen:
                seen.add(region.offsets)
                yield shard, region

    def _owners_along(self, shape: Shape, dim: int) -> Iterator[tuple[int, Region]]:
        """Yield the regions of one shard axis without a call for each: a thousand ranks have 600,000."""
        size, before, after = shape[dim], shape[:dim], shape[dim + 1 :]
        zeros_before, zeros_after = (0,) * len(before), (0,) * len(after)
        step = -(-size // self.num_shards)
        whole = (*before, step, *after)
        for shard in range(self.num_shards):
            start = shard * step
            if start >= size:
                yield shard, Region((*zeros_before, size, *zeros_after), (*before, 0, *after))
                return
            sizes = whole if start + step <= size else (*before, size - start, *after)
            yield shard, Region((*zeros_before, start, *zeros_after), sizes)

    def _shard_position(self, shard: int) -> tuple[int, ...]:
        """Return the position on each axis of a shard coordinate's first replica."""
        return _unravel(shard, [axis.size if axis.role == "shard" else 1 for axis in self.axes])


def _unravel(index: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the position of a row-major index."""
    position = []
    for size in reversed(sizes):
        index, at = divmod(index, size)
        position.append(at)
    return tuple(reversed(position))


def parse_mesh(text: str | None, world_size: int | None) -> Mesh:
    """Return the mesh that `--mesh` and `--world-size` describe together.

    Args:
        text: such as "dp_replicate=2,dp_shard=16". Unknown names state their role, as in
            "replica:replicate=2,fsdp:shard=8". None for one axis `dp_shard` of `world_size`.
        world_size: number of ranks; None takes the mesh's.

    Raises:
        MeshError: neither is given, the text cannot be read, the two disagree, an axis is repeated or
            unknown, or a replicate axis follows a shard axis.
    """
    if text is None:
        if world_size is None:
            raise MeshError("no mesh given", hint="pass --world-size N, or --mesh dp_replicate=2,dp_shard=16")
        if world_size < 1:
            raise MeshError(f"--world-size must be at least 1, not {world_size}")
        _check_size(world_size)
        return Mesh((Axis("dp_shard", world_size, "shard"),))
    mesh = Mesh(tuple(_parse_axis(part.strip()) for part in text.split(",")))
    _check_axes(mesh)
    _check_size(mesh.size)
    if world_size is not None and world_size != mesh.size:
        raise MeshError(
            f"--mesh {mesh} has {mesh.size} ranks, --world-size says {world_size}",
            hint="give one of the two, or make them agree",
        )
    return mesh


def _check_size(num_ranks: int) -> None:
    if num_ranks > _MAX_RANKS:
        raise MeshError(f"{num_ranks} ranks are more than shardkit plans for: the limit is {_MAX_RANKS}")


def _parse_axis(part: str) -> Axis:
    match = _AXIS.fullmatch(part)
    if match is None:
        raise MeshError(
            f"not a mesh axis: {escape(part)!r}",
            hint="write NAME=SIZE, as in dp_replicate=2,dp_shard=16, or NAME:replicate=2, NAME:shard=8",
        )
    name, role, size = match.group(1), match.group(2), int(match.group(3))
    if name in LATER_AXES:
        raise MeshError(
            f"mesh axis {name!r} is not supported yet: only data-parallel axes (dp_replicate, dp_shard) are",
            hint="pre-shard for the dp_shard axis alone",
        )
    known = ROLES.get(name)
    if known and role and role != known:
        raise MeshError(f"mesh axis {name!r} has the role {known}, not {role}")
    if not (known or role):
        raise MeshError(
            f"mesh axis {name!r} has no known role{suggestion(name, ROLES)}",
            hint=f"say what it does: {name}:shard={size} or {name}:replicate={size}",
        )
    if size < 1:
        raise MeshError(f"mesh axis {name!r} must have a size of at least 1, not {size}")
    return Axis(name, size, known or role)  # type: ignore[arg-type]  # the pattern admits only the two roles


def _check_axes(mesh: Mesh) -> None:
    if len(set(mesh.names)) != len(mesh.names):
        raise MeshError(f"a mesh axis is named twice: {', '.join(mesh.names)}")
    roles = [axis.role for axis in mesh.axes]
    if "shard" not in roles:
        raise MeshError(f"mesh {mesh} shards nothing", hint="add a dp_shard axis")
    if "replicate" in roles[roles.index("shard") :]:
        raise MeshError(
            f"mesh {mesh}: replicate axes come before shard axes (fully_shard takes them by position)",
            hint="write the replicate axis first",
        )
    if roles.count("shard") > 1 or roles.count("replicate") > 1:
        raise MeshError(
            f"mesh {mesh}: fully_shard takes one shard axis and at most one replicate axis",
            hint="multiply the sizes of axes with the same role into one",
        )
