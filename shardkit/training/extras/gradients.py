"""Compute the gradient norm of a sharded model, and clip gradients by it.

A rank's own parts give a part of the norm. Each parameter's norm is summed over exactly those axes of its
mesh that cut it, or over the ranks that share an FSDP1 unit. So parameters on different meshes (such as
tensor-parallel ones), replicated ones and plain ones add up correctly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit._torch import Fsdp1Unit, foreach_norms, foreach_scale_, is_fsdp1_part
from shardkit.core.keywords import suggests_keywords
from shardkit.errors import ShardkitError, UsageError
from shardkit.training.ranks.local import cut_axes, fsdp1_units, local_tensor, reshard

Parameters = nn.Module | torch.Tensor | Iterable[torch.Tensor]


@dataclass(slots=True, kw_only=True)
class _SharedGradients:
    """Gradients that are cut over the same ranks."""

    groups: tuple[dist.ProcessGroup, ...] = ()
    """Groups to sum over, one after the other; empty if every rank has whole gradients."""
    device: torch.device | str = "cpu"
    """Device for communication in `groups`; offloaded gradients are on another one."""
    tensors: list[torch.Tensor] = field(default_factory=list)
    """This rank's parts, without empty ones."""


@suggests_keywords
@torch.no_grad()
def grad_norm(parameters: Parameters, norm_type: float = 2.0) -> torch.Tensor:
    """Return the norm of all gradients together, as one process with the whole model would compute it.

    Every rank calls it, with the same parameters. Gradients that are None count as zero,
    even if only some ranks lack them. Gradients in half precision are accumulated in fp32.

    Args:
        parameters: a model, which may contain roots of FSDP2, FSDP1 and DDP at any depth, or be a LightningModule that
            its strategy has wrapped. Or parameters: DTensors on any meshes, and plain ones whose gradients are equal
            on all ranks.
        norm_type: 2.0, any other positive order, or `inf`.

    Returns:
        A plain tensor without dims, fp32 (fp64 if a gradient is), equal on every rank.

    Raises:
        UsageError: parameters of FSDP1 are given without their model, FSDP1 is used over tensor parallelism, gradients
            of FSDP1 are not reduced yet, or the order is not positive.
    """
    return _norm(*_parameters(parameters), norm_type)


