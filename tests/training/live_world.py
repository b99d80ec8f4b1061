"""Models that are in use: forward was called, parts are held by ranks of several axes, ranks were called differently.

    python live_world.py OUT

Writes OUT/<world size>-<rank>.json: by scenario what was found.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from transformers import AutoModelForCausalLM

import shardkit
from tests.training import models
from tests.worlds.processes import fork, wait

torch.set_num_threads(1)

NUM_LARGE, ROWS = 16, 256


class Large(nn.Module):
    """Weights that are worth sending."""

    def __init__(self) -> None:
        super().__init__()
        self.ws = nn.ParameterList([nn.Parameter(torch.empty(ROWS, 1024)) for _ in range(NUM_LARGE)])


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(self.last(self.first(x)))
        return found


def write_sources(out: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    large = {f"ws.{at}": torch.randn(ROWS, 1024, generator=generator) for at in range(NUM_LARGE)}
    save_file(large, out / "large.safetensors")
    models.save("qwen3", out / "tied")
    for seed in (1, 2):
        torch.manual_seed(seed)
        save_file(Small().state_dict(), out / f"small-{seed}.safetensors")


def replicated_on_two_axes(out: Path) -> int:
    """Return how many weights are wrong."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    wanted = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        model = Large()
    for at in range(NUM_LARGE):
        everywhere = [Replicate(), Replicate()]
        whole = DTensor.from_local(model.ws[at].detach(), mesh, everywhere, run_check=False)
        model.ws[at] = nn.Parameter(whole)
    shardkit.load_into(model, out / "large.safetensors", strategy="direct")
    every = [torch.randn(ROWS, 1024, generator=wanted) for _ in range(NUM_LARGE)]
    return sum(not torch.equal(w.to_local(), v) for w, v in zip(model.ws, every, strict=True))


def small(source: Path | None) -> tuple[nn.Module, shardkit.ModelInitializationContext]:
    context = shardkit.prepare(Small, source)
    fully_shard(context.model.first)
    fully_shard(context.model, reshard_after_forward=False)
    return shardkit.finalize(context.model, context), context


def wrong_after_evaluation(out: Path, strategy: Any) -> list[str]:
    """Load other weights after a forward without a backward, train, and name what is not those."""
    model, _ = small(out / "small-1.safetensors")
    with torch.no_grad():
        model(torch.ones(4, 8))
    shardkit.load_into(model, out / "small-2.safetensors", strategy=strategy)
    model.eval()
    model(torch.ones(4, 8)).sum().backward()
    torch.manual_seed(2)
    wanted = Small().state_dict()
    return [n for n, p in model.named_parameters() if not torch.equal(p.full_tensor(), wanted[n])]  # type: ignore[operator]


def steps_of_a_new_optimizer(out: Path) -> dict[str, float]:
    """One of two optimizers has stepped: what is saved of each."""
    model, _ = small(out / "small-1.safetensors")
    old, new = (torch.optim.AdamW(part.parameters()) for part in (model.first, model.last))
    model(torch.randn(4, 8)).sum().backward()
    old.step()
    shardkit.save(model, out / "two", optimizer=[old, new])
    names = FileSystemReader(out / "two").read_metadata().state_dict_metadata
    steps = {name: torch.full((), -1.0) for name in names if name.endswith(".step")}
    load(steps, checkpoint_id=out / "two")
    return {name.removeprefix("optimizer.state."): float(value) for name, value in steps.items()}


def after_evaluation(out: Path) -> dict[str, Any]:
    """Ask a model with gathered copies for its gradient norm, and point an optimizer at its parameters."""
    context = shardkit.prepare(Small, out / "small-1.safetensors")
    optimizer = torch.optim.SGD(context.model.named_parameters(), lr=1.0)
    fully_shard(context.model, reshard_after_forward=False)
    model = shardkit.finalize(context.model, context).eval()
    model(torch.ones(4, 8)).sum().backward()
    norm = float(shardkit.grad_norm(model))
    with torch.no_grad():
        model(torch.ones(4, 8))
    again = float(shardkit.grad_norm(model))
    with torch.no_grad():
        model(torch.ones(4, 8))
    shardkit.rebind_optimizer(model, optimizer)
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    model(torch.ones(4, 8)).sum().backward()
    return {"norms": [norm, again], "stepped": stepped == {id(p) for p in model.parameters()}}


def statistics_of_a_second_finalize(out: Path) -> list[float]:
    model, context = small(None)
    model(torch.ones(4, 8)).sum().backward()
    shardkit.finalize(model, context)
    return list(model.norm.running_mean.tolist())  # type: ignore[union-attr, operator]


def wrapped_apart() -> nn.Module:
    """Return a tied model whose head is a unit of its own: `fully_shard` has made two parameters of one."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(models.config_of("qwen3"))
    model.tie_weights()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    fully_shard(model.lm_head)
    fully_shard(model)
    assert isinstance(model, nn.Module)
    return model


def warned_of(out: Path, *, emptied: bool) -> list[str]:
    """Return the warnings of `load_into` for a model on meta, or one that `to_empty` gave whatever memory held."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(models.config_of("qwen3"))
    model.tie_weights()
    fully_shard(model.model.layers[0])
    fully_shard(model)
    if emptied:
        model.to_empty(device="cpu")
        for buffer in model.buffers():
            buffer.fill_(7)
    said: list[str] = []
    log = logging.getLogger("shardkit")
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    shardkit.load_into(model, out / "tied/model.safetensors")
    log.removeHandler(handler)
    return said


def message(work: Callable[[], object]) -> str:
    try:
        work()
    except shardkit.ShardkitError as error:
        return str(error)
    return ""


def run_two(out: Path) -> dict[str, Any]:
    rank = dist.get_rank()
    source = out / "small-1.safetensors"

    def by_rank() -> None:
        context = shardkit.prepare(Small, source)
        shardkit.finalize(context.model, context, strategy="direct" if rank else "broadcast")

    return {
        "direct": wrong_after_evaluation(out, "direct"),
        "broadcast": wrong_after_evaluation(out, "broadcast"),
        "steps": steps_of_a_new_optimizer(out),
        "evaluation": after_evaluation(out),
        "statistics": statistics_of_a_second_finalize(out),
        "source": message(lambda: shardkit.prepare(Small, None if rank else source)),
        "strategy": message(by_rank),
        "type": message(lambda: shardkit.load_into(Small(), 3 if rank else source)),  # type: ignore[arg-type]
        "head": message(lambda: shardkit.load_into(Large(), source)),
        "apart": message(lambda: shardkit.load_into(wrapped_apart(), out / "tied/model.safetensors")),
        "meta": warned_of(out, emptied=False),
        "emptied": warned_of(out, emptied=True),
        "other": message(lambda: shardkit.finalize(nn.Linear(2, 2), shardkit.prepare(Small, None))),
    }


def run_four(out: Path) -> dict[str, Any]:
    return {"wrong": [replicated_on_two_axes(out) for _ in range(4)]}


def run(out: Path, size: int, rank: int, work: Callable[[Path], dict[str, Any]]) -> None:
    store = f"file://{out / f'store-{size}'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    (out / f"{size}-{rank}.json").write_text(json.dumps(work(out)))
    dist.barrier()


def main(out: Path) -> None:
    write_sources(out)
    for size, work in ((2, run_two), (4, run_four)):
        wait(
            [fork(lambda size=size, rank=rank, work=work: run(out, size, rank, work)) for rank in range(size)]
        )  # type: ignore[misc]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
