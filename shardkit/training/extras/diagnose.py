"""Report the result of wrapping a model: units, settings, this rank's share, and problems to expect.

Ranks do not communicate and nothing is changed, so one rank may call it alone, even without a process group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

from shardkit._folding import fold
from shardkit._torch import (
    Fsdp1Unit,
    Fsdp2Unit,
    class_before_sharding,
    fsdp1_unit,
    fsdp2_units,
    is_checkpointed,
    shard_of,
)
from shardkit.core.text import MIB, count, escape, listed
from shardkit.keys.names import clean_name
from shardkit.layout.classes import broken_ties, is_transformers_layer
from shardkit.training.ranks.agree import world
from shardkit.training.ranks.local import distinct_tensors, full_name, local_tensor, with_root

_TOLERANCE = 0.2  # fraction of the expected share; a larger deviation is reported as a problem
_KINDS = {
    "fsdp2": "FSDP2 (fully_shard)",
    "fsdp1": "FSDP1 (FullyShardedDataParallel)",
    "ddp": "DistributedDataParallel: every rank holds everything",
    "tensor-parallel": "DTensors without FSDP",
    "plain": "not wrapped: every rank holds everything",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosedUnit:
    """A unit of FSDP, which may be the root."""

    path: str
    """Path of its module, without wrappers; "" is the model."""
    is_root: bool
    """True if no other unit is around it, so that a forward begins with it."""
    class_name: str
    """Class of the module before wrapping."""
    parameters: int
    """Number of elements of its whole parameters."""
    local_parameters: int
    """Number of these elements on this rank."""
    mesh: str = ""
    """Axes and sizes: "dp_replicate=2, dp_shard=4"."""
    placements: tuple[str, ...]
    """All placements that its parameters have, such as "R, S(0)"."""
    reshard_after_forward: str = ""
    """"True", "False", or the number of ranks that share it after forward; for FSDP1 the sharding strategy."""
    mixed_precision: str = ""
    """Dtypes of computing, reducing and outputs; empty if none is set."""
    cpu_offload: bool = False
    dtypes: tuple[str, ...]
    """Dtypes of its trained parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredParameter:
    """The storage of a parameter (or of a flat parameter of FSDP1) over the ranks."""

    fqn: str
    numel: int
    """Number of elements of the whole parameter."""
    itemsize: int
    local_numel: int
    """Number of elements on this rank."""
    num_parts: int
    """Number of parts into which it is cut."""
    placements: str
    dtype: torch.dtype
    is_trainable: bool
    is_uneven: bool
    """True if its parts differ in size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """A wrapped model as one rank sees it. `str()` is a table; `problems` lists the problems."""

    kind: str
    """"fsdp2", "fsdp1", "ddp", "tensor-parallel" or "plain"."""
    model_class: str
    rank: int
    world_size: int
    units: tuple[DiagnosedUnit, ...]
    """Units in module order, with a root before its inner units."""
    checkpoint_wrappers: int
    """Number of modules whose activations are recomputed in backward, by torch's wrapper or by transformers."""
    parameters: int
    """Number of elements of all whole parameters; tied ones count once."""
    parameter_bytes: int
    """Size of all whole parameters."""
    local_parameters: int
    """Number of elements on this rank."""
    local_bytes: int
    """Size of the parameters on this rank."""
    expected_bytes: int
    """Size on this rank if all parts had equal sizes and no parameter were whole: `parameter_bytes` / `num_parts`,
    unless tensor parallelism cuts some parameters into more parts."""
    num_parts: int
    """Number of parts into which most of the model was cut."""
    uneven: tuple[str, ...]
    """Parameters whose parts differ in size."""
    empty: tuple[str, ...]
    """Parameters of which this rank stores no element."""
    whole: tuple[str, ...]
    """Parameters that are whole on this rank although the model is cut."""
    ties: tuple[tuple[str, ...], ...]
    """Groups of names that are one parameter."""
    broken_ties: tuple[tuple[str, ...], ...]
    """Groups of names that the model's class declares to be one parameter, but that are several."""
    meta: tuple[str, ...]
    """Parameters, buffers and plain tensor attributes without memory."""
    problems: tuple[str, ...]
    """The problems, one sentence each."""

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        return _make_table(self, _KINDS[self.kind])


