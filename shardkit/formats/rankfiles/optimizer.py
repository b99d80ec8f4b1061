"""The optimizer's state dict in files of `torch.save`, one for each rank or one for all.

Either `optimizer.state_dict()`, whose parameters are numbered, or what gathers it by FQN
(`FSDP.optim_state_dict`, `get_optimizer_state_dict`). What is not in the state's own form (quantized states, parts
that do not say where they belong) is not taken over: half an optimizer would train, and train wrongly.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, TypeGuard

from shardkit.core.regions import Shape
from shardkit.core.text import count, escape, listed
from shardkit.formats.optimizer import (
    GROUPS,
    PARAMS,
    STATE,
    Agreement,
    OptimizerState,
    StateWriter,
    Unmapped,
    check_groups,
    state_path,
    unmapped,
)
from shardkit.formats.rankfiles.files import Gathering, each_file
from shardkit.formats.rankfiles.flat_files import FlatState, is_flat, open_flat_states
from shardkit.formats.rankfiles.numbered import Parameter, has_names, name_numbers, names_in_groups
from shardkit.formats.torchsave.file import DistributedRef, TensorRef, TorchFile, UnreadableTensor

_Key = str | int  # a parameter's FQN or number
# Adafactor's and CAME's second moments: sums over rows and columns.
_FACTORED = re.compile(r"(.*_)?(row|col)(_.*)?")


class _State(NamedTuple):
    """What one file says."""

    file: TorchFile
    by_parameter: Mapping[_Key, Mapping[str, object]]
    groups: Sequence[Mapping[str, Any]]


def open_optimizer_files(
    directory: str, names: Sequence[str], parameters: Sequence[Parameter]
) -> OptimizerState | Unmapped:
    """Open the optimizer's state and give it the names of the model's parameters.

    Args:
        directory: of the checkpoint.
        names: the files, in the order of the ranks; at least one.
        parameters: the model's, in its order.

    Raises:
        SourceError: files that are damaged or contradict each other, or parts that do not make up the whole.
        IntegrityError: files of different saves.
        ResourceError: a file may not be read.
    """
    gathering, named, agreement = Gathering(directory), dict[_Key, str](), Agreement()
    others: dict[tuple[str, str], object] = {}
    shapes = {parameter.name: parameter.shape for parameter in parameters}
    first: _State | None = None
    for file, _ in each_file(directory, names):
        state = _read(file)
        if state is None:
            return unmapped(names, f"{escape(file.name)} is no state dict of an optimizer")
        if first is None and len(names) > 1 and _is_flat(state, parameters):
            return open_flat_states(directory, names, _flat_states(directory, names), parameters)
        if first is None:
            found = _names(state, parameters)
            if isinstance(found, str):
                return unmapped(names, found)
            first, named = state._replace(file=file), found
        reason = _problem(state, named, None if len(names) == 1 else shapes)
        if reason is not None:
            return unmapped(names, f"{escape(file.name)}: {reason}")
        gathering.add(file, {STATE: _tensors(state, named)})
        by_name = {named[key]: leaves for key, leaves in state.by_parameter.items()}
        agreement.add(file.name, by_name, state.groups)
        for key, leaves in state.by_parameter.items():
            for leaf, value in leaves.items():
                if not _is_tensor(value):
                    others.setdefault((named[key], leaf), value)
    assert first is not None
    agreement.check()
    catalog = gathering.finish().catalog
    writer = StateWriter(catalog, first.file.source)
    for (fqn, leaf), value in others.items():
        writer.add_object(state_path(fqn, leaf), value)
    writer.add_groups(first.groups, [_params(group, named) for group in first.groups])
    return writer.finish(_notes(first, named))


def _flat_states(directory: str, names: Sequence[str]) -> Iterator[FlatState]:
    for file, _ in each_file(directory, names):
        state = _read(file)
        numbers = {} if state is None else state.by_parameter
        by_number = {key: leaves for key, leaves in numbers.items() if type(key) is int}
        yield FlatState(file, by_number, [] if state is None else state.groups)


def _read(file: TorchFile) -> _State | None:
    tree = file.tree if isinstance(file.tree, dict) else {}
    states, groups = tree.get(STATE), tree.get(GROUPS)
    if not isinstance(states, dict) or not all(isinstance(leaves, dict) for leaves in states.values()):
        return None
    if not isinstance(groups, list) or not all(_is_group(group) for group in groups):
        return None
    check_groups(file.name, groups)
    by_parameter = {
        key: {str(leaf): value for leaf, value in leaves.items()} for key, leaves in states.items()
    }
    return _State(file, by_parameter, groups)


def _is_group(group: object) -> bool:
    params = group.get(PARAMS) if isinstance(group, dict) else None
    return isinstance(params, list) and all(type(key) in (str, int) for key in params)


def _is_tensor(value: object) -> TypeGuard[TensorRef | DistributedRef | UnreadableTensor]:
    return isinstance(value, (TensorRef, DistributedRef, UnreadableTensor))


def _params(group: Mapping[str, Any], named: Mapping[_Key, str]) -> list[str]:
    return [named[key] for key in group[PARAMS] if key in named]


def _tensors(state: _State, named: Mapping[_Key, str]) -> dict[str, dict[str, object]]:
    return {
        named[key]: {leaf: value for leaf, value in leaves.items() if _is_tensor(value)}
        for key, leaves in state.by_parameter.items()
    }


def _names(state: _State, parameters: Sequence[Parameter]) -> dict[_Key, str] | str:
    """Return the FQN of each parameter, or why they cannot be told."""
    keys = [*state.by_parameter, *(key for group in state.groups for key in group[PARAMS])]
    if not any(type(key) is int for key in keys):
        return {key: str(key) for key in keys}
    if not all(type(key) is int for key in keys):
        return "some of its parameters are numbered, and some are named"
    shapes: dict[Any, Shape] = {
        key: shape for key, leaves in state.by_parameter.items() if (shape := _shape(leaves)) is not None
    }
    found = names_in_groups(state.groups, shapes, parameters)
    if found is None and (factored := _factored(state)):
        return f"{listed(factored)} do not have a parameter's shape, which would tell which one they are of"
    if found is None:
        found = name_numbers([group[PARAMS] for group in state.groups], shapes, parameters)
    return found if isinstance(found, str) else {key: found[key] for key in found}


def _factored(state: _State) -> list[str]:
    """Return the leaves that are all that some parameter has, and do not have its shape."""
    lone = {leaf for leaves in state.by_parameter.values() if _shape(leaves) is None for leaf in leaves}
    return sorted(filter(_FACTORED.fullmatch, lone))


def _is_flat(state: _State, parameters: Sequence[Parameter]) -> bool:
    """True for the states of FSDP1's flat parameters, of which there are fewer than parameters."""
    keys = [key for group in state.groups for key in group[PARAMS]]
    states = state.by_parameter.values()
    return (
        all(type(key) is int for key in keys)
        and bool(states)
        and all(map(is_flat, states))
        and any(len(parameter.shape) > 1 for parameter in parameters)
    )


