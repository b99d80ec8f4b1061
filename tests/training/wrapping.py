"""Ways to wrap a model by hand, and to hold it against another one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardkit.training.wrap import wrap
from tests.training.models import inputs
from tests.worlds.ranks import on_all

TP_WIDTHS = {"intermediate_size": 38}
"""Of a Llama: even over `tp`, not over both axes of `tensor_parallel`."""


def blocks_of(model: nn.Module) -> list[nn.Module]:
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return [block for each in lists for block in each if any(p.numel() for p in block.parameters())]


def shard(model: nn.Module, mesh: Any) -> None:
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def one_axis(model: nn.Module) -> None:
    shard(model, init_device_mesh("cpu", (dist.get_world_size(),)))


def hybrid(model: nn.Module) -> None:
    shard(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")))


def plain(model: nn.Module) -> None:
    """Nobody wraps it."""


def wrapped(model: nn.Module) -> nn.Module:
    """By shardkit, over all ranks, in the model's own precision."""
    return wrap(model, init_device_mesh("cpu", (dist.get_world_size(),)), mixed_precision=None)


def wrapped_with_replicas(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    return wrap(model, mesh, mixed_precision=None)


def tensor_parallel(model: nn.Module) -> nn.Module:
    """By shardkit, inside of whose units a Llama's matrices are cut by torch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    for layer in model.model.layers:
        plan = {
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(),
        }
        parallelize_module(layer, mesh["tp"], plan)
    return wrap(model, mesh, mixed_precision=None)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def loss_of(name: str, model: nn.Module) -> torch.Tensor:
    return run_model(name, model).float().pow(2).mean()


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return {
            name: value.full_tensor() if isinstance(value, DTensor) else value.clone()
            for name, value in model.state_dict().items()
        }


def run_model(name: str, model: nn.Module) -> torch.Tensor:
    made = model(**inputs("llama" if name == "trained" else name.removesuffix("-bf16")))
    return made.logits if hasattr(made, "logits") else made.last_hidden_state


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], what: str) -> None:
    assert list(a) == list(b), f"{what}: other names"
    wrong = [name for name in a if a[name].dtype != b[name].dtype or not torch.equal(a[name], b[name])]
    assert not wrong, f"{what}: {wrong}"


def logged(work: Callable[[], object], level: int = logging.INFO) -> list[list[str]]:
    """Return what each rank logs meanwhile, of this level and above."""
    lines: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("shardkit")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        work()
    finally:
        log.removeHandler(handler)
    return on_all(lines)
