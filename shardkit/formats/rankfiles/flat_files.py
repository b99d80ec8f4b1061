"""FSDP1's own optimizer state: `optimizer.state_dict()` over flat parameters, each rank's part of them, without names.

Nothing in such files says what a flat parameter is made of. The sizes do, with the model's names and shapes: `flat_units`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from shardkit.core.text import escape
from shardkit.formats.deepspeed.files import without_tree
from shardkit.formats.optimizer import PARAMS, Agreement, OptimizerState, Unmapped, unmapped
from shardkit.formats.rankfiles.flat import Piece, Weight
from shardkit.formats.rankfiles.flat_state import Leaves, write_state
from shardkit.formats.rankfiles.flat_units import split_units
from shardkit.formats.rankfiles.numbered import Parameter, without_copies
from shardkit.formats.torchsave.file import TensorRef, TorchFile

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
