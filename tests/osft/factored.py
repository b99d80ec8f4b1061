"""States whose matrices are factors, and what folding them has to give."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from shardkit.osft.plan import Target
from shardkit.osft.svd import factorise, fold

Q, K = (f"model.layers.0.self_attn.{name}_proj" for name in "qk")


def target_for(path: str, weight: torch.Tensor, rank: int | None = None) -> Target:
    """Return a target of half of the directions, or of some rank."""
    rows, columns = weight.shape
    return Target(path=path, rows=rows, columns=columns, rank=rank or min(rows, columns) // 2)


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
