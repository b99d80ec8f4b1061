"""The gradient norm of a model that is in parts, and clipping by it.

A rank's own parts give a part of the norm. Each parameter's is summed over exactly those axes of its mesh that cut it:
parameters on different meshes (tensor parallel ones among others), replicated and plain ones add up right.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from shardkit._torch import foreach_norms, foreach_scale_
from shardkit.errors import ShardkitError, UsageError
from shardkit.training.local import reshard

Parameters = nn.Module | torch.Tensor | Iterable[torch.Tensor]


@dataclass(slots=True, kw_only=True)
class _Share:
    """Gradients that are cut by the same axes of one mesh."""

    mesh: DeviceMesh | None
    axes: tuple[int, ...]
    """Axes of the mesh that cut them; none for what every rank has whole."""
    tensors: list[torch.Tensor] = field(default_factory=list)
    """This rank's parts, empty ones left out."""


@torch.no_grad()
def grad_norm(parameters: Parameters, norm_type: float = 2.0) -> torch.Tensor:
    """Return the norm of all gradients together, as one process with the whole model would have it.

    A collective: every rank calls it with the same parameters. Gradients that are None count for nothing, also where
    only some ranks have them. Gradients in half precision are accumulated in fp32.

    Args:
        parameters: a model, or parameters: DTensors on any meshes, and plain ones, whose gradients all ranks have.
        norm_type: 2.0, any other positive order, or `inf`.

    Returns:
        A plain tensor without dims, fp32 (fp64 if there are such gradients), the same on every rank.

    Raises:
        UsageError: a model that FSDP1 wrapped, or an order that is not positive.
    """
    return _norm(_parameters(parameters), norm_type)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Parameters, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scale all gradients in place so that their norm is at most `max_norm`; return what it was.

    Args:
        parameters: as `grad_norm` takes them; a model that FSDP1 wrapped is passed on to FSDP1.
        max_norm: of the whole model, not of a rank's part.
        norm_type: as `grad_norm` takes it.
        error_if_nonfinite: raise where the norm is infinite or not a number; else gradients become so too.

    Raises:
        UsageError: an order that is not positive.
        ShardkitError: the norm is not finite; no gradient was changed.
    """
    if isinstance(parameters, FullyShardedDataParallel):
        return parameters.clip_grad_norm_(max_norm, norm_type)
    found = _parameters(parameters)
    norm = _norm(found, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise ShardkitError(
            f"the gradient norm of order {norm_type} is {norm.item()}",
            hint="no gradient was changed; skip this step, or look for the batch that did it",
        )
    # torch.nn.utils.clip_grad_norm_: the same arithmetic, and no branch, which a GPU would have to wait for.
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    parts: dict[torch.device, list[torch.Tensor]] = {}
    for parameter in found:
        if parameter.grad is not None:
            local = _local(parameter.grad)
            parts.setdefault(local.device, []).append(local)
    for device, tensors in parts.items():
        foreach_scale_(tensors, factor.to(device))
    return norm


def _parameters(parameters: Parameters) -> list[torch.Tensor]:
    """Every parameter once: a tied one must not count twice."""
    if isinstance(parameters, FullyShardedDataParallel):
        raise UsageError(
            "FSDP1 keeps gradients in flat parameters, whose parts only it can tell apart",
            hint="clip_grad_norm_ takes the wrapped model itself, and returns the norm",
        )
    if isinstance(parameters, nn.Module):
        reshard(parameters)  # gathered copies have no gradients
        parameters = parameters.parameters()
    if isinstance(parameters, torch.Tensor):
        parameters = (parameters,)
    return list({id(parameter): parameter for parameter in parameters}.values())


def _norm(parameters: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise UsageError(f"norm_type cannot be {norm_type}", hint="give 2.0, another positive number, or inf")
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    is_double = any(gradient.dtype == torch.float64 for gradient in gradients)
    dtype = torch.float64 if is_double else torch.float32
    device = gradients[0].device if gradients else torch.device("cpu")
    powers = [_reduced(share, norm_type, dtype).to(device) for share in _shares(parameters)]
    if not powers:
        return torch.zeros((), dtype=dtype, device=device)
    stacked = torch.stack(powers)
    return stacked.amax() if math.isinf(norm_type) else stacked.sum() ** (1.0 / norm_type)


def _shares(parameters: list[torch.Tensor]) -> list[_Share]:
    """Parameters, not gradients, decide which collectives there are: a rank that lacks a gradient must not miss one."""
    shares: dict[tuple[DeviceMesh | None, tuple[int, ...]], _Share] = {}
    for parameter in parameters:
        mesh, axes = None, tuple[int, ...]()
        if isinstance(parameter, DTensor):
            axes = tuple(
                at for at, placement in enumerate(parameter.placements) if not placement.is_replicate()
            )
            mesh = parameter.device_mesh if axes else None
        share = shares.setdefault((mesh, axes), _Share(mesh=mesh, axes=axes))
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
            # Tensor parallelism may leave sums that have not been made yet.
            if gradient.placements != parameter.placements:
                gradient = gradient.redistribute(placements=parameter.placements)
        if gradient is not None and (local := _local(gradient)).numel():
            share.tensors.append(local)
    return list(shares.values())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _reduced(share: _Share, norm_type: float, dtype: torch.dtype) -> torch.Tensor:
    """The sum of |x|^norm_type over the whole of some gradients, or their largest |x|."""
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
    if share.mesh is None:
        return total
    total = total.to(share.mesh.device_type)  # offloaded gradients lie elsewhere than their mesh communicates
    for axis in share.axes:
        dist.all_reduce(total, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, share.mesh.get_group(axis))
    return total
