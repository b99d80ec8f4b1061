"""Turn a policy into calls of `fully_shard` on a live model: choose the modules that are units, and split units.

The tracing child and `wrap` both choose units here, so training has the same units as the files for its policy.
Only code that has a model imports this module. It imports torch, and nothing heavier.

FSDP2 gathers the parameters of a unit in one dtype. At the first forward it refuses a unit whose trainable
parameters are stored in several dtypes. So parameters that a model keeps in fp32 next to half precision are split
off. Each goes to a unit on a module inside the policy's unit, as far out as possible, because modules around
a parameter may read it too. Parameters directly on the unit's own module have no such place and stay
outside of FSDP. So do parameters without a dim (CLIP's `logit_scale`), which `fully_shard` refuses.

A unit is *wide* if FSDP2 computes it in fp32 although the rest of the model is computed in half precision.

The factors of OSFT are stored in fp32 next to weights of any dtype, but computed in the dtype of these weights.
Frozen and trained factors are split off together, into units that are not wide.
"""

from __future__ import annotations

import contextlib
import importlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, takewhile
from typing import Any

import torch
from torch import nn

from shardkit.core.factored import factor_of
from shardkit.core.text import escape
from shardkit.errors import LayoutError, PolicyError
from shardkit.keys.names import clean_name
from shardkit.layout.classes import ClassDtypes, collect
from shardkit.layout.wrap_policy import (
    OPTION,
    PolicyWording,
    WrapPolicy,
    list_candidates,
    match_paths,
    path_templates,
    unknown_names_error,
)

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_MAX_SHOWN = 200


def find_units(model: nn.Module, policy: WrapPolicy) -> list[str]:
    """Return the paths of the modules, other than the root, that get a `fully_shard` call of their own.

    Args:
        model: a model that is not wrapped yet.
        policy: a policy of any kind but "function".

    Returns:
        Paths in module order, that is, with children after the modules that contain them.

    Raises:
        PolicyError: the policy matches nothing, or a class cannot be imported.
        LayoutError: names of one parameter would lie in different units.
    """
    if policy.kind == "auto":
        return without_ties(model, match_auto(model, OPTION))
    if policy.kind == "names":
        matched = match_names(model, policy.names)
        check_ties(model, matched, OPTION)
        return matched
    return []


def match_auto(model: nn.Module, wording: PolicyWording) -> list[str]:
    """Return the modules of the model's `_no_split_modules`, else the blocks of its outermost numbered containers.

    Raises:
        PolicyError: the model has neither modules of these classes nor such containers. The error lists the classes of its
            modules, those first whose names are most like a decoder layer's.
    """
    names = collect(model, "_no_split_modules")
    matched = [path for path, module in model.named_modules() if path and type(module).__name__ in names]
    matched = matched or list(_blocks(model))
    if matched:
        return matched
    why = f"none of {', '.join(names)} is in the model" if names else "it names none (_no_split_modules)"
    raise PolicyError(
        f"{wording.of('auto')}: {type(model).__name__} has no classes to wrap: {why}, and it has no list of blocks",
        problems=list_candidates(class_counts(model), ("DecoderLayer",)),
        hint=f"name one of these classes; {wording.of('none')} {wording.effect}",
    )


def _blocks(model: nn.Module) -> Iterator[str]:
    """Yield the children of `model.layers`, `transformer.h` and the like: modules that are numbered from 0.

    A block consists of modules itself. Modules inside a block (the experts of a layer) are not blocks.
    """
    inside: list[str] = []
    for path, module in model.named_modules():
        if not path or any(path.startswith(f"{outer}.") for outer in inside):
            continue
        children = dict(module.named_children())
        is_numbered = list(children) == [str(number) for number in range(len(children))]
        is_list = isinstance(module, _CONTAINERS) and bool(children) and is_numbered
        if is_list and all(map(_is_block, children.values())):
            inside.append(path)
            yield from (f"{path}.{name}" for name in children)


