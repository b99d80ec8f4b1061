"""Open the optimizer's state dict in `torch.save` files, one for each rank or one for all, and name its parameters.

It is either `optimizer.state_dict()`, whose parameters are numbered, or was collected by FQN
(`FSDP.optim_state_dict`, `get_optimizer_state_dict`). If any state has another form (quantised, or a part whose place is
unknown), the whole optimizer is refused: training with half of its state would run on with wrong results.

`optimizer.state_dict()` numbers parameters in the order in which the optimizer received them, group by group.
Within a group that is usually the model's own order (`model.parameters()`). So a group is a subsequence of
the model's parameters, which the shapes of its states identify, unless several subsequences fit. An optimizer
that was made from `model.named_parameters()` also records the names, whatever their order.

FSDP1 without `use_orig_params` numbers flat parameters. It lays the parameters of a wrapped module end to
end, in the model's order, except those of modules wrapped inside it. The ranks hold equal parts, the last
ones with padding. The files do not record which parameters a flat parameter consists of. But `model.parameters()`
returns the root's first, then those of the modules inside, in order. So the sizes show which modules were wrapped,
unless several choices have these sizes.

Source: torch 2.13, torch/distributed/fsdp/_flat_param.py (`_init_flat_param_and_metadata`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple, TypeGuard

from shardkit.core.catalog import Catalog
from shardkit.core.regions import Shape
from shardkit.core.text import count, escape, listed
from shardkit.formats.contract import copies_warnings
from shardkit.formats.contract.optimizer import (
    GROUPS,
    PARAMS,
    STATE,
    OptimizerComparison,
    OptimizerState,
    StateWriter,
    UnusableOptimizer,
    read_groups,
    state_path,
)
from shardkit.formats.rankfiles.files import TensorCollector, open_each
from shardkit.formats.rankfiles.flat import (
    FlatPiece,
    Pieces,
    RankStateDict,
    pieces_across_ranks,
    split_states,
)
from shardkit.formats.torchsave.file import DistributedRef, TensorRef, TorchFile, UnreadableTensor
from shardkit.keys.names import clean, join

_Key = str | int  # a parameter's FQN or number
# Second moments of Adafactor and CAME: sums over rows and columns.
_FACTORED = re.compile(r"(.*_)?(row|col)(_.*)?")
# The parameters that PEFT 0.21 trains; it freezes all others.
_ADAPTER = re.compile(r"(.*\.)?(lora_\w+|modules_to_save)\..*")
_NAMES = "param_names"  # torch 2.6 and later: beside `params`, in its order
_NO_FIT = "the shapes of its states are not those of the model's parameters, in their order"
_UNKNOWN = (
    "its states are flat parameters of FSDP1, and their sizes do not show which parameters they consist of; load "
    "it with the training script that saved it, and save it with torch.distributed.checkpoint.state_dict"
)
_SEVERAL_GROUPS = "its states are flat parameters of FSDP1 in {} groups, whose order in the model is unknown"


class Parameter(NamedTuple):
    """A parameter of the model in its checkpoint."""

    name: str
    shape: Shape
    content: object = None
    """Checksums, which are equal for copies of one tensor; None if unknown."""


def open_optimizer_files(
    directory: str, names: Sequence[str], parameters: Sequence[Parameter]
) -> OptimizerState | UnusableOptimizer:
    """Open the optimizer's state, and name its entries by the model's parameters.

    Args:
        directory: of the checkpoint.
        names: of the files, in the order of the ranks; at least one.
        parameters: the model's, in its order.

    Returns:
        The state, or the reason why it cannot be used.

    Raises:
        SourceError: files are damaged or contradict each other, or parts do not make up the whole.
        IntegrityError: files of different saves.
        ResourceError: a file may not be read.
    """
    gathering, named, agreement = TensorCollector(directory), dict[_Key, str](), OptimizerComparison()
    plain_values: dict[tuple[str, str], object] = {}
    shapes = {parameter.name: parameter.shape for parameter in parameters}
    first: RankStateDict | None = None
    for state in open_each(directory, names, read_states):
        if isinstance(state, str):
            return UnusableOptimizer(names, state)
        if first is None and len(names) > 1 and _is_flat(state, parameters):
            return _open_flat(directory, names, parameters)
        if first is None:
            decided = _find_names(state, parameters)
            if isinstance(decided, str):
                return UnusableOptimizer(names, decided)
            first, named = state, decided
        reason = why_unusable(state, named, None if len(names) == 1 else shapes)
        if reason is not None:
            return UnusableOptimizer(names, f"{escape(state.file.name)}: {reason}")
        by_name = {named[key]: leaves for key, leaves in state.states.items()}
        gathering.add(state.file, {STATE: {name: _tensor_leaves(leaves) for name, leaves in by_name.items()}})
        agreement.add(state.file.name, by_name, state.groups)
        for name, leaves in by_name.items():
            for leaf, value in leaves.items():
                if not is_tensor(value):
                    plain_values.setdefault((name, leaf), value)
    assert first is not None
    agreement.check()
    gathered = gathering.finish()
    writer = StateWriter(gathered.catalog, first.file.source)
    for (fqn, leaf), value in plain_values.items():
        writer.add_object(state_path(fqn, leaf), value)
    groups = first.groups or ()
    writer.add_groups(groups, [[named[key] for key in group[PARAMS] if key in named] for group in groups])
    return writer.finish([*_notes(first, named), *gathered.notes, *copies_warnings(gathered.differing)])


def read_states(file: TorchFile) -> RankStateDict | str:
    """Return the state dict in a file, or a message that the file has none."""
    tree = file.tree if isinstance(file.tree, dict) else {}
    states, groups = tree.get(STATE), read_groups(file.name, tree.get(GROUPS))
    if (
        not isinstance(states, dict)
        or not all(isinstance(leaves, dict) for leaves in states.values())
        or groups is None
        or not all(map(_has_params, groups))
    ):
        return f"{escape(file.name)} is not the state dict of an optimizer"
    leaves_of = {key: {str(leaf): value for leaf, value in leaves.items()} for key, leaves in states.items()}
    return RankStateDict(file, leaves_of, groups)


def _has_params(group: Mapping[str, Any]) -> bool:
    params = group.get(PARAMS)
    return isinstance(params, list) and all(type(key) in (str, int) for key in params)


def _in_groups(state: RankStateDict) -> list[_Key]:
    """Return the parameters of all groups, one group after another."""
    return [key for group in state.groups or () for key in group[PARAMS]]


def is_tensor(value: object) -> TypeGuard[TensorRef | DistributedRef | UnreadableTensor]:
    return isinstance(value, (TensorRef, DistributedRef, UnreadableTensor))


def _tensor_leaves(leaves: Mapping[str, object]) -> dict[str, object]:
    return {leaf: value for leaf, value in leaves.items() if is_tensor(value)}


def _find_names(state: RankStateDict, parameters: Sequence[Parameter]) -> dict[_Key, str] | str:
    """Return the FQN of each parameter, or the reason why it is unknown."""
    groups, keys = state.groups or (), [*state.states, *_in_groups(state)]
    if not any(type(key) is int for key in keys):
        return {key: str(key) for key in keys}
    if not all(type(key) is int for key in keys):
        return "some of its parameters are numbered, and some are named"
    shapes: dict[Any, Shape] = {
        key: shape for key, leaves in state.states.items() if (shape := _parameter_shape(leaves)) is not None
    }
    named = names_in_groups(groups, shapes, parameters)
    if named is None and (factored := _factored_leaves(state)):
        return (
            f"{listed(factored)} do not have a parameter's shape, so nothing shows which one they belong to"
        )
    if named is None:
        named = name_numbers([group[PARAMS] for group in groups], shapes, parameters)
    return named if isinstance(named, str) else {key: named[key] for key in named}


def _factored_leaves(state: RankStateDict) -> list[str]:
    """Return the names of factored leaves of those parameters that have no leaf with the parameter's shape."""
    lone = {leaf for leaves in state.states.values() if _parameter_shape(leaves) is None for leaf in leaves}
    return sorted(filter(_FACTORED.fullmatch, lone))


