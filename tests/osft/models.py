"""Models with factors in the place of weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from shardkit.core.factored import FACTORS, Target
from shardkit.osft.modules import candidates, factor_modules, placement_fn
from shardkit.osft.plan import OsftPlan, choose_targets
from shardkit.osft.svd import factorise


def targets_of(model: nn.Module, plan: OsftPlan) -> tuple[Target, ...]:
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    return choose_targets(plan, candidates(model), model_type)[0]


def factored(model: nn.Module, plan: OsftPlan) -> Any:
    """Return a copy of a model with factors of its weights."""
    new = copy.deepcopy(model)
    targets = targets_of(model, plan)
    modules = factor_modules(new, targets)
    for target in targets:
        weight, module = model.get_parameter(target.weight), modules[target.path]
        module.to_empty(device="cpu", recurse=False)
        module.osft_params.to_empty(device="cpu")
        found = factorise(weight.detach(), target)
        with torch.no_grad():
            for name in FACTORS:
                module.get_parameter(name).copy_(found.tensors[name])
            if module.bias is not None:
                module.bias.copy_(model.get_parameter(f"{target.path}.bias"))
    return new


def shard(model: Any, mesh: DeviceMesh, *, along_columns: bool = True) -> None:
    """Wrap a Llama as a trainer of one's own would."""
    place = placement_fn(model, mesh.size(-1)) if along_columns else None
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, shard_placement_fn=place)
    fully_shard(model, mesh=mesh, shard_placement_fn=place)
