"""Universal checkpoints of DeepSpeed: `zero/PARAMETER/fp32.pt`, one file for each parameter.

From ZeRO-1 and 2 a file is {"param": tensor, ...} with the parameter's shape; from ZeRO-3 it is a bare flat
tensor. The optimizer's leaves lie beside it (`exp_avg.pt`), its settings in `zero/optimizer_state.pt`. Newer
versions also write a file for buffers and tied names, which the optimizer does not have, cast from the
module: those are read from the module itself.

Source: DeepSpeed 0.19, checkpoint/ds_to_universal.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from shardkit.core.regions import Shape
from shardkit.core.text import escape
from shardkit.errors import SourceError
from shardkit.files import storage
from shardkit.formats.contract import inner, listing
from shardkit.formats.contract.optimizer import (
    GROUPS,
    STATE,
    STEP,
    Group,
    OptimizerState,
    Unmapped,
    read_groups,
)
from shardkit.formats.deepspeed.files import ModelStates, Tag, open_states
from shardkit.formats.deepspeed.zero import group_params
from shardkit.formats.rankfiles.flat import Leaves, Weight, is_number, without_tree, write_state
from shardkit.formats.torchsave.file import TensorRef, TorchFile

_WEIGHTS, _SUFFIX = "fp32.pt", ".pt"
_SETTINGS = "zero/optimizer_state.pt"
_AGAIN = "convert the checkpoint again"


class _Stored(NamedTuple):
    """What one file holds."""

    file: TorchFile
    value: TensorRef | float | None
    """None for something else than a tensor or a number."""


class _Settings(NamedTuple):
    """What `optimizer_state.pt` says."""

    file: TorchFile
    groups: Sequence[Group]
    steps: Mapping[int, Weight | float]
    """From ZeRO-3, which has no `step.pt`: the count of each flat tensor."""


def open_parameters(
    tag: Tag, state: ModelStates, first_file: int
) -> tuple[dict[str, Weight], list[TorchFile]]:
    """Return the trained parameters, and their files.

    Args:
        state: that has the shapes.
        first_file: the number that the first file will have in the catalog.

    Raises:
        SourceError: lists every file that is missing, damaged, or does not hold its parameter.
    """
    shapes = _shapes(tag, state)
    missing = [name for name in shapes if not _has_weights(tag, name)]
    if missing:
        raise SourceError(
            f"{escape(tag.directory)}: {len(missing)} of {len(shapes)} parameters have no {_WEIGHTS}",
            problems=[escape(f"{tag.prefix}zero/{name}/{_WEIGHTS}") for name in missing],
            hint=f"copy the whole directory, or {_AGAIN}",
        )
    opened = open_states(tag, [f"zero/{name}/{_WEIGHTS}" for name in shapes], _read)
    weights: dict[str, Weight] = {}
    problems = []
    for number, (name, (file, value)) in enumerate(zip(shapes, opened, strict=True), start=first_file):
        weight = _weight(number, value, shapes[name]) if isinstance(value, TensorRef) else None
        if weight is None:
            problems.append(f"{escape(name)}: {escape(file.name)} does not hold {list(shapes[name] or ())}")
        else:
            weights[name] = weight
    if problems:
        raise SourceError(
            f"{escape(tag.directory)}: {len(problems)} files do not hold their parameter",
            problems=problems,
            hint=_AGAIN,
        )
    return weights, [file for file, _ in opened]


def open_universal_optimizer(tag: Tag, state: ModelStates) -> OptimizerState | Unmapped:
    """Open the optimizer's state: the files beside each parameter's weights, and `zero/optimizer_state.pt`.

    Raises:
        SourceError, IntegrityError, ResourceError: as `open_parameters`; a parameter lacks what others have.
    """
    shapes = _shapes(tag, state)
    beside = {name: _leaves(tag, name) for name in shapes}
    kinds = sorted(set().union(*beside.values()))
    if not kinds:
        return Unmapped([f"{tag.prefix}zero"], "no parameter has a state of the optimizer beside its weights")
    lacking = [
        f"{tag.prefix}zero/{name}/{leaf}{_SUFFIX}"
        for leaf in kinds
        for name in shapes
        if leaf not in beside[name]
    ]
    if lacking:
        raise SourceError(
            f"{escape(tag.directory)}: the optimizer's state of some parameters is missing",
            problems=map(escape, lacking),
            hint=f"copy the whole directory, or {_AGAIN}",
        )
    settings = open_states(tag, [_SETTINGS], _read_settings)[0]
    files, taken = [settings.file], Leaves()
    wanted = [(name, leaf) for name in shapes for leaf in kinds]
    opened = open_states(tag, [f"zero/{name}/{leaf}{_SUFFIX}" for name, leaf in wanted], _read)
    for (name, leaf), (file, value) in zip(wanted, opened, strict=True):
        if isinstance(value, TensorRef):
            found: Weight | float | None = _weight(len(files), value, shapes[name] if value.shape else ())
        else:
            found = value
        if found is None:
            return Unmapped([file.name], f"it does not hold the {escape(leaf)} of {escape(name)}")
        files.append(file)
        taken.setdefault(name, {})[leaf] = found
    names = [list(group) for group in state.groups or ()]
    steps = {
        name: settings.steps[number]
        for number, group in enumerate(names)
        if number in settings.steps
        for name in group
    }
    for name, held in taken.items():
        if name in steps:
            held.setdefault(STEP, steps[name])
    params = group_params(settings.groups, names or [list(shapes)])
    if isinstance(params, str):
        return Unmapped([settings.file.name], params)
    return write_state(tag.directory, files, taken, settings.groups, params)


def is_cut(tag: Tag) -> bool:
    """True where the module's files are parts of a model-parallel model, so that none holds the model's values."""
    return any(
        name.startswith("mp_rank_") and not name.startswith("mp_rank_00_") for name in listing(tag.directory)
    )


def _shapes(tag: Tag, state: ModelStates) -> dict[str, Shape | None]:
    """Return the parameters and their shapes; None where only the file has it."""
    if state.groups is not None and not is_cut(tag):
        return {name: shape for group in state.groups for name, shape in group.items()}
    zero = os.path.join(tag.directory, "zero")
    return {name: None for name in sorted(listing(zero)) if _has_weights(tag, name)}


def _has_weights(tag: Tag, name: str) -> bool:
    """True where a parameter has its file. Names come from a file too, and must not lead elsewhere."""
    if os.path.basename(name) != name or "\0" in name:
        return False
    directory = inner(tag.directory, f"zero/{name}")
    return directory is not None and storage.lexists(os.path.join(directory, _WEIGHTS))


def _leaves(tag: Tag, name: str) -> set[str]:
    """Return what a parameter's directory has beside its weights."""
    directory = inner(tag.directory, f"zero/{name}")
    names = listing(directory) if directory is not None else frozenset()
    return {found.removesuffix(_SUFFIX) for found in names if found.endswith(_SUFFIX) and found != _WEIGHTS}