@suggests_keywords
@torch.no_grad()
def clip_grad_norm_(
    parameters: Parameters, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scale all gradients in place so that their norm is at most `max_norm`; return the norm before.

    Args:
        parameters: as for `grad_norm`.
        max_norm: limit for the whole model, not for a rank's part.
        norm_type: as for `grad_norm`.
        error_if_nonfinite: raise an error if the norm is infinite or not a number. Otherwise the gradients become so
            too.

    Raises:
        UsageError: as for `grad_norm`.
        ShardkitError: the norm is not finite; no gradient was changed.
    """
    unique, units = _parameters(parameters)
    norm = _norm(unique, units, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise ShardkitError(
            f"the gradient norm of order {norm_type} is {norm.item()}",
            hint="no gradient was changed; skip this step, or look for the batch that caused it",
        )
    # The arithmetic of torch.nn.utils.clip_grad_norm_, without a branch, for which a GPU would have to synchronise.
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    parts: dict[torch.device, list[torch.Tensor]] = {}
    for parameter in unique:
        if parameter.grad is not None:
            local = local_tensor(parameter.grad)
            parts.setdefault(local.device, []).append(local)
    for device, tensors in parts.items():
        foreach_scale_(tensors, factor.to(device))
    return norm


def _parameters(parameters: Parameters) -> tuple[list[torch.Tensor], Mapping[int, Fsdp1Unit]]:
    """Return (each parameter once, so that ties do not count twice; id of parameter -> FSDP1 unit)."""
    units: dict[int, Fsdp1Unit] = {}
    if isinstance(parameters, nn.Module):
        reshard(parameters)  # gathered copies have no gradients
        units = fsdp1_units(parameters)
        parameters = parameters.parameters()
    if isinstance(parameters, torch.Tensor):
        parameters = (parameters,)
    unique = list({id(parameter): parameter for parameter in parameters}.values())
    _refuse_fsdp1(unique, units)
    return unique, units


def _refuse_fsdp1(parameters: list[torch.Tensor], units: Mapping[int, Fsdp1Unit]) -> None:
    """Raise an error, on every rank and before communication, for gradients that cannot be summed correctly."""
    if any(is_fsdp1_part(parameter) and id(parameter) not in units for parameter in parameters):
        raise UsageError(
            "parameters of FSDP1 do not say which ranks hold their other parts",
            hint="give the whole model that FSDP1 has wrapped, not its parameters or a part of it",
        )
    if any(unit.has_dtensors for unit in units.values()):
        raise UsageError(
            "FSDP1 has made flat parameters of tensor-parallel ones, which cannot be told apart",
            hint="use fully_shard (FSDP2) together with tensor parallelism",
        )
    if any(p.grad is not None and p.grad.shape != p.shape for p in parameters if id(p) in units):
        raise UsageError(
            "gradients of FSDP1 are not reduced yet: backward ran inside no_sync()",
            hint="run the last backward before a step outside no_sync()",
        )


def _norm(parameters: list[torch.Tensor], units: Mapping[int, Fsdp1Unit], norm_type: float) -> torch.Tensor:
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise UsageError(f"norm_type cannot be {norm_type}", hint="give 2.0, another positive number, or inf")
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    is_double = any(gradient.dtype == torch.float64 for gradient in gradients)
    dtype = torch.float64 if is_double else torch.float32
    device = gradients[0].device if gradients else torch.device("cpu")
    powers = [_reduce_share(share, norm_type, dtype).to(device) for share in _shares(parameters, units)]
    if not powers:
        return torch.zeros((), dtype=dtype, device=device)
    stacked = torch.stack(powers)
    return stacked.amax() if math.isinf(norm_type) else stacked.sum() ** (1.0 / norm_type)


def _shares(parameters: list[torch.Tensor], units: Mapping[int, Fsdp1Unit]) -> list[_SharedGradients]:
    """Group gradients by the ranks over which they are cut.

    The collectives depend on parameters, not on gradients, so that a rank without a gradient does not miss one.
    """
    shares: dict[object, _SharedGradients] = {}
    for parameter in parameters:
        share = _share_of(parameter, units.get(id(parameter)), shares)
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
            # Tensor parallelism may leave partial sums.
            if gradient.placements != parameter.placements:
                gradient = gradient.redistribute(placements=parameter.placements)
        if gradient is not None and (local := local_tensor(gradient)).numel():
            share.tensors.append(local)
    return list(shares.values())


def _share_of(
    parameter: torch.Tensor, unit: Fsdp1Unit | None, shares: dict[object, _SharedGradients]
) -> _SharedGradients:
    """Return the share to which a parameter belongs, adding it if it is new."""
    if unit is not None and unit.group is not None:
        return shares.setdefault(unit.group, _SharedGradients(groups=(unit.group,), device=unit.device))
    if isinstance(parameter, DTensor):
        mesh, axes = parameter.device_mesh, cut_axes(parameter)
        if axes and (mesh, axes) not in shares:
            groups = tuple(map(mesh.get_group, axes))
            shares[mesh, axes] = _SharedGradients(groups=groups, device=mesh.device_type)
        if axes:
            return shares[mesh, axes]
    return shares.setdefault(None, _SharedGradients())


def _reduce_share(share: _SharedGradients, norm_type: float, dtype: torch.dtype) -> torch.Tensor:
    """Return the sum of |x|^norm_type over gradients on all their ranks, or their largest |x| for `inf`."""
    is_max = math.isinf(norm_type)
    total = torch.zeros((), dtype=dtype)
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in share.tensors:
        by_kind.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for tensors in by_kind.values():
        norms = torch.stack(foreach_norms(tensors, norm_type, dtype))
        part = norms.amax() if is_max else (norms**norm_type).sum()
        total = total.to(part.device)
        total = torch.maximum(total, part) if is_max else total + part
    if share.groups:
        total = total.to(share.device)
    for group in share.groups:
        dist.all_reduce(total, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group)
    return total