def _is_block(module: nn.Module) -> bool:
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):  # never called; its children are blocks
        return False
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def match_names(model: nn.Module, names: Iterable[str], wording: PolicyWording = OPTION) -> list[str]:
    """Return the paths of the modules that names match. A name is a class, else a module path, else an import path.

    Raises:
        PolicyError: names match nothing (the error lists them, and the names that exist), or an import fails.
    """
    modules = {path: module for path, module in model.named_modules() if path}
    matched = {
        name: [path for path, module in modules.items() if type(module).__name__ == name]
        or match_paths(name, list(modules))
        or _match_import(name, modules, wording)
        for name in names
    }
    unknown = [name for name, paths in matched.items() if not paths]
    if unknown:
        if all("." in name for name in unknown):
            raise unknown_names_error(unknown, path_templates(modules), what="module paths", wording=wording)
        raise unknown_names_error(unknown, class_counts(model), what="module classes", wording=wording)
    matching = set(chain.from_iterable(matched.values()))
    return [path for path in modules if path in matching]


def _match_import(name: str, modules: dict[str, nn.Module], wording: PolicyWording) -> list[str]:
    module_name, _, attribute = name.rpartition(".")
    if not module_name or "*" in name:
        return []
    try:
        module_class = import_name(module_name, attribute, wording)
    except PolicyError as error:
        if isinstance(error.__cause__, ModuleNotFoundError | AttributeError):
            return []  # the caller's error lists the names that exist, which helps more
        raise
    if not isinstance(module_class, type):
        raise PolicyError(
            f"{wording.name}: {name} is not a class", hint="a function is written module:function"
        )
    return [path for path, module in modules.items() if isinstance(module, module_class)]


def class_counts(model: nn.Module) -> Counter[str]:
    """Return the number of modules with parameters of each class, without the root and module lists."""
    modules = (m for m in model.modules() if m is not model and any(True for _ in m.parameters()))
    return Counter(type(module).__name__ for module in modules if not isinstance(module, nn.ModuleList))


def import_name(module_name: str, attribute: str, wording: PolicyWording = OPTION) -> Any:
    """Import a class or function that the user named.

    Raises:
        PolicyError: it cannot be imported. The error's cause is the exception that its code raised.
    """
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (Exception, SystemExit) as error:
        raise PolicyError(
            f"{wording.name}: cannot import {attribute} from {module_name}: {describe_error(error)}",
            hint="it is looked for in the current directory, PYTHONPATH and the installed packages",
        ) from error


def describe_error(error: BaseException) -> str:
    """Return one line that describes an exception of the user's or the model's code."""
    if isinstance(error, SystemExit):
        return f"it called sys.exit({repr(error.code)[:_MAX_SHOWN]})"
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {escape(text[0])}" if text else type(error).__name__


def split_ties(model: nn.Module, paths: Iterable[str]) -> list[dict[str, str]]:
    """Return the parameters whose names lie in different units, each as name -> path of its unit ("" is the root).

    `fully_shard` splits such a parameter in two, or fails at the first forward.
    """
    modules = dict(model.named_modules())
    units = {id(modules[path]): path for path in paths}
    holders: dict[int, dict[str, str]] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), {})[fqn] = unit_of(model, fqn, units)
    return [names for names in holders.values() if len(set(names.values())) > 1]


def unit_of(model: nn.Module, fqn: str, units: dict[int, str]) -> str:
    """Return the path of the innermost unit around a parameter.

    Args:
        model: the model.
        fqn: name of the parameter.
        units: id of each unit's module -> path. A module may have several paths, so paths cannot be compared.
    """
    module, unit = model, ""
    for part in fqn.split(".")[:-1]:
        module = getattr(module, part)
        unit = units.get(id(module), unit)
    return unit