def diagnose(model: nn.Module) -> Diagnosis:
    """Return a report on a model that is wrapped by FSDP2, FSDP1, DDP, tensor parallelism, or not at all.

    Args:
        model: the model, with weights or on meta, outside of a forward. For a LightningModule, the report includes the
            unit that its strategy has put around it.
    """
    rank, world_size = world()
    model = with_root(model)
    kind = _kind(model)
    stored, units = _read_fsdp1(model) if kind == "fsdp1" else _read_units(model)
    total = sum(p.numel * p.itemsize for p in stored)
    num_parts = _usual_parts(stored)
    diagnosis = Diagnosis(
        kind=kind,
        model_class=plain_class(model),
        rank=rank,
        world_size=world_size,
        units=tuple(units),
        checkpoint_wrappers=sum(map(_is_recomputed, model.modules())),
        parameters=sum(p.numel for p in stored),
        parameter_bytes=total,
        local_parameters=sum(p.local_numel for p in stored),
        local_bytes=sum(p.local_numel * p.itemsize for p in stored),
        expected_bytes=round(sum(_even_share(p, num_parts) for p in stored)),
        num_parts=num_parts,
        uneven=tuple(p.fqn for p in stored if p.is_uneven),
        empty=tuple(p.fqn for p in stored if p.numel and not p.local_numel),
        whole=tuple(p.fqn for p in stored if p.num_parts == 1 < num_parts),
        ties=tuple(
            names
            for names, _, expected in distinct_tensors(model)
            if len(names) > 1 and expected.kind == "parameter"
        ),
        broken_ties=tuple(map(tuple, broken_ties(model))),
        meta=tuple(_on_meta(model)),
        problems=(),
    )
    return replace(diagnosis, problems=tuple(_problems(diagnosis)))


def _kind(model: nn.Module) -> str:
    kinds = {FullyShardedDataParallel: "fsdp1", FSDPModule: "fsdp2", DistributedDataParallel: "ddp"}
    for kind, name in kinds.items():
        if any(isinstance(module, kind) for module in model.modules()):
            return name
    return "tensor-parallel" if any(isinstance(p, DTensor) for p in model.parameters()) else "plain"


def _usual_parts(stored: list[StoredParameter]) -> int:
    """Return the number of parts into which most bytes are cut, not counting parameters that are not cut."""
    weights: dict[int, int] = {}
    for p in stored:
        if p.num_parts > 1:
            weights[p.num_parts] = weights.get(p.num_parts, 0) + p.numel * p.itemsize
    return max(weights, key=lambda parts: weights[parts], default=1)


def _even_share(p: StoredParameter, usual_parts: int) -> float:
    return p.numel * p.itemsize / (p.num_parts if p.num_parts > 1 else usual_parts)


def _on_meta(model: nn.Module) -> Iterator[str]:
    """Yield the names of tensors without memory, with which a forward would compute garbage or fail."""
    for path, module in model.named_modules():
        prefix = f"{clean_name(path)}." if path else ""
        named = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
        attributes = {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}
        yield from (f"{prefix}{name}" for name, tensor in {**named, **attributes}.items() if tensor.is_meta)


def _is_recomputed(module: nn.Module) -> bool:
    if is_checkpointed(module):
        return True
    return is_transformers_layer(module) and bool(getattr(module, "gradient_checkpointing", False))


def _problems(diagnosis: Diagnosis) -> Iterator[str]:
    if len(diagnosis.units) == 1:
        yield "no units: the policy matched nothing, and every forward gathers the whole model at once"
    if diagnosis.num_parts > 1 and diagnosis.expected_bytes:
        share = diagnosis.local_bytes / diagnosis.expected_bytes
        if share > 1 + _TOLERANCE:
            some, why = (
                (diagnosis.whole, "not cut") if diagnosis.whole else (diagnosis.uneven, "cut unevenly")
            )
            yield f"this rank holds {share:.1f} times its share: {count(len(some), 'parameter')} {why} ({listed(some)})"
        elif share < 1 - _TOLERANCE:
            yield f"this rank holds {share:.1f} of its share: dims smaller than the mesh leave more to other ranks"
    for names in diagnosis.broken_ties:
        yield f"{' and '.join(map(escape, names))} should be one parameter, and are not"
    for unit in diagnosis.units if diagnosis.kind == "fsdp2" else ():
        if len(unit.dtypes) > 1:
            yield (
                f"unit {escape(unit.path) or 'root'} trains parameters of {' and '.join(unit.dtypes)}, which FSDP2 "
                "refuses at the first forward"
            )
    if diagnosis.meta:
        yield f"{count(len(diagnosis.meta), 'tensor')} without memory (meta): {listed(diagnosis.meta)}"


