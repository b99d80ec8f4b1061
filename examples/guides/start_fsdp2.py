"""Start FSDP2 from a pre-sharded directory: each rank reads its own file.

    torchrun --nproc-per-node 8 start_fsdp2.py my-model-dp_shard8

Runs on CUDA with nccl, and on CPU with gloo.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardkit


def main(weights: str) -> None:
    """Build the model on meta, shard it, fill it, and show that it works."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("dp_shard",))

    context = shardkit.prepare(weights, weights, dtype="fp32")  # on meta; no tensor is read yet
    model = context.model
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model = shardkit.finalize(model, context)  # memory for this rank's shards alone, filled and checked

    tokens = torch.arange(16, device=device).unsqueeze(0)
    loss = model(input_ids=tokens, labels=tokens).loss
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.4f} on {dist.get_world_size()} ranks")
    dist.barrier()  # no rank leaves while another still sends
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
