"""reshard killed anywhere, two folders and files beside: absent or complete, and again ends with the same bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

CRASH = Path(__file__).with_name("reshard_crash.py")
NUM_POINTS = {"copied": 20, "cast": 5}
Run = Callable[..., dict[str, Any]]

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    process = subprocess.Popen(
        [sys.executable, str(CRASH)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(CRASH.parents[2]), *filter(None, sys.path)])},
    )
    assert process.stdin
    assert process.stdout

    def once(fatal: int, source: Path, output: Path, **options: Any) -> dict[str, Any]:
        request = {"fatal": fatal, "source": str(source), "output": str(output), "options": options}
        print(json.dumps(request), file=process.stdin, flush=True)
        assert process.stdout
        answer: dict[str, Any] = json.loads(process.stdout.readline())
        assert answer["code"] in (0, -9)
        return answer

    yield once
    process.communicate()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint-2"
    weights = {f"layers.{n}.weight": torch.randn(300, 133) for n in range(5)}
    state = {name: {"exp_avg": w + 1, "step": torch.tensor(257.0)} for name, w in weights.items()}
    dcp.save({"model": weights}, checkpoint_id=path / "pytorch_model_fsdp_0", no_dist=True)
    optimizer = {"state": state, "param_groups": [{"lr": 1e-3}]}
    dcp.save({"optimizer": optimizer}, checkpoint_id=path / "optimizer_0", no_dist=True)
    (path / "scheduler.pt").write_bytes(bytes(range(256)) * 12_000)  # some blocks
    (path / "logs").mkdir()
    (path / "logs/trainer_state.json").write_text("{}")
    return path


def content(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


@pytest.mark.parametrize(("name", "options"), [("copied", {}), ("cast", {"optimizer_dtype": "bf16"})])
def test_killed_at_points_spread_over_the_run(
    name: str, options: dict[str, Any], run: Run, source: Path, tmp_path: Path
) -> None:
    wanted = {"world_size": 3, "max_memory": "2MiB", **options}
    expected_at = tmp_path / "whole"
    num_calls = run(0, source, expected_at, **wanted)["calls"]
    expected, resumed_files, num_points = content(expected_at), 0, NUM_POINTS[name]
    assert len(expected) == 2 * (2 * 3 + 2) + 2
    for fatal in sorted({1 + n * (num_calls - 1) // (num_points - 1) for n in range(num_points)}):
        out = tmp_path / f"out{fatal}"
        killed = run(fatal, source, out, **wanted)["code"] == -9
        assert killed or fatal > num_calls - 5, f"call {fatal} of {num_calls} was not reached"
        assert not out.exists() or content(out) == expected
        resumed_files += run(0, source, out, **wanted, overwrite=out.exists())["resumed"]
        assert content(out) == expected
        assert not list(tmp_path.glob(".*")), "litter was left behind"
    assert resumed_files > 0
