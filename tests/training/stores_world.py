"""Ranks that read a model from an object store and say which values they have, or save one into it.

    python stores_world.py REQUEST

REQUEST is JSON: {"verb", "source", "out", "num_ranks", "fault"}; `{rank}` in a source is the rank. Each rank writes
OUT/<rank>.json: by name, the sum of the whole tensor; or what `save` says. It is a script: its processes have not used a
store before.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
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
from shardkit.files.remote.objects import ObjectStream
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


class Failing:
    """Something to save that one rank cannot."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == 1 and self.fault == "error":
            raise ValueError("this rank cannot")
        return {"step": 7}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing."""


def save(path: str, fault: str, **options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Model()
    model.wide = nn.Linear(1024, 5120, bias=False)  # of two ranks, each sends two parts
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.layers[0](torch.ones(2, 16)).sum().backward()
    optimizer.step()
    if dist.get_rank() == 1 and fault == "kill":
        write, calls = ObjectStream.write, itertools.count()

        def killed(self: ObjectStream, data: Any) -> int:
            if next(calls) == 12:  # in the middle of the file
                os.kill(os.getpid(), signal.SIGKILL)
            return write(self, data)

        ObjectStream.write = killed  # type: ignore[method-assign]
    try:
        result = shardkit.save(model, path, optimizer=optimizer, extra={"job": Failing(fault)}, **options)
    except shardkit.ShardkitError as error:
        return {"error": type(error).__name__, "message": str(error)}
    return asdict(result)


VERBS: dict[str, Callable[[str], nn.Module]] = {"prepare": prepare, "load_into": load_into}


def run(request: dict[str, Any], place: dict[str, str], rank: int) -> None:
    os.environ.update(place, RANK=str(rank), WORLD_SIZE=str(request["num_ranks"]))
    dist.init_process_group("gloo")
    if request["verb"] == "save":
        answer = save(request["source"], request.get("fault", ""), overwrite=request.get("overwrite", False))
        Path(request["out"], f"{rank}.json").write_text(json.dumps(answer))
        if "error" not in answer:
            end_world()
        os._exit(0)  # a rank that was killed would be waited for
    state = VERBS[request["verb"]](request["source"].format(rank=rank)).state_dict()
    whole = {name: value.full_tensor() for name, value in state.items() if isinstance(value, DTensor)}
    assert whole.keys() == state.keys()
    sums = {name: value.double().sum().item() for name, value in whole.items()}
    Path(request["out"], f"{rank}.json").write_text(json.dumps(sums))
    end_world()


if __name__ == "__main__":
    torch.set_num_threads(1)
    given = json.loads(sys.argv[1])
    with agent_store() as found:
        children = [fork(partial(run, given, found, rank)) for rank in range(given["num_ranks"])]
        if given.get("fault") == "kill":
            ended = [os.waitpid(child, 0)[1] for child in children]
            assert [os.WTERMSIG(each) for each in ended] == [0, signal.SIGKILL], ended
        else:
            wait(children)