def _parameter_shape(leaves: Mapping[str, object]) -> Shape | None:
    """Return the shape of a parameter from the leaves of its state; None if none has the parameter's shape."""
    shapes = [
        value.shape
        for leaf, value in leaves.items()
        if isinstance(value, (TensorRef, DistributedRef)) and not _FACTORED.fullmatch(leaf)
    ]
    return max(shapes, key=len, default=None) if any(shapes) else None


def why_unusable(
    state: RankStateDict, named: Mapping[_Key, str], shapes: Mapping[str, Shape] | None
) -> str | None:
    """Return the reason why a file's states cannot be assembled with those of other ranks; None if they can.

    Args:
        state: of the file.
        named: the FQN of each parameter.
        shapes: of the model's parameters; None if there is only one file.
    """
    for key, leaves in state.states.items():
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
            if shapes.get(named[key]) != value.shape:  # a whole leaf would have the parameter's shape
                return f"{where} is a rank's own part, without a record of its place"
    return None


def _notes(first: RankStateDict, named: Mapping[_Key, str]) -> Iterator[str]:
    numbered = [key for key in _in_groups(first) if type(key) is int]
    if numbered and not all(map(has_names, first.groups or ())):
        yield (
            "the optimizer only numbered its parameters: they were matched with the model's in order, and their "
            "shapes agree"
        )
    lost = [key for key in numbered if key not in named]
    if lost:
        yield f"{count(len(lost), 'parameter')} of the optimizer without any state are left out: {listed(list(map(str, lost)))}"


