"""Recognise the tensors of experts by their names."""

from __future__ import annotations

import re

from shardkit.core.regions import Shape

_MODULES = ("experts", "deepspeed_experts")
_EXPERT = re.compile(r"(?:expert_)?([0-9]{1,6})", re.ASCII)
_MAX_FUSED = 4096


def expert_of(name: str) -> tuple[str, int | None] | None:
    """Return (module with the experts, number of the expert or None for all) for a tensor of an expert; else None.

    "mlp.experts.3.up.weight" -> ("mlp", 3), "mlp.experts.gate_up_proj" -> ("mlp", None), "mlp.up.weight" -> None.
    """
    parts = name.split(".")
    index = next((index for index, part in enumerate(parts[:-1]) if part in _MODULES), None)
    if index is None:
        return None
    # experts.3.up.weight; experts.deepspeed_experts.3.up.weight; experts.w1.3
    numbers = [number for part in parts[index + 1 : index + 3] if (number := _EXPERT.fullmatch(part))]
    return ".".join(parts[:index]), int(numbers[0][1]) if numbers else None


def num_fused(name: str, shape: Shape) -> int | None:
    """Return how many experts a tensor has along dim 0; None if it is not a fused weight or bias of several experts."""
    owner = expert_of(name)
    is_fused = owner is not None and owner[1] is None and (len(shape) > 2 or name.endswith("bias"))
    return shape[0] if is_fused and len(shape) > 1 and 1 < shape[0] <= _MAX_FUSED else None
