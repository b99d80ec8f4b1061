"""A model that any number of ranks trains on the same batches, and the comparison of two runs of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.distributed.meshes import Shape, device_mesh

STEPS = 5
BATCH = 12


class Model(nn.Module):
    """Odd sizes, a dim 0 smaller than some worlds, a buffer; float64, so that only orders of sums differ."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 10)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(10, 23), nn.GELU(), nn.Linear(23, 10)) for _ in range(3)
        )
        self.norm = nn.LayerNorm(10)
        self.score = nn.Linear(10, 2, bias=False)
        self.register_buffer("scale", torch.full((3,), 0.5))
        self.double()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.score(self.norm(hidden)).mean(1) * self.scale.mean()


def start(model: nn.Module, shape: Shape) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Shard a model's blocks and itself, and make its optimizer."""
    mesh = device_mesh(shape)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, adamw(model)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the global batch of a step: tokens and labels."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 37, (BATCH, 6), generator=generator)
    return tokens, torch.randint(0, 2, (BATCH,), generator=generator)


def local_loss(model: nn.Module, step: int) -> torch.Tensor:
    """Return the loss of this rank's share of a step's batch."""
    share = BATCH // dist.get_world_size()
    mine = slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)
    tokens, labels = batch_of(step)
    return nn.functional.cross_entropy(model(tokens[mine]), labels[mine])


def global_loss(loss: torch.Tensor) -> float:
    """Average a loss over the ranks."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> list[float]:
    """Take STEPS steps on the batches `first ..`; return the global losses."""
    losses = []
    for step in range(first, first + STEPS):
        loss = local_loss(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(global_loss(loss))
    return losses


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Every leaf by its path; tensors gathered whole."""
    if isinstance(tree, dict):
        return {k: v for key, value in tree.items() for k, v in flat(value, f"{prefix}{key}.").items()}
    if isinstance(tree, DTensor):
        return {prefix: tree.full_tensor()}
    return {prefix: tree}


def assert_same_leaves(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Compare two flat trees, tensors by value."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for key, value in expected.items():
        same = torch.equal(value, found[key]) if isinstance(value, torch.Tensor) else value == found[key]
        assert same, f"{key} differs"


def keep_run(losses: list[float], weights: Mapping[str, torch.Tensor], path: Path) -> None:
    """Leave what a run came to, for the ranks that are to come to the same."""
    torch.save({"losses": losses, "weights": weights}, path)


def assert_same_run(losses: list[float], weights: Mapping[str, torch.Tensor], path: Path) -> None:
    """Compare what a run came to with the one that was kept; only the order of sums may differ."""
    kept = torch.load(path)
    assert len(set(kept["losses"])) == STEPS
    assert losses == pytest.approx(kept["losses"], rel=1e-12)
    for key, value in kept["weights"].items():
        torch.testing.assert_close(weights[key], value, rtol=1e-9, atol=1e-12)


@contextmanager
def group_of_one() -> Iterator[None]:
    """A process group for a process that has none."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