def check_ties(model: nn.Module, paths: Sequence[str], wording: PolicyWording) -> None:
    """Raise an error if units would split a tie.

    Raises:
        LayoutError: a tie would be split; the error lists each with its names and their units, and a policy that works.
    """
    split = split_ties(model, paths)
    if split:
        modules = dict(model.named_modules())
        raise tie_error(split, [(path, type(modules[path]).__name__) for path in paths], wording)


def tie_error(
    split: Iterable[dict[str, str]], units: Iterable[tuple[str, str]], wording: PolicyWording
) -> LayoutError:
    """Return the error for ties in different units.

    Args:
        split: result of `split_ties`.
        units: (path, class name) of every unit but the root.
    """
    split, units = list(split), list(units)
    bad = {path for names in split for path in names.values()}
    bad_classes = {class_name for path, class_name in units if path in bad}
    unaffected_classes = sorted({class_name for _, class_name in units} - bad_classes)
    return LayoutError(
        "tied parameters lie in different units, where training would untie them",
        problems=[
            " and ".join(f"{escape(n)} (unit {escape(path) or 'root'})" for n, path in names.items())
            for names in split
        ],
        hint=f"both names must share a unit, such as the root: {wording.of(','.join(unaffected_classes) or 'none')}",
    )


def without_ties(model: nn.Module, paths: list[str]) -> list[str]:
    """Return the units without those that would split a tie. Their parameters go to the unit around them."""
    while split := split_ties(model, paths):
        bad = {path for names in split for path in names.values()}
        paths = [path for path in paths if path not in bad]
    return paths


# (class, parameter) of parameters that are rounded to half precision. transformers 5.23 adds them to half precision,
# which gives fp32, and multiplies the sum by half precision, which torch refuses. So DeBERTa needs them rounded.
_ROUNDED = {("DisentangledSelfAttention", "q_bias"), ("DisentangledSelfAttention", "v_bias")}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedUnit:
    """One call of `fully_shard`."""

    path: str
    """Path of the module."""
    around: str
    """Path of the policy's unit that this one was split off from; equal to `path` for a unit of the policy."""
    is_wide: bool
    """FSDP2 computes the unit in fp32, whatever the dtype of the rest."""
    parameters: tuple[nn.Parameter, ...] | None = None
    """The parameters of a unit that was split off; None for all parameters that no other unit has."""
    factors_of: torch.dtype | None = None
    """For a unit that has only factors: the dtype of the weights around it. The factors are computed in this dtype
    unless the mixed-precision policy names another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlan:
    """All calls of `fully_shard`."""

    units: tuple[PlannedUnit, ...]
    """In the order of the calls: the policy's units, inner ones first; the root; the units that were split off."""
    outside: Mapping[str, nn.Parameter]
    """Name in the model -> parameter that cannot be in any unit."""


@dataclass(frozen=True, slots=True)
class _UnitTraits:
    """The properties that all parameters of a unit must share."""

    is_wide: bool
    stored: torch.dtype | None
    """The stored dtype. None for untrained parameters other than factors: FSDP2 accepts them with any dtype."""


@dataclass(slots=True)
class _Member:
    """A parameter of one of the policy's units."""

    names: list[str]
    """All its names in the model; several for a tie."""
    parameter: nn.Parameter
    kind: _UnitTraits
    is_rounded: bool
    """It is rounded to half precision, see `_ROUNDED`."""
    is_factor: bool
    """It is a factor of OSFT."""