def _read_units(model: nn.Module) -> tuple[list[StoredParameter], list[DiagnosedUnit]]:
    """Return parameters and units of a model that is not wrapped by FSDP1."""
    sharded: dict[tuple[int, str], nn.Parameter] = {}
    parts: list[tuple[str, bool, Any, Fsdp2Unit | None]] = []  # FSDPModule is no nn.Module to type checkers
    roots: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, FSDPModule):
            is_root = _is_outermost(path, roots)
            roots += [path] if is_root else []
            groups = list(fsdp2_units(module, is_root=is_root))
            new = [group for group in groups if not sharded.keys() & group.parameters.keys()]
            for group in new:
                sharded.update(group.parameters)
                parts.append((path, is_root, module, group))
            if not groups:
                parts.append((path, is_root, module, None))
    stored: dict[int, StoredParameter] = {}
    for path, module in model.named_modules():
        for name, registered in module.named_parameters(recurse=False):
            parameter = sharded.get((id(module), name), registered)
            stored.setdefault(id(parameter), _describe_parameter(full_name(path, name), parameter))
    return list(stored.values()), [_fsdp2_unit(*part, stored) for part in parts]


def _describe_parameter(fqn: str, parameter: torch.Tensor) -> StoredParameter:
    local, placements, by_dim = local_tensor(parameter), "", dict[int, int]()
    if isinstance(parameter, DTensor):
        for placement, size in zip(parameter.placements, parameter.device_mesh.shape, strict=True):
            cut = shard_of(placement)
            if cut is not None:
                by_dim[cut[0]] = by_dim.get(cut[0], 1) * size
        placements = ", ".join(map(_placement, parameter.placements))
    return StoredParameter(
        fqn=fqn,
        numel=parameter.numel(),
        itemsize=parameter.itemsize,
        local_numel=local.numel(),
        num_parts=prod(by_dim.values()),
        placements=placements,
        dtype=parameter.dtype,
        is_trainable=parameter.requires_grad,
        is_uneven=any(parameter.shape[dim] % parts for dim, parts in by_dim.items()),
    )


def _placement(placement: object) -> str:
    cut = shard_of(placement)
    if cut is None:
        return "R" if isinstance(placement, Replicate) else "P"
    dim, split = cut
    return f"S({dim})" if split == 1 else f"S({dim}) after {split} parts"


def _fsdp2_unit(
    path: str, is_root: bool, module: Any, unit: Fsdp2Unit | None, stored: Mapping[int, StoredParameter]
) -> DiagnosedUnit:
    """Return the description of a module that `fully_shard` wrapped.

    Args:
        path: name of the module.
        is_root: no other wrapped module is around it.
        module: the module.
        unit: FSDP's parameters and settings, or None if all of its parameters belong to units inside it.
        stored: the model's parameters, by `id`.
    """
    if unit is None:
        return _unit(path, is_root, module, [])
    policy = unit.mixed_precision
    precision = {
        "compute": unit.compute_dtypes,
        "reduce": (getattr(policy, "reduce_dtype", None),),
        "output": (getattr(policy, "output_dtype", None),),
    }
    return replace(
        _unit(path, is_root, module, [stored[key] for key in {id(p) for p in unit.parameters.values()}]),
        mesh=_mesh(unit.mesh),
        reshard_after_forward=str(unit.reshard_after_forward),
        mixed_precision=_precision(precision),
        cpu_offload=bool(unit.cpu_offload),
    )


def _unit(path: str, is_root: bool, module: nn.Module, parameters: list[StoredParameter]) -> DiagnosedUnit:
    """Return a unit with some parameters, but without settings."""
    return DiagnosedUnit(
        path=clean_name(path),
        is_root=is_root,
        class_name=plain_class(module),
        parameters=sum(p.numel for p in parameters),
        local_parameters=sum(p.local_numel for p in parameters),
        placements=tuple(sorted({p.placements for p in parameters})),
        dtypes=tuple(sorted({str(p.dtype).removeprefix("torch.") for p in parameters if p.is_trainable})),
    )


def _mesh(mesh: Any) -> str:
    names = mesh.mesh_dim_names or tuple(str(axis) for axis in range(mesh.ndim))
    return ", ".join(f"{name}={size}" for name, size in zip(names, mesh.shape, strict=True))


def _precision(dtypes: Mapping[str, Sequence[torch.dtype | None]]) -> str:
    named = {
        name: [str(d).removeprefix("torch.") for d in used if d is not None] for name, used in dtypes.items()
    }
    return ", ".join(f"{name} {' and '.join(values)}" for name, values in named.items() if values)


