"""Open the state dicts of optimizers inside a `torch.save` file that also has the model.

    {"model": ..., "optim": {"state": {FQN: ...}, "param_groups": [...]}, "step": 30}

torch's `get_state_dict` and FSDP's `full_optim_state_dict` return a state by FQN. It keeps its path and its names, and
its settings become byte entries, as `dcp.save` of the same dict would store them. A state by number, from
`optimizer.state_dict()`, is refused: it does not record which parameter a number stands for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from shardkit.core.catalog import Catalog, subset
from shardkit.core.text import escape
from shardkit.errors import SourceError
from shardkit.formats.contract.optimizer import (
    GROUPS,
    PARAMS,
    STATE,
    OptimizerState,
    Path,
    StateWriter,
    UnusableOptimizer,
    path_name,
    state_path,
)
from shardkit.formats.rankfiles.optimizer import is_tensor, read_states, why_unusable
from shardkit.formats.torchsave.file import TorchFile

_MAX_DEPTH = 4  # of dicts and lists around an optimizer's state dict
_FLAT = f"{GROUPS}."  # torch's flatten_optimizer_state_dict: param_groups.<FQN>.lr


class StateInside(NamedTuple):
    """The state dict of an optimizer inside a file."""

    path: Path
    """From the top of the file's tree; empty for the whole file."""
    tree: Mapping[str | int, Any]


def find_states(tree: object, path: Path = ()) -> Iterator[StateInside]:
    """Yield the state dicts of optimizers in a file's tree."""
    if isinstance(tree, dict):
        is_flat = any(type(key) is str and key.startswith(_FLAT) for key in tree)
        if is_flat or (isinstance(tree.get(GROUPS), list) and isinstance(tree.get(STATE), dict)):
            yield StateInside(path, tree)
            return
    if isinstance(tree, (dict, list, tuple)) and len(path) < _MAX_DEPTH:
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from find_states(value, (*path, key))


def open_states(
    file: TorchFile, states: Collection[StateInside], catalog: Catalog, unreadable: Collection[str]
) -> OptimizerState | UnusableOptimizer:
    """Return a file's catalog with the settings of its optimizers added, or the reason why one of these cannot be used.

    Args:
        file: with the states.
        states: from `find_states`.
        catalog: of all tensors of the file.
        unreadable: names of tensors that the catalog lacks, because their bytes are not their values.

    Raises:
        SourceError: the whole file is a state that cannot be used, or it has more settings than any optimizer.
    """
    names = [path_name(state.path) for state in states]
    for state, name in zip(states, names, strict=True):
        prefix = f"{name}." if name else ""
        if (
            reason := _why_unusable(file, state, [odd for odd in unreadable if odd.startswith(prefix)])
        ) is None:
            continue
        if not name:
            raise SourceError(
                f"{escape(file.name)} is the state dict of an optimizer, and cannot be resharded: {reason}",
                hint="save it with torch.distributed.checkpoint.state_dict.get_state_dict, by name",
            )
        return UnusableOptimizer(names, f"{escape(name)}: {reason}", settings_in(states))
    whole, objects, notes = subset(catalog, catalog.tensors), list[str](), list[str]()
    settings = dict[str, object]()
    for state in states:
        writer = StateWriter(whole, file.source, below=state.path)
        if _is_flat(state.tree):
            for key, value in state.tree.items():
                if not is_tensor(value):
                    writer.add_object((str(key),), value)
        else:
            _add_nested(writer, file, state.tree)
        added = writer.finish()
        objects += added.objects
        settings |= added.settings
        notes += added.notes
    return OptimizerState(
        catalog=whole, objects=tuple(objects), has_model=True, settings=settings, notes=tuple(notes)
    )


def settings_in(states: Iterable[StateInside]) -> dict[str, object]:
    """Return the settings of all groups, by the names that `dcp.save` would give them."""
    settings = dict[str, object]()
    for path, tree in states:
        groups = tree.get(GROUPS, [])
        for number, group in enumerate(groups):
            if isinstance(group, dict):
                settings |= {path_name((*path, GROUPS, number, key)): value for key, value in group.items()}
        settings |= {
            path_name((*path, key)): value for key, value in tree.items() if str(key).startswith(_FLAT)
        }
    return settings


def _is_flat(tree: Mapping[str | int, Any]) -> bool:
    return GROUPS not in tree


def _why_unusable(file: TorchFile, state: StateInside, unreadable: Collection[str]) -> str | None:
    """Return the reason why a state cannot be used, escaped; None if it can."""
    if unreadable:
        return f"{escape(next(iter(unreadable)))} is not stored as plain values"
    if _is_flat(state.tree):
        return None
    read = read_states(replace(file, tree=state.tree))
    if isinstance(read, str):
        return "it is not in the form of a state dict of torch"
    keys = [*read.states, *(key for group in read.groups or () for key in group[PARAMS])]
    if any(type(key) is int for key in keys):
        return "its parameters are numbered, and a state can be resharded only by name"
    return why_unusable(read, {key: str(key) for key in keys}, None)


def _add_nested(writer: StateWriter, file: TorchFile, tree: Mapping[str | int, Any]) -> None:
    """Add the settings of every group, and the values of the state that are not tensors."""
    read = read_states(replace(file, tree=tree))
    assert not isinstance(read, str)
    for key, values in read.states.items():
        for leaf, value in values.items():
            if not is_tensor(value):
                writer.add_object(state_path(str(key), leaf), value)
    groups = read.groups or ()
    writer.add_groups(groups, [group[PARAMS] for group in groups])
