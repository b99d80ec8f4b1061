"""A linear layer whose weight is six factors. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.nn import functional

from shardkit.core.factored import FACTORS, Target, factor_of, shard_dim
from shardkit.core.text import escape
from shardkit.errors import LayoutError
from shardkit.keys.names import clean_name
from shardkit.osft.plan import Candidate


class OsftParams(nn.Module):
    """The trained factors of a layer."""

    U_low: nn.Parameter
    S_low: nn.Parameter
    V_low: nn.Parameter


class OsftLinear(nn.Module):
    """y = x W' + b with W = U_high S_high V_high + U_low S_low V_low; the first three are frozen.

    Args:
        target: gives the shapes.
        bias: of the replaced layer, kept unchanged; None for a layer without bias.
        device: for the factors, which are in float32.
    """

    osft_U_high: nn.Parameter
    osft_S_high: nn.Parameter
    osft_V_high: nn.Parameter
    osft_params: OsftParams
    bias: nn.Parameter | None

    def __init__(
        self, target: Target, bias: nn.Parameter | None = None, *, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.path = target.path
        self.in_features, self.out_features, self.rank = target.columns, target.rows, target.rank
        self.osft_params = OsftParams()
        for name in FACTORS:
            owner, attribute = self._place(name)
            values = torch.empty(target.shapes[f"{target.path}.{name}"], device=device, dtype=torch.float32)
            owner.register_parameter(attribute, nn.Parameter(values, requires_grad=owner is not self))
        self.register_parameter("bias", bias)

    def _place(self, name: str) -> tuple[nn.Module, str]:
        holder, _, attribute = name.rpartition(".")
        return (self.osft_params if holder else self), attribute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (..., N) for (..., M)."""
        low = self.osft_params
        kept = functional.linear(functional.linear(x, self.osft_V_high) * self.osft_S_high, self.osft_U_high)
        trained = functional.linear(functional.linear(x, low.V_low) * low.S_low, low.U_low)
        y = kept + trained
        return y if self.bias is None else y + self.bias

    def __getattr__(self, name: str) -> Any:
        """Return a parameter or submodule; reading `weight` raises an error that explains why it does not exist."""
        if name == "weight":
            raise AttributeError(
                f"{escape(self.path)} has OSFT factors and no weight, which the model's own code reads; leave it dense: "
                f"add '!{escape(self.path)}' to the targets (OsftPlan.targets)"
            )
        return super().__getattr__(name)

    def extra_repr(self) -> str:
        """Return the sizes, like `nn.Linear`."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, rank={self.rank}, "
            f"bias={self.bias is not None}"
        )


def candidates(model: nn.Module) -> dict[str, Candidate]:
    """Return each parameter of a model by FQN, with the reason why it cannot be a target, if any."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(clean_name(name))
    modules = {clean_name(path): module for path, module in model.named_modules()}
    parameters = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        fqn = clean_name(name)
        tied_names = [alias for alias in names[id(parameter)] if alias != fqn]
        why = f"it is tied to {escape(tied_names[0])}" if tied_names else ""
        if not why and not parameter.is_floating_point():
            why = f"it is {parameter.dtype}: quantised"
        module = modules[fqn.rpartition(".")[0]]
        # A subclass may compute something else with its weight.
        parameters[fqn] = Candidate(tuple(parameter.shape), type(module).__name__, why)
    return parameters


def factor_modules(model: nn.Module, targets: Iterable[Target]) -> dict[str, OsftLinear]:
    """Replace each target's module by an `OsftLinear` with factors on meta, in float32.

    Args:
        model: not wrapped yet.
        targets: from `choose_targets` for this model.

    Returns:
        The new modules by path.

    Raises:
        LayoutError: a target's module does not exist, or is not a Linear of that size.
    """
    layers: dict[str, OsftLinear] = {}
    problems = []
    for target in targets:
        parent, _, attribute = target.path.rpartition(".")
        try:
            old = model.get_submodule(target.path)
        except AttributeError:
            problems.append(f"{escape(target.path)}: the model has no such module")
            continue
        if not isinstance(old, nn.Linear) or (old.out_features, old.in_features) != (
            target.rows,
            target.columns,
        ):
            problems.append(f"{escape(target.path)}: is {escape(repr(old))}")
            continue
        new = OsftLinear(target, old.bias, device="meta")
        new.train(old.training)
        setattr(model.get_submodule(parent), attribute, new)
        layers[target.path] = new
    LayoutError.raise_for(problems, "the model's layers differ from those of the OSFT checkpoint")
    return layers


def osft_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the factored layers of a model by clean path, in its order, whatever library created or wrapped them.

    Parameter names identify them: a layer of mini_trainer is an `nn.Linear` with factors in place of `weight`.
    """
    names = {clean_name(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    paths = {
        path
        for path in map(factor_of, names)
        if path and names.issuperset(f"{path}.{name}" for name in FACTORS)
    }
    return {
        path: module
        for path, module in ((clean_name(path), module) for path, module in model.named_modules())
        if path in paths
    }


def factors_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a factored layer by the names of `core.factored.FACTORS`."""
    return {name: module.get_parameter(name) for name in FACTORS}


PlacementFn = Callable[[nn.Parameter], Shard | None]


def placement_fn(model: nn.Module, num_shards: int, user_fn: PlacementFn | None = None) -> PlacementFn | None:
    """Return a `shard_placement_fn` for `fully_shard` that shards V along dim 1; `user_fn` if no factor needs it.

    Args:
        model: its parameters are compared by identity.
        num_shards: size of the shard axis.
        user_fn: the caller's function, which has precedence where it does not return None.
    """
    cut = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, OsftLinear)
        for name, parameter in factors_of(module).items()
        if shard_dim(f".{name}", parameter.shape, num_shards)
    }
    if not cut:
        return user_fn

    def place(parameter: nn.Parameter) -> Shard | None:
        chosen = user_fn(parameter) if user_fn is not None else None
        return Shard(1) if chosen is None and id(parameter) in cut else chosen

    return place
