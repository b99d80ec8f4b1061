"""Projections of gradients and parameters, which keep training out of the frozen subspace.

The component of U_low's gradient in the span of U_high is removed, and that of V_low's in the rows of V_high; S_low is
unconstrained. AdamW scales elements individually and has momentum, so steps with projected gradients still leak; the
parameters are therefore projected after the step too.

With H the frozen directions as columns and L the trained ones, both projections are L -= H (H'L). If the long dim is
sharded, as for U and (by `wrap`) for V, ranks sum products of r x k numbers, for many layers at a time. If V is sharded
along its directions, V_high is gathered, one layer at a time.

Source: "Sculpting Subspaces", arXiv 2504.07097, section 3.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import isnan, nan
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit.core.factored import HIGH, LOW
from shardkit.core.text import count, escape
from shardkit.errors import LayoutError, UsageError
from shardkit.osft.modules import factors_of, osft_modules
from shardkit.training.ranks.local import (
    cut_axes,
    local_tensor,
    optimizer_parameters,
    refuse_copies,
    refuse_fsdp1,
    reshard,
    unwrap_optimizer,
)

_U_HIGH, _, _V_HIGH = HIGH
_U_LOW, _, _V_LOW = LOW
_BUCKET_NUMEL = 16 << 20  # 64 MiB of fp32 are summed over ranks at a time

_HOOKED: WeakKeyDictionary[torch.optim.Optimizer, list[ref[nn.Module]]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class _Pair:
    """Frozen directions, and the values to be projected, on this rank; directions are columns of both."""

    name: str
    """FQN of the trained factor."""
    basis: torch.Tensor
    """(n, k): this rank's part of the long dim."""
    vectors: torch.Tensor | None
    """(n, r): a view of the parameter or of its gradient; None if this rank has no gradient."""
    num_vectors: int
    groups: tuple[dist.ProcessGroup, ...]
    """Ranks that hold the other parts of the long dim."""
    gathered: DTensor | None
    """V_high, if it is sharded along its directions; the basis is then gathered from all ranks."""
    device: torch.device
    """Where `groups` communicate."""

    @property
    def numel(self) -> int:
        """Number of elements that the ranks sum."""
        return self.basis.shape[1] * self.num_vectors


def project_gradients_(model: nn.Module) -> None:
    """Remove from the gradients of all factors their part in the frozen subspace; every rank calls it.

    Call it after clipping and before the optimizer's step, or let `osft_optimizer` do it. Gradients that are None
    stay so.

    Args:
        model: with OSFT layers, plain, or sharded by FSDP2 or HSDP.

    Raises:
        LayoutError: the model has no OSFT layers, or the frozen and trained factors of a layer are sharded differently.
        UsageError: the model is wrapped by FSDP1.
    """
    _project(_pairs(model, lambda parameter: parameter.grad))


def project_parameters_(model: nn.Module) -> None:
    """Remove from all trained factors their part in the frozen subspace; every rank calls it.

    Call it after the optimizer's step, or let `osft_optimizer` do it.

    Args:
        model: as for `project_gradients_`.

    Raises:
        As `project_gradients_`.
    """
    _project(_pairs(model, lambda parameter: parameter))


def osft_leak(model: nn.Module) -> float:
    """Return the share of the trained factors that lies in the frozen subspace; every rank calls it.

    Args:
        model: as for `project_gradients_`.

    Returns:
        The ratio of the norms of H'L and L (Frobenius), the largest over all layers and over U and V; the same on every
        rank. After `project_parameters_` in float32 it is below 1e-6; a step of AdamW without projection leaves about
        1e-2. It is nan if training has diverged.

    Raises:
        As `project_gradients_`.
    """
    leaks = [0.0]
    with _full_precision():
        for pairs in _buckets(_pairs(model, lambda parameter: parameter)):
            for pair, inside in zip(pairs, _coefficients(pairs), strict=True):
                assert pair.vectors is not None
                parts = [inside.double().square().sum(), pair.vectors.double().square().sum()]
                if pair.gathered is None:  # `inside` is complete already
                    parts[1] = _sum_over(parts[1], pair.groups, pair.device)
                else:
                    shared = _shard_groups(pair.gathered)
                    parts = [_sum_over(part, shared, pair.device) for part in parts]
                leak, whole = (float(part.sqrt()) for part in parts)
                leaks.append(leak / whole if whole else 0.0)
    return nan if any(map(isnan, leaks)) else max(leaks)


