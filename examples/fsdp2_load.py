"""Load a pre-sharded directory in your own FSDP2 script. No shardkit at run time: stock torch reads it.

    shardkit preshard MODEL CHECKPOINT --world-size 2
    torchrun --nproc-per-node 2 examples/fsdp2_load.py MODEL CHECKPOINT

MODEL is a local directory of the Hub model (only its config is read here), CHECKPOINT is what preshard
made of it. Each rank opens its own file of CHECKPOINT and nothing else of any size. Runs on CPU with gloo
and on CUDA with nccl; without a GPU, put CUDA_VISIBLE_DEVICES= before torchrun. Needs transformers and accelerate.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import init_empty_weights
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM


def build_on_meta(model_directory: str) -> nn.Module:
    """Phase 1: parameters have names and shapes, no memory; buffers have their values.

    `torch.device("meta")` would leave buffers without values: rotary tables and position ids are in no checkpoint.
    """
    config = AutoConfig.from_pretrained(model_directory)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()  # init_empty_weights makes two parameters of a tied one
    return model


def wrap(model: nn.Module, device_type: str) -> None:
    """Phase 2: the units that `--wrap auto` assumed, and the root. The mesh has the world size of preshard."""
    mesh = init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def fill(model: nn.Module, checkpoint: str, device_type: str) -> None:
    """Phase 3: memory for this rank's shard, the buffers that it takes away, and the weights."""
    buffers = dict(model.named_buffers())
    model.to_empty(device=device_type)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    dcp.load(model.state_dict(), checkpoint_id=checkpoint)


def train_one_step(model: nn.Module, device_type: str) -> float:
    """Your training loop; returns the loss before the step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    tokens = torch.arange(16, device=device_type).unsqueeze(0)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def main(model_directory: str, checkpoint: str) -> None:
    """Build, wrap, fill, train."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    model = build_on_meta(model_directory)
    wrap(model, device_type)
    fill(model, checkpoint, device_type)
    loss = train_one_step(model, device_type)
    if dist.get_rank() == 0:
        print(f"loss {loss:.6f}")
    dist.barrier()  # no rank leaves while another still sends
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