def _read(file: TorchFile) -> _Stored:
    value = file.tree.get("param") if isinstance(file.tree, dict) else file.tree
    return _Stored(
        without_tree(file, [value]), value if isinstance(value, TensorRef) or is_number(value) else None
    )


def _weight(number: int, stored: TensorRef, shape: Shape | None) -> Weight | None:
    """Return the stored tensor as the parameter; from ZeRO-3 it is flat. None where it cannot be that."""
    if shape in (None, stored.shape):
        return Weight.whole(number, stored)
    assert shape is not None
    fits = stored.is_contiguous and prod(stored.shape) == prod(shape)
    return Weight.whole(number, stored, shape) if fits else None


def _read_settings(file: TorchFile) -> _Settings:
    tree: Any = file.tree if isinstance(file.tree, dict) else {}
    groups, inner_state = read_groups(file.name, tree.get(GROUPS)), tree.get("optimizer_state_dict")
    if groups is None:
        raise SourceError(f"{escape(file.name)} has no settings of the optimizer", hint=_AGAIN)
    states = inner_state.get(STATE) if isinstance(inner_state, dict) else None
    steps: dict[int, Weight | float] = {}
    kept: list[TensorRef] = []
    for number, leaves in states.items() if isinstance(states, dict) else ():
        step: Any = leaves.get(STEP) if isinstance(leaves, dict) else None
        if type(number) is int and is_number(step):
            steps[number] = step
        elif type(number) is int and isinstance(step, TensorRef) and not step.shape:
            steps[number] = Weight.whole(0, step)
            kept.append(step)
    return _Settings(without_tree(file, kept), groups, steps)
