"""Which rank stores which regions of each tensor; and the layout that FSDP2's rule gives without a model.

A layout is a mesh, a placement for each tensor, units and ties. FSDP2 places every parameter as `Shard(0)` on
the shard axis and replicates buffers. A name does not show whether a tensor is a buffer. In doubt the rule
replicates, because `dcp.load` reads a tensor either way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

from shardkit.core.catalog import TensorEntry
from shardkit.core.mesh import Mesh
from shardkit.core.placements import REPLICATE, HeldRegion, Placement, Placements
from shardkit.core.regions import Region, Shape
from shardkit.core.text import escape
from shardkit.errors import LayoutError, PolicyError
from shardkit.files.manifest import Unit
from shardkit.keys.expressions import Expression
from shardkit.keys.ties import stored_ties
from shardkit.layout.wrap_policy import (
    WrapPolicy,
    list_candidates,
    match_paths,
    parse_policy,
    path_templates,
    unknown_names_error,
)


class CannotBuildError(LayoutError):
    """No model can be built from the config. This is about the model, not about the policy or the mesh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLayout:
    """How one tensor of the live model's state dict is placed."""

    fqn: str
    shape: Shape
    """Global shape in elements."""
    placements: Placements
    """One for each axis of its mesh."""
    unit: int
    """Index into `Layout.units`. Buffers and unsharded parameters belong to their module's unit."""
    is_buffer: bool = False
    mesh: Mesh | None = None
    """The tensor's own mesh over the same ranks, such as the mesh of experts; None for the layout's mesh."""
    stage: int | None = None
    """The pipeline stage that stores the tensor; None without pipeline parallelism."""

    @property
    def is_sharded(self) -> bool:
        """True if some axis cuts the tensor."""
        return any(placement.shard_dim is not None for placement in self.placements)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A mesh and the placement of every tensor, which may lie on a mesh of its own over the same ranks.

    Ties are resolved: the first name of a group has a `TensorLayout`, the others are its aliases.
    """

    origin: Literal["traced", "declared"]
    """Whether a real model was wrapped, or rules were applied to names and shapes."""
    mesh: Mesh
    units: tuple[Unit, ...]
    """Units in forward order. The root is first, because its parameters are needed first."""
    tensors: dict[str, TensorLayout]
    """Tensors by name, in any order: files have their own order, whatever the units are."""
    ties: tuple[tuple[str, ...], ...] = ()
    """Groups of names that are one parameter in the live model. Every name is in its `state_dict()`, and the
    bytes are stored under the first."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Name in the model -> name in the source, for every tensor and for those aliases that the source has too."""
    expressions: Mapping[str, Expression] = field(default_factory=dict)
    """Name in `sources` -> how it is made of stored tensors, where the source lacks it, as with fused experts."""
    omitted: tuple[tuple[str, str], ...] = ()
    """(name, reason) of source tensors that the live model does not load."""
    keep_fp32: frozenset[str] | None = None
    """Names that the model's class keeps in fp32 under a `--dtype` of half precision; None if not known."""
    policy: str = "auto"
    """The wrap policy as the user wrote it."""
    notes: tuple[str, ...] = ()
    """Remarks about this layout, to be shown to the user."""

    def owners(self, fqn: str) -> Iterator[tuple[int, Region]]:
        """Yield (lowest rank that holds it, region) of every stored chunk of a tensor."""
        tensor = self.tensors[fqn]
        return self.mesh_of(fqn).owners(tensor.shape, tensor.placements)

    def held(self, fqn: str, rank: int) -> list[HeldRegion]:
        """Return the parts of a tensor that a rank holds: one, or several if a dim is packed."""
        tensor = self.tensors[fqn]
        return self.mesh_of(fqn).held(tensor.shape, tensor.placements, rank)

    def not_for_stock(self) -> list[str]:
        """Return the tensors that stock `dcp.load` would fill wrongly, as it computes other regions for the ranks."""
        return [
            name
            for name, tensor in self.tensors.items()
            if not (tensor.mesh or self.mesh).is_read_by_stock(tensor.shape, tensor.placements)
        ]

    def mesh_of(self, fqn: str) -> Mesh:
        """Return the mesh that a tensor lies on: its own or the layout's, reduced to the ranks of its stage."""
        tensor = self.tensors[fqn]
        mesh = tensor.mesh or self.mesh
        return mesh if tensor.stage is None else self.mesh.on_stage(tensor.stage, mesh)