def osft_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Make each step of an optimizer leave the frozen subspace unchanged; every rank calls it.

    Gradients are projected before the step and parameters after it, by hooks of the optimizer, so schedulers, gradient
    scalers and checkpoints of its state work as usual. A step with a learning rate of 0 changes no parameter. Clip
    gradients before the step, as usual. A second call with the same arguments has no effect.

    Args:
        model: with OSFT layers, wrapped already.
        optimizer: of its parameters; for accelerate's, the optimizer that it wraps is used. If a step gets a closure,
            gradients are projected after each of its calls.

    Returns:
        The same optimizer.

    Raises:
        LayoutError: the model has no OSFT layers.
        UsageError: the optimizer steps frozen factors, none of those that are trained, or copies that a forward has
            gathered.
    """
    outer_optimizer, optimizer = optimizer, unwrap_optimizer(optimizer)
    layers = _layers(model)
    reshard(model)  # gathered parameters are copies
    refuse_copies(model, optimizer)
    _check_parameters(layers.values(), optimizer)
    hooked = _HOOKED.setdefault(optimizer, [])
    if any(hooked_model() is model for hooked_model in hooked):
        return outer_optimizer
    hooked.append(ref(model))

    def before(
        _: object, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        closures = [
            value for value in (*args[1:], kwargs.get("closure")) if value is not None
        ]  # the first is the optimizer
        if not closures:
            project_gradients_(model)
            return args, kwargs
        return (args[0], _with_projection(closures[0], model)), {}

    def after(*_: object) -> None:
        _project(_pairs(model, _moving_parameters(optimizer)))

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return outer_optimizer


def _moving_parameters(optimizer: torch.optim.Optimizer) -> Callable[[nn.Parameter], nn.Parameter | None]:
    """Return a function that returns a parameter that a step may move, or None for a *resting* one, whose rate is 0.

    torch initialises an optimizer's state by a step with rates of 0, to save or load it. Projecting afterwards would
    change weights by a rounding. A rate on a GPU is not read, as that would synchronise.
    """
    rates = [(group["params"], group.get("lr")) for group in optimizer.param_groups]
    resting_groups = [
        params
        for params, rate in rates
        if rate is not None and (not isinstance(rate, torch.Tensor) or rate.device.type == "cpu") and not rate
    ]
    resting_ids = {id(parameter) for params in resting_groups for parameter in params}
    # A parameter in none of the groups, such as another optimizer's, counts as moving, except if this whole step rests.
    is_resting_step = len(resting_groups) == len(rates)
    return lambda parameter: None if is_resting_step or id(parameter) in resting_ids else parameter


def _with_projection(closure: Callable[[], Any], model: nn.Module) -> Callable[[], Any]:
    @functools.wraps(closure)
    def run() -> Any:
        loss = closure()
        project_gradients_(model)
        return loss

    return run


def _check_parameters(layers: Iterable[nn.Module], optimizer: torch.optim.Optimizer) -> None:
    stepped = {id(parameter) for parameter in optimizer_parameters(optimizer)}
    factors = [factors_of(layer) for layer in layers]
    every = (parameter for of_layer in factors for parameter in of_layer.values())
    if not any(id(parameter) in stepped for parameter in every if parameter.requires_grad):
        raise UsageError(
            "the optimizer has none of the model's trained factors",
            hint="make it after wrap and finalize, of model.parameters()",
        )
    if any(of_layer[name].requires_grad for of_layer in factors for name in (_U_HIGH, _V_HIGH)):
        raise UsageError(
            "frozen factors (osft_U_high, osft_V_high) have requires_grad=True and would be trained",
            hint="give them requires_grad_(False); after requires_grad_(True) on the whole model too",
        )


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    refuse_fsdp1(model)
    layers = osft_modules(model)
    if not layers:
        raise LayoutError(
            "the model has no OSFT layers",
            hint="prepare(model, source, osft=0.3) puts them in the place of linear layers",
        )
    return layers


def _pairs(model: nn.Module, of: Callable[[nn.Parameter], torch.Tensor | None]) -> Iterator[_Pair]:
    """Yield the pairs of all layers, in the same order on every rank."""
    layers = _layers(model)
    reshard(model)  # gathered parameters are copies
    pairs, problems = list[tuple[str, nn.Parameter, nn.Parameter, bool]](), list[str]()
    for path, layer in layers.items():
        factors = factors_of(layer)
        for high, trained, is_v in ((_U_HIGH, _U_LOW, False), (_V_HIGH, _V_LOW, True)):
            pairs.append((f"{path}.{trained}", factors[high], factors[trained], is_v))
            if _placements(factors[high]) != _placements(factors[trained]):
                problems.append(
                    f"{escape(path)}: {'V' if is_v else 'U'}_high and _low are sharded differently"
                )
    LayoutError.raise_for(
        problems,
        f"{count(len(problems), 'pair')} of factors cannot be projected",
        hint="shard each OSFT layer whole, as shardkit.wrap does",
    )
    for name, kept, low, is_v in pairs:
        yield _pair(name, kept, low, of(low), is_v=is_v)


def _placements(whole: torch.Tensor) -> object:
    return (whole.device_mesh, whole.placements) if isinstance(whole, DTensor) else None


def _pair(
    name: str, high: nn.Parameter, trained: nn.Parameter, target: torch.Tensor | None, *, is_v: bool
) -> _Pair:
    basis = local_tensor(high)
    vectors = None if target is None else local_tensor(_check_placements(trained, target))
    long_dim = 1 if is_v else 0
    groups, gathered, device = tuple[dist.ProcessGroup, ...](), None, basis.device
    if isinstance(high, DTensor):
        device = torch.device(high.device_mesh.device_type)
        if any(placement.is_shard(1 - long_dim) for placement in high.placements):
            gathered = high
        else:
            groups = _shard_groups(high)
    return _Pair(
        name=name,
        basis=basis.T if is_v else basis,
        vectors=vectors.T if is_v and vectors is not None else vectors,
        num_vectors=local_tensor(trained).shape[1 - long_dim],
        groups=groups,
        gathered=gathered,
        device=device,
    )


def _check_placements(parameter: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if (
        isinstance(target, DTensor)
        and isinstance(parameter, DTensor)
        and target.placements != parameter.placements
    ):
        raise LayoutError(
            f"a gradient has placements {target.placements}, its parameter {parameter.placements}",
            hint="project after backward has reduced the gradients",
        )
    return target


def _shard_groups(whole: DTensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the process groups over which a tensor is sharded, without replicas."""
    return tuple(map(whole.device_mesh.get_group, cut_axes(whole)))