def _shape(leaves: Mapping[str, object]) -> Shape | None:
    """Return the shape of a parameter, which most of its states have; None where there is none that tells."""
    shapes = [
        value.shape
        for leaf, value in leaves.items()
        if isinstance(value, (TensorRef, DistributedRef)) and not _FACTORED.fullmatch(leaf)
    ]
    return max(shapes, key=len, default=None) if any(shapes) else None


def _problem(state: _State, named: Mapping[_Key, str], shapes: Mapping[str, Shape] | None) -> str | None:
    """Return why the states of a file cannot be put together with those of the others.

    Args:
        named: the FQN of each parameter.
        shapes: of the model's parameters; None where there are no other files.
    """
    for key, leaves in state.by_parameter.items():
        if key not in named:
            return f"it has a state of parameter {escape(str(key))}, which other files do not have"
        for leaf, value in leaves.items():
            where = f"{escape(leaf)} of {escape(named[key])}"
            if isinstance(value, UnreadableTensor):
                return f"{where} is not stored as plain values: {escape(value.name)}"
            if isinstance(value, DistributedRef) and value.problem:
                return f"{where}: {escape(value.problem)}"
            if shapes is None or not isinstance(value, TensorRef) or prod(value.shape) == 1:
                continue
            if shapes.get(named[key]) != value.shape:  # whole, it would have the parameter's shape
                return f"{where} is a rank's own part, which does not say where it belongs"
    return None


def _notes(first: _State, named: Mapping[_Key, str]) -> Iterator[str]:
    numbered = [key for group in first.groups for key in group[PARAMS] if type(key) is int]
    if numbered and not all(map(has_names, first.groups)):
        yield (
            "the optimizer has only numbered its parameters: they were taken to be the model's in its order, which "
            "their shapes bear out"
        )
    lost = [key for key in numbered if key not in named]
    if lost:
        yield f"{count(len(lost), 'parameter')} of the optimizer without any state are left out: {listed(list(map(str, lost)))}"
