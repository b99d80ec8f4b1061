"""consolidate killed anywhere: the output is absent or complete, and running again ends with the same bytes."""

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

from tests.operations.consolidate_checkpoints import CONFIG, hub, save, training_state, weights

CRASH = Path(__file__).with_name("consolidate_crash.py")
NUM_POINTS = {"copied": 20, "cast": 8}
Run = Callable[..., dict[str, Any]]


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


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize(("name", "options"), [("copied", {}), ("cast", {"dtype": "bf16"})])
def test_killed_at_points_spread_over_the_run(
    name: str, options: dict[str, Any], run: Run, tmp_path: Path
) -> None:
    large = {f"model.layers.{n}.weight": torch.randn(300, 133) for n in range(6)}
    model = {**weights(), **large}
    source = save(training_state(model), tmp_path / "c")
    halved = {name: value.bfloat16() for name, value in model.items()}  # tells what may be half precision
    base = hub(tmp_path / "base", halved, CONFIG, tokenizer__json="{}")
    wanted = {"base": str(base), "max_shard_size": 90_000, "max_memory": "2MiB", **options}
    expected_at = tmp_path / "whole"
    num_calls = run(0, source, expected_at, **wanted)["calls"]
    expected, resumed_files, num_points = content(expected_at), 0, NUM_POINTS[name]
    assert len(expected) > 6
    for fatal in sorted({1 + n * (num_calls - 1) // (num_points - 1) for n in range(num_points)}):
        out = tmp_path / f"out{fatal}"
        killed = run(fatal, source, out, **wanted)["code"] == -9
        assert killed or fatal > num_calls - 5, f"call {fatal} of {num_calls} was not reached"
        assert not out.exists() or content(out) == expected
        resumed_files += run(0, source, out, **wanted, overwrite=True)["resumed"]
        assert content(out) == expected
        assert not list(tmp_path.glob(".*")), "litter was left behind"
    assert resumed_files > 0
