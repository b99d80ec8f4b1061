"""A plain FSDP2 loop that saves with stock torch, and goes on from such a checkpoint in any number of ranks.

    torchrun --nproc-per-node 4 plain_fsdp2.py my-model run/step-2 2             trains 2 steps
    torchrun --nproc-per-node 6 plain_fsdp2.py my-model run/step-4 4 run/step-2  goes on to step 4

Runs on CUDA with nccl, and on CPU with gloo.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM


def build(model_directory: str, device: str) -> nn.Module:
    """Load the model and shard it over all ranks."""
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, device: str) -> float:
    """One step on made-up data, the same on all ranks; returns the loss before it."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 60, (2, 16), generator=generator).to(device)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def main(model_directory: str, output: str, num_steps: str, resume: str | None = None) -> None:
    """Train up to `num_steps`, and save model and optimizer to `output`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    model = build(model_directory, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    done = 0
    if resume is not None:
        weights, state = get_state_dict(model, optimizer)
        saved = {"model": weights, "optimizer": state, "step": 0}
        dcp.load(saved, checkpoint_id=resume)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        done = saved["step"]
    for step in range(done, int(num_steps)):
        loss = train_step(model, optimizer, step, device)
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss:.4f}")
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state, "step": int(num_steps)}, checkpoint_id=output)
    dist.barrier()  # no rank leaves while another still sends
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
