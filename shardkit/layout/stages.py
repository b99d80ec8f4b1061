"""Assign the parts of a model to pipeline stages.

    auto            The blocks are split evenly; if some are left over, each of the first stages gets one more.
                    Tensors before the blocks go to the first stage, tensors after them to the last. transformers
                    has used this rule since 5.24; until 5.23 the last stage got all blocks that were left over.
    pkg.mod:fn      fn(model, num_stages) returns the module paths of each stage, as torchtitan's helper does.

Only code that has a model imports this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from shardkit.core.text import count, escape, listed
from shardkit.errors import PolicyError
from shardkit.layout.layout import find_containers
from shardkit.layout.units import describe_error, import_name
from shardkit.layout.wrap_policy import STAGES, WrapPolicy


def find_stages(
    model: nn.Module, names: Sequence[str], num_stages: int, policy: WrapPolicy
) -> dict[str, list[int]]:
    """Return the stages that hold each tensor of a model.

    Args:
        model: a model that is not wrapped yet.
        names: names in its state dict, in the model's order.
        num_stages: number of stages, at least 2.
        policy: the parsed `--stages`.

    Returns:
        Name -> its stages, ascending. There are several if several stages have a copy of the tensor.

    Raises:
        PolicyError: the model's blocks cannot be found, the function fails, or a tensor is on no stage.
    """
    parts = (
        _split_evenly(model, names, num_stages)
        if policy.function is None
        else _call_function(model, num_stages, policy)
    )
    stages_of = {
        name: [stage for stage, paths in enumerate(parts) if any(_lies_in(name, path) for path in paths)]
        for name in names
    }
    lost = [name for name, stages in stages_of.items() if not stages]
    idle = [
        f"stage {stage}: {escape(path)}"
        for stage, paths in enumerate(parts)
        for path in paths
        if not any(_lies_in(name, path) for name in names) and not _is_module(model, path)
    ]
    PolicyError.raise_for(
        [*(f"{part}: no such module" for part in idle), *(f"{escape(name)}: on no stage" for name in lost)],
        f"--stages {policy.text}: the parts of {count(num_stages, 'stage')} do not make up the model",
        hint="each stage has the paths of its modules, such as model.layers.0",
    )
    return stages_of


def _lies_in(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")


def _is_module(model: nn.Module, path: str) -> bool:
    """True if a model has a module with this path, even one without tensors, such as a rotary embedding."""
    try:
        model.get_submodule(path)
    except AttributeError:
        return False
    return True


def _split_evenly(model: nn.Module, names: Sequence[str], num_stages: int) -> list[list[str]]:
    """Return the names of the modules and tensors on each stage: the blocks evenly, what comes before them on the first stage,
    and the rest on the last.
    """
    blocks, num_blocks = _blocks(model, names)
    if num_blocks < num_stages:
        raise PolicyError(
            f"{type(model).__name__} has {count(num_blocks, 'block')} in {escape(blocks)}, fewer than the "
            f"{num_stages} stages"
        )
    per_stage, left_over = divmod(num_blocks, num_stages)
    starts = [stage * per_stage + min(stage, left_over) for stage in range(num_stages + 1)]
    parts = [[f"{blocks}.{block}" for block in range(*ends)] for ends in pairwise(starts)]
    inside = [position for position, name in enumerate(names) if _lies_in(name, blocks)]
    parts[0] += names[: inside[0]]
    parts[-1] += [name for name in names[inside[0] :] if not _lies_in(name, blocks)]
    return parts


def _blocks(model: nn.Module, names: Sequence[str]) -> tuple[str, int]:
    """Return the path of the list of a model's blocks, such as "model.layers", and its length."""
    planned = {
        path: len(module)
        for path, module in model.named_modules()
        if path in (getattr(model, "pp_plan", None) or {}) and isinstance(module, nn.ModuleList)
    }
    containers = planned or find_containers(names)
    if len(containers) != 1:
        raise PolicyError(
            f"{type(model).__name__} does not say which blocks are split over pp: it has "
            f"{listed(list(containers)) if containers else 'no numbered modules'}",
            hint="say it with a function of your own: --stages module:function",
        )
    return next(iter(containers.items()))


def _call_function(model: nn.Module, num_stages: int, policy: WrapPolicy) -> list[list[str]]:
    assert policy.function is not None
    function = import_name(*policy.function, STAGES)
    try:
        parts = function(model, num_stages)
        stages = [[str(path) for path in paths] for paths in parts]
    except (Exception, SystemExit) as error:
        raise PolicyError(
            f"--stages {policy.text}: the function failed: {describe_error(error)}",
            hint="it is called with the model on the meta device and the number of stages, and returns a list of module "
            "paths for each stage",
        ) from error
    if len(stages) != num_stages:
        raise PolicyError(
            f"--stages {policy.text}: the function returned {len(stages)} lists, not {num_stages}"
        )
    return stages
