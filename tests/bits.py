"""The bytes of tensors, and single bits of them in files."""

from __future__ import annotations

from pathlib import Path

import torch


def raw(tensor: torch.Tensor) -> bytes:
    """Return the tensor's bytes, row-major."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def flip_byte(path: Path, at: int) -> None:
    """Change one bit of a file's byte `at`; a negative one counts from its end."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def flip(path: Path, held: torch.Tensor, at: int = 777) -> None:
    """Change one bit, `at` bytes into what a file holds of a tensor."""
    content = bytearray(path.read_bytes())
    content[content.index(raw(held)) + at] ^= 8
    path.write_bytes(content)