# FSDP1's flat parameters


def _is_flat(state: RankStateDict, parameters: Sequence[Parameter]) -> bool:
    """True if all states are flat although the model has parameters with several dims: these are FSDP1's flat parameters."""
    return (
        all(type(key) is int for key in _in_groups(state))
        and bool(state.states)
        and all(_flat_length(leaves) is not None for leaves in state.states.values())
        and any(len(parameter.shape) > 1 for parameter in parameters)
    )


def _flat_length(leaves: Mapping[str, object]) -> int | None:
    """Return the number of elements of a flat parameter's longest leaf; None if the leaves cannot be a flat parameter's."""
    tensors = [value for value in leaves.values() if isinstance(value, TensorRef) and value.shape]
    if not all(len(value.shape) == 1 and value.is_contiguous for value in tensors):
        return None
    return max((value.shape[0] for value in tensors), default=None)


def _open_flat(
    directory: str, names: Sequence[str], parameters: Sequence[Parameter]
) -> OptimizerState | UnusableOptimizer:
    """Open the states of flat parameters, and cut them into those of the model's parameters."""
    ranks: list[RankStateDict] = []
    for state in open_each(directory, names, read_states):
        if isinstance(state, str):
            return UnusableOptimizer(names, state)
        ranks.append(state.without_tree())
    groups = ranks[0].groups or ()
    num_groups = sum(bool(group[PARAMS]) for group in groups)
    if num_groups > 1:
        return UnusableOptimizer(names, _SEVERAL_GROUPS.format(num_groups))
    numbers: list[Any] = _in_groups(ranks[0])
    lengths = [_flat_lengths(rank, numbers) for rank in ranks]
    first = lengths[0]
    units = None
    if first is not None and all(rank_lengths == first for rank_lengths in lengths):
        sizes = [length * len(ranks) for length in first.values()]
        # FSDP1 stores a tied parameter under each of its names, and trains it once.
        units = split_units(sizes, len(ranks), parameters) or split_units(
            sizes, len(ranks), without_copies(parameters)
        )
    if first is None or units is None:
        return UnusableOptimizer(names, _UNKNOWN)
    pieces: Pieces = {}
    for (number, length), unit in zip(first.items(), units, strict=True):
        bounds, stop = [rank * length for rank in range(len(ranks) + 1)], 0
        for parameter in unit:
            start, stop = stop, stop + prod(parameter.shape)
            # A parameter without elements has no pieces; it still has a state.
            pieces[parameter.name] = list(pieces_across_ranks(number, bounds, start, stop)) or [
                FlatPiece(0, number, 0, 0, 0)
            ]
    shapes = {parameter.name: parameter.shape for unit in units for parameter in unit}
    params = [list(shapes) if group[PARAMS] else [] for group in groups]
    result = split_states(directory, ranks, pieces, shapes, [first] * len(ranks), params)
    return UnusableOptimizer(names, result) if isinstance(result, str) else result


