"""Which modules of a live model a policy makes units. The tracing child and `wrap` both choose by this, so that
what was written for a policy is what training asks for with it.

Imported only where there is a model: it imports torch, and nothing heavier.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from shardkit.core.text import escape
from shardkit.errors import LayoutError, PolicyError
from shardkit.layout.wrap_policy import (
    OPTION,
    Wording,
    WrapPolicy,
    list_candidates,
    match_paths,
    no_split_names,
    unknown_names,
)

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_MAX_SHOWN = 200


def find_units(model: nn.Module, policy: WrapPolicy, wording: Wording = OPTION) -> list[str]:
    """Return the paths of the modules that get a `fully_shard` call of their own, the root aside.

    Args:
        model: not wrapped yet.
        policy: of any kind but "function".
        wording: how the policy was asked for.

    Returns:
        Paths in module order; children come after the modules that they lie in.

    Raises:
        PolicyError: it matches nothing, or a class cannot be imported.
        LayoutError: names that are one parameter would lie in different units.
    """
    if policy.kind == "auto":
        return without_ties(model, match_auto(model, wording))
    if policy.kind == "names":
        matched = match_names(model, policy.names, wording)
        check_ties(model, matched, wording)
        return matched
    return []


def collect(model: nn.Module, attribute: str) -> tuple[str, ...]:
    """Return the strings of a class attribute over all modules; it may be a str, list, set or None.

    transformers 5 puts a `set()` of the attribute on each instance, which makes single letters of a str;
    so the class is asked as well, and single letters count for nothing.
    """
    values = (getattr(holder, attribute, None) for part in model.modules() for holder in (type(part), part))
    return tuple(dict.fromkeys(name for value in values for name in no_split_names(value) if len(name) > 1))


def match_auto(model: nn.Module, wording: Wording) -> list[str]:
    """Return the modules that the model itself names, else the blocks of its outermost numbered containers.

    Raises:
        PolicyError: it has neither.
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
    """Yield the children of `model.layers`, `transformer.h` and their like: modules made of modules, numbered from 0.

    What lies inside a block (the experts of a layer) is none.
    """
    inside: list[str] = []
    for path, module in model.named_modules():
        if not path or any(path.startswith(f"{outer}.") for outer in inside):
            continue
        children = dict(module.named_children())
        is_numbered = list(children) == [str(at) for at in range(len(children))]
        if (
            isinstance(module, _CONTAINERS)
            and children
            and is_numbered
            and all(map(_is_block, children.values()))
        ):
            inside.append(path)
            yield from (f"{path}.{name}" for name in children)


def _is_block(module: nn.Module) -> bool:
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def match_names(model: nn.Module, names: Iterable[str], wording: Wording = OPTION) -> list[str]:
    """Return the modules of every name: a class, a place in the model, or an import path, tried in that order.

    Raises:
        PolicyError: names that match nothing, all at once with what exists; an import that fails.
    """
    modules = {path: module for path, module in model.named_modules() if path}
    found: set[str] = set()
    unknown = []
    for name in names:
        matched = [path for path, module in modules.items() if type(module).__name__ == name]
        matched = matched or match_paths(name, list(modules)) or _match_import(name, modules, wording)
        found.update(matched)
        if not matched:
            unknown.append(name)
    if unknown:
        raise unknown_names(unknown, class_counts(model), what="module classes", wording=wording)
    return [path for path in modules if path in found]


def _match_import(name: str, modules: dict[str, nn.Module], wording: Wording) -> list[str]:
    module_name, _, attribute = name.rpartition(".")
    if not module_name or "*" in name:
        return []
    try:
        wanted = import_name(module_name, attribute, wording)
    except PolicyError as error:
        if isinstance(error.__cause__, ModuleNotFoundError | AttributeError):
            return []  # then the list of what exists says more
        raise
    if not isinstance(wanted, type):
        raise PolicyError(
            f"{wording.name}: {name} is not a class", hint="a function is written module:function"
        )
    return [path for path, module in modules.items() if isinstance(module, wanted)]


def class_counts(model: nn.Module) -> Counter[str]:
    """Return how many modules of each class hold parameters, the root and containers aside."""
    held = (m for m in model.modules() if m is not model and any(True for _ in m.parameters()))
    return Counter(type(module).__name__ for module in held if not isinstance(module, nn.ModuleList))


def import_name(module_name: str, attribute: str, wording: Wording = OPTION) -> Any:
    """Import what a person named.

    Raises:
        PolicyError: it cannot be imported, whatever its code raised; that is the error's cause.
    """
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (Exception, SystemExit) as error:
        raise PolicyError(
            f"{wording.name}: cannot import {attribute} from {module_name}: {describe(error)}",
            hint="it is looked for in the current directory, PYTHONPATH and the installed packages",
        ) from error


def describe(error: BaseException) -> str:
    """Return what somebody's own code raised as one line."""
    if isinstance(error, SystemExit):
        return f"it called sys.exit({repr(error.code)[:_MAX_SHOWN]})"
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {escape(text[0])}" if text else type(error).__name__


def split_ties(model: nn.Module, paths: Iterable[str]) -> list[dict[str, str]]:
    """Return the parameters whose names lie in different units: of each, name to unit's path ("" is the root).

    `fully_shard` takes them apart, or fails at the first forward.
    """
    modules = dict(model.named_modules())
    units = {id(modules[path]): path for path in paths}
    holders: dict[int, dict[str, str]] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), {})[fqn] = unit_of(model, fqn, units)
    return [names for names in holders.values() if len(set(names.values())) > 1]


def unit_of(model: nn.Module, fqn: str, units: dict[int, str]) -> str:
    """The innermost unit on a parameter's way; told by the module, which may stand in several places."""
    module, unit = model, ""
    for part in fqn.split(".")[:-1]:
        module = getattr(module, part)
        unit = units.get(id(module), unit)
    return unit


def check_ties(model: nn.Module, paths: Sequence[str], wording: Wording) -> None:
    """Refuse units that would take a tie apart.

    Raises:
        LayoutError: every such parameter with its names and their units, and a policy that works.
    """
    split = split_ties(model, paths)
    if split:
        modules = dict(model.named_modules())
        raise tie_error(split, [(path, type(modules[path]).__name__) for path in paths], wording)


def tie_error(
    split: Iterable[dict[str, str]], units: Iterable[tuple[str, str]], wording: Wording
) -> LayoutError:
    """Return the error for ties in different units.

    Args:
        split: as `split_ties` returns it.
        units: (path, class name) of every unit but the root.
    """
    split, units = list(split), list(units)
    bad = {path for names in split for path in names.values()}
    bad_classes = {class_name for path, class_name in units if path in bad}
    others = sorted({class_name for _, class_name in units} - bad_classes)
    return LayoutError(
        "tied parameters lie in different units, where training would untie them",
        problems=[
            " and ".join(f"{escape(n)} (unit {escape(path) or 'root'})" for n, path in names.items())
            for names in split
        ],
        hint=f"both names must share a unit, such as the root: {wording.of(','.join(others) or 'none')}",
    )


def without_ties(model: nn.Module, paths: list[str]) -> list[str]:
    """Return units without those that would take a tie apart: their parameters go to the unit around them."""
    while split := split_ties(model, paths):
        bad = {path for names in split for path in names.values()}
        paths = [path for path in paths if path not in bad]
    return paths
