"""A plain FSDP2 training loop that starts from any weights, saves, and goes on from where it stopped.

    torchrun --nproc-per-node 4 examples/train_fsdp2.py MODEL RUN [STEPS]

MODEL is a local directory of a Hub model. RUN gets `last/`, which has the model and the optimizer; started again, the
loop goes on from it, in any world size. It uses of shardkit only what a loop of your own needs: `prepare` and `finalize` around
your own `fully_shard` calls, `clip_grad_norm_` and `save`. Runs on CPU with gloo and on CUDA with nccl.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardkit


def start(model_directory: str, weights: str, device_type: str) -> nn.Module:
    """Build, wrap by hand, and fill from `weights`."""
    mesh = init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    context = shardkit.prepare(model_directory, weights, dtype="fp32")
    model = context.model
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return shardkit.finalize(model, context)


def resume_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Path) -> int:
    """Load the optimizer's state with stock torch; return the steps that were done."""
    state = {"optimizer": get_optimizer_state_dict(model, optimizer), "extra": {"step": 0}}
    dcp.load(state, checkpoint_id=checkpoint)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return int(state["extra"]["step"])


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, device_type: str) -> float:
    """One step on made-up data, the same on all ranks; returns the loss before it."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 60, (2, 16), generator=generator).to(device_type)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    shardkit.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def train(model_directory: str, last: Path, num_steps: int, device_type: str) -> None:
    """Train for some steps, saving after each."""
    resumes = last.exists()  # whole or not there: `save` renames once
    model = start(model_directory, str(last) if resumes else model_directory, device_type)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    done = resume_optimizer(model, optimizer, last) if resumes else 0
    for step in range(done, num_steps):
        loss = train_step(model, optimizer, step, device_type)
        shardkit.save(model, last, optimizer=optimizer, extra={"step": step + 1}, overwrite=True)
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss:.6f}", flush=True)


def main(model_directory: str, run: str, num_steps: str = "4") -> None:
    """Set up, train, and leave in good order."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    Path(run).mkdir(parents=True, exist_ok=True)
    train(model_directory, Path(run) / "last", int(num_steps), device_type)
    # A sharded model refers to itself, and keeps threads of the process group that must not outlive Python.
    gc.collect()
    dist.barrier()  # no rank leaves while another still sends
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