def _read_fsdp1(model: nn.Module) -> tuple[list[StoredParameter], list[DiagnosedUnit]]:
    """Return parameters and units of FSDP1, with each flat parameter as one, since it is cut as a whole."""
    stored, units = list[StoredParameter](), list[DiagnosedUnit]()
    flat_ids: set[int] = set()
    roots: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, FullyShardedDataParallel):
            continue
        unit, policy = fsdp1_unit(module), module.mixed_precision
        is_root = _is_outermost(path, roots)
        roots += [path] if is_root else []
        flat_parameters = [_flat_parameter(clean_name(path), unit)] if unit is not None else []
        flat_ids.update(map(id, unit.registered if unit is not None else ()))
        stored += flat_parameters
        precision = {
            "compute": (getattr(policy, "param_dtype", None),),
            "reduce": (getattr(policy, "reduce_dtype", None),),
            "buffers": (getattr(policy, "buffer_dtype", None),),
        }
        described = replace(
            _unit(path, is_root, module, flat_parameters),
            mesh=f"{unit.num_shards} ranks" if unit else "",
            reshard_after_forward=module.sharding_strategy.name,
            mixed_precision=_precision(precision),
            cpu_offload=bool(module.cpu_offload.offload_params),
        )
        units.append(described)
    for name, parameter in model.named_parameters():
        if id(parameter) not in flat_ids:
            stored.append(_describe_parameter(clean_name(name), parameter))
    return stored, units


def _flat_parameter(path: str, unit: Fsdp1Unit) -> StoredParameter:
    numel = sum(unit.numels)
    return StoredParameter(
        fqn=f"{path}.{count(len(unit.fqns), 'parameter')}".lstrip("."),
        numel=numel,
        itemsize=unit.local.itemsize,
        local_numel=unit.local.numel(),
        num_parts=unit.num_shards,
        placements="flat",
        dtype=unit.local.dtype,
        is_trainable=True,
        is_uneven=bool(numel % unit.num_shards),
    )


def _is_outermost(path: str, roots: list[str]) -> bool:
    return not any(not root or path.startswith(f"{root}.") for root in roots)


def plain_class(module: nn.Module) -> str:
    """Return the name of a module's class as it was before wrapping."""
    if isinstance(module, FullyShardedDataParallel):
        return plain_class(module.module)
    return class_before_sharding(module).__name__


def _make_table(diagnosis: Diagnosis, kind: str) -> str:
    """Return a diagnosis as text, with one line for all units of one kind.

    Args:
        diagnosis: the diagnosis.
        kind: `diagnosis.kind` in words.
    """
    lines = [
        f"{escape(diagnosis.model_class)} on rank {diagnosis.rank} of {diagnosis.world_size}: {kind}",
        f"  parameters    {diagnosis.local_parameters:,} of {diagnosis.parameters:,} here: {_mib(diagnosis.local_bytes)} MiB, "
        f"expected {_mib(diagnosis.expected_bytes)} of {_mib(diagnosis.parameter_bytes)}",
        f"  units         {_units(diagnosis)}",
        *(f"    {line}" for line in _settings(diagnosis.units)),
        f"  checkpointed  {count(diagnosis.checkpoint_wrappers, 'module')}",
        *_names("uneven", diagnosis.uneven),
        *_names("empty here", diagnosis.empty),
        *_names("not cut", diagnosis.whole),
        *(f"  tied          {' = '.join(map(escape, names))}" for names in diagnosis.ties),
    ]
    return "\n".join([*lines, *(f"  problem       {problem}" for problem in diagnosis.problems)])


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.2f}"


def _units(diagnosis: Diagnosis) -> str:
    inner = [unit.path for unit in diagnosis.units if not unit.is_root]
    roots = [unit.path for unit in diagnosis.units if unit.is_root]
    if not roots:
        return "none"
    if len(roots) > 1:
        return f"{len(diagnosis.units)}, and nothing around them: {listed(roots)}"
    return f"{len(inner)} and {escape(roots[0]) or 'the root'}{f': {listed(inner)}' if inner else ''}"


def _settings(units: Sequence[DiagnosedUnit]) -> Iterator[str]:
    """Yield one line for each kind of unit: those with equal settings whose paths differ only in numbers."""
    for folded in fold((unit.path, _describe(unit)) for unit in units):
        times = f" ({folded.count})" if folded.count > 1 else ""
        yield f"{escape(folded.pattern) or 'root'}{times}  {folded.key}"


def _describe(unit: DiagnosedUnit) -> str:
    if not unit.mesh:
        return f"{escape(unit.class_name)}, nothing of its own"
    parts = [
        escape(unit.class_name),
        f"{unit.parameters:,} parameters",
        f"mesh {escape(unit.mesh)}",
        f"placed {' and '.join(f'({placed})' for placed in unit.placements)}",
        f"reshard {unit.reshard_after_forward}",
        unit.mixed_precision or "no mixed precision",
        *(["on the CPU"] if unit.cpu_offload else []),
    ]
    return ", ".join(parts)


def _names(title: str, names: Sequence[str]) -> Iterator[str]:
    if names:
        yield f"  {title:<14}{count(len(names), 'parameter')}: {listed(names)}"
