"""Two gloo ranks prepare models together, some of them without a source, or with another model.

python prepare_world.py DIRECTORY: it has the models `hub` (llama), `moe` and `vlm`, and gets RANK.json.
"""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardkit.errors import ShardkitError
from shardkit.training.model.initialise import initialise, new_rows
from shardkit.training.prepare import prepare
from shardkit.training.ranks.context import describe
from shardkit.training.source.weights import open_weights
from tests.training import models
from tests.worlds.processes import end_world, fork, wait

torch.set_num_threads(1)
SIZE = 2


def attempt(work: Callable[[], Any]) -> dict[str, Any]:
    """Return what a context says, or the error."""
    try:
        ctx = work()
    except ShardkitError as error:
        return error.to_json()
    return {
        "unavailable": ctx.unavailable is not None,
        "weights": None if ctx.weights is None else ctx.weights.identity,
        "initialised": sorted(ctx.initialised),
        "grown": ctx.grown,
        "drawn": digest(
            [
                *(value for _, value in initialise(ctx, ctx.initialised)),
                *(new_rows(ctx, fqn) for fqn in ctx.grown),
            ]
        ),
        "buffers": digest(list(ctx.buffers.values())),
        "meta": all(parameter.is_meta for parameter in ctx.model.parameters()),
    }


def digest(tensors: list[torch.Tensor]) -> str:
    content = [hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest() for tensor in tensors]
    return hashlib.sha256("".join(content).encode()).hexdigest()


def refuse() -> nn.Module:
    raise OSError("no disk")


def scenarios(rank: int, root: Path) -> dict[str, Any]:
    hub, other = str(root / "hub"), str(root / f"only-0-{rank}")
    copy = root / f"copy-{rank}"
    if rank == 0:
        shutil.copytree(hub, other)
    shutil.copytree(hub, copy)
    if rank == 1:
        file = copy / "model.safetensors"
        os.truncate(file, file.stat().st_size - 4)
    empty = root / f"empty-{rank}"
    shutil.copytree(hub, empty)
    if rank == 1:
        (empty / "model.safetensors").unlink()
    torch.manual_seed(rank)  # nothing may depend on it

    def wider() -> nn.Module:
        return transformers.LlamaForCausalLM(models.llama(vocab_size=101 + rank))

    def score() -> nn.Module:
        return transformers.LlamaForSequenceClassification(models.llama(num_labels=1))

    return {
        "all": attempt(lambda: prepare(hub, hub)),
        "scratch": attempt(lambda: prepare(hub, None)),
        "hidden": attempt(lambda: prepare(score, other, missing=["score.*"], tokenizer=120)),
        "emptied": attempt(lambda: prepare(hub, str(empty))),
        "nowhere": attempt(lambda: prepare(hub, str(root / "nowhere.d/"))),
        "truncated": attempt(lambda: prepare(hub, str(copy))),
        "mismatch": attempt(lambda: prepare(score, hub)),
        "hidden mismatch": attempt(lambda: prepare(score, other)),
        "experts": attempt(lambda: prepare(str(root / "moe"), str(root / "moe"), missing="init")),
        "other model": attempt(lambda: prepare(wider, None)),
        "other seed": attempt(lambda: prepare(hub, hub, seed=rank)),
        "one cannot build": attempt(lambda: prepare(refuse if rank else hub, hub)),
        "untied": attempt(lambda: prepare(str(root / "untied"), str(root / "untied"))),
        "backend": dist.get_backend(),
        **sharded(root),
    }


def sharded(root: Path) -> dict[str, Any]:
    """A model that is wrapped already is refused; a source is found for it all the same."""
    ctx = prepare(str(root / "vlm"), str(root / "vlm"))
    mesh = init_device_mesh("cpu", (SIZE,))
    for layer in ctx.model.model.language_model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    fully_shard(ctx.model, mesh=mesh)
    expected, ties = describe(ctx.model)
    assert ctx.weights is not None
    again = open_weights(root / "vlm", expected, ties, model=ctx.model)
    return {
        "names of a sharded model": [
            again.names == ctx.weights.names,
            again.identity == ctx.weights.identity,
        ],
        "wrapped": attempt(lambda: prepare(ctx.model, str(root / "vlm"))),
    }


def run(rank: int, root: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{root}/store", rank=rank, world_size=SIZE, timeout=timedelta(seconds=600)
    )
    (root / f"{rank}.json").write_text(json.dumps(scenarios(rank, root)))
    end_world()


if __name__ == "__main__":
    wait([fork(lambda rank=rank: run(rank, Path(sys.argv[1]))) for rank in range(SIZE)])  # type: ignore[misc]
