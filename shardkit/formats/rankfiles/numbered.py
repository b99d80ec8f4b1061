"""Which parameter is which, where an optimizer has only numbered them.

`optimizer.state_dict()` numbers parameters in the order in which the optimizer got them, group by group.
Within a group that is usually the model's own order (`model.parameters()`). So a group is a subsequence of
the model's parameters, and the shapes of its states tell which one, or that several would fit. An optimizer
that was made from `model.named_parameters()` also says the names, whatever their order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shardkit.core.catalog import Catalog
from shardkit.core.regions import Shape
from shardkit.core.text import escape
from shardkit.formats.contract.optimizer import PARAMS
from shardkit.keys.names import clean, join

# PEFT 0.21: the parameters of a model that it trains; the others are frozen.
_ADAPTER = re.compile(r"(.*\.)?(lora_\w+|modules_to_save)\..*")
_NAMES = "param_names"  # torch 2.6 and later: beside `params`, in its order
_NO_FIT = "the shapes of its states are not those of the model's parameters, in their order"


class Parameter(NamedTuple):
    """A parameter of the model, as its checkpoint describes it."""

    name: str
    shape: Shape
    content: object = None
    """Equal for copies of one tensor; None where nothing is known about it."""


def parameters_of(
    catalog: Catalog, plain: frozenset[str], contents: Mapping[str, object] | None = None
) -> list[Parameter]:
    """Return the parameters of a model's state dict, in its order; of tied names, the first.

    Args:
        catalog: of the whole state dict.
        plain: names of tensors that every rank holds whole. Beside sharded tensors, these are buffers.
        contents: as in `Gathered`.
    """
    table, seen, found = catalog.chunks, set[object](), list[Parameter]()
    is_sharded = len(plain) < len(catalog.tensors)
    for name, entry in catalog.tensors.items():
        if not entry.dtype.is_floating or (is_sharded and name in plain):
            continue
        rows = slice(entry.chunk_ids.start, entry.chunk_ids.stop)
        places = zip(table.file[rows], table.start[rows], table.regions(entry.chunk_ids), strict=True)
        key = (entry.shape, frozenset(places))
        if entry.num_elements and key in seen:
            continue
        seen.add(key)
        found.append(Parameter(name, entry.shape, (contents or {}).get(name)))
    return found


def without_copies(parameters: Sequence[Parameter]) -> list[Parameter]:
    """Return the parameters without matrices that are copies of earlier ones: tied parameters that are stored twice."""
    seen, found = set[object](), list[Parameter]()
    for parameter in parameters:
        key = (parameter.shape, parameter.content)
        if parameter.content is None or len(parameter.shape) < 2 or key not in seen:
            found.append(parameter)
        seen.add(key)
    return found


def has_names(group: Mapping[str, Any]) -> bool:
    """True for a group that says the names of its numbered parameters."""
    names, params = group.get(_NAMES), group.get(PARAMS)
    return (
        isinstance(names, list)
        and isinstance(params, list)
        and len(names) == len(params)
        and all(type(name) is str for name in names)
    )


def names_in_groups(
    groups: Sequence[Mapping[str, Any]], shapes: Mapping[int, Shape], parameters: Sequence[Parameter]
) -> dict[int, str] | str | None:
    """Return the name of each numbered parameter if the optimizer says them, None otherwise.

    Args:
        groups: as `optimizer.state_dict()` has them.
        shapes: of the states, by number; without those that have no state.
        parameters: of the model.

    Returns:
        A text, escaped, where the names are not those of the model.
    """
    if not groups or not all(map(has_names, groups)):
        return None
    known = {join(clean(parameter.name)): parameter for parameter in parameters}
    named: dict[int, str] = {}
    for group in groups:
        for number, name in zip(group[PARAMS], group[_NAMES], strict=True):
            parameter = known.get(join(clean(name)))
            if parameter is None:
                return f"it names a parameter that the model does not have: {escape(name)}"
            if shapes.get(number, parameter.shape) != parameter.shape:
                return f"its state of {escape(name)} has another shape than the parameter"
            named[number] = parameter.name
    if len(set(named.values())) < sum(len(group[PARAMS]) for group in groups):
        return "it names a parameter twice"
    return named


def name_numbers(
    groups: Sequence[Sequence[int]], shapes: Mapping[int, Shape], parameters: Sequence[Parameter]
) -> dict[int, str] | str:
    """Return the name of each numbered parameter, or why that cannot be told.

    A parameter without a state gets a name only if all parameters are in one group.

    Args:
        groups: the numbers of each group, in its order.
        shapes: of the states, by number; without those that have no state.
        parameters: of the model, in its order.
    """
    if len(groups) == 1 and len(groups[0]) == len(parameters):
        pairs = list(zip(groups[0], parameters, strict=True))
        if all(shapes.get(number, parameter.shape) == parameter.shape for number, parameter in pairs):
            return {number: parameter.name for number, parameter in pairs}
        return _NO_FIT
    adapters = [parameter for parameter in parameters if _ADAPTER.fullmatch(parameter.name)]
    named: dict[int, str] = {}
    for group in groups:
        numbers = [number for number in group if number in shapes]
        wanted = [shapes[number] for number in numbers]
        if len(groups) == 1 and wanted == [parameter.shape for parameter in adapters]:
            names = [parameter.name for parameter in adapters]
        else:
            found = _only_names(wanted, parameters)
            if isinstance(found, str):
                return found
            names = found
        named.update(zip(numbers, names, strict=True))
    if len(set(named.values())) < len(named):
        return "the shapes of its states fit the same parameters twice"
    return named


def _only_names(wanted: Sequence[Shape], parameters: Sequence[Parameter]) -> list[str] | str:
    """Return the names of the parameters with these shapes in this order, or why not: none or several choices fit."""
    first = _first_places(wanted, parameters)
    if first is None:
        return _NO_FIT
    last = _first_places(wanted[::-1], parameters[::-1]) or []
    if first != [len(parameters) - 1 - place for place in reversed(last)]:
        return (
            f"it has only numbered its parameters, {len(wanted)} of {len(parameters)}, and their shapes fit several "
            "choices"
        )
    return [parameters[place].name for place in first]


def _first_places(wanted: Sequence[Shape], parameters: Sequence[Parameter]) -> list[int] | None:
    """Return the first places in the model's order that fit, None if none do."""
    places: list[int] = []
    at = 0
    for shape in wanted:
        while at < len(parameters) and parameters[at].shape != shape:
            at += 1
        if at == len(parameters):
            return None
        places.append(at)
        at += 1
    return places
