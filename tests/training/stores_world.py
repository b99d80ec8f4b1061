"""Ranks that read a model from an object store, and say which values they have.

    python stores_world.py REQUEST

REQUEST is JSON: {"verb", "source", "out", "num_ranks"}. Each rank writes OUT/<rank>.json: by name, the sum of the whole
tensor. It is a script: its processes have not used a store before.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardkit
from tests.worlds.processes import agent_store, end_world, fork, wait


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))


def shard(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def prepare(source: str) -> nn.Module:
    context = shardkit.prepare(Model, source)
    return shardkit.finalize(shard(context.model), context)


def load_into(source: str) -> nn.Module:
    with torch.device("meta"):
        model = Model()
    return shardkit.load_into(shard(model), source)


VERBS: dict[str, Callable[[str], nn.Module]] = {"prepare": prepare, "load_into": load_into}


def run(request: dict[str, Any], place: dict[str, str], rank: int) -> None:
    os.environ.update(place, RANK=str(rank), WORLD_SIZE=str(request["num_ranks"]))
    dist.init_process_group("gloo")
    state = VERBS[request["verb"]](request["source"]).state_dict()
    whole = {name: value.full_tensor() for name, value in state.items() if isinstance(value, DTensor)}
    assert whole.keys() == state.keys()
    sums = {name: value.double().sum().item() for name, value in whole.items()}
    Path(request["out"], f"{rank}.json").write_text(json.dumps(sums))
    end_world()


if __name__ == "__main__":
    torch.set_num_threads(1)
    given = json.loads(sys.argv[1])
    with agent_store() as found:
        wait([fork(partial(run, given, found, rank)) for rank in range(given["num_ranks"])])