def plan_units(model: nn.Module, paths: Collection[str], wide: ClassDtypes | None) -> UnitPlan:
    """Return the calls of `fully_shard` that shard a model so that no unit mixes dtypes.

    Args:
        model: a model that is not wrapped yet.
        paths: the policy's modules, without the root.
        wide: the dtypes of the model's classes. Parameters that they keep in fp32 are computed in fp32, and so are
            those that are stored in fp32 in a unit of half precision. With None everything is computed alike, and
            units are split by stored dtypes only.
    """
    units, split, outside = list[PlannedUnit](), list[PlannedUnit](), dict[str, nn.Parameter]()
    of_weights = dict[str, torch.dtype | None]()
    members = _members(model, paths, wide)
    inner_first = sorted(paths, key=lambda path: -path.count("."))  # stable: module order within a depth
    for path in (*inner_first, ""):
        held_here = members.get(path, [])
        cut = [member for member in held_here if member.parameter.ndim]
        outside |= {member.names[0]: member.parameter for member in held_here if not member.parameter.ndim}
        kinds = _by_kind(cut, has_wide=wide is not None)
        main = _main_kind(kinds, is_root=not path)
        units.append(PlannedUnit(path=path, around=path, is_wide=main is not None and main.is_wide))
        of_weights[path] = _dtype_of(
            [member for member in kinds.get(main, ()) if not member.is_factor] if main else ()
        )
        unit_paths = {path}
        for kind, kind_members in kinds.items():
            if kind == main:
                continue
            hosts: dict[str, list[nn.Parameter]] = {}
            for member in kind_members:
                host = _host_module(model, path, member.names, unit_paths)
                if host is None:
                    outside[member.names[0]] = member.parameter
                else:
                    hosts.setdefault(host, []).append(member.parameter)
            unit_paths.update(hosts)
            are_factors = all(member.is_factor for member in kind_members)
            computed = _dtype_of(kinds.get(main)) if are_factors and main else None
            split += [
                PlannedUnit(
                    path=host,
                    around=path,
                    is_wide=kind.is_wide,
                    parameters=tuple(parameters),
                    factors_of=computed,
                )
                for host, parameters in hosts.items()
            ]
    split.sort(key=lambda unit: -unit.path.count("."))
    planned = (_with_dtype_around(unit, members.get(unit.path, ()), of_weights) for unit in units)
    return UnitPlan(units=(*planned, *split), outside=outside)


def _with_dtype_around(
    unit: PlannedUnit, members: Sequence[_Member], of_weights: Mapping[str, torch.dtype | None]
) -> PlannedUnit:
    """Return one of the policy's units, with `factors_of` set if the unit has only factors.

    Args:
        unit: one of the policy's units.
        members: its parameters.
        of_weights: path of each of the policy's units -> dtype of its weights; None for a unit without weights.
    """
    if not members or not all(member.is_factor for member in members):
        return unit
    parts = unit.path.split(".")
    around = (".".join(parts[:size]) for size in range(len(parts) - 1, -1, -1))
    return replace(unit, factors_of=next((dtype for path in around if (dtype := of_weights.get(path))), None))