def _flat_lengths(rank: RankStateDict, numbers: Sequence[int]) -> dict[int, int] | None:
    """Return the number of elements in a rank's part of each flat parameter; None if some state does not show it."""
    lengths: dict[int, int] = {}
    for number in numbers:
        leaves = rank.states.get(number, {})
        sizes = {value.shape for value in leaves.values() if isinstance(value, TensorRef) and value.shape}
        length = _flat_length(leaves)
        if not length or len(sizes) != 1:
            return None
        lengths[number] = length
    return lengths


class _ParameterRange(NamedTuple):
    """The parameters of one module, as a range of the model's parameters."""

    start: int
    stop: int


def split_units(
    sizes: Sequence[int], num_ranks: int, parameters: Sequence[Parameter]
) -> list[list[Parameter]] | None:
    """Return the model's parameters in each flat parameter, found from the sizes; None if no choice or several fit.

    Args:
        sizes: of the flat parameters with their padding, in elements and in the optimizer's order.
        num_ranks: the number of parts that each is cut into.
        parameters: the model's, in its order.
    """
    choices = [_units(sizes, num_ranks, parameters, has_root=has_root) for has_root in (True, False)]
    fitting = [choice for choice in choices if choice is not None]
    return fitting[0] if fitting and fitting.count(fitting[0]) == len(fitting) else None


def _units(
    sizes: Sequence[int], num_ranks: int, parameters: Sequence[Parameter], *, has_root: bool
) -> list[list[Parameter]] | None:
    """Return the only choice with a root, or the only one without; None if no choice or several fit.

    The root, if there is one, is the first flat parameter: it has all parameters that are in no wrapped module.
    """
    runs = _only_runs(sizes[has_root:], num_ranks, parameters) if sizes else None
    if runs is None:
        return None
    inside = {place for run in runs for place in range(run.start, run.stop)}
    root = [parameter for place, parameter in enumerate(parameters) if place not in inside]
    if bool(root) != has_root:
        return None
    if has_root and not _is_padded_size(
        sum(prod(parameter.shape) for parameter in root), sizes[0], num_ranks
    ):
        return None
    return [root] * has_root + [list(parameters[run.start : run.stop]) for run in runs]


