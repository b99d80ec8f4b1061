"""Real gloo worlds that train, save as trainers with a form of their own do, and go on from what reshard made of it.

    python kept_world.py BASE

For each form, two ranks train, save BASE/<form>, gather the whole optimizer's state with torch's own functions, and
train on. The checkpoint is resharded; worlds of other sizes load it with stock `dcp.load`, compare every value with what was
gathered, and train the same steps on the same global batches. Each world writes BASE/<form>-<name>.json and .pt.
"""

from __future__ import annotations

import json
import sys
import warnings
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import (
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import shardkit
from tests.distributed.train_world import STEPS, Model, flat, train, world

WORLDS: dict[str, dict[str, tuple[int, ...]]] = {
    "verl-fsdp2": {"three": (3,), "hsdp": (2, 2)},
    "verl-fsdp1": {"three": (3,)},
    "verl-tied-fsdp1": {"three": (3,)},
    "accelerate-fsdp2": {"three": (3,)},
    "accelerate-fsdp1": {"one": (1,)},
}
"""Of each form, the meshes of the worlds that go on."""

Run = tuple[nn.Module, torch.optim.Optimizer]


class TiedModel(Model):
    """Its head is its embedding: one parameter with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(10, 37, bias=False).double()
        self.score.weight = self.embed.weight


def begin(form: str, shape: tuple[int, ...]) -> Run:
    torch.manual_seed(0)
    model = TiedModel() if "tied" in form else Model()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard")[-len(shape) :])
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def begin_fsdp1(form: str) -> Run:
    torch.manual_seed(0)
    inner = TiedModel() if "tied" in form else Model()
    model = FSDP(inner, device_id=torch.device("cpu"), auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def save_verl(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As verl's FSDPCheckpointManager.save_checkpoint: raw state dicts, a file of each for each rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.save(model.state_dict(), path / f"model_world_size_{size}_rank_{rank}.pt")
    torch.save(optimizer.state_dict(), path / f"optim_world_size_{size}_rank_{rank}.pt")
    torch.save({"lr_scheduler": None}, path / f"extra_state_world_size_{size}_rank_{rank}.pt")


def save_accelerate(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As accelerate's save_fsdp_model and save_fsdp_optimizer with use_dcp=False."""
    rank = dist.get_rank()
    state = FSDP.optim_state_dict if isinstance(model, FSDP) else get_optimizer_state_dict
    torch.save(model.state_dict(), path / f"pytorch_model_fsdp_0_rank{rank}.bin")
    torch.save(state(model, optimizer), path / f"optimizer_0_rank{rank}.bin")


def save(form: str, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    writer = save_verl if form.startswith("verl") else save_accelerate
    if not isinstance(model, FSDP):
        writer(path, model, optimizer)
        return
    configs = ShardedStateDictConfig(offload_to_cpu=True), ShardedOptimStateDictConfig(offload_to_cpu=True)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *configs):
        writer(path, model, optimizer)


def truth(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The whole optimizer's state, gathered by torch."""
    whole = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    return comparable(whole)


def comparable(state: dict[str, Any]) -> dict[str, Any]:
    """Every leaf by its path, in no order: of parameters in a group too."""
    groups = [{**group, "params": sorted(group["params"])} for group in state["param_groups"]]
    return flat({"state": state["state"], "groups": dict(enumerate(groups))})


def first_run(base: Path, form: str) -> None:
    warnings.simplefilter("ignore")  # torch's own about FSDP1
    model, optimizer = begin_fsdp1(form) if form.endswith("fsdp1") else begin(form, (2,))
    train(model, optimizer, 0)
    save(form, base / form, model, optimizer)
    whole = truth(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(whole, base / f"{form}.truth")
    finish(base, f"{form}-two", model, optimizer)


def finish(base: Path, name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    losses = train(model, optimizer, STEPS)
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        torch.save(weights, base / f"{name}.pt")
        (base / f"{name}.json").write_text(json.dumps(losses))


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    with torch.no_grad():  # stale values must not pass for loaded ones
        for parameter in model.parameters():
            parameter.fill_(77)
    weights, optim = get_state_dict(model, optimizer)
    found = {"model": weights, "optim": optim}
    dcp.load(found, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"])
    return comparable(get_optimizer_state_dict(model, optimizer))


def next_run(base: Path, form: str, name: str) -> None:
    model, optimizer = begin(form, WORLDS[form][name])
    found = load(base / f"{form}-{name}", model, optimizer)
    expected = torch.load(base / f"{form}.truth", weights_only=False)
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for key, value in expected.items():
        same = torch.equal(value, found[key]) if isinstance(value, torch.Tensor) else value == found[key]
        assert same, f"{form}, {name}: {key} differs"
    finish(base, f"{form}-{name}", model, optimizer)


def main() -> None:
    base = Path(sys.argv[1])
    for form, worlds in WORLDS.items():
        (base / form).mkdir()
        world(base, form, 2, partial(first_run, base, form))
        for name, shape in worlds.items():
            axes = ("dp_replicate", "dp_shard")[-len(shape) :]
            mesh = ",".join(f"{axis}={size}" for axis, size in zip(axes, shape, strict=True))
            result = shardkit.reshard(base / form, base / f"{form}-{name}", mesh=mesh)
            assert not result.warnings, result.warnings
            world(base, f"{form}-{name}", prod(shape), partial(next_run, base, form, name))


if __name__ == "__main__":
    main()
