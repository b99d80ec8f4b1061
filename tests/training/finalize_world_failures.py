"""Real gloo worlds in which something goes wrong on one rank: what each rank is told.

    python finalize_world_failures.py OUT

Writes OUT/<world>-<rank>.json: by scenario the error as plain data.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardkit.training.fill.reading
from shardkit.errors import ShardkitError
from shardkit.training.finalize import finalize, load_into
from shardkit.training.prepare import prepare
from shardkit.training.ranks.local import local_shards
from tests.worlds.processes import fork

torch.set_num_threads(1)
SIZE = 3
TIMEOUT_S = 600.0
"""Of the group: whoever is told of it has waited for a rank that was not there any more."""
LARGE = (9 << 20) // 4  # elements; several bands of a broadcast


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.large = nn.Parameter(torch.empty(LARGE // 8, 8))
        self.head = nn.Linear(8, 30, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("angles", torch.arange(4.0), persistent=False)
        self.register_buffer("noise", torch.rand(4), persistent=False)  # of its own on every rank
        self.plain = torch.ones(2)


def make_source(out: Path) -> None:
    torch.manual_seed(0)
    state = {name: torch.randn(value.shape) for name, value in Model().state_dict().items()}
    del state["head.weight"]
    (out / "model").mkdir()
    save_file(state, out / "model/model.safetensors")
    (out / "model/config.json").write_text("{}")


def wrap(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (SIZE,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def start(source: Path, strategy: str, between: Callable[[nn.Module], None] | None = None) -> nn.Module:
    ctx = prepare(Model, str(source))
    wrap(ctx.model)
    if between is not None:
        between(ctx.model)
    return finalize(ctx.model, ctx, strategy=strategy)


def own_copy(out: Path, name: str) -> Path:
    """Every rank has the weights on its own disk."""
    copy = out / f"{name}-{dist.get_rank()}"
    shutil.copytree(out / "model", copy)
    return copy


def hidden(out: Path, strategy: str, rank: int) -> None:
    source = out / "model" if dist.get_rank() != rank else out / "nowhere"
    model = start(source, strategy)
    expected = load_file(out / "model/model.safetensors")
    for each in local_shards(model):
        if each.kind == "parameter":
            window = tuple(slice(o, o + s) for o, s in zip(*each.region, strict=True))
            assert torch.equal(each.tensor, expected[each.fqn][window]), each.fqn


def truncated(out: Path, strategy: str, rank: int) -> None:
    """Between prepare and finalize, as by a copy that is written again."""
    copy = own_copy(out, f"truncated-{strategy}")

    def cut(_: nn.Module) -> None:
        if dist.get_rank() == rank:
            os.truncate(copy / "model.safetensors", 5 << 20)

    start(copy, strategy, cut)


def unreadable(out: Path, rank: int) -> None:
    """The source fails in the middle of a large tensor; what was sent before is of no use."""
    copy, real = own_copy(out, "unreadable"), shardkit.training.fill.reading.Worker.fill
    calls = 0

    def fail(self: Any, read: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise OSError(5, "Input/output error")
        real(self, read)

    if dist.get_rank() == rank:
        shardkit.training.fill.reading.Worker.fill = fail
    try:
        start(copy, "broadcast")
    finally:
        shardkit.training.fill.reading.Worker.fill = real


def other_weights(out: Path, strategy: str) -> None:
    """One rank's copy is of another fine-tune: same header, other bytes."""
    copy = own_copy(out, f"other-{strategy}")
    if dist.get_rank() == 2:
        state = {k: v + 1 for k, v in load_file(copy / "model.safetensors").items()}
        save_file(state, copy / "model.safetensors")
    start(copy, strategy)


def changed_model(out: Path, change: Callable[[nn.Module], None]) -> None:
    model = start(out / "model", "direct", change)
    assert model.embed.weight is model.head.weight


def replace(model: nn.Module) -> None:
    """A wrapper that exchanges a module after prepare."""
    model.angles = torch.arange(4.0)
    model.register_buffer("angles", torch.arange(4.0), persistent=True)


def untie(model: nn.Module) -> None:
    model.head.weight = nn.Parameter(torch.empty_like(model.embed.weight))


def apart(out: Path) -> None:
    """Both ends of a tie in units of their own: torch would tell at the first forward."""
    ctx = prepare(Model, str(out / "model"))
    mesh = init_device_mesh("cpu", (SIZE,))
    fully_shard(ctx.model.embed, mesh=mesh)
    fully_shard(ctx.model.head, mesh=mesh)
    wrap(ctx.model)
    finalize(ctx.model, ctx)


