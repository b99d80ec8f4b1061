"""Training goes on from checkpoints that trainers keep in forms of their own, optimizer and all, once they are resharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
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
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import shardkit
from tests.distributed.meshes import Shape, mesh_text
from tests.distributed.training import (
    STEPS,
    Model,
    adamw,
    assert_same_leaves,
    assert_same_run,
    flat,
    group_of_one,
    keep_run,
    start,
    train,
)
from tests.worlds.ranks import Ranks

pytestmark = pytest.mark.prove

two = Ranks(__name__, 2)
one = Ranks(__name__, 1)
three = Ranks(__name__, 3)
four = Ranks(__name__, 4)

FORMS: dict[str, list[Shape]] = {
    "verl-fsdp2": [(3,), (2, 2)],
    "verl-fsdp1": [(3,)],
    "verl-tied-fsdp1": [(3,)],
    "accelerate-fsdp2": [(3,)],
    "accelerate-fsdp1": [(1,)],
}
"""Of each form, the meshes of the ranks that go on."""

Run = tuple[nn.Module, torch.optim.Optimizer]


def forms_for(*shape: int) -> list[str]:
    return [form for form, shapes in FORMS.items() if shape in shapes]


class TiedModel(Model):
    """Its head is its embedding: one parameter with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(10, 37, bias=False).double()
        self.score.weight = self.embed.weight


def begin(form: str, shape: Shape) -> Run:
    return start(build(form), shape)


def begin_fsdp1(form: str) -> Run:
    wraps = ModuleWrapPolicy({nn.Sequential})
    model = FSDP(build(form), device_id=torch.device("cpu"), auto_wrap_policy=wraps)
    return model, adamw(model)


def build(form: str) -> Model:
    torch.manual_seed(0)
    return TiedModel() if "tied" in form else Model()


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
    path.mkdir(exist_ok=True)
    if not isinstance(model, FSDP):
        writer(path, model, optimizer)
        return
    configs = ShardedStateDictConfig(offload_to_cpu=True), ShardedOptimStateDictConfig(offload_to_cpu=True)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *configs):
        writer(path, model, optimizer)


def comparable(state: dict[str, Any]) -> dict[str, Any]:
    """Every leaf by its path, in no order: of parameters in a group too."""
    groups = [{**group, "params": sorted(group["params"])} for group in state["param_groups"]]
    return flat({"state": state["state"], "groups": dict(enumerate(groups))})


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Load with stock torch; return what the optimizer has then."""
    with torch.no_grad():  # stale values must not pass for loaded ones
        for parameter in model.parameters():
            parameter.fill_(77)
    weights, optim = get_state_dict(model, optimizer)
    found = {"model": weights, "optim": optim}
    dcp.load(found, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"])
    return comparable(get_optimizer_state_dict(model, optimizer))


def train_on(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[float], dict[str, Any]]:
    """Return the losses of the next steps, and the whole weights after them."""
    losses = train(model, optimizer, STEPS)
    return losses, get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def resharded(form: str, shape: Shape, out: Path) -> Path:
    return out / f"{form}-{'x'.join(map(str, shape))}"


@two.test_each(FORMS.keys())
def test_two_ranks_train_and_what_they_save_is_resharded(form: str, out: Path) -> None:
    model, optimizer = begin_fsdp1(form) if form.endswith("fsdp1") else begin(form, (2,))
    train(model, optimizer, 0)
    save(form, out / form, model, optimizer)
    gathered = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    whole = comparable(gathered)
    if dist.get_rank() == 0:
        torch.save(whole, out / f"{form}.optimizer")  # its steps are the optimizer's own, and go on counting
    losses, weights = train_on(model, optimizer)
    if dist.get_rank() == 0:
        keep_run(losses, weights, out / f"{form}.run")
        for shape in FORMS[form]:
            result = shardkit.reshard(out / form, resharded(form, shape, out), mesh=mesh_text(shape))
            assert not result.warnings, result.warnings


def check_goes_on(form: str, shape: Shape, out: Path) -> None:
    """The optimizer has every value that torch gathered, and the same steps come to the same."""
    model, optimizer = begin(form, shape)
    found = load(resharded(form, shape, out), model, optimizer)
    assert_same_leaves(found, torch.load(out / f"{form}.optimizer", weights_only=False))
    losses, weights = train_on(model, optimizer)
    assert_same_run(losses, weights, out / f"{form}.run")


@one.test_each(forms_for(1))
def test_one_rank_goes_on(form: str, out: Path) -> None:
    with group_of_one():
        check_goes_on(form, (1,), out)


@three.test_each(forms_for(3))
def test_three_ranks_go_on(form: str, out: Path) -> None:
    check_goes_on(form, (3,), out)


@four.test_each(forms_for(2, 2))
def test_replicas_of_two_ranks_go_on(form: str, out: Path) -> None:
    check_goes_on(form, (2, 2), out)
