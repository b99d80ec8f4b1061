"""The optimizer's state dict in files of `torch.save`, one for each rank or one for all.

Either `optimizer.state_dict()`, whose parameters are numbered, or what gathers it by FQN
(`FSDP.optim_state_dict`, `get_optimizer_state_dict`). What is not in the state's own form (quantized states, parts
that do not say where they belong) is not taken over: half an optimizer would train, and train wrongly.

FSDP1's own optimizer state: `optimizer.state_dict()` over flat parameters, each rank's part of them, without names.

Nothing in such files says what a flat parameter is made of. The sizes do, with the model's names and shapes: `flat_units`.

Which parameters the flat parameters of FSDP1 are made of, where only their sizes are known.

FSDP1 without `use_orig_params` lays the parameters of a wrapped module end to end, in the model's order, but for those of
modules that are wrapped inside it; the ranks hold equal parts, the last ones with padding. `model.parameters()` gives the root's
first, then those of the modules inside, in order. So the sizes say which modules were wrapped, unless several choices have them.

Source: torch 2.13, torch/distributed/fsdp/_flat_param.py (`_init_flat_param_and_metadata`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
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
from shardkit.formats.rankfiles.flat import Leaves, Piece, Weight, without_tree, write_state
from shardkit.formats.rankfiles.numbered import (
    Parameter,
    has_names,
    name_numbers,
    names_in_groups,
    without_copies,
)
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


_UNKNOWN = (
    "its states are flat parameters of FSDP1, and which parameters they are made of cannot be told from their sizes; load "
    "it with the training script that saved it, and save by torch.distributed.checkpoint.state_dict"
)


_SEVERAL_GROUPS = (
    "its states are flat parameters of FSDP1 in {} groups: which of them come first in the model is not told"
)


class FlatState(NamedTuple):
    """What one rank's file says."""

    file: TorchFile
    by_number: Mapping[int, Mapping[str, object]]
    groups: Sequence[Mapping[str, Any]]


def is_flat(leaves: Mapping[str, object]) -> bool:
    """True for what may be the states of a flat parameter: plain tensors of one dim, beside numbers."""
    tensors = [value for value in leaves.values() if isinstance(value, TensorRef) and value.shape]
    return bool(tensors) and all(len(value.shape) == 1 and value.is_contiguous for value in tensors)


def open_flat_states(
    directory: str, names: Sequence[str], states: Iterable[FlatState], parameters: Sequence[Parameter]
) -> OptimizerState | Unmapped:
    """Take flat states apart.

    Args:
        directory: of the checkpoint.
        names: of the files.
        states: what they say, in the order of the ranks.
        parameters: the model's, in its order.

    Raises:
        IntegrityError: files of different saves.
    """
    ranks = [_lean(state) for state in states]
    first = ranks[0]
    num_groups = sum(bool(group[PARAMS]) for group in first.groups)
    if num_groups > 1:
        return unmapped(names, _SEVERAL_GROUPS.format(num_groups))
    numbers = [number for group in first.groups for number in group[PARAMS]]
    lengths = [_lengths(rank, numbers) for rank in ranks]
    if lengths[0] is None or any(found != lengths[0] for found in lengths):
        return unmapped(names, _UNKNOWN)
    sizes = [length * len(ranks) for length in lengths[0]]
    units = split_units(sizes, len(ranks), parameters)
    if units is None:  # FSDP1 stores a tied parameter under each of its names, and trains it once
        units = split_units(sizes, len(ranks), without_copies(parameters))
    if units is None:
        return unmapped(names, _UNKNOWN)
    taken: Leaves = {}
    for number, length, unit in zip(numbers, lengths[0], units, strict=True):
        start = 0
        for parameter in unit:
            leaves = taken[parameter.name] = {}
            for leaf, value in first.by_number[number].items():
                found = _leaf(leaf, value, number, (start, length), parameter, ranks)
                if isinstance(found, str):
                    return unmapped(names, f"{escape(leaf)} of {escape(parameter.name)}: {found}")
                leaves[leaf] = found
            start += prod(parameter.shape)
    _check_agreement(ranks, numbers)
    unit_of = dict(zip(numbers, units, strict=True))
    params = [
        [parameter.name for number in group[PARAMS] for parameter in unit_of[number]]
        for group in first.groups
    ]
    return write_state(directory, [rank.file for rank in ranks], taken, first.groups, params)


def _check_agreement(ranks: Sequence[FlatState], numbers: Sequence[int]) -> None:
    agreement = Agreement()
    for rank in ranks:
        states = {f"flat parameter {number}": rank.by_number[number] for number in numbers}
        agreement.add(rank.file.name, states, rank.groups)
    agreement.check()


def _lean(state: FlatState) -> FlatState:
    refs = [value for leaves in state.by_number.values() for value in leaves.values()]
    refs += [value for group in state.groups for value in group.values()]
    return state._replace(file=without_tree(state.file, [ref for ref in refs if isinstance(ref, TensorRef)]))


