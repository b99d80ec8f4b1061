"""Killed anywhere, the destination is absent or complete, and running again ends with the same bytes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

CRASH = Path(__file__).with_name("crash.py")
NUM_POINTS = 20


def run(fatal: int, source: Path, output: Path, *flags: str) -> tuple[int, list[int]]:
    """Return the exit code, and (calls, resumed files) where the run lived."""
    command = [sys.executable, str(CRASH), str(fatal), str(source), str(output), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode in (0, -9), done.stderr
    return done.returncode, [int(word) for word in done.stdout.split()]


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture
def source(make_hub: Callable[..., Path]) -> Path:
    torch.manual_seed(0)
    tensors = {f"layers.{index}.weight": torch.randn(64, 33) for index in range(6)}
    return make_hub({**tensors, "scalar": torch.tensor(1.0)})


def points(num_calls: int) -> list[int]:
    return sorted({1 + index * (num_calls - 1) // (NUM_POINTS - 1) for index in range(NUM_POINTS)})


def test_killed_at_points_spread_over_the_run(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "whole"
    _, (num_calls, _) = run(0, source, output)
    expected, resumed_files = content(output), 0
    for fatal in points(num_calls):
        out = tmp_path / f"out{fatal}"
        code, _ = run(fatal, source, out)
        assert code == -9, f"call {fatal} of {num_calls} was not reached"
        assert not out.exists() or content(out) == expected
        _, (_, resumed) = run(0, source, out, "--overwrite")
        resumed_files += resumed
        assert content(out) == expected
        assert not list(tmp_path.glob(".*")), "litter was left behind"
    assert resumed_files > 0


def test_killed_while_replacing_the_name_is_never_absent(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(0, source, out)
    expected = content(out)
    old = {**expected, "from-before": b"", "__9_0.distcp": b"of a larger world"}
    _, (num_calls, _) = run(0, source, out, "--overwrite")
    killed = 0
    for fatal in points(num_calls)[-8:]:
        for name, data in old.items():
            (out / name).write_bytes(data)
        code, _ = run(fatal, source, out, "--overwrite")
        killed += code == -9
        assert content(out) in (old, expected)
        run(0, source, out, "--overwrite")
        assert content(out) == expected
        assert not list(tmp_path.glob(".*")), "litter was left behind"
    assert killed >= 6