def _is_padded_size(num_elements: int, size: int, num_ranks: int) -> bool:
    return size == -(-num_elements // num_ranks) * num_ranks


def _only_runs(
    sizes: Sequence[int], num_ranks: int, parameters: Sequence[Parameter]
) -> list[_ParameterRange] | None:
    """Return consecutive modules of these sizes, as ranges of parameters; None if no choice or several fit."""
    bounds = [0, *accumulate(prod(parameter.shape) for parameter in parameters)]
    modules = _modules(parameters)
    fitting = {
        size: [
            run for run in modules if _is_padded_size(bounds[run.stop] - bounds[run.start], size, num_ranks)
        ]
        for size in set(sizes)
    }
    first, end = list[_ParameterRange](), 0
    for size in sizes:
        run = min((run for run in fitting[size] if run.start >= end), key=lambda run: run.stop, default=None)
        if run is None:
            return None
        first.append(run)
        end = run.stop
    last, start = list[_ParameterRange](), len(parameters)
    for size in reversed(sizes):
        run = max(
            (run for run in fitting[size] if run.stop <= start), key=lambda run: run.start, default=None
        )
        if run is None:
            return None
        last.append(run)
        start = run.start
    if first != last[::-1]:
        return None
    # Any other choice has a module around one of these in its place, whose size with padding is the same.
    nested = any(
        candidate != run and candidate.start <= run.start and run.stop <= candidate.stop
        for size, run in zip(sizes, first, strict=True)
        for candidate in fitting[size]
    )
    return None if nested else first


def _modules(parameters: Sequence[Parameter]) -> list[_ParameterRange]:
    """Return the ranges of parameters of all modules, each once."""
    bounds: dict[str, _ParameterRange] = {}
    for place, parameter in enumerate(parameters):
        steps = parameter.name.split(".")
        for depth in range(1, len(steps)):
            path = ".".join(steps[:depth])
            bounds[path] = _ParameterRange(bounds[path].start if path in bounds else place, place + 1)
    return sorted(set(bounds.values()))


def parameters_of(
    catalog: Catalog, plain: frozenset[str], contents: Mapping[str, object] | None = None
) -> list[Parameter]:
    """Return the parameters in a model's state dict, in its order; of tied names, only the first.

    Args:
        catalog: of the whole state dict.
        plain: names of tensors that every rank holds whole. If others are sharded, these are buffers.
        contents: as in `GatheredTensors`.
    """
    table, seen, parameters = catalog.chunks, set[object](), list[Parameter]()
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
        parameters.append(Parameter(name, entry.shape, (contents or {}).get(name)))
    return parameters


def without_copies(parameters: Sequence[Parameter]) -> list[Parameter]:
    """Return the parameters without matrices that equal earlier ones, as these are tied parameters stored twice."""
    seen, kept = set[object](), list[Parameter]()
    for parameter in parameters:
        key = (parameter.shape, parameter.content)
        if parameter.content is None or len(parameter.shape) < 2 or key not in seen:
            kept.append(parameter)
        seen.add(key)
    return kept


def has_names(group: Mapping[str, Any]) -> bool:
    """True for a group that records the names of its numbered parameters."""
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
    """Return the name of each numbered parameter if the groups record names, else None.

    Args:
        groups: the `param_groups` of `optimizer.state_dict()`.
        shapes: of the states, by number; without parameters that have no state.
        parameters: of the model.

    Returns:
        Names by number; or the reason, as escaped text, why the names do not fit the model.
    """
    if not groups or not all(map(has_names, groups)):
        return None
    by_name = {join(clean(parameter.name)): parameter for parameter in parameters}
    named: dict[int, str] = {}
    for group in groups:
        for number, name in zip(group[PARAMS], group[_NAMES], strict=True):
            parameter = by_name.get(join(clean(name)))
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
    """Return the name of each numbered parameter, found from the shapes of the states, or the reason why it is unknown.

    A parameter without a state gets a name only if all parameters are in one group.

    Args:
        groups: the numbers in each group, in its order.
        shapes: of the states, by number; without parameters that have no state.
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
        state_shapes = [shapes[number] for number in numbers]
        if len(groups) == 1 and state_shapes == [parameter.shape for parameter in adapters]:
            names = [parameter.name for parameter in adapters]
        else:
            fitting = _unique_names(state_shapes, parameters)
            if isinstance(fitting, str):
                return fitting
            names = fitting
        named.update(zip(numbers, names, strict=True))
    if len(set(named.values())) < len(named):
        return "the shapes of its states fit the same parameters twice"
    return named


def _unique_names(shapes: Sequence[Shape], parameters: Sequence[Parameter]) -> list[str] | str:
    """Return the names of the only subsequence of parameters with these shapes, or a text that none or several fit."""
    first = _first_places(shapes, parameters)
    if first is None:
        return _NO_FIT
    last = _first_places(shapes[::-1], parameters[::-1]) or []
    if first != [len(parameters) - 1 - place for place in reversed(last)]:
        return (
            f"it has only numbered its parameters, {len(shapes)} of {len(parameters)}, and their shapes fit several "
            "choices"
        )
    return [parameters[place].name for place in first]


def _first_places(shapes: Sequence[Shape], parameters: Sequence[Parameter]) -> list[int] | None:
    """Return the indexes of the first subsequence of parameters with these shapes, or None."""
    places: list[int] = []
    place = 0
    for shape in shapes:
        while place < len(parameters) and parameters[place].shape != shape:
            place += 1
        if place == len(parameters):
            return None
        places.append(place)
        place += 1
    return places
