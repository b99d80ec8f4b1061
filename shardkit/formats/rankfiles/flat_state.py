"""The optimizer's state as pieces of flat tensors in several files, put into the form of the recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardkit.formats.optimizer import STEP, OptimizerState, StateWriter, path_name, state_path
from shardkit.formats.rankfiles.flat import Weight, build_catalog
from shardkit.formats.torchsave.file import TorchFile

Leaves = dict[str, dict[str, Weight | float]]
"""By parameter and leaf, a tensor or a number."""


def write_state(
    directory: str,
    files: Sequence[TorchFile],
    taken: Leaves,
    groups: Sequence[Mapping[str, Any]],
    params: Sequence[Sequence[str]],
) -> OptimizerState:
    """Return the state, given every parameter's leaves.

    Args:
        directory: of the checkpoint.
        files: that leaves point into; the first is also that of the groups.
        taken: the state.
        groups: settings of the inner optimizer; none where they were not saved.
        params: the parameters of each group.
    """
    weights, paths = dict[str, Weight](), dict[str, tuple[str | int, ...]]()
    for name, leaves in taken.items():
        for leaf, value in leaves.items():
            if isinstance(value, Weight):
                path = state_path(name, leaf)
                weights[path_name(path)], paths[path_name(path)] = value, path
    catalog = build_catalog(directory, files, weights)
    catalog.paths = paths
    writer = StateWriter(catalog, files[0].source)
    in_group = {name: group for group, names in zip(groups, params, strict=True) for name in names}
    for name, leaves in taken.items():
        for leaf, value in leaves.items():
            if isinstance(value, (int, float)):
                writer.add_count(state_path(name, leaf), value)
        count: object = in_group.get(name, {}).get(STEP)  # apex's and DeepSpeed's own Adam count by group
        if STEP not in leaves and isinstance(count, (int, float)):
            writer.add_count(state_path(name, STEP), count)
    writer.add_groups(
        [{key: value for key, value in group.items() if key != STEP} for group in groups], params
    )
    lacking = [] if groups else ["the settings of the optimizer's groups (lr, ...) are not in the checkpoint"]
    return writer.finish(lacking, has_boxes=False)
