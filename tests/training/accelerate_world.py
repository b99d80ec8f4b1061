"""Two real ranks that train with accelerate's FSDP2, from models on meta, and one process that trains the same.

    python accelerate_world.py OUT

Every rank writes OUT/accelerate-<rank>.json.
It is a script: accelerate may be missing, and what it reads at its start holds for the whole process.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.tensor import DTensor

import shardkit
from shardkit.errors import ShardkitError
from tests.distributed.trainers.accelerate_cases import allow_cpu
from tests.training.models import inputs, reference
from tests.worlds.processes import end_world, fork, wait

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()

Found = dict[str, Any]
Groups = Callable[[nn.Module], Iterable[Any]]
NUM_STEPS = 5


def decayed(items: Iterable[tuple[str, nn.Parameter]], named: bool) -> list[Found]:
    """Two groups with different options, of pairs of name and parameter or of parameters."""
    pairs = list(items)
    groups = [[pair for pair in pairs if (pair[1].ndim > 1) is is_matrix] for is_matrix in (True, False)]
    return [
        {"params": group if named else [p for _, p in group], "weight_decay": decay}
        for group, decay in zip(groups, (0.1, 0.0), strict=True)
    ]


def with_names(model: nn.Module) -> Iterable[Any]:
    return decayed(model.named_parameters(), named=True)


def without_names(model: nn.Module) -> Iterable[Any]:
    return decayed(model.named_parameters(), named=False)


def all_in_one(model: nn.Module) -> Iterable[Any]:
    return model.parameters()


def train(name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The whole weights after some steps, on batches that are the same on every rank."""
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        model(**inputs(name)).logits.float().pow(2).mean().backward()
        optimizer.step()
    values = {key: value.detach() for key, value in model.state_dict().items()}
    return {key: v.full_tensor() if isinstance(v, DTensor) else v for key, v in values.items()}


def compare(name: str, hub: str, groups: Groups, accelerator: Accelerator, *, rebinds: bool) -> Found:
    """Train by the recipe, hold the weights against one process's, and tell what accelerate had made of the optimizer."""
    plain = reference(name)
    expected = train(name, plain, torch.optim.AdamW(groups(plain), lr=1e-2))

    context = shardkit.prepare(hub, hub, dtype="fp32")
    optimizer = torch.optim.AdamW(groups(context.model), lr=1e-2)
    names = shardkit.parameter_names(context.model, optimizer)
    model, optimizer = accelerator.prepare(context.model, optimizer)
    stepped = [id(p) for group in optimizer.param_groups for p in group["params"]]
    if rebinds:
        shardkit.rebind_optimizer(model, optimizer, names)
        model = shardkit.finalize(model, context)
        shardkit.rebind_optimizer(model, optimizer, names)  # there is nothing left to do
    else:
        model = shardkit.finalize(model, context, optimizer=optimizer)
    after = train(name, model, optimizer)
    accelerator.free_memory()
    return {
        "places": [len(stepped), len(set(stepped))],
        "decay": [group["weight_decay"] for group in optimizer.param_groups],
        "state": len(optimizer.state),
        "parameters": len(list(model.parameters())),
        "same": all(torch.equal(after[key], value) for key, value in expected.items()),
        "moved": all(not torch.equal(v, reference(name).state_dict()[k]) for k, v in expected.items()),
    }


def refused(name: str, hub: str, accelerator: Accelerator) -> Found:
    """An optimizer whose parameters cannot be known again."""
    context = shardkit.prepare(hub, hub, dtype="fp32")
    optimizer = torch.optim.AdamW(without_names(context.model), lr=1e-2)
    model, optimizer = accelerator.prepare(context.model, optimizer)
    try:
        shardkit.finalize(model, context, optimizer=optimizer)
    except ShardkitError as error:
        return error.to_json()
    return {}


def work(out: Path) -> Found:
    allow_cpu()
    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False),
    )
    hubs = {name: str(out / name) for name in ("llama", "llama-tied")}
    if dist.get_rank() == 0:
        for name, hub in hubs.items():
            reference(name).save_pretrained(hub)
    dist.barrier()
    llama = partial(compare, "llama", hubs["llama"], accelerator=accelerator)
    tied = partial(compare, "llama-tied", hubs["llama-tied"], accelerator=accelerator)
    return {
        "recorded": llama(groups=with_names, rebinds=False),
        "given": llama(groups=without_names, rebinds=True),
        "all": llama(groups=all_in_one, rebinds=False),
        "tied": tied(groups=with_names, rebinds=False),
        "unknown": refused("llama", hubs["llama"], accelerator),
    }


def rank(out: Path, number: int) -> None:
    os.environ.update({"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2"})
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=number, world_size=2)
    (out / f"accelerate-{number}.json").write_text(json.dumps(work(out)))
    end_world()


def main() -> None:
    out = Path(sys.argv[1])
    wait([fork(partial(rank, out, number)) for number in range(2)])


if __name__ == "__main__":
    main()