def _project(pairs: Iterable[_Pair]) -> None:
    with _full_precision():
        for bucket in _buckets(pairs):
            for pair, inside in zip(bucket, _coefficients(bucket), strict=True):
                if pair.vectors is None or not pair.vectors.numel():
                    continue
                pair.vectors.sub_(_widen(pair.basis) @ inside)


@contextlib.contextmanager
def _full_precision() -> Iterator[None]:
    """Disable gradients, autocast and TF32, which would leave a thousandth of the leak."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.no_grad(), contextlib.ExitStack() as stack:
            for kind in ("cpu", "cuda"):
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def _buckets(pairs: Iterable[_Pair]) -> Iterator[list[_Pair]]:
    """Group pairs whose products are summed together. Pairs with a gathered basis are alone, to save memory."""
    bucket: list[_Pair] = []
    for pair in pairs:
        size = sum(queued.numel for queued in bucket)
        is_other = bucket and (bucket[0].groups, bucket[0].device) != (pair.groups, pair.device)
        if bucket and (is_other or pair.gathered is not None or size + pair.numel > _BUCKET_NUMEL):
            yield bucket
            bucket = []
        if pair.gathered is not None:
            yield [_with_basis(pair)]
        else:
            bucket.append(pair)
    if bucket:
        yield bucket


def _coefficients(pairs: list[_Pair]) -> list[torch.Tensor]:
    """Return H'L (k, r) of each pair, summed over the ranks. A rank without vectors adds nothing."""
    parts = [
        _widen(pair.basis).T @ _widen(pair.vectors)
        if pair.vectors is not None
        else pair.basis.new_zeros((pair.basis.shape[1], pair.num_vectors), dtype=_widen(pair.basis).dtype)
        for pair in pairs
    ]
    if not pairs[0].groups:
        return parts
    flat = _sum_over(torch.cat([part.flatten() for part in parts]), pairs[0].groups, pairs[0].device)
    pieces = torch.split(flat, [part.numel() for part in parts])
    return [piece.view_as(part) for piece, part in zip(pieces, parts, strict=True)]


def _widen(values: torch.Tensor) -> torch.Tensor:
    """Return values in at least float32: half precision would leave a hundredth of the leak."""
    return values if values.dtype == torch.float64 else values.float()


def _sum_over(
    values: torch.Tensor, groups: Iterable[dist.ProcessGroup], device: torch.device
) -> torch.Tensor:
    """Return the sum over ranks on the device of the values; offloaded values are summed on `device`."""
    home, total = values.device, values
    for group in groups:
        total = total.to(device)
        dist.all_reduce(total, group=group)
    return total.to(home)


def _with_basis(pair: _Pair) -> _Pair:
    """Gather the frozen directions of a pair; every rank calls it, even without elements."""
    cut = pair.gathered
    assert cut is not None
    local = cut.to_local().to(pair.device)
    on_device = DTensor.from_local(
        local, cut.device_mesh, cut.placements, run_check=False, shape=cut.shape, stride=cut.stride()
    )
    return replace(pair, basis=on_device.full_tensor().T.to(pair.basis.device))
