"""Train a MoE model with FSDP2, its experts spread over `ep` ranks, from a pre-sharded directory.

    torchrun --nproc-per-node 8 moe_run.py Qwen3-30B-A3B-dp_shard8-ep8 run 1000 8

The arguments are the directory, where to save, the number of steps, and `ep` (1: no expert parallelism). Runs on CUDA
with nccl, and on CPU with gloo.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardkit


def start(weights: str, ep: int, device: str) -> nn.Module:
    """Build the model on meta, shard it for this mesh, and fill it."""
    size = dist.get_world_size()
    mesh = init_device_mesh(device, (size,), mesh_dim_names=("dp_shard",))
    experts = None
    if ep > 1:  # the same ranks, seen as a second mesh
        experts = init_device_mesh(device, (size // ep, ep), mesh_dim_names=("efsdp", "ep"))
    context = shardkit.prepare(weights, weights, dtype="fp32")  # fp32 masters of bf16 files
    model = shardkit.wrap(context.model, mesh, expert_mesh=experts, mixed_precision="bf16")
    return shardkit.finalize(model, context)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, device: str) -> float:
    """One step on made-up data, other data on each rank; returns the mean loss before it."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    tokens = torch.randint(0, 60, (2, 16), generator=generator).to(device)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    shardkit.clip_grad_norm_(model, 1.0)  # right for parameters on two meshes
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def main(weights: str, run: str, num_steps: str, ep: str = "1") -> None:
    """Train, and save model and optimizer to `run/last`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    model = start(weights, int(ep), device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(int(num_steps)):
        loss = train_step(model, optimizer, step, device)
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss:.4f}", flush=True)
    shardkit.save(model, f"{run}/last", optimizer=optimizer, extra={"step": int(num_steps)}, overwrite=True)
    dist.barrier()  # no rank leaves while another still sends
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
