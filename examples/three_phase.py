"""Start a sharded model in three phases; no rank ever holds the whole.

    torchrun --nproc-per-node 2 examples/three_phase.py SOURCE [MODEL]

SOURCE is a Hub model (directory or repo id), what `shardkit preshard` made of one, or any sharded checkpoint;
MODEL is where config.json lies, if SOURCE has none. Runs on CPU with gloo and on CUDA with nccl; without a GPU, put
CUDA_VISIBLE_DEVICES= before torchrun.
"""

from __future__ import annotations

import logging
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shardkit


def main(source: str, model_directory: str) -> None:
    """Prepare, wrap, finalize, and look at what came out."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # which strategy, and why
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    mesh = init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("dp_shard",))

    # fp32 master weights, whatever the file holds.
    context = shardkit.prepare(model_directory, source, dtype="fp32")
    model = shardkit.wrap(context.model, mesh, mixed_precision=None)
    model = shardkit.finalize(model, context)

    report = shardkit.diagnose(model)
    if dist.get_rank() == 0:
        print(report)
    tokens = torch.arange(16, device=device_type).unsqueeze(0)
    loss = model(input_ids=tokens, labels=tokens).loss
    if dist.get_rank() == 0:
        print(f"loss {float(loss.detach()):.6f}")
    dist.barrier()  # no rank leaves while another still sends
    dist.destroy_process_group()


if __name__ == "__main__":
    config = os.path.join(sys.argv[-1], "config.json")
    if os.path.isdir(sys.argv[-1]) and not os.path.isfile(config):
        sys.exit(f"{config} is missing: name the model too, as in three_phase.py {sys.argv[1]} MODEL")
    main(sys.argv[1], sys.argv[-1])
