"""Device meshes: named axes over the ranks of a world, and which rank holds which region of a tensor.

A mesh is a view of the ranks. The main mesh of a layout is given by axis names and sizes, outermost first, as for
`init_device_mesh`. Other meshes are different views of the same ranks: with expert parallelism, dense weights are on
(dp_shard, tp) and experts on (efsdp, ep). Ranks with equal positions on all axes of a mesh hold copies.

With pipeline parallelism each stage is a range of consecutive ranks with its own mesh, and all these meshes are alike. A
tensor is on the mesh of one stage.

Each distinct region of a tensor is stored once, in the file of the lowest rank that holds it. Replicate axes are
outermost in a stage, so files belong to the ranks of its first replica.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod
from typing import Literal

from shardkit.core.placements import HeldRegion, Placements, cuts, held_regions, stock_region
from shardkit.core.regions import Region, Shape
from shardkit.core.text import escape, suggestion
from shardkit.errors import MeshError

Role = Literal["replicate", "shard", "tensor"]

# Names from torchtitan's and transformers' meshes.
ROLES: dict[str, Role] = {
    "dp_replicate": "replicate",
    "dp_shard": "shard",
    "cp": "shard",
    "tp": "tensor",
    "ep": "tensor",
}
_STAGES, _CONTEXT = "pp", "cp"
MAIN_AXES = (_STAGES, *ROLES)
"""Axis names that are allowed in a main mesh without a role."""

_MAX_RANKS = 1 << 17  # each rank is a file, and a typo should not cause hours of planning

_AXIS = re.compile(r"([A-Za-z_]\w{0,63})(?::(replicate|shard|tensor))?=(\d{1,9})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a mesh."""

    name: str
    size: int
    role: Role


