"""A model that is trained on two ranks, saved, and trained on, by any torch."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.versions.values import value

STEPS = 3

if not hasattr(torch.cpu.Stream, "record_event"):
    # torch 2.6 lacks them, so that FSDP2's forward fails on CPU; those of 2.7 (torch/cpu/__init__.py) do nothing.
    torch.cpu.Stream.record_event = lambda self: None  # type: ignore[attr-defined]
    torch.cpu.Stream.wait_event = lambda self, event: None  # type: ignore[attr-defined]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(nn.functional.silu(self.up(hidden)))


class Model(nn.Module):
    """Uneven sizes, a dim 0 of which one rank has no part, a buffer; float64, so that only orders of sums differ."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.layers = nn.ModuleList([Block(), Block()])
        self.score = nn.Linear(6, 1)
        self.register_buffer("scale", torch.full((3,), 0.5))
        self.double()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.score(hidden).mean(1) * self.scale.mean()


def start() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the wrapped model, its parameters as their names say, and an optimizer that has not stepped."""
    model = Model()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(value(name, tuple(parameter.shape), torch.float64) / 4 - 0.5)
    mesh = init_device_mesh("cpu", (2,))
    for module in (
        *model.layers,
        model,
    ):  # on CPU torch 2.6 cannot gather again in backward what it resharded
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> list[float]:
    """Take STEPS steps from step `first` on, each rank on its half of the batch; return the losses of the whole batch."""
    losses, rank = [], torch.distributed.get_rank()
    for step in range(first, first + STEPS):
        tokens = (torch.arange(24).reshape(4, 6) * 5 + 7 * step) % 13
        loss = model(tokens[2 * rank : 2 * rank + 2]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        losses.append(total.item() / 2)
    return losses
