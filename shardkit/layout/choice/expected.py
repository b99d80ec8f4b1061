"""The layout that a model's class will most likely answer, from its config and the files alone.

Asking the class takes seconds of imports. For most models the answer is known before: the names in memory are
those of the files, or single experts are fused in the one way that their type has. Bytes can move by such a
layout while the class is asked. It is only a guess: what is written by it counts once the class has said the
same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from shardkit.core.catalog import TensorEntry
from shardkit.core.mesh import Mesh
from shardkit.errors import LayoutError, PolicyError
from shardkit.keys.expressions import Expression, Stored, concat, made_name, stack
from shardkit.layout.choice.choose import Model
from shardkit.layout.layout import Layout, declare
from shardkit.layout.traced import SAME_IN_MEMORY

# Types whose experts lie one by one in the files and are fused in memory, all in the same form.
_FUSES_EXPERTS = frozenset(
    "deepseek_v2 deepseek_v3 deepseek_v32 dots1 flex_olmo glm4_moe glm4_moe_lite hunyuan_v1_moe mixtral olmoe"
    " qwen2_moe qwen3_moe qwen3_next".split()
)
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
_PART = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}  # of Mixtral
_IN_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_NOT_SAVED = ".rotary_emb.inv_freq"


def expect_layout(model: Model, mesh: Mesh) -> Layout | None:
    """Return the layout that tracing a model will most likely give, but for its units; None if nothing tells.

    Args:
        model: the source.
        mesh: the device mesh that training will use; one without `tp`, `ep` and `pp`.
    """
    config = model.config or {}
    kind = config.get("model_type")
    try:
        stored = {
            name: entry for name, entry in model.catalog.tensors.items() if not _is_left_out(name, config)
        }
        if kind in _FUSES_EXPERTS:
            names = _fused(stored, config)
        elif kind in SAME_IN_MEMORY:
            names = _Names(stored, {name: name for name in stored}, {})
        else:
            return None
        layout = declare(names.tensors, mesh, "none", config)
    except (LayoutError, PolicyError, ValueError):  # the class will say so better
        return None
    return replace(layout, sources=names.sources, made=names.made)


class _Names(NamedTuple):
    tensors: Mapping[str, TensorEntry]
    """What the model holds, by its own names."""
    sources: Mapping[str, str]
    """As `Layout.sources`."""
    made: Mapping[str, Expression]
    """As `Layout.made`."""


def _is_left_out(name: str, config: Mapping[str, Any]) -> bool:
    """True for what a class does not load: buffers that it computes, layers behind its last one."""
    num_layers, layer = config.get("num_hidden_layers"), _IN_LAYER.search(name)
    is_behind = isinstance(num_layers, int) and layer is not None and int(layer[1]) >= num_layers
    return is_behind or name.endswith(_NOT_SAVED)


def _fused(stored: Mapping[str, TensorEntry], config: Mapping[str, Any]) -> _Names:
    """Return what the model holds where its experts lie one by one in the files.

    Raises:
        ValueError: experts or parts of them are missing, or differ in shape or dtype.
    """
    experts: dict[str, dict[str, dict[int, TensorEntry]]] = {}
    tensors, sources, made = dict[str, TensorEntry](), dict[str, str](), dict[str, Expression]()
    for name, entry in stored.items():
        found = _EXPERT.fullmatch(name)
        if found is None:
            fqn = _live_name(name, config)
            tensors[fqn], sources[fqn] = replace(entry, fqn=fqn), name
            continue
        path, number, part = found.groups()
        parts = experts.setdefault(_live_name(path, config), {})
        parts.setdefault(_PART.get(part, part), {})[int(number)] = entry
    for path, parts in experts.items():
        if parts.keys() != {"gate_proj", "up_proj", "down_proj"}:
            raise ValueError(f"{path} has no experts of three weights")
        gate, up, down = (_stacked(parts[part]) for part in ("gate_proj", "up_proj", "down_proj"))
        (dtype,) = {entry.dtype for entries in parts.values() for entry in entries.values()}
        for fqn, expression in (
            (f"{path}.gate_up_proj", concat([gate, up], 1)),
            (f"{path}.down_proj", down),
        ):
            sources[fqn] = made_name(fqn, stored)
            made[sources[fqn]] = expression
            tensors[fqn] = TensorEntry(
                fqn=fqn, dtype=dtype, shape=expression.shape, first_chunk=0, num_chunks=0
            )
    return _Names(tensors, sources, made)


def _live_name(name: str, config: Mapping[str, Any]) -> str:
    return name.replace(".block_sparse_moe.", ".mlp.") if config.get("model_type") == "mixtral" else name


def _stacked(experts: Mapping[int, TensorEntry]) -> Expression:
    if experts.keys() != set(range(len(experts))):
        raise ValueError("an expert is missing")
    return stack([Stored(experts[at].fqn, experts[at].shape) for at in range(len(experts))], 0)
