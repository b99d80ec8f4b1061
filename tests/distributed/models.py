"""A model of the kinds of tensors that shard in odd ways, or not at all."""

from __future__ import annotations

import torch
from torch import nn


class Edges(nn.Module):
    """Fewer rows than ranks, no rows, odd rows; complex, fp8, bool, int and 0-d tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, rows) for rows in (1, 2, 3, 7))
        self.phase = nn.Parameter(torch.zeros(5, 3, dtype=torch.complex64))
        self.small = nn.Parameter(torch.zeros(3, 2, dtype=torch.float8_e4m3fn), requires_grad=False)
        self.odd = nn.Parameter(torch.zeros(9, 2, dtype=torch.bfloat16))
        self.nothing = nn.Parameter(torch.zeros(0, 4))
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("step", torch.zeros((), dtype=torch.float32).long())
        self.register_buffer("mask", torch.ones(5, 3, dtype=torch.bool))
        self.register_buffer("ids", torch.arange(7))


def random_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same kind with any bits at all, NaNs of every sort among them."""
    if tensor.dtype is torch.bool:
        return torch.randint(0, 2, tensor.shape).bool()
    data = torch.randint(0, 256, (tensor.numel() * tensor.itemsize,), dtype=torch.uint8)
    return data.view(tensor.dtype).reshape(tensor.shape)
