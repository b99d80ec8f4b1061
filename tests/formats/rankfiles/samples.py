"""Files of ranks under the names of any trainer."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from tests.formats.rank_world import WORLD_SIZE
from tests.formats.reading import Contents, expected

RANK_FILE = f"model_world_size_{WORLD_SIZE}_rank_{{}}.pt"


def copy_ranks(case: str, files: Path, rename: Callable[[int], Path]) -> Contents:
    """Copy the files of a case of `rank_world` to the paths that `rename` returns; return what is in them."""
    for rank in range(WORLD_SIZE):
        target = rename(rank)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(files / case / RANK_FILE.format(rank), target)
    return expected(torch.load(files / f"{case}.truth"))