def _lengths(rank: FlatState, numbers: Sequence[int]) -> list[int] | None:
    """Return the elements that a rank has of each flat parameter; None where a state does not tell."""
    found: list[int] = []
    for number in numbers:
        leaves = rank.by_number.get(number, {})
        sizes = {value.shape[0] for value in leaves.values() if isinstance(value, TensorRef) and value.shape}
        if not is_flat(leaves) or len(sizes) != 1 or 0 in sizes:
            return None
        found += sizes
    return found


def _leaf(
    leaf: str,
    value: object,
    number: int,
    place: tuple[int, int],
    parameter: Parameter,
    ranks: Sequence[FlatState],
) -> Weight | float | str:
    """Return what a parameter has of a leaf, or why it cannot be told.

    Args:
        place: the parameter's first element in the flat one, and the elements of each rank's part of that.
    """
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, TensorRef) and not value.shape:
        return Weight.whole(0, value)  # all ranks count alike
    (start, part), pieces = place, list[Piece]()
    at, stop = start, start + prod(parameter.shape)
    while at < stop or not pieces:
        rank = min(at // part, len(ranks) - 1)
        ref = ranks[rank].by_number[number].get(leaf)
        if not isinstance(ref, TensorRef):
            return f"{escape(ranks[rank].file.name)} has no flat tensor of it"
        length = min(stop, (rank + 1) * part) - at
        pieces.append(Piece(rank, ref, at - rank * part, at - start, length))
        at += length
    return Weight(dtype=pieces[0].tensor.dtype, shape=parameter.shape, pieces=pieces)


class _Run(NamedTuple):
    """Parameters of one module: `start .. stop` of the model's."""

    start: int
    stop: int


def split_units(
    sizes: Sequence[int], num_ranks: int, parameters: Sequence[Parameter]
) -> list[list[Parameter]] | None:
    """Return the parameters of each flat parameter; None where none or several choices fit.

    Args:
        sizes: of the flat parameters with their padding, in elements and in the optimizer's order.
        num_ranks: that each is cut for.
        parameters: the model's, in its order.
    """
    choices = [_with_root(sizes, num_ranks, parameters), _without_root(sizes, num_ranks, parameters)]
    found = [choice for choice in choices if choice is not None]
    return found[0] if found and found.count(found[0]) == len(found) else None


def _with_root(
    sizes: Sequence[int], num_ranks: int, parameters: Sequence[Parameter]
) -> list[list[Parameter]] | None:
    runs = _only_runs(sizes[1:], num_ranks, parameters)
    if runs is None or not sizes:
        return None
    inside = {place for run in runs for place in range(run.start, run.stop)}
    root = [parameter for place, parameter in enumerate(parameters) if place not in inside]
    if not _fits(sum(prod(parameter.shape) for parameter in root), sizes[0], num_ranks) or not root:
        return None
    return [root, *(list(parameters[run.start : run.stop]) for run in runs)]


def _without_root(
    sizes: Sequence[int], num_ranks: int, parameters: Sequence[Parameter]
) -> list[list[Parameter]] | None:
    """Where every parameter is in a module that was wrapped, the root has none."""
    runs = _only_runs(sizes, num_ranks, parameters)
    if runs is None or sum(run.stop - run.start for run in runs) != len(parameters):
        return None
    return [list(parameters[run.start : run.stop]) for run in runs]


def _fits(num_elements: int, size: int, num_ranks: int) -> bool:
    return size == -(-num_elements // num_ranks) * num_ranks


def _only_runs(sizes: Sequence[int], num_ranks: int, parameters: Sequence[Parameter]) -> list[_Run] | None:
    """Return one module after the other with such sizes; None where there are none or several choices."""
    candidates = _modules(parameters)
    bounds = [0, *accumulate(prod(parameter.shape) for parameter in parameters)]
    fitting = {
        size: [run for run in candidates if _fits(bounds[run.stop] - bounds[run.start], size, num_ranks)]
        for size in set(sizes)
    }
    first, at = list[_Run](), 0
    for size in sizes:
        run = min((run for run in fitting[size] if run.start >= at), key=lambda run: run.stop, default=None)
        if run is None:
            return None
        first.append(run)
        at = run.stop
    last, at = list[_Run](), len(parameters)
    for size in reversed(sizes):
        run = max((run for run in fitting[size] if run.stop <= at), key=lambda run: run.start, default=None)
        if run is None:
            return None
        last.append(run)
        at = run.start
    if first != last[::-1]:
        return None
    # Any other choice would have to hold more than these: a module around one of them, of almost its size.
    nested = any(
        other != run and other.start <= run.start and run.stop <= other.stop
        for size, run in zip(sizes, first, strict=True)
        for other in fitting[size]
    )
    return None if nested else first


def _modules(parameters: Sequence[Parameter]) -> list[_Run]:
    """Return the runs that are all parameters of some module, each once."""
    bounds: dict[str, _Run] = {}
    for place, parameter in enumerate(parameters):
        steps = parameter.name.split(".")
        for depth in range(1, len(steps)):
            path = ".".join(steps[:depth])
            bounds[path] = _Run(bounds[path].start if path in bounds else place, place + 1)
    return sorted(set(bounds.values()))
