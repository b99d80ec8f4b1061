"""How much tensors and single experts differ, as one number each, called the *amount*: 0 for equal values.

A relative error may exceed 1. Pictures draw maps of amounts, scaled by the largest, and `experts_line` summarises them in a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from shardkit.core.text import count, escape, few
from shardkit.operations.diff.experts import expert_of, num_fused

if TYPE_CHECKING:
    from shardkit.operations.diff import TensorDiff

_LAYER = re.compile(r"(?:^|\.)(0|[1-9][0-9]{0,8})(?=\.|$)", re.ASCII)
_MAX_NUMBERS, _MAX_LAYERS = 4, 3

Experts = Mapping[str, Mapping[int, float | None]]
"""Module with the experts -> number of the expert -> the largest amount of its tensors; None if not comparable."""


def amount_of(tensor: TensorDiff) -> float | None:
    """Return the amount of a tensor: its relative error if known, else the share of elements that differ; None if its
    values cannot be compared."""
    if tensor.status in ("only_a", "only_b", "shape") or (tensor.stats and tensor.stats.num_nonfinite):
        return None
    if not tensor.is_difference:
        return 0.0
    return tensor.relative_error if tensor.relative_error is not None else tensor.share_changed or 0.0


def experts_of(tensors: Sequence[TensorDiff]) -> Experts:
    """Return the amount of each expert; empty if none can be compared."""
    experts: dict[str, dict[int, float | None]] = {}
    for tensor in tensors:
        for module, number, amount in _amounts(tensor):
            of_module = experts.setdefault(module, {})
            so_far = of_module.get(number, 0.0)
            of_module[number] = None if so_far is None or amount is None else max(so_far, amount)
    is_comparable = any(amount is not None for each in experts.values() for amount in each.values())
    return experts if is_comparable else {}


def _amounts(tensor: TensorDiff) -> Iterator[tuple[str, int, float | None]]:
    """Yield (module, expert, amount) for all experts of a tensor."""
    owner, amount = expert_of(tensor.name), amount_of(tensor)
    if owner is not None and owner[1] is not None:
        yield owner[0], owner[1], amount
    elif owner is not None and (number := num_fused(tensor.name, tensor.shape_a or tensor.shape_b or ())):
        amounts = tensor.experts if tensor.is_difference and tensor.experts else (amount,) * number
        yield from ((owner[0], expert, each) for expert, each in enumerate(amounts))


def layer_names(modules: Sequence[str]) -> list[str]:
    """Return "layer 3" for each module, or its name if several modules are in the same layer; escaped."""
    layers = [_LAYER.search(module) for module in modules]
    names = [f"layer {layer[1]}" for layer in layers if layer]
    return names if len(set(names)) == len(modules) else [escape(module) or "the model" for module in modules]


def experts_line(experts: Experts) -> str:
    """Return a sentence on identical experts: "4 of 256 are identical: 4 of 128 in layer 0 (4, 17, 90, 91)"."""
    layers: list[tuple[bool, str]] = []
    total, num_equal = sum(map(len, experts.values())), 0
    for name, amounts in zip(layer_names(list(experts)), experts.values(), strict=True):
        equal = [number for number, amount in sorted(amounts.items()) if amount == 0.0]
        num_equal += len(equal)
        is_all = len(equal) == len(amounts)
        numbers = f" ({few(list(map(str, equal)), _MAX_NUMBERS)})" if not is_all else ""
        if equal:
            layers.append((is_all, f"{'all' if is_all else len(equal)} of {len(amounts)} in {name}{numbers}"))
    if num_equal in (0, total):
        return (
            f"{'all' if num_equal else 'none'} of {total:,} in {count(len(experts), 'layer')} are identical"
        )
    shown = [text for _, text in sorted(layers, key=lambda layer: layer[0])]  # wholly equal layers last
    more = " layers" if len(shown) > _MAX_LAYERS else ""
    return f"{num_equal:,} of {total:,} are identical: {few(shown, _MAX_LAYERS, '; ')}{more}"
