"""Four gloo ranks save distributed tensors as trainers save them: a file of `torch.save` for each rank.

Run with a directory as its argument. For every case there come `CASE/model_world_size_4_rank_R.pt` and
`CASE.truth`, the whole tensors.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.worlds.processes import fork, wait

WORLD_SIZE = 4
State = dict[str, torch.Tensor]


class Model(nn.Module):
    """Uneven rows, fewer rows than ranks, an odd dtype, tied weights, plain buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.few = nn.Linear(7, 10), nn.Linear(5, 3, bias=False)
        self.low = nn.Parameter(torch.zeros(9, 2, dtype=torch.bfloat16))
        self.tied = nn.Linear(7, 10, bias=False)
        self.tied.weight = self.wide.weight
        self.register_buffer("step", torch.tensor(7))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(numbers(parameter.shape) + number)


def numbers(shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def fsdp2() -> tuple[State, State]:
    model = Model()
    truth = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return fully_shard(
        model, mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
    ).state_dict(), truth


def hsdp() -> tuple[State, State]:
    model = Model()
    truth = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp"))
    return fully_shard(model, mesh=mesh).state_dict(), truth


def fsdp2_tp() -> tuple[State, State]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(7, 11), nn.Linear(11, 9))
    truth = {name: numbers(tensor.shape) for name, tensor in model.state_dict().items()}
    cuts = {"0.weight": Shard(0), "0.bias": Shard(0), "1.weight": Shard(1), "1.bias": Replicate()}
    for name, cut in cuts.items():
        module, _, attribute = name.rpartition(".")
        placed = distribute_tensor(truth[name], mesh["tp"], [cut], src_data_rank=None)
        setattr(model.get_submodule(module), attribute, nn.Parameter(placed))
    return fully_shard(model, mesh=mesh["dp"]).state_dict(), truth


def fsdp1() -> tuple[State, State]:
    model = nn.Sequential(nn.Linear(7, 10), nn.Linear(10, 3))
    truth = {name: numbers(tensor.shape) for name, tensor in model.state_dict().items()}
    model.load_state_dict(truth)
    wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    config = ShardedStateDictConfig(offload_to_cpu=False)
    with FullyShardedDataParallel.state_dict_type(wrapped, StateDictType.SHARDED_STATE_DICT, config):
        return wrapped.state_dict(), truth


def placed() -> tuple[State, State]:
    """What few trainers do: other dims, one dim cut twice, a part that is stored with its strides."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    cuts = {
        "dim1": [Shard(1), Replicate()],
        "twice": [Shard(0), Shard(0)],
        "grid": [Shard(1), Shard(0)],
        "whole": [Replicate(), Replicate()],
    }
    truth = {name: numbers((8, 7)) for name in (*cuts, "strided")}
    state: State = {
        name: distribute_tensor(truth[name], mesh, cut, src_data_rank=None) for name, cut in cuts.items()
    }
    rank = dist.get_rank()
    line = init_device_mesh("cpu", (4,))
    part = truth["strided"].chunk(4)[rank].t().contiguous().t()
    state["strided"] = DTensor.from_local(
        part, line, [Shard(0)], run_check=False, shape=torch.Size((8, 7)), stride=(7, 1)
    )
    return state, truth


def partial() -> tuple[State, State]:
    mesh = init_device_mesh("cpu", (4,))
    return {"sum": DTensor.from_local(numbers((2, 2)), mesh, [Partial()], run_check=False)}, {}


CASES: tuple[Callable[[], tuple[State, State]], ...] = (fsdp2, hsdp, fsdp2_tp, fsdp1, placed, partial)


def save_all(out: Path, rank: int, store: str) -> None:
    warnings.simplefilter("ignore")  # torch's own about FSDP1
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD_SIZE)
    for case in CASES:
        directory = out / case.__name__
        directory.mkdir(exist_ok=True)
        state, truth = case()
        torch.save(state, directory / f"model_world_size_{WORLD_SIZE}_rank_{rank}.pt")
        if rank == 0:
            torch.save(
                {name: tensor.detach().clone() for name, tensor in truth.items()}, f"{directory}.truth"
            )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        store = f"{scratch}/store"
        wait([fork(lambda rank=rank: save_all(Path(sys.argv[1]), rank, store)) for rank in range(WORLD_SIZE)])