UNCHECKED = "names were not checked against a model"

# Buffers of torch's and transformers' modules, by the last segment of their names.
_BUFFERS = frozenset(
    "running_mean running_var num_batches_tracked inv_freq position_ids token_type_ids relative_position_index"
    " masked_bias cos_cached sin_cached e_score_correction_bias final_logits_bias".split()
)


def declare(
    tensors: Mapping[str, TensorEntry],
    mesh: Mesh,
    wrap: str,
    config: Mapping[str, Any] | None,
    *,
    reason: str = "",
) -> Layout:
    """Lay tensors out by FSDP2's rule: `Shard(0)` on the shard axis, buffers replicated.

    Args:
        tensors: by name.
        mesh: at most one replicate axis, then one shard axis.
        wrap: `auto` makes a unit of each child of an outermost numbered container ("model.layers.N."), `none`
            makes one unit. Module paths are matched against the tensor names.
        config: the content of config.json, for ties; or None.
        reason: why no model was traced, for the note and for errors.

    Returns:
        Layout of origin "declared".

    Raises:
        PolicyError: the policy or the mesh needs the model, or the policy matches no module path.
    """
    if mesh.pp > 1:
        raise PolicyError(
            f"--mesh {mesh}: assigning tensors to pipeline stages needs the model, and {reason or 'there is no model'}",
            hint="pre-shard without pp; stock dcp.load reads that into any stage",
        )
    axes = [axis.name for axis in mesh.axes if axis.role == "tensor"] + ["ep"] * (mesh.ep > 1)
    if axes:
        raise PolicyError(
            f"--mesh {mesh}: how weights are cut over {axes[0]} needs the model, and {reason or 'there is no model'}",
            hint="say it with --parallel-rule 'GLOB=colwise', or pre-shard for dp_replicate and dp_shard alone: stock "
            "dcp.load reads that into any mesh",
        )
    ties = stored_ties({fqn: entry.shape for fqn, entry in tensors.items()}, config)
    aliases = {name for group in ties for name in group[1:]}
    kept = [entry for fqn, entry in tensors.items() if fqn not in aliases]
    paths = _unit_paths(parse_policy(wrap), tensors, reason)
    units = ("", *paths)
    unit_of = {path: index for index, path in enumerate(units)}
    placed = [_place(entry, mesh, innermost_unit(entry.fqn, unit_of)) for entry in kept]
    return Layout(
        origin="declared",
        mesh=mesh,
        units=tuple(Unit(path=path, class_name=None) for path in units),
        tensors={tensor.fqn: tensor for tensor in placed},
        ties=ties,
        sources={fqn: fqn for fqn in tensors},
        policy=wrap,
        notes=(f"{UNCHECKED}: {reason}" if reason else UNCHECKED,),
    )


def _place(entry: TensorEntry, mesh: Mesh, unit: int) -> TensorLayout:
    """Place a tensor by its dtype, shape and name, as there is no model to say which tensors are buffers.

    Scalars stay whole because FSDP2 refuses them. Every integer tensor counts as a buffer: only quantised models have
    integer parameters, and those that preshard recognises were refused or dequantised before.
    """
    is_buffer = entry.dtype.kind in ("int", "bool") or entry.fqn.rpartition(".")[2] in _BUFFERS
    sharded = Placement(0) if entry.shape and not is_buffer else REPLICATE
    placements: Placements = tuple(sharded if axis.role == "shard" else REPLICATE for axis in mesh.axes)
    return TensorLayout(
        fqn=entry.fqn, shape=entry.shape, placements=placements, unit=unit, is_buffer=is_buffer
    )


