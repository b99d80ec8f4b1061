"""What wrapping really did to a model: units, settings, this rank's share, and what will go wrong.

Nothing is communicated and nothing is changed: one rank may ask alone, without a process group too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardkit._torch import is_checkpointed
from shardkit.core.text import count, escape, listed
from shardkit.training.diagnostics.table import make_table
from shardkit.training.diagnostics.units import (
    DiagnosedUnit,
    StoredParameter,
    plain_class,
    read_fsdp1,
    read_units,
)
from shardkit.training.ranks.agree import world
from shardkit.training.ranks.context import clean_name

_TOLERANCE = 0.2  # of the expected share, before it is called far
_KINDS = {
    "fsdp2": "FSDP2 (fully_shard)",
    "fsdp1": "FSDP1 (FullyShardedDataParallel)",
    "ddp": "DistributedDataParallel: every rank holds everything",
    "tensor-parallel": "DTensors without FSDP",
    "plain": "not wrapped: every rank holds everything",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """A model, as one rank sees it. `str()` is a table, `problems` what should not be so."""

    kind: str
    """"fsdp2", "fsdp1", "ddp", "tensor-parallel" or "plain"."""
    model_class: str
    rank: int
    world_size: int
    units: tuple[DiagnosedUnit, ...]
    """In module order, a root before what is inside of it."""
    checkpoint_wrappers: int
    """Modules whose activations are computed again in backward, by torch's wrapper or transformers' own way."""
    parameters: int
    """Elements of all parameters, whole, ties once."""
    parameter_bytes: int
    local_parameters: int
    """Elements on this rank."""
    local_bytes: int
    expected_bytes: int
    """What this rank would hold if every part were of one size and nothing whole: `parameter_bytes` / `num_parts`,
    unless tensor parallelism cuts some parameters into more parts."""
    num_parts: int
    """Into how many parts most of the model was cut."""
    uneven: tuple[str, ...]
    """Parameters whose parts are not all of one size."""
    empty: tuple[str, ...]
    """Parameters of which this rank has nothing."""
    whole: tuple[str, ...]
    """Parameters that lie on this rank whole, though the model is cut."""
    ties: tuple[tuple[str, ...], ...]
    """Groups of names that are one parameter."""
    broken_ties: tuple[tuple[str, ...], ...]
    """Groups of names that the model says are one parameter, and are not."""
    meta: tuple[str, ...]
    """Parameters, buffers and plain tensor attributes without memory."""
    problems: tuple[str, ...]
    """What should not be so; one sentence each."""

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        return make_table(self, _KINDS[self.kind])


def diagnose(model: nn.Module) -> Diagnosis:
    """Look at a model that anybody wrapped: FSDP2, FSDP1, DDP, tensor parallel, or none of them.

    Args:
        model: with weights or on meta; not inside of a forward.
    """
    rank, world_size = world()
    kind = _kind(model)
    stored, units = read_fsdp1(model) if kind == "fsdp1" else read_units(model)
    total = sum(p.numel * p.itemsize for p in stored)
    num_parts = _usual_parts(stored)
    ties = _ties(model)
    found = Diagnosis(
        kind=kind,
        model_class=plain_class(model),
        rank=rank,
        world_size=world_size,
        units=tuple(units),
        checkpoint_wrappers=sum(map(_is_recomputed, model.modules())),
        parameters=sum(p.numel for p in stored),
        parameter_bytes=total,
        local_parameters=sum(p.local_numel for p in stored),
        local_bytes=sum(p.local_numel * p.itemsize for p in stored),
        expected_bytes=round(sum(_even_share(p, num_parts) for p in stored)),
        num_parts=num_parts,
        uneven=tuple(p.fqn for p in stored if p.is_uneven),
        empty=tuple(p.fqn for p in stored if p.numel and not p.local_numel),
        whole=tuple(p.fqn for p in stored if p.num_parts == 1 < num_parts),
        ties=ties,
        broken_ties=_broken_ties(model, ties),
        meta=tuple(_on_meta(model)),
        problems=(),
    )
    return replace(found, problems=tuple(_problems(found)))


def _kind(model: nn.Module) -> str:
    modules = list(model.modules())
    if any(isinstance(module, FullyShardedDataParallel) for module in modules):
        return "fsdp1"
    if any(isinstance(module, FSDPModule) for module in modules):
        return "fsdp2"
    if any(isinstance(module, DistributedDataParallel) for module in modules):
        return "ddp"
    return "tensor-parallel" if any(isinstance(p, DTensor) for p in model.parameters()) else "plain"


def _usual_parts(stored: list[StoredParameter]) -> int:
    """Into how many parts most bytes are cut, of those that are cut at all."""
    weights: dict[int, int] = {}
    for p in stored:
        if p.num_parts > 1:
            weights[p.num_parts] = weights.get(p.num_parts, 0) + p.numel * p.itemsize
    return max(weights, key=lambda parts: weights[parts], default=1)


def _even_share(p: StoredParameter, usual_parts: int) -> float:
    return p.numel * p.itemsize / (p.num_parts if p.num_parts > 1 else usual_parts)


def _ties(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(clean_name(name))
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def _broken_ties(model: nn.Module, ties: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
    """Names that transformers says are tied (`all_tied_weights_keys`), and that are parameters of their own."""
    names = {clean_name(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    group_of = {name: group for group in ties for name in group}
    broken: list[tuple[str, str]] = []
    seen: list[str] = []
    for path, module in model.named_modules():
        said = getattr(module, "all_tied_weights_keys", None)
        # An inner model's own word may be overruled by the one around it.
        if not isinstance(said, Mapping) or any(not outer or path.startswith(f"{outer}.") for outer in seen):
            continue
        seen.append(path)
        prefix = f"{clean_name(path)}." if path else ""
        pairs = [(f"{prefix}{source}", f"{prefix}{target}") for target, source in said.items()]
        broken += [
            pair for pair in pairs if names.issuperset(pair) and pair[1] not in group_of.get(pair[0], ())
        ]
    return tuple(dict.fromkeys(broken))


def _on_meta(model: nn.Module) -> Iterator[str]:
    """Yield what has no memory: a forward would run on garbage, or fail."""
    for path, module in model.named_modules():
        prefix = f"{clean_name(path)}." if path else ""
        named = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
        attributes = {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}
        yield from (f"{prefix}{name}" for name, tensor in {**named, **attributes}.items() if tensor.is_meta)


def _is_recomputed(module: nn.Module) -> bool:
    if is_checkpointed(module):
        return True
    is_layer = any(base.__name__ == "GradientCheckpointingLayer" for base in type(module).__mro__)
    return is_layer and bool(getattr(module, "gradient_checkpointing", False))


def _problems(found: Diagnosis) -> Iterator[str]:
    if len(found.units) == 1:
        yield "no units: the policy matched nothing, and every forward gathers the whole model at once"
    if found.num_parts > 1 and found.expected_bytes:
        share = found.local_bytes / found.expected_bytes
        if share > 1 + _TOLERANCE:
            some, why = (found.whole, "not cut") if found.whole else (found.uneven, "cut unevenly")
            yield f"this rank holds {share:.1f} times its share: {count(len(some), 'parameter')} {why} ({listed(some)})"
        elif share < 1 - _TOLERANCE:
            yield f"this rank holds {share:.1f} of its share: dims smaller than the mesh leave more to other ranks"
    for names in found.broken_ties:
        yield f"{' and '.join(map(escape, names))} should be one parameter, and are not"
    for unit in found.units if found.kind == "fsdp2" else ():
        if len(unit.dtypes) > 1:
            yield (
                f"unit {escape(unit.path) or 'root'} trains parameters of {' and '.join(unit.dtypes)}, which FSDP2 "
                "refuses at the first forward"
            )
    if found.meta:
        yield f"{count(len(found.meta), 'tensor')} without memory (meta): {listed(found.meta)}"
