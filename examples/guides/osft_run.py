"""Train with OSFT: what is frozen stays, the rest learns.

    torchrun --nproc-per-node 8 osft_run.py Qwen/Qwen3-8B Qwen/Qwen3-8B run

The second is the source: the model's weights, or what an earlier run has saved. Runs on CUDA with nccl, and on CPU with
gloo.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shardkit


def main(model_name: str, source: str, run: str) -> None:
    """Train ten steps on made-up data, and save."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    if kind == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    mesh = init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("dp_shard",))

    context = shardkit.prepare(
        model_name, source, osft=0.3
    )  # dense weights become factors; stored factors are read
    model = shardkit.wrap(context.model, mesh)
    model = shardkit.finalize(model, context)

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
    shardkit.osft_optimizer(model, optimizer)  # from now on its steps leave alone what is frozen
    for _ in range(10):
        tokens = torch.randint(0, 60, (2, 16), device=kind)  # your data
        model(input_ids=tokens, labels=tokens).loss.backward()
        shardkit.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    leak = shardkit.osft_leak(model)  # below 1e-6: nothing has grown into what is frozen
    if dist.get_rank() == 0:
        print(f"leak {leak:.1e}")
    shardkit.save(model, f"{run}/last", optimizer=optimizer)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
