"""Train a Hub model as verl's FSDP2 actor, and save it with verl's own checkpoint manager.

    torchrun --nproc-per-node 8 verl_run.py my-model checkpoints

Runs on CUDA with nccl, and on CPU with gloo.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.utils.checkpoint.checkpoint_manager import get_checkpoint_tracker_filename
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.fsdp_utils import apply_fsdp2, get_shard_placement_fn


def build(model_directory: str, device: str) -> nn.Module:
    """Load the model and shard it over all ranks, as verl does."""
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
    size = dist.get_world_size()
    mesh = init_device_mesh(device, (size,), mesh_dim_names=("fsdp",))
    apply_fsdp2(model, {"mesh": mesh, "shard_placement_fn": get_shard_placement_fn(size)}, {})
    return model


def main(model_directory: str, output: str) -> None:
    """Train two steps on made-up data, and save after the second."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    model = build(model_directory, device)
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in (1, 2):
        tokens = torch.randint(0, 60, (2, 16), generator=generator).to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.4f}")
    manager = FSDPCheckpointManager(model, optimizer, processing_class=tokenizer)
    manager.save_checkpoint(f"{output}/global_step_2/actor", global_step=2)
    if dist.get_rank() == 0:  # verl's trainer writes this when all ranks have saved
        Path(get_checkpoint_tracker_filename(output)).write_text("2")
    dist.barrier()  # no rank leaves while another still sends
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
