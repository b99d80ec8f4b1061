"""Real gloo worlds that train a little and save, with the whole tensors beside: for consolidate.

    python consolidate_world.py OUT

Writes OUT/<name>/{.metadata,...} with stock `dcp.save`, and OUT/<name>.safetensors as rank 0 gathers it.
"""

import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import save_file
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import (
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.operations.consolidate.checkpoints import CONFIG
from tests.worlds.processes import fork, wait

torch.set_num_threads(1)


def begin(rank: int, world_size: int, out: Path, name: str) -> None:
    store = f"file://{out}.{name}.store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)


def keep_whole(state: dict[str, torch.Tensor], rank: int, path: Path) -> None:
    whole = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state.items()}
    if rank == 0:
        save_file({name: value.clone().contiguous() for name, value in whole.items()}, path)


def train(rank: int, out: Path) -> None:
    """Two steps of a model with tied embeddings on three ranks: uneven rows, an optimizer beside."""
    begin(rank, 3, out, "train")
    config = transformers.AutoConfig.for_model(**{**CONFIG, "tie_word_embeddings": True})
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).bfloat16()
    mesh = init_device_mesh("cpu", (3,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(2):
        tokens = torch.arange(8).reshape(1, 8) + step
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save({**states, "step": 2}, checkpoint_id=out / "trained")
    keep_whole(get_model_state_dict(model), rank, out / "trained.safetensors")
    dist.barrier()


def place(rank: int, out: Path) -> None:
    """Every way in which two axes cut a tensor."""
    begin(rank, 4, out, "place")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    ways = {
        "grid": (Shard(0), Shard(1)),
        "rows": (Shard(0), Shard(0)),
        "columns": (Shard(1), Replicate()),
        "replicas": (Replicate(), Replicate()),
    }
    state = {
        f"{name}.{shape[0]}.weight": distribute_tensor(torch.randn(shape), mesh, placements)
        for name, placements in ways.items()
        for shape in ((16, 9), (7, 5), (1, 6))
    }
    dcp.save(state, checkpoint_id=out / "placed")
    keep_whole(state, rank, out / "placed.safetensors")
    dist.barrier()


def build() -> transformers.PreTrainedModel:
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(transformers.AutoConfig.for_model(**CONFIG))


def replicate(rank: int, out: Path) -> None:
    """HSDP: two replicas of two shards, every layer checkpointed, saved while the job goes on, one file for each tensor."""
    begin(rank, 4, out, "replicate")
    model = build()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = fully_shard(checkpoint_wrapper(layer), mesh=mesh)
    fully_shard(model, mesh=mesh)
    writer = dcp.FileSystemWriter(out / "replicated", single_file_per_rank=False)
    dcp.async_save({"app": {"model": model.state_dict()}}, storage_writer=writer).result()
    keep_whole(get_model_state_dict(model), rank, out / "replicated.safetensors")
    dist.barrier()


def flatten(rank: int, out: Path) -> None:
    """FSDP1 with SHARDED_STATE_DICT: pieces of flat parameters, and the optimizer's state beside."""
    begin(rank, 3, out, "flatten")
    model = FSDP(build(), use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.arange(8).reshape(1, 8)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    with FSDP.state_dict_type(
        model,
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(_use_dtensor=False),
        ShardedOptimStateDictConfig(_use_dtensor=False),
    ):
        state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
        assert any(isinstance(value, ShardedTensor) for value in state["model"].values())
        dcp.save(state, checkpoint_id=out / "flattened")
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        keep_whole(model.state_dict(), rank, out / "flattened.safetensors")
    dist.barrier()


def main() -> None:
    out = Path(sys.argv[1])
    for world_size, work in ((3, train), (4, place), (4, replicate), (3, flatten)):
        wait([fork(partial(work, rank, out)) for rank in range(world_size)])


main()
