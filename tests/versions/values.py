"""What the checkpoints of `tests/data/torch` hold: every value follows from the tensor's name, so no truth lies beside it."""

from __future__ import annotations

import zlib

import torch

NUM_RANKS = 2
NUM_WIDE = 720
"""Ranks in the large metadata: enough for more than a megabyte, from which on it is read in columns."""
WIDE: dict[str, tuple[int, ...]] = {
    **{f"layers.{n}.weight": (1400, 8) for n in range(8)},
    "conv": (2100, 3, 70_000),
    "long": (2_200_000, 5),
    "norm": (70,),  # fewer rows than ranks: the others list an empty chunk
}


def value(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the tensor of a name: multiples of 1/64 between 1/64 and 4, which bf16 holds too."""
    count = torch.Size(shape).numel()
    numbers = (torch.arange(count) * 37 + zlib.crc32(name.encode())) % 256 + 1
    return (numbers.double() / 64).to(dtype).reshape(shape)


def plain() -> dict[str, torch.Tensor]:
    """Return tensors that do not lie row-major in memory, and some small ones that do."""
    return {
        "transposed": value("transposed", (5, 3)).t(),
        "permuted": value("permuted", (2, 3, 4), torch.bfloat16).permute(2, 0, 1),
        "channels_last": value("channels_last", (2, 3, 4, 5)).to(memory_format=torch.channels_last),
        "stepped": value("stepped", (6, 8))[:, ::2],
        "expanded": value("expanded", (1, 4)).expand(3, 4),
        "inner": value("inner", (9,))[2:7],
        "scalar": value("scalar", (), torch.float64),
        "empty": value("empty", (0, 4)),
        "integers": torch.arange(-3, 4),
        "flags": torch.tensor([True, False, True]),
        "narrow": value("narrow", (4, 4)).to(torch.float8_e4m3fn).t(),
    }


SHARDED: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "rows": ((7, 4), torch.float32),
    "columns": ((6, 5), torch.bfloat16),
    "few": ((1, 3), torch.float32),
}
"""Name -> (shape, dtype) of what the ranks hold in parts that lie transposed in memory; cut along dim 0."""
CHECKPOINTABLE: dict[str, tuple[int, ...]] = {"table": (6, 4), "pieces": (8, 3)}
"""torch 2.14's `CheckpointableTensor`: plain tensors that say which part of a whole they are."""


def wide_rows(shape: tuple[int, ...], rank: int) -> tuple[int, int]:
    """Return (first row, number of rows) of a rank's part of a tensor of `WIDE`."""
    step = -(-shape[0] // NUM_WIDE)
    first = min(rank * step, shape[0])
    return first, min(step, shape[0] - first)
