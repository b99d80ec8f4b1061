"""Telling whether code has written a tensor: it is run over two different fillings, and the bits are compared."""

from __future__ import annotations

from typing import Any

import torch

from shardkit.training.fill.reading import flat_bytes

FILLS = (0xFF, 0x2A)
"""Bytes to fill memory with: NaN, -1 or True; then something else."""


def filled(like: torch.Tensor, byte: int) -> torch.Tensor:
    """Return memory on the CPU for a tensor on meta, every byte of it `byte`."""
    made = torch.empty_like(like, device="cpu", requires_grad=False)
    # 0x2A is neither False nor True.
    memory: Any = made.untyped_storage()
    memory.fill_(byte & 1 if like.dtype == torch.bool else byte)
    return made


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True for tensors of one dtype and shape with equal bytes; NaNs are compared as they are."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return flat_bytes(tensor.detach().contiguous())
