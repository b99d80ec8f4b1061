"""Universal checkpoints of DeepSpeed: `zero/PARAMETER/fp32.pt`, one file for each parameter.

From ZeRO-1 and 2 a file is {"param": tensor, ...} with the parameter's shape; from ZeRO-3 it is a bare flat
tensor. Newer versions also write a file for what the optimizer does not have, a buffer or a tied name, cast
from the module: those are read from the module itself.

Source: DeepSpeed 0.19, checkpoint/ds_to_universal.py.
"""

from __future__ import annotations

import os
from math import prod

from shardkit.core.regions import Shape
from shardkit.core.text import escape
from shardkit.errors import SourceError
from shardkit.formats.sharded.deepspeed_catalog import Weight
from shardkit.formats.sharded.deepspeed_files import Tag, open_states, without_tree
from shardkit.formats.sharded.deepspeed_states import ModelStates
from shardkit.formats.sharded.nearby import inner, listing
from shardkit.formats.torch_file import TensorRef, TorchFile

_WEIGHTS = "fp32.pt"


def open_parameters(
    tag: Tag, state: ModelStates, first_file: int
) -> tuple[dict[str, Weight], list[TorchFile]]:
    """Return the trained parameters, and the files that they are.

    Args:
        state: that has the shapes.
        first_file: the number that the first file is to have in the catalog.

    Raises:
        SourceError: lists every file that is missing, damaged, or does not hold its parameter.
    """
    shapes = _shapes(tag, state)
    missing = [name for name in shapes if not _has_weights(tag, name)]
    if missing:
        raise SourceError(
            f"{escape(tag.directory)}: {len(missing)} of {len(shapes)} parameters have no {_WEIGHTS}",
            problems=[escape(f"{tag.prefix}zero/{name}/{_WEIGHTS}") for name in missing],
            hint="copy the whole directory, or convert the checkpoint again",
        )
    opened = open_states(tag, [f"zero/{name}/{_WEIGHTS}" for name in shapes], _read_parameter)
    weights: dict[str, Weight] = {}
    problems = []
    for number, (name, (file, stored)) in enumerate(zip(shapes, opened, strict=True), start=first_file):
        weight = _weight(number, stored, shapes[name])
        if weight is None:
            problems.append(f"{escape(name)}: {escape(file.name)} does not hold {list(shapes[name] or ())}")
        else:
            weights[name] = weight
    if problems:
        raise SourceError(
            f"{escape(tag.directory)}: {len(problems)} files do not hold their parameter",
            problems=problems,
            hint="convert the checkpoint again",
        )
    return weights, [file for file, _ in opened]


def is_cut(tag: Tag) -> bool:
    """True where the module's files are parts of a model-parallel model: what they hold is not the model's."""
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
    """True where a parameter has its file; names come from a file too, and may not lead elsewhere."""
    if os.path.basename(name) != name or "\0" in name:
        return False
    directory = inner(tag.directory, f"zero/{name}")
    return directory is not None and os.path.lexists(os.path.join(directory, _WEIGHTS))


def _read_parameter(file: TorchFile) -> tuple[TorchFile, TensorRef | None]:
    stored = file.tree.get("param") if isinstance(file.tree, dict) else file.tree
    if not isinstance(stored, TensorRef):
        return without_tree(file, []), None
    return without_tree(file, [stored]), stored


def _weight(number: int, stored: TensorRef | None, shape: Shape | None) -> Weight | None:
    """Return the stored tensor as the parameter; from ZeRO-3 it is flat. None where it cannot be that."""
    if stored is None or shape in (None, stored.shape):
        return Weight.whole(number, stored) if stored is not None else None
    assert shape is not None
    fits = stored.is_contiguous and prod(stored.shape) == prod(shape)
    return Weight.whole(number, stored, shape) if fits else None