def innermost_unit(fqn: str, index: Mapping[str, int]) -> int:
    """Return the index of the innermost unit that contains a tensor. The root contains all and has index 0."""
    return next((index[path] for path in _enclosing_paths(fqn) if path in index), 0)


def _enclosing_paths(path: str) -> Iterator[str]:
    """Yield the paths that enclose a module or tensor, innermost first: for "a.b.c", "a.b" and then "a"."""
    while path := path.rpartition(".")[0]:
        yield path


def _unit_paths(policy: WrapPolicy, fqns: Iterable[str], reason: str) -> list[str]:
    """Return the paths of the units of a policy, found from names alone.

    Args:
        policy: the policy.
        fqns: names of the tensors.
        reason: why there is no model, for messages; empty if unknown.

    Raises:
        PolicyError: the policy needs a model, or matches nothing.
    """
    if policy.kind == "none":
        return []
    if policy.kind == "function":
        raise PolicyError(
            f"--wrap {escape(policy.text)}: a function is called with the model, and {reason or 'there is no model'}",
            hint="--wrap auto, none and module paths (model.layers) work without a model",
        )
    if policy.kind == "auto":
        containers = find_containers(fqns)
        if not containers:
            raise PolicyError(
                "--wrap auto: no numbered container (as in model.layers.0.) among the tensor names",
                problems=list_candidates(path_templates(_module_paths(fqns))),
                hint="name one of these module paths, or --wrap none for one unit",
            )
        return [f"{path}.{index}" for path, size in containers.items() for index in range(size)]
    return _named_paths(policy, fqns, reason)


def _named_paths(policy: WrapPolicy, fqns: Iterable[str], reason: str) -> list[str]:
    """Return the paths that a policy's names match; arguments and errors are those of `_unit_paths`."""
    modules = _module_paths(fqns)
    matched = {name: match_paths(name, modules) for name in policy.names}
    unknown = [name for name, paths in matched.items() if not paths]
    if unknown:
        why = "class names need the model (transformers and config.json)"
        raise unknown_names_error(
            unknown,
            path_templates(modules),
            what="module paths",
            reason=f"{why}, and {reason}" if reason else why,
        )
    matching = set(chain.from_iterable(matched.values()))
    return _natural_order(path for path in modules if path in matching)


def find_containers(fqns: Iterable[str]) -> dict[str, int]:
    """Return the outermost numbered containers: path to number of children, in order of appearance.

    A container's children are modules named 0 .. n-1 ("model.layers" with "model.layers.0.mlp..."). A
    container inside a child of another (the experts of a layer) does not count.
    """
    children: dict[str, set[str]] = {}
    for fqn in fqns:
        parts = fqn.split(".")
        for index, part in enumerate(parts[:-1]):
            if index and part.isdecimal():
                children.setdefault(".".join(parts[:index]), set()).add(part)
    whole = {
        path: len(names) for path, names in children.items() if names == set(map(str, range(len(names))))
    }
    return {path: size for path, size in whole.items() if whole.keys().isdisjoint(_enclosing_paths(path))}


def _module_paths(fqns: Iterable[str]) -> list[str]:
    """Return every module that the tensor names pass through, parents first."""
    modules: dict[str, None] = {}
    for fqn in fqns:
        parts = fqn.split(".")
        for stop in range(1, len(parts)):
            modules.setdefault(".".join(parts[:stop]))
    return list(modules)


def _natural_order(paths: Iterable[str]) -> list[str]:
    """Sort children of one parent by number (layers.2 before layers.10), parents by first appearance."""
    place: dict[str, int] = {}
    keyed = []
    for path in paths:
        key: list[tuple[int, int]] = []
        parts = path.split(".")
        for stop, part in enumerate(parts, 1):
            position = place.setdefault(".".join(parts[:stop]), len(place))
            key.append((0, int(part)) if part.isdecimal() else (1, position))
        keyed.append((key, path))
    return [path for _, path in sorted(keyed)]
