"""Four gloo ranks train a model with parameters that no unit can have, over all kinds of meshes; one process does too.

    python outside_world.py OUT

Every rank writes OUT/outside-<rank>.json: by case how far gradients and weights are from those of one process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardkit
from shardkit.keys.names import clean_name
from shardkit.training.gradients import clip_grad_norm_
from tests.worlds.processes import end_world, fork, wait

torch.set_num_threads(1)

SIZE, STEPS, BATCH, WIDTH = 4, 5, 24, 8
Found = dict[str, Any]


class Block(nn.Module):
    """Beside matrices it has numbers, and a wider parameter directly on itself; a list holds some, which nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.query = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
        self.scales = nn.ParameterList([nn.Parameter(torch.tensor(0.5)) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.down(torch.tanh(self.up(x))) * self.gain
        return x * self.scales[0] + hidden * self.scales[1] + self.query.float()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.logit_scale = nn.Parameter(torch.tensor(2.0))
        self.frozen = nn.Parameter(torch.tensor(3.0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.logit_scale.exp() / self.frozen


OUTSIDE = sorted(
    ["logit_scale", "frozen"]
    + [f"blocks.{n}.{name}" for n in range(2) for name in ("gain", "query", "scales.0", "scales.1")]
)


def loss_of(model: nn.Module, part: torch.Tensor) -> torch.Tensor:
    return (model(part) - part.flip(-1)).pow(2).mean()


def batch(step: int) -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(100 + step))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(
    model: nn.Module, backwards: Callable[[nn.Module, torch.Tensor], None]
) -> list[dict[str, torch.Tensor]]:
    """Return all gradients of each step, the norms before clipping among them, and the weights at the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found: list[dict[str, torch.Tensor]] = []
    for step in range(STEPS):
        backwards(model, batch(step))
        norm = clip_grad_norm_(model, 1.0)
        gradients = {clean_name(name): p.grad for name, p in model.named_parameters()}
        found.append({name: whole(g).clone() for name, g in gradients.items() if g is not None} | {"": norm})
        optimizer.step()
        optimizer.zero_grad()
    return [*found, {clean_name(name): whole(p.detach()) for name, p in model.named_parameters()}]


def one(model: nn.Module, rows: torch.Tensor) -> None:
    loss_of(model, rows).backward()


def several(rank: int, size: int, how: str, model: nn.Module, rows: torch.Tensor) -> None:
    """This rank's rows in three backwards; gradients meet at each of them, or at the last."""
    assert isinstance(model, FSDPModule)
    parts = rows.chunk(size)[rank].chunk(3)
    for at, part in enumerate(parts):
        if how == "last":
            model.set_requires_gradient_sync(at == len(parts) - 1)
        (loss_of(model, part) / len(parts)).backward()


def distance(found: list[dict[str, torch.Tensor]], expected: list[dict[str, torch.Tensor]]) -> Found:
    assert [sorted(each) for each in found] == [sorted(each) for each in expected]
    apart = [
        max(float((a[name] - b[name]).abs().max()) for name in a)
        for a, b in zip(found, expected, strict=True)
    ]
    return {"gradients": max(apart[:-1]), "weights": apart[-1]}


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def case(out: Path, rank: int, shape: str, how: str, again: bool) -> Found:
    """Start from the source, train, and save."""
    sizes, names = {
        "flat": ((SIZE,), ("dp_shard",)),
        "hsdp": ((2, 2), ("dp_replicate", "dp_shard")),
        "tp": ((2, 2), ("dp_shard", "tp")),
    }[shape]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    context = shardkit.prepare(Model, str(out / "model"))
    if shape == "tp":
        tensor_parallel(context.model, mesh["tp"])
    model = shardkit.wrap(context.model, mesh, mixed_precision=None, activation_checkpointing=again)
    model = shardkit.finalize(model, context)
    outside = sorted(clean_name(n) for n, p in model.named_parameters() if not isinstance(p, DTensor))
    size, index = (2, rank // 2) if shape == "tp" else (SIZE, rank)
    backwards = (
        partial(several, index, size, how) if how else lambda model, rows: one(model, rows.chunk(size)[index])
    )
    found = train(model, backwards)
    place = out / f"saved-{shape}-{how}-{again}"
    shardkit.save(model, place)
    return {
        **distance(found, expected()),
        "outside": outside,
    }


def expected() -> list[dict[str, torch.Tensor]]:
    return train(Model(), one)


CASES = [
    *(("flat", how, False) for how in ("", "each", "last")),
    *(("hsdp", how, again) for how, again in (("", False), ("last", False), ("each", True))),
    *(("tp", how, False) for how in ("", "last")),
    ("flat", "last", True),
]


def rank_main(out: Path, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=SIZE)
    found = {" ".join(map(str, each)): case(out, rank, *each) for each in CASES}
    (out / f"outside-{rank}.json").write_text(json.dumps(found))
    end_world()


def main() -> None:
    out = Path(sys.argv[1])
    (out / "model").mkdir()
    save_file(Model().state_dict(), out / "model" / "model.safetensors")
    (out / "model" / "config.json").write_text("{}")
    torch.save(expected()[-1], out / "weights.pt")
    wait([fork(partial(rank_main, out, rank)) for rank in range(SIZE)])


if __name__ == "__main__":
    main()
