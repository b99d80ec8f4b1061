"""From the modules of a policy to calls of `fully_shard`: parameters of another dtype get units of their own.

FSDP2 gathers the parameters of a unit in one dtype, and at the first forward refuses trainable ones that are stored
in several. So what a model keeps in fp32 beside half precision is split off: each such parameter goes to a unit on a
module inside of the policy's unit, as far out as it can be, because modules around a parameter may look at it too.
What lies directly on the unit's own module has no such place, and stays outside of FSDP. So do parameters without a
dim (CLIP's `logit_scale`), which `fully_shard` refuses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile

import torch
from torch import nn

from shardkit.keys.names import clean_name
from shardkit.layout.dtypes import ClassDtypes
from shardkit.layout.units import unit_of

# (class, parameter). transformers 5.23 adds these to half precision and then multiplies the sum with half precision,
# which torch refuses: DeBERTa runs in bf16 only where they are rounded.
_ROUNDED = {("DisentangledSelfAttention", "q_bias"), ("DisentangledSelfAttention", "v_bias")}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedUnit:
    """One call of `fully_shard`."""

    path: str
    """Of the module."""
    around: str
    """The policy's module that it was split off from; the same one where it was not."""
    is_wide: bool
    """It is computed with in fp32, whatever the rest is."""
    parameters: tuple[nn.Parameter, ...] | None = None
    """Those that were split off; None is all that no other unit has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlan:
    """All calls of `fully_shard`."""

    units: tuple[PlannedUnit, ...]
    """In their order: the policy's modules, inner ones first, the root, then what is split off."""
    outside: Mapping[str, nn.Parameter]
    """Name in the model -> parameter that no unit can have."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """What parameters have in common that one unit may hold."""

    is_wide: bool
    stored: torch.dtype | None
    """None for what is not trained: FSDP2 takes it with any."""


@dataclass(slots=True)
class _Member:
    """A parameter of a unit of the policy."""

    names: list[str]
    parameter: nn.Parameter
    kind: _Kind
    is_rounded: bool


def plan_units(model: nn.Module, paths: Collection[str], wide: ClassDtypes | None) -> UnitPlan:
    """Return how a model is sharded so that no unit mixes dtypes.

    Args:
        model: not wrapped yet.
        paths: modules of the policy, without the root.
        wide: what the model's classes have in fp32 is computed in fp32, and so is what is stored wider than the rest
            of its unit. None computes everything alike, and splits by stored dtypes alone.
    """
    units, split, outside = list[PlannedUnit](), list[PlannedUnit](), dict[str, nn.Parameter]()
    members = _members(model, paths, wide)
    for path in (
        *sorted(paths, key=lambda path: -path.count(".")),
        "",
    ):  # stable: module order within a depth
        cut = [each for each in members.get(path, []) if each.parameter.ndim]
        outside |= {
            each.names[0]: each.parameter for each in members.get(path, []) if not each.parameter.ndim
        }
        kinds = _by_kind(cut, has_wide=wide is not None)
        main = _main(kinds, is_root=not path)
        units.append(PlannedUnit(path=path, around=path, is_wide=main is not None and main.is_wide))
        taken = {path}
        for kind, held in kinds.items():
            if kind == main:
                continue
            hosts: dict[str, list[nn.Parameter]] = {}
            for each in held:
                host = _host(model, path, each.names, taken)
                if host is None:
                    outside[each.names[0]] = each.parameter
                else:
                    hosts.setdefault(host, []).append(each.parameter)
            taken.update(hosts)
            split += [
                PlannedUnit(path=host, around=path, is_wide=kind.is_wide, parameters=tuple(parameters))
                for host, parameters in hosts.items()
            ]
    split.sort(key=lambda unit: -unit.path.count("."))
    return UnitPlan(units=(*units, *split), outside=outside)


def shard_units(
    plan: UnitPlan, modules: Mapping[str, nn.Module], shard: Callable[[PlannedUnit, nn.Module], object]
) -> None:
    """Call `shard` for each unit, while its module shows no parameters but those of the unit.

    Args:
        plan: from `plan_units`.
        modules: path of each unit -> its module, or what wraps that since.
        shard: calls `fully_shard`.
    """
    apart = {id(p) for unit in plan.units for p in unit.parameters or ()}
    apart.update(map(id, plan.outside.values()))
    for unit in plan.units:
        module = modules[unit.path]
        if unit.parameters is None:
            hidden = {id(p) for p in module.parameters()} & apart
        else:
            hidden = {id(p) for p in module.parameters()}.difference(map(id, unit.parameters))
        with _without(module, hidden):
            shard(unit, module)


def _members(model: nn.Module, paths: Collection[str], wide: ClassDtypes | None) -> dict[str, list[_Member]]:
    """Return the parameters of each unit of the policy, each once."""
    modules = dict(model.named_modules())
    units = {id(modules[path]): path for path in paths}
    found: dict[int, _Member] = {}
    by_unit: dict[str, list[_Member]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        member = found.get(id(parameter))
        if member is None:
            stored = parameter.dtype if parameter.requires_grad else None
            member = found[id(parameter)] = _Member(
                [], parameter, _Kind(False, stored), _is_rounded(modules, name)
            )
            by_unit.setdefault(unit_of(model, name, units), []).append(member)
        member.names.append(name)
        if wide is not None and parameter.is_floating_point() and not member.is_rounded:
            is_wide = wide.of(clean_name(name)) is torch.float32 is not wide.wanted
            member.kind = replace(member.kind, is_wide=member.kind.is_wide or is_wide)
    return by_unit


def _is_rounded(modules: Mapping[str, nn.Module], name: str) -> bool:
    path, _, attribute = name.rpartition(".")
    return (type(modules[path]).__name__, attribute) in _ROUNDED


def _by_kind(members: Sequence[_Member], *, has_wide: bool) -> dict[_Kind, list[_Member]]:
    """Sort the parameters of a unit; those that are not trained go with others that are computed alike."""
    trained = {each.kind for each in members if each.kind.stored is not None}
    narrow = [kind.stored for kind in trained if kind.stored is not None and not kind.is_wide]
    is_half = has_wide and any(stored.is_floating_point and stored.itemsize == 2 for stored in narrow)
    found: dict[_Kind, list[_Member]] = {}
    for each in members:
        kind = each.kind
        if kind.stored is None:
            kind = next((other for other in trained if other.is_wide == kind.is_wide), kind)
        elif is_half and kind.stored is torch.float32 and not each.is_rounded:
            kind = replace(kind, is_wide=True)
        found.setdefault(kind, []).append(each)
    return found


def _main(kinds: Mapping[_Kind, Sequence[_Member]], *, is_root: bool) -> _Kind | None:
    """Return the kind that stays in the policy's unit: the narrowest, because what is kept wide is the exception, and
    embeddings, which models call from anywhere, are not. The root casts its inputs to what it computes in, so that it
    never is a wide one."""

    def order(kind: _Kind) -> tuple[bool, int, int]:
        size = kind.stored.itemsize if kind.stored is not None else 0
        return kind.is_wide, size, -sum(each.parameter.numel() for each in kinds[kind])

    return min((kind for kind in kinds if not (is_root and kind.is_wide)), key=order, default=None)


def _host(model: nn.Module, unit: str, names: Sequence[str], taken: Collection[str]) -> str | None:
    """Return the outermost module inside of a unit that is called and has a parameter under all of its names."""
    inside = [name.removeprefix(f"{unit}." if unit else "").split(".")[:-1] for name in names]
    around = takewhile(lambda parts: len(set(parts)) == 1, zip(*inside, strict=False))
    for path in accumulate((part for part, *_ in around), "{}.{}".format):
        full = f"{unit}.{path}" if unit else path
        module = model.get_submodule(full)
        if full not in taken and type(module).forward is not nn.Module.forward:
            return full
    return None


@contextlib.contextmanager
def _without(module: nn.Module, hidden: Collection[int]) -> Iterator[None]:
    """While it is active, a module and those in it do not show some parameters; their order stays."""
    taken = [
        (part, name, parameter)
        for part in module.modules()
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False)
        if id(parameter) in hidden
    ]
    for part, name, _ in taken:
        part.register_parameter(name, None)
    try:
        yield
    finally:
        for part, name, parameter in taken:
            part.register_parameter(name, parameter)
