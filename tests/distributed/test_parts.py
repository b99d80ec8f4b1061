"""torchrun starts the parts, as it starts anything else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import shardkit


@pytest.mark.dist
def test_torchrun_starts_parts(make_hub: Callable[..., Path], tmp_path: Path) -> None:
    model = make_hub({f"layers.{n}.weight": torch.randn(64, 32) for n in range(4)})
    options = ["--world-size", "6", "--layout", "declared"]
    shardkit.preshard(model, tmp_path / "whole", world_size=6, layout="declared")
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr",
        "localhost",
        "--nproc-per-node",
        "2",
    ]
    command = ["-m", "shardkit", "preshard", str(model), str(tmp_path / "out"), *options, "--part", "env"]
    done = subprocess.run(
        [sys.executable, *launcher, *command],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f"part: {rank + 1}/2, from RANK={rank}, WORLD_SIZE=2" in done.stderr
    out, whole = tmp_path / "out", tmp_path / "whole"
    assert {p.name: p.read_bytes() for p in out.iterdir()} == {
        p.name: p.read_bytes() for p in whole.iterdir()
    }
