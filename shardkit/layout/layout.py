"""Which rank stores which regions of each tensor: a mesh, a placement for each tensor, units and ties."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from shardkit.core.mesh import Mesh, Placements
from shardkit.core.regions import Region, Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """The parameters that one `fully_shard` call manages; the root unit has the path ""."""

    path: str
    """Module path, e.g. "model.layers.0"."""
    class_name: str | None
    """The module's class, None where no model was at hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLayout:
    """How one tensor of the live model's state dict is placed."""

    fqn: str
    shape: Shape
    """Global shape in elements."""
    placements: Placements
    """One for each mesh axis."""
    unit: int
    """Index into `Layout.units`; buffers and unsharded parameters stand in their module's unit."""
    is_buffer: bool = False

    @property
    def is_sharded(self) -> bool:
        """True where some axis cuts the tensor."""
        return any(placement.shard_dim is not None for placement in self.placements)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A mesh and the placement of every tensor.

    Ties are resolved: a group's first name is the one that has a `TensorLayout`, the others are its aliases.
    """

    origin: Literal["traced", "declared"]
    """Whether a real model was wrapped, or rules were applied to names and shapes."""
    mesh: Mesh
    units: tuple[Unit, ...]
    """In forward order: the root first, because its parameters are needed first."""
    tensors: dict[str, TensorLayout]
    """By name, in any order: files have an order of their own, whatever the units are."""
    ties: tuple[tuple[str, ...], ...] = ()
    """Groups of names that are one parameter in the live model; every name is in its `state_dict()`.
    The first name is the one whose bytes are stored."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """The source's name of every tensor, and of those aliases that it has; the model may have others."""
    omitted: tuple[tuple[str, str], ...] = ()
    """(name, reason) of source tensors that the live model does not load."""
    keep_fp32: frozenset[str] | None = None
    """Names that the model's class has in fp32 under the half precision that `--dtype` asks for; None where that is not
    known."""
    policy: str = "auto"
    """The wrap policy as it was asked for."""
    notes: tuple[str, ...] = ()
    """What a person should be told about this layout."""

    def owners(self, fqn: str) -> Iterator[tuple[int, Region]]:
        """Yield (shard coordinate, region) of every stored chunk of a tensor."""
        tensor = self.tensors[fqn]
        return self.mesh.owners(tensor.shape, tensor.placements)