def add(model: nn.Module) -> None:
    if dist.get_rank() == 1:
        model.blocks[0].extra = torch.empty(2, device="meta")


def misfit(out: Path) -> None:
    """One wrong shape, one missing and one unexpected tensor; an integer where a float is wanted."""
    with torch.device("meta"):
        model = Model()
        model.blocks[0] = nn.Linear(8, 9)
        model.blocks[1].gain = nn.Parameter(torch.empty(3))
        model.register_parameter("large", nn.Parameter(torch.empty(LARGE // 8, 8, dtype=torch.int32), False))
        del model.embed, model.head
    model.angles, model.noise, model.plain = torch.ones(4), torch.ones(4), torch.ones(2)
    load_into(model, out / "model")


def lost_buffers(out: Path) -> None:
    with torch.device("meta"):
        model = Model()
    wrap(model)
    load_into(model, out / "model")


def random_buffer(out: Path) -> float:
    torch.manual_seed(dist.get_rank())
    model = start(out / "model", "direct")
    assert model.embed.weight is model.head.weight
    return float(model.noise.sum())


def wrong_option(out: Path) -> None:
    start(out / "model", "fastest")


def scenarios(out: Path) -> dict[str, Callable[[], Any]]:
    return {
        "hidden-auto": partial(hidden, out, "auto", 1),
        "hidden-source-auto": partial(hidden, out, "auto", 0),
        "hidden-direct": partial(hidden, out, "direct", 1),
        "truncated-direct": partial(truncated, out, "direct", 1),
        "truncated-broadcast": partial(truncated, out, "broadcast", 0),
        "unreadable": partial(unreadable, out, 0),
        "other-direct": partial(other_weights, out, "direct"),
        "other-auto": partial(other_weights, out, "auto"),
        "persistent": partial(changed_model, out, replace),
        "untied": partial(changed_model, out, untie),
        "apart": partial(apart, out),
        "attribute": partial(changed_model, out, add),
        "misfit": partial(misfit, out),
        "buffers": partial(lost_buffers, out),
        "random-buffer": partial(random_buffer, out),
        "option": partial(wrong_option, out),
    }


def tell(work: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"error": None, "value": work()}
    except ShardkitError as error:
        return error.to_json()


def join(rank: int, out: Path, name: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{out}/store-{name}",
        rank=rank,
        world_size=SIZE,
        timeout=timedelta(seconds=TIMEOUT_S),
    )


def run(rank: int, out: Path) -> None:
    join(rank, out, "failures")
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardkit").addHandler(handler)
    logging.getLogger("shardkit").setLevel(logging.INFO)
    found = {}
    for name, work in scenarios(out).items():
        lines.clear()
        found[name] = {**tell(work), "log": list(lines)}
        dist.barrier()
    (out / f"failures-{rank}.json").write_text(json.dumps(found))


def kill(rank: int, out: Path, name: str, strategy: str, victim: int, calls: int) -> None:
    """A rank is killed after so many reads, or where it receives, at its first message."""
    join(rank, out, name)
    ctx = prepare(Model, str(out / "model"))
    wrap(ctx.model)
    real, done = shardkit.training.fill.reading.Worker.fill, 0

    def die(self: Any, read: Any) -> None:
        nonlocal done
        done += 1
        if done == calls:
            os.kill(os.getpid(), signal.SIGKILL)
        real(self, read)

    def die_receiving(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == victim:
        shardkit.training.fill.reading.Worker.fill = die
        if strategy == "broadcast" and victim:
            dist.recv = die_receiving
    told = tell(lambda: finalize(ctx.model, ctx, strategy=strategy) and None)
    (out / f"{name}-{rank}.json").write_text(json.dumps(told))
    os._exit(0)  # no orderly end of a group that has lost a rank


KILLS = {
    "kill-reader": ("direct", 1, 2),
    "kill-source": ("broadcast", 0, 6),
    "kill-receiver": ("broadcast", 2, 0),
}

if __name__ == "__main__":
    out = Path(sys.argv[1])
    make_source(out)
    ctx = prepare(Model, str(out / "model"))
    finalize(ctx.model, ctx)  # imports what is imported late, once for all
    children = [fork(partial(run, rank, out)) for rank in range(SIZE)]
    for name, (strategy, victim, calls) in KILLS.items():
        children += [fork(partial(kill, rank, out, name, strategy, victim, calls)) for rank in range(SIZE)]
    for child in children:
        os.waitpid(child, 0)