Digits = tuple[tuple[int, int], ...]
"""(size, stride) of each part of an axis, outermost first; several if the axis was flattened from several."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Axis names, sizes and roles, outermost first."""

    axes: tuple[Axis, ...]
    steps: tuple[Digits, ...] = ()
    """Digits of each axis; empty if the axes number the ranks of the world row-major."""
    ep: int = 1
    """Main mesh only: number of ranks that hold distinct experts; `experts` is the corresponding mesh."""
    pp: int = 1
    """Main mesh only: number of pipeline stages. The axes describe one stage."""
    ranks: range | None = None
    """Ranks of the stage that this mesh covers; None for all ranks."""

    @property
    def size(self) -> int:
        """Number of positions; of a main mesh, the world size."""
        return self.pp * prod(axis.size for axis in self.axes)

    @property
    def num_shards(self) -> int:
        """Number of ranks in one replica of a stage; only these ranks have files."""
        return prod(axis.size for axis in self.axes if axis.role != "replicate")

    @property
    def file_ranks(self) -> list[int]:
        """The ranks that have files."""
        return [
            first + shard
            for first in range(0, self.size, self.size // self.pp)
            for shard in range(self.num_shards)
        ]

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return tuple(axis.size for axis in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the axes."""
        return tuple(axis.name for axis in self.axes)

    @property
    def digits(self) -> tuple[Digits, ...]:
        """(size, stride) pairs of each axis."""
        return self.steps or tuple(
            ((axis.size, prod(self.shape[index + 1 :])),) for index, axis in enumerate(self.axes)
        )

    @property
    def experts(self) -> Mesh | None:
        """The mesh of experts: replicate axes, then `efsdp` and `ep`; None without expert parallelism."""
        if self.ep == 1:
            return None
        replicas = tuple(axis for axis in self.axes if axis.role == "replicate")
        rest = Axis("efsdp", self.num_shards // self.ep, "shard")
        return Mesh((*replicas, rest, Axis("ep", self.ep, "tensor")))

    def __str__(self) -> str:
        stages = [] if self.pp == 1 else [f"pp={self.pp}"]
        experts = [] if self.ep == 1 else [f"ep={self.ep}"]
        return ",".join([*stages, *(f"{axis.name}={axis.size}" for axis in self.axes), *experts])

    def on_stage(self, stage: int, view: Mesh | None = None) -> Mesh:
        """Return the mesh of a pipeline stage, or another view of the ranks of a stage."""
        size = self.size // self.pp
        return replace(view or self, pp=1, ranks=range(stage * size, (stage + 1) * size))

    def coord(self, rank: int) -> tuple[int, ...]:
        """Return a rank's position on each axis."""
        coord = []
        rank -= self._first
        for digits in self.digits:
            position = 0
            for size, stride in digits:
                position = position * size + rank // stride % size
            coord.append(position)
        return tuple(coord)

    def held(self, shape: Shape, placements: Placements, rank: int) -> list[HeldRegion]:
        """Return the parts of a tensor that a rank holds: one, several if a dim is packed, none on other stages.

        Args:
            shape: global shape in elements.
            placements: one for each axis, in mesh order.
            rank: of the world.
        """
        if self.ranks is not None and rank not in self.ranks:
            return []
        return held_regions(shape, cuts(placements, self.shape), self.coord(rank))

    def is_read_by_stock(self, shape: Shape, placements: Placements) -> bool:
        """True if stock `dcp.load` and `dcp.save` assign to each rank's memory the region that it really holds."""
        return all(placement.split_factor == 1 for placement in placements) or _is_read_by_stock(
            self, shape, placements
        )

    def owners(self, shape: Shape, placements: Placements) -> Iterator[tuple[int, Region]]:
        """Yield (lowest rank that holds it, region) for every distinct region, in row-major order of the regions.

        A tensor that no axis cuts is yielded once, for the first rank. Trailing empty regions share their offsets and are
        therefore yielded once, as `dcp.save` writes them.
        """
        ordered = cuts(placements, self.shape)
        if not ordered:
            yield self._first, Region((0,) * len(shape), shape)
        elif len(ordered) == 1 and ordered[0].num_blocks == 1:  # every FSDP and HSDP mesh
            yield from self._owners_along(shape, ordered[0].dim, ordered[0].axis)
        else:
            yield from _owners(self, shape, placements)

    def _owners_along(self, shape: Shape, dim: int, axis: int) -> Iterator[tuple[int, Region]]:
        """Yield the regions along a single axis; optimised, as a thousand ranks have 600,000 regions."""
        size, before, after = shape[dim], shape[:dim], shape[dim + 1 :]
        zeros_before, zeros_after = (0,) * len(before), (0,) * len(after)
        ranks = _lowest_ranks(self, axis)
        step = -(-size // len(ranks))
        whole = (*before, step, *after)
        for part, rank in enumerate(ranks):
            start = part * step
            if start >= size:
                yield rank, Region((*zeros_before, size, *zeros_after), (*before, 0, *after))
                return
            sizes = whole if start + step <= size else (*before, size - start, *after)
            yield rank, Region((*zeros_before, start, *zeros_after), sizes)

    @property
    def _first(self) -> int:
        return 0 if self.ranks is None else self.ranks.start


@lru_cache(maxsize=64)
def _lowest_ranks(mesh: Mesh, axis: int) -> tuple[int, ...]:
    """Return the lowest rank at each position of an axis."""
    digits = mesh.digits[axis]
    return tuple(
        mesh._first + sum(digit * stride for digit, (_, stride) in zip(place, digits, strict=True))
        for place in product(*(range(size) for size, _ in digits))
    )


@lru_cache(maxsize=256)  # layers are alike
def _is_read_by_stock(mesh: Mesh, shape: Shape, placements: Placements) -> bool:
    ordered = cuts(placements, mesh.shape)
    cutting = {cut.axis for cut in ordered}
    sizes = [axis.size if index in cutting else 1 for index, axis in enumerate(mesh.axes)]
    for coord in product(*map(range, sizes)):
        parts, stock = held_regions(shape, ordered, coord), stock_region(shape, placements, mesh.shape, coord)
        is_empty = stock.num_elements == 0 and sum(part.region.num_elements for part in parts) == 0
        if not is_empty and [part.region for part in parts] != [stock]:
            return False
    return True


@lru_cache(maxsize=256)
def _owners(mesh: Mesh, shape: Shape, placements: Placements) -> tuple[tuple[int, Region], ...]:
    ordered = cuts(placements, mesh.shape)
    lowest = {cut.axis: _lowest_ranks(mesh, cut.axis) for cut in ordered}
    coord, owners = [0] * len(mesh.axes), dict[Shape, tuple[int, Region]]()
    for place in product(*(range(len(ranks)) for ranks in lowest.values())):
        for axis, position in zip(lowest, place, strict=True):
            coord[axis] = position
        rank = mesh._first + sum(ranks[coord[axis]] - mesh._first for axis, ranks in lowest.items())
        for region, _ in held_regions(shape, ordered, coord):
            owner = owners.get(region.offsets)
            # A region without elements may begin where one with elements does.
            if owner is None or (region.num_elements == 0, rank) < (owner[1].num_elements == 0, owner[0]):
                owners[region.offsets] = rank, region
    return tuple(sorted(owners.values(), key=lambda item: item[1]))


def parse_mesh(text: str | None, world_size: int | None) -> Mesh:
    """Return the mesh that `--mesh` and `--world-size` describe together.

    Args:
        text: such as "dp_replicate=2,dp_shard=16", "dp_shard=4,tp=2", "pp=2,dp_shard=4", or
            "dp_shard=4,ep=2", where `ep` is not an additional axis but the way in which the same ranks share experts.
            Unknown names need a role, as in "replica:replicate=2,fsdp:shard=8". None for one axis `dp_shard` of
            `world_size`.
        world_size: number of ranks; None for the size of the mesh.

    Raises:
        MeshError: neither is given, the text cannot be read, the two disagree, an axis is repeated or
            unknown, or the axes are not in the order in which ranks are numbered.
    """
    if text is None:
        if world_size is None:
            raise MeshError("no mesh given", hint="pass --world-size N, or --mesh dp_replicate=2,dp_shard=16")
        if world_size < 1:
            raise MeshError(
                f"--world-size must be at least 1, not {world_size}",
                hint="give the number of ranks that will load it, such as --world-size 8",
            )
        check_size(world_size)
        return Mesh((Axis("dp_shard", world_size, "shard"),))
    axes = [_parse_axis(part.strip()) for part in text.split(",")]
    names = [axis.name for axis in axes]
    mesh = Mesh(tuple(_with_context([axis for axis in axes if axis.name not in ("ep", _STAGES)])))
    _check_axes(mesh, names)
    mesh = _with_experts(mesh, next((axis.size for axis in axes if axis.name == "ep"), 1))
    mesh = replace(mesh, pp=next((axis.size for axis in axes if axis.name == _STAGES), 1))
    check_size(mesh.size)
    if world_size is not None and world_size != mesh.size:
        raise MeshError(
            f"--mesh {mesh} has {mesh.size} ranks, --world-size says {world_size}",
            hint="give one of the two, or make them agree",
        )
    return mesh


def _with_context(axes: list[Axis]) -> list[Axis]:
    """Merge the context-parallel axis into the sharding axis, as trainers do before calling `fully_shard`.

    Source: torchtitan, parallel_dims.py, and accelerate 1.15, parallelism_config.py: dp_shard and cp are flattened,
    dp_shard outermost.
    """
    index = next((index for index, axis in enumerate(axes) if axis.name == _CONTEXT), None)
    without_context = [axis for axis in axes if axis.name != _CONTEXT]
    shards = [axis for axis in without_context if axis.role == "shard"]
    if index is None or len(axes) > len(without_context) + 1 or len(shards) > 1:
        return axes
    cp = axes[index]
    if not shards:
        return [*axes[:index], replace(cp, name="dp_shard"), *axes[index + 1 :]]
    if axes[index - 1] != shards[0] or index == 0:
        raise MeshError(
            f"mesh axis {_CONTEXT!r} comes right after {shards[0].name}: the ranks that share a sequence are neighbours",
            hint=f"write it there, as in {shards[0].name}={shards[0].size},{_CONTEXT}={cp.size}",
        )
    longer = replace(shards[0], size=shards[0].size * cp.size)
    return [*axes[: index - 1], longer, *axes[index + 1 :]]


def _with_experts(mesh: Mesh, ep: int) -> Mesh:
    """Return a mesh with expert parallelism.

    Source: transformers 5.23, DistributedConfig: ep covers whole tp groups, and a replica is ep times efsdp.
    """
    tensor = prod(axis.size for axis in mesh.axes if axis.role == "tensor")
    if ep > 1 and (ep % tensor or mesh.num_shards % ep):
        why = f"is not a multiple of tp={tensor}" if ep % tensor else "does not divide its ranks"
        raise MeshError(
            f"mesh {mesh}: ep={ep} {why}",
            hint=f"ep is a multiple of tp ({tensor}) and divides dp_shard x tp ({mesh.num_shards})",
        )
    return replace(mesh, ep=ep)


def check_size(num_ranks: int) -> None:
    """Refuse a world with too many ranks.

    Raises:
        MeshError: the number exceeds the limit.
    """
    if num_ranks > _MAX_RANKS:
        raise MeshError(f"{num_ranks} ranks are more than shardkit plans for: the limit is {_MAX_RANKS}")


def _parse_axis(part: str) -> Axis:
    match = _AXIS.fullmatch(part)
    if match is None:
        raise MeshError(
            f"not a mesh axis: {escape(part)!r}",
            hint="write NAME=SIZE, as in dp_replicate=2,dp_shard=16 or dp_shard=4,tp=2, or NAME:replicate=2, "
            "NAME:shard=8, NAME:tensor=2",
        )
    name, role, size = match.group(1), match.group(2), int(match.group(3))
    if name == "efsdp":
        raise MeshError(
            "mesh axis 'efsdp' follows from the others", hint="leave it out: it is dp_shard x tp / ep"
        )
    implied_role: Role | None = "replicate" if name == _STAGES else ROLES.get(name)  # stages cut no tensor
    if name == _STAGES and role:
        raise MeshError(f"mesh axis {name!r} has no role", hint=f"write {name}={size}")
    if implied_role and role and role != implied_role:
        raise MeshError(f"mesh axis {name!r} has the role {implied_role}, not {role}")
    if not (implied_role or role):
        raise MeshError(
            f"mesh axis {name!r} has no known role{suggestion(name, ROLES)}",
            hint=f"give its role: {name}:shard={size}, {name}:replicate={size} or {name}:tensor={size}",
        )
    if size < 1:
        raise MeshError(f"mesh axis {name!r} must have a size of at least 1, not {size}")
    return Axis(name, size, implied_role or role)  # type: ignore[arg-type]  # the pattern admits only the roles


def _check_axes(mesh: Mesh, names: list[str]) -> None:
    if len(set(names)) != len(names):
        raise MeshError(f"a mesh axis is named twice: {', '.join(names)}")
    if _STAGES in names[1:]:
        raise MeshError(
            f"mesh axis {_STAGES!r} comes first: the ranks of a stage are neighbours",
            hint=f"write it first, as in {_STAGES}=2,dp_shard=4",
        )
    roles = [axis.role for axis in mesh.axes]
    if "shard" not in roles and ("replicate" in roles or not roles):
        raise MeshError(f"a mesh of {', '.join(names)} alone shards nothing", hint="add a dp_shard axis")
    if "shard" in roles and "replicate" in roles[roles.index("shard") :]:
        raise MeshError(
            f"mesh {mesh}: replicate axes come before shard axes (fully_shard takes them by position)",
            hint="write the replicate axis first",
        )
    if "tensor" in roles[:-1] and roles.count("tensor") == 1:
        raise MeshError(
            f"mesh {mesh}: the tensor-parallel axis comes last, as its ranks are neighbours",
            hint="write it last, as in dp_shard=4,tp=2",
        )
    if any(roles.count(role) > 1 for role in ("replicate", "shard", "tensor")):
        raise MeshError(
            f"mesh {mesh}: fully_shard takes one shard axis and at most one replicate axis, and a tensor is "
            "parallelised over one axis",
            hint="multiply the sizes of axes with the same role into one",
        )
