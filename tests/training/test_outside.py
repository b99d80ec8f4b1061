"""Parameters that no FSDP unit can have train as they do in one process: numbers, and what is of another dtype.

Four ranks train over all kinds of meshes; one process does too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardkit
from shardkit.keys.names import clean_name
from shardkit.training.extras.gradients import clip_grad_norm_
from tests.training.wrapping import full
from tests.worlds.ranks import Ranks

pytestmark = pytest.mark.prove

STEPS, BATCH, WIDTH = 5, 24, 8


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
        found.append({name: full(g).clone() for name, g in gradients.items() if g is not None} | {"": norm})
        optimizer.step()
        optimizer.zero_grad()
    return [*found, {clean_name(name): full(p.detach()) for name, p in model.named_parameters()}]


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


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


@functools.cache
def trained_by_one_process() -> list[dict[str, torch.Tensor]]:
    return train(Model(), one)


def make_model(out: Path) -> None:
    (out / "model").mkdir()
    save_file(Model().state_dict(), out / "model" / "model.safetensors")
    (out / "model" / "config.json").write_text("{}")


four = Ranks(__name__, 4, first=make_model)


class Case(NamedTuple):
    mesh: str
    synced: str
    """When gradients meet: at each of three backwards, at the last, or at the one there is."""
    recomputed: bool = False

    @property
    def name(self) -> str:
        return " ".join(map(str, self))


MESHES = {
    "flat": ((4,), ("dp_shard",)),
    "hsdp": ((2, 2), ("dp_replicate", "dp_shard")),
    "tp": ((2, 2), ("dp_shard", "tp")),
}
CASES = [
    *(Case("flat", how) for how in ("", "each", "last")),
    *(Case("hsdp", how, again) for how, again in (("", False), ("last", False), ("each", True))),
    *(Case("tp", how) for how in ("", "last")),
    Case("flat", "last", True),
]


def saved(out: Path, case: Case) -> Path:
    return out / f"saved-{case.name.replace(' ', '-')}"


@four.test_each({case.name: case for case in CASES})
def test_gradients_and_weights_are_those_of_one_process(case: Case, out: Path) -> None:
    sizes, names = MESHES[case.mesh]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    context = shardkit.prepare(Model, str(out / "model"))
    if case.mesh == "tp":
        tensor_parallel(context.model, mesh["tp"])
    model = shardkit.wrap(context.model, mesh, mixed_precision=None, activation_checkpointing=case.recomputed)
    model = shardkit.finalize(model, context)
    outside = sorted(clean_name(n) for n, p in model.named_parameters() if not isinstance(p, DTensor))
    assert outside == OUTSIDE
    size, index = (2, dist.get_rank() // 2) if case.mesh == "tp" else (4, dist.get_rank())
    found = train(
        model,
        partial(several, index, size, case.synced)
        if case.synced
        else lambda model, rows: one(model, rows.chunk(size)[index]),
    )
    shardkit.save(model, saved(out, case))
    for step, expected in zip(
        found, trained_by_one_process(), strict=True
    ):  # the weights are the last of them
        assert sorted(step) == sorted(expected)
        for name, value in expected.items():
            assert float((step[name] - value).abs().max()) < 1e-5, name


@pytest.mark.dist
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_was_trained_is_saved_and_consolidated(
    case: Case, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    out = four.folder(tmp_path_factory)
    shardkit.consolidate(saved(out, case), str(tmp_path / "out"), base=str(out / "model"))
    found, expected = load_file(tmp_path / "out/model.safetensors"), trained_by_one_process()[-1]
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype
        assert found[key].shape == value.shape
        assert float((found[key] - value).abs().max()) < 1e-5
