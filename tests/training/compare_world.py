"""Two real gloo ranks fill a model from sources with and without damage; rank 0 writes what each of them was told.

python compare_world.py OUT
"""

from __future__ import annotations

import json
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardkit
from shardkit.errors import ShardkitError
from tests.distributed.processes import fork, wait

torch.set_num_threads(1)
warnings.simplefilter("ignore")


def build() -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 900), nn.Linear(900, 301))
    for number, parameter in enumerate(model.parameters()):
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))
    return model


def flip(path: Path, held: torch.Tensor, at: int) -> None:
    """Change one bit, `at` bytes into what a file holds of a tensor."""
    content = bytearray(path.read_bytes())
    content[content.index(held.contiguous().view(torch.uint8).numpy().tobytes()) + at] ^= 8
    path.write_bytes(content)


def make_sources(out: Path) -> None:
    """One file, three shards by stock torch's chunks, three by shardkit's manifest, one storage for all; each twice."""
    state = dict(build().state_dict())
    for name in ("good", "bad"):
        dcp.save(state, checkpoint_id=out / name / "one", no_dist=True)
        shardkit.reshard(out / name / "one", out / name / "listed", world_size=3)
        shardkit.reshard(out / name / "one", out / name / "three", world_size=3)
        (out / name / "three" / "shardkit.json").unlink()
        flat = torch.cat([value.flatten() for value in state.values()])
        views, at = {}, 0
        for key, value in state.items():
            views[key] = flat[at : at + value.numel()].view(value.shape)
            at += value.numel()
        torch.save(views, out / name / "flat.pt")
    weight = state["1.weight"]
    flip(out / "bad" / "one" / "__0_0.distcp", weight, 700_000)
    for folder in ("listed", "three"):
        flip(out / "bad" / folder / "__1_0.distcp", weight[101:202], 300_000)  # of both ranks' rows
    flip(out / "bad" / "flat.pt", weight, 5)


SOURCES = {"one": "one", "listed": "listed", "three": "three", "flat": "flat.pt"}


def answers(out: Path, rank: int) -> dict[str, Any]:
    """Fill from every source, in both ways."""
    told: dict[str, Any] = {}
    mesh = init_device_mesh("cpu", (2,))
    for strategy in ("direct", "broadcast"):
        for name, file in SOURCES.items():
            for kind, check in (("good", True), ("bad", True), ("bad", False)):
                with torch.device("meta"):
                    model = build_on_meta()
                ctx = shardkit.prepare(lambda model=model: model, str(out / kind / file))
                for layer in ctx.model:
                    fully_shard(layer, mesh=mesh)
                fully_shard(ctx.model, mesh=mesh)
                key = f"{strategy} {name} {kind} {check}"
                try:
                    shardkit.finalize(ctx.model, ctx, strategy=strategy, check_source=check)
                except ShardkitError as error:
                    told[key] = {
                        "error": type(error).__name__,
                        "problems": list(error.problems),
                        "hint": error.hint,
                    }
                else:
                    assert ctx.checked is not None
                    told[key] = {
                        "checked_bytes": ctx.checked.checked_bytes,
                        "unchecked": [
                            [p.reason, p.num_entries, p.entry_bytes] for p in ctx.checked.unchecked
                        ],
                    }
    return told


def build_on_meta() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 900), nn.Linear(900, 301))


def work(rank: int, out: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=2)
    told = answers(out, rank)
    (out / f"told{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    out = Path(sys.argv[1])
    make_sources(out)
    wait([fork(partial(work, rank, out)) for rank in range(2)])
