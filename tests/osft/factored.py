"""States whose matrices are factors, and what folding them has to give."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from shardkit.core.factored import FACTORS, Target
from shardkit.osft.svd import factorise

Q, K = (f"model.layers.0.self_attn.{name}_proj" for name in "qk")


def target_for(path: str, weight: torch.Tensor, rank: int | None = None) -> Target:
    """Return a target of half of the directions, or of some rank."""
    rows, columns = weight.shape
    return Target(path=path, rows=rows, columns=columns, rank=rank or min(rows, columns) // 2)


def fold(factors: Mapping[str, torch.Tensor], rows: slice = slice(None)) -> torch.Tensor:
    """Return rows of the weight that factors are, in float64.

    Args:
        factors: by the names of `core.factored.FACTORS`.
        rows: of the weight; all by default.
    """
    u_high, s_high, v_high, u_low, s_low, v_low = (factors[name] for name in FACTORS)
    whole: torch.Tensor = (u_high[rows].double() * s_high.double()) @ v_high.double()
    return whole.addmm_(u_low[rows].double() * s_low.double(), v_low.double())


def factored(state: Mapping[str, torch.Tensor], paths: Iterable[str] = (Q, K)) -> dict[str, torch.Tensor]:
    """Return a state in which the weights of some modules are factors."""
    made = dict(state)
    for path in paths:
        weight = made.pop(f"{path}.weight")
        tensors = factorise(weight, target_for(path, weight)).tensors
        made |= {f"{path}.{name}": tensor for name, tensor in tensors.items()}
    return made


def folded(state: Mapping[str, torch.Tensor], paths: Iterable[str] = (Q, K)) -> dict[str, torch.Tensor]:
    """Return a state in which the factors of some modules are dense weights, in float64."""
    dense = dict(state)
    for path in paths:
        six = {
            name.removeprefix(f"{path}."): dense.pop(name)
            for name in state
            if name.startswith(f"{path}.osft_")
        }
        dense[f"{path}.weight"] = fold(six)
    return dense
