"""The optimizer's state of DeepSpeed: flat tensors, cut like the fp32 masters, of which each gives a tensor for each parameter.

    optimizer_state_dict
        base_optimizer_state     ZeRO-1 and 2, bf16: the state dict of the inner optimizer, or a list of states
        optimizer_state_dict     ZeRO-3: the same
            state                for each flat tensor: exp_avg, exp_avg_sq, as long as it; step
            param_groups         settings; their parameters are flat tensors, by number

Source: DeepSpeed 0.19, runtime/zero/stage_1_and_2.py, runtime/zero/stage3.py and runtime/bf16_optimizer.py (`state_dict`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from shardkit.core.regions import Shape
from shardkit.core.text import escape
from shardkit.formats.deepspeed.files import ModelStates, OptimizerStates, Tag, open_states
from shardkit.formats.deepspeed.zero import FlatPiece, pieces_of
from shardkit.formats.optimizer import (
    GROUPS,
    PARAMS,
    STATE,
    STEP,
    Agreement,
    OptimizerState,
    Unmapped,
    check_groups,
    unmapped,
)
from shardkit.formats.rankfiles.flat import Leaves, Piece, Weight, without_tree, write_state
from shardkit.formats.torchsave.file import TensorRef, TorchFile

_NEVER = "it has no state: the optimizer never took a step, or keeps it elsewhere (NVMe offload)"


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseState:
    """The inner optimizer's state in one `*_optim_states.pt`."""

    file: TorchFile
    states: Sequence[Mapping[str, object]]
    """Of each flat tensor, by leaf: tensors and numbers."""
    groups: Sequence[Mapping[str, Any]] | None
    """Their parameters are numbers of flat tensors. None where they were not saved."""


def open_zero_optimizer(
    tag: Tag, names: Sequence[str], model: ModelStates, ranks: Sequence[OptimizerStates]
) -> OptimizerState | Unmapped:
    """Open the optimizer's state of ZeRO-1, 2 or 3.

    Args:
        tag: of the checkpoint.
        names: the optimizer's files, in the order of the ranks.
        model: that has the names and shapes.
        ranks: what the files say of the fp32 masters.

    Raises:
        SourceError, IntegrityError, ResourceError: as opening the weights does; files of different saves.
    """
    bases = open_states(tag, names, partial(_read_base, num_flat=len(ranks[0].flat)))
    files = [tag.prefix + name for name in names]
    first = bases[0]
    if not any(first.states):
        return unmapped(files, _NEVER)
    taken: Leaves = {}
    shapes = {name: shape for group in model.groups or () for name, shape in group.items()}
    for name, pieces in pieces_of(model, ranks, tag.directory).items():
        # A parameter without elements has no pieces; it still has a state.
        at = pieces or [FlatPiece(0, 0, 0, 0, 0)]
        leaves = taken[name] = {}
        for leaf, value in first.states[at[0].group].items():
            found = _leaf(leaf, value, shapes[name], at, bases, ranks)
            if isinstance(found, str):
                return unmapped(files, f"{escape(leaf)} of {escape(name)}: {found}")
            leaves[leaf] = found
        if not leaves:
            return unmapped(files, f"{escape(name)}: {_NEVER}")
    params = _params(first, model)
    if isinstance(params, str):
        return unmapped(files, params)
    agreement = Agreement()
    for base in bases:
        agreement.add(
            base.file.name, {f"flat tensor {n}": leaves for n, leaves in enumerate(base.states)}, base.groups
        )
    agreement.check()
    return write_state(tag.directory, [base.file for base in bases], taken, first.groups or (), params)


def _read_base(file: TorchFile, *, num_flat: int) -> BaseState:
    tree: Any = file.tree
    state = tree["optimizer_state_dict"]  # read_optimizer_states has seen it
    base = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
    groups = None
    if isinstance(base, list):  # "elastic": a state for each flat tensor, without settings
        states: Mapping[int, Any] = dict(enumerate(base))
        count = state.get("base_optimizer_state_step")
        if type(count) is int:
            states = {
                key: {STEP: count, **leaves} for key, leaves in states.items() if isinstance(leaves, dict)
            }
    else:
        base = base if isinstance(base, dict) else {}
        states = base[STATE] if isinstance(base.get(STATE), dict) else {}
        found = base.get(GROUPS)
        if isinstance(found, list) and all(isinstance(group, dict) for group in found):
            check_groups(file.name, found)
            groups = [{str(key): value for key, value in group.items()} for group in found]
    kept = [_leaves(states.get(number)) for number in range(num_flat)]
    refs = [value for leaves in kept for value in leaves.values() if isinstance(value, TensorRef)]
    tensors = [value for group in groups or () for value in group.values() if isinstance(value, TensorRef)]
    return BaseState(file=without_tree(file, [*refs, *tensors]), states=kept, groups=groups)


def _leaves(state: object) -> dict[str, object]:
    return {str(leaf): value for leaf, value in state.items()} if isinstance(state, dict) else {}


def _leaf(
    leaf: str,
    value: object,
    shape: Shape,
    pieces: Sequence[FlatPiece],
    bases: Sequence[BaseState],
    ranks: Sequence[OptimizerStates],
) -> Weight | float | str:
    """Return what a parameter has of a leaf, or why it cannot be told."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    if isinstance(value, TensorRef) and not value.shape:
        return Weight.whole(0, value)  # all ranks count alike
    parts = []
    for piece in pieces:
        ref = bases[piece.rank].states[piece.group].get(leaf)
        if not isinstance(ref, TensorRef) or len(ref.shape) != 1 or not ref.is_contiguous:
            return f"{escape(bases[piece.rank].file.name)} has no flat tensor of it"
        if ref.shape[0] < ranks[piece.rank].flat[piece.group].shape[0]:  # with the padding it may be longer
            return (
                f"{escape(bases[piece.rank].file.name)} has {ref.shape[0]} elements for "
                f"{ranks[piece.rank].flat[piece.group].shape[0]}"
            )
        parts.append(Piece(piece.rank, ref, *piece[2:]))
    return Weight(dtype=parts[0].tensor.dtype, shape=shape, pieces=parts)


def _params(base: BaseState, model: ModelStates) -> list[list[str]] | str:
    """Return the parameters of each group of settings, or why they cannot be told."""
    shapes = model.groups or ()
    if base.groups is None:
        return []
    return group_params(base.groups, [list(group) for group in shapes])


def group_params(
    groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]
) -> list[list[str]] | str:
    """Return the parameters of each group of settings.

    Args:
        groups: whose parameters are numbers of flat tensors.
        names: the parameters in each flat tensor.
    """
    if len(groups) == 1:
        return [[name for flat in names for name in flat]]
    numbers = [found if isinstance(found := group.get(PARAMS), list) else [] for group in groups]
    flat = [number for found in numbers for number in found]
    if all(type(number) is int for number in flat) and sorted(flat) == list(range(len(names))):
        return [[name for number in found for name in names[number]] for found in numbers]
    return f"which parameters its {len(groups)} groups have cannot be told"
