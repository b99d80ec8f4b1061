"""Reading a wrapped model: its units and how each parameter is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate

from shardkit._torch import Fsdp2Unit, class_before_sharding, fsdp1_unit, fsdp2_units, shard_of
from shardkit.core.text import count
from shardkit.training.ranks.context import clean_name


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosedUnit:
    """One unit, the root included."""

    path: str
    """Of its module, without wrappers; "" is the model."""
    is_root: bool
    """No other unit is around it: a forward begins with it."""
    class_name: str
    """Of the module, as it was before wrapping."""
    parameters: int
    """Elements of its parameters, whole."""
    local_parameters: int
    """Elements of them on this rank."""
    mesh: str
    """Axes and sizes: "dp_replicate=2, dp_shard=4"."""
    placements: tuple[str, ...]
    """Every combination that its parameters have, as "R, S(0)"."""
    reshard_after_forward: str
    """"True", "False", or the number of ranks that keep a part; of FSDP1 the sharding strategy."""
    mixed_precision: str
    """dtypes of computing, reducing and outputs; empty where none is set."""
    cpu_offload: bool
    dtypes: tuple[str, ...]
    """Of what is trained in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredParameter:
    """A parameter as it is stored."""

    fqn: str
    numel: int
    """Whole."""
    itemsize: int
    local_numel: int
    num_parts: int
    placements: str
    dtype: torch.dtype
    is_trainable: bool
    is_uneven: bool


def read_units(model: nn.Module) -> tuple[list[StoredParameter], list[DiagnosedUnit]]:
    """Parameters and units of anything but FSDP1."""
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
                parts.append((clean_name(path), is_root, module, group))
            if not groups:
                parts.append((clean_name(path), is_root, module, None))
    stored: dict[int, StoredParameter] = {}
    for path, module in model.named_modules():
        for name, registered in module.named_parameters(recurse=False):
            parameter = sharded.get((id(module), name), registered)
            fqn = clean_name(f"{path}.{name}" if path else name)
            stored.setdefault(id(parameter), describe(fqn, parameter))
    return list(stored.values()), [_unit(*part, stored) for part in parts]


def describe(fqn: str, parameter: torch.Tensor) -> StoredParameter:
    local, placements, by_dim = parameter, "", dict[int, int]()
    if isinstance(parameter, DTensor):
        with torch.no_grad():
            local = parameter.to_local()
        for placement, size in zip(parameter.placements, parameter.device_mesh.shape, strict=True):
            cut = shard_of(placement)
            if cut is not None:
                by_dim[cut[0]] = by_dim.get(cut[0], 1) * size
        placements = ", ".join(map(_placement, parameter.placements))
    return StoredParameter(
        fqn=fqn,
        numel=parameter.numel(),
        itemsize=parameter.element_size(),
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


def _unit(
    path: str,
    is_root: bool,
    module: nn.Module,
    group: Fsdp2Unit | None,
    stored: Mapping[int, StoredParameter],
) -> DiagnosedUnit:
    own = [stored[key] for key in {id(p) for p in group.parameters.values()}] if group else []
    policy = group.mixed_precision if group else None
    precision = {
        "compute": group.compute_dtypes if group else (),
        "reduce": (getattr(policy, "reduce_dtype", None),),
        "output": (getattr(policy, "output_dtype", None),),
    }
    return DiagnosedUnit(
        path=path,
        is_root=is_root,
        class_name=plain_class(module),
        parameters=sum(p.numel for p in own),
        local_parameters=sum(p.local_numel for p in own),
        mesh=_mesh(group.mesh) if group else "",
        placements=tuple(sorted({p.placements for p in own})),
        reshard_after_forward=str(group.reshard_after_forward) if group else "",
        mixed_precision=_precision(precision),
        cpu_offload=bool(group and group.cpu_offload),
        dtypes=tuple(sorted({str(p.dtype).removeprefix("torch.") for p in own if p.is_trainable})),
    )


def _mesh(mesh: Any) -> str:
    names = mesh.mesh_dim_names or tuple(str(at) for at in range(mesh.ndim))
    return ", ".join(f"{name}={size}" for name, size in zip(names, mesh.shape, strict=True))


def _precision(dtypes: Mapping[str, Sequence[torch.dtype | None]]) -> str:
    named = {
        name: [str(d).removeprefix("torch.") for d in each if d is not None] for name, each in dtypes.items()
    }
    return ", ".join(f"{name} {' and '.join(each)}" for name, each in named.items() if each)


def read_fsdp1(model: nn.Module) -> tuple[list[StoredParameter], list[DiagnosedUnit]]:
    """Parameters and units of FSDP1: of a flat parameter only the whole is cut evenly."""
    stored, units = list[StoredParameter](), list[DiagnosedUnit]()
    flat_ids: set[int] = set()
    roots: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, FullyShardedDataParallel):
            continue
        unit, numel, local = fsdp1_unit(module), 0, 0
        is_root = _is_outermost(path, roots)
        roots += [path] if is_root else []
        if unit is not None:
            numel, local = sum(unit.numels), unit.local.numel()
            flat_ids.update(map(id, unit.registered))
            stored.append(
                StoredParameter(
                    fqn=f"{clean_name(path)}.{count(len(unit.fqns), 'parameter')}".lstrip("."),
                    numel=numel,
                    itemsize=unit.local.element_size(),
                    local_numel=local,
                    num_parts=unit.num_shards,
                    placements="flat",
                    dtype=unit.local.dtype,
                    is_trainable=True,
                    is_uneven=bool(numel % unit.num_shards),
                )
            )
        precision = module.mixed_precision
        names = {"compute": "param_dtype", "reduce": "reduce_dtype", "buffers": "buffer_dtype"}
        units.append(
            DiagnosedUnit(
                path=clean_name(path),
                is_root=is_root,
                class_name=plain_class(module.module),
                parameters=numel,
                local_parameters=local,
                mesh=f"{unit.num_shards} ranks" if unit else "",
                placements=("flat",) if unit else (),
                reshard_after_forward=module.sharding_strategy.name,
                mixed_precision=_precision(
                    {text: (getattr(precision, name, None),) for text, name in names.items()}
                ),
                cpu_offload=bool(module.cpu_offload.offload_params),
                dtypes=(str(unit.local.dtype).removeprefix("torch."),) if unit else (),
            )
        )
    for name, parameter in model.named_parameters():
        if id(parameter) not in flat_ids:
            stored.append(describe(clean_name(name), parameter))
    return stored, units


def _is_outermost(path: str, roots: list[str]) -> bool:
    return not any(not root or path.startswith(f"{root}.") for root in roots)


def plain_class(module: nn.Module) -> str:
    """Return the name of a module's class as it was before wrapping."""
    if isinstance(module, FullyShardedDataParallel):
        return plain_class(module.module)
    return class_before_sharding(module).__name__