def shard_units(
    plan: UnitPlan, modules: Mapping[str, nn.Module], shard: Callable[[PlannedUnit, nn.Module], object]
) -> None:
    """Call `shard` for each unit, while all other parameters of the unit's module are hidden.

    Args:
        plan: result of `plan_units`.
        modules: path of each unit -> its module, or the wrapper that has replaced the module.
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
        with _hide_parameters(module, hidden):
            shard(unit, module)


def _members(model: nn.Module, paths: Collection[str], wide: ClassDtypes | None) -> dict[str, list[_Member]]:
    """Return path of each of the policy's units -> its parameters. A tied parameter occurs once."""
    modules = dict(model.named_modules())
    units = {id(modules[path]): path for path in paths}
    by_id: dict[int, _Member] = {}
    by_unit: dict[str, list[_Member]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        member = by_id.get(id(parameter))
        if member is None:
            is_factor = factor_of(name) is not None
            stored = parameter.dtype if parameter.requires_grad or is_factor else None
            member = by_id[id(parameter)] = _Member(
                [], parameter, _UnitTraits(False, stored), _is_rounded(modules, name), is_factor
            )
            by_unit.setdefault(unit_of(model, name, units), []).append(member)
        member.names.append(name)
        if wide is not None and parameter.is_floating_point() and not member.is_rounded:
            is_wide = wide.of(clean_name(name)) is torch.float32 is not wide.default_dtype
            member.kind = replace(member.kind, is_wide=member.kind.is_wide or is_wide)
    return by_unit


def _is_rounded(modules: Mapping[str, nn.Module], name: str) -> bool:
    path, _, attribute = name.rpartition(".")
    return (type(modules[path]).__name__, attribute) in _ROUNDED


def _by_kind(members: Sequence[_Member], *, has_wide: bool) -> dict[_UnitTraits, list[_Member]]:
    """Group the parameters of a unit by kind. Untrained ones join trained ones that are computed alike, if any."""
    trained = list(dict.fromkeys(member.kind for member in members if member.kind.stored is not None))
    of_weights = {member.kind for member in members if not member.is_factor}
    narrow = [kind.stored for kind in trained if kind in of_weights and not kind.is_wide]
    is_half = has_wide and any(
        stored is not None and stored.is_floating_point and stored.itemsize == 2 for stored in narrow
    )
    groups: dict[_UnitTraits, list[_Member]] = {}
    for member in members:
        kind, dtype = member.kind, member.parameter.dtype
        if kind.stored is None:
            alike = (candidate for candidate in trained if candidate.is_wide == kind.is_wide)
            # Factors are computed in the dtype of the weights, not in the dtype that they are stored in.
            kind = next(
                (candidate for candidate in alike if candidate in of_weights or candidate.stored is dtype),
                kind,
            )
        elif is_half and kind.stored is torch.float32 and not (member.is_rounded or member.is_factor):
            kind = replace(kind, is_wide=True)
        groups.setdefault(kind, []).append(member)
    return groups


def _dtype_of(members: Sequence[_Member] | None) -> torch.dtype | None:
    """Return the dtype of the first floating parameter, or None."""
    return next(
        (member.parameter.dtype for member in members or () if member.parameter.is_floating_point()), None
    )


def _main_kind(kinds: Mapping[_UnitTraits, Sequence[_Member]], *, is_root: bool) -> _UnitTraits | None:
    """Return the kind whose parameters stay in the policy's unit: the narrowest kind.

    Wide parameters are usually few. Embeddings, which models call from anywhere, are not among them. The root casts
    its inputs to the dtype that it computes in, so it is never a wide unit.
    """

    def order(kind: _UnitTraits) -> tuple[bool, int, int]:
        size = kind.stored.itemsize if kind.stored is not None else 0
        return kind.is_wide, size, -sum(member.parameter.numel() for member in kinds[kind])

    return min((kind for kind in kinds if not (is_root and kind.is_wide)), key=order, default=None)


def _host_module(
    model: nn.Module, unit: str, names: Sequence[str], unit_paths: Collection[str]
) -> str | None:
    """Return the path of the outermost module in a unit that has a `forward` and contains all names of a parameter."""
    inside = [name.removeprefix(f"{unit}." if unit else "").split(".")[:-1] for name in names]
    around = takewhile(lambda parts: len(set(parts)) == 1, zip(*inside, strict=False))
    for path in accumulate((part for part, *_ in around), "{}.{}".format):
        full = f"{unit}.{path}" if unit else path
        module = model.get_submodule(full)
        if full not in unit_paths and type(module).forward is not nn.Module.forward:
            return full
    return None


@contextlib.contextmanager
def _hide_parameters(module: nn.Module, hidden: Collection[int]) -> Iterator[None]:
    """Hide parameters of a module and its submodules while the context lasts; they return in the same order.

    Args:
        module: the module.
        hidden: ids of the parameters to hide.
    """
    removed = [
        (part, name, parameter)
        for part in module.modules()
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False)
        if id(parameter) in hidden
    ]
    for part, name, _ in removed:
        part.register_parameter(name, None)
    try:
        yield
    finally:
        for part, name, parameter in removed:
            part.register_parameter(name, parameter)
