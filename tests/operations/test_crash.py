"""Killed anywhere, the destination is absent or complete, and running again ends with the same bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

import shardkit
from shardkit import manifest
from shardkit.errors import ShardkitError

CRASH = Path(__file__).with_name("crash.py")
NUM_POINTS = 20
# In 2 MiB, two threads have buffers that hold a part of a file and bands that hold a part of a tensor.
TWO_THREADS = {"world_size": 5, "jobs": 2, "max_memory": "2MiB"}
RUNS: dict[str, dict[str, Any]] = {
    "one-thread": {"options": {"world_size": 5, "jobs": 1}},
    "two-threads": {"options": TWO_THREADS},
    "scattered": {"options": TWO_THREADS, "columns": True},
    "cast": {"options": {**TWO_THREADS, "dtype": "fp16"}},
    "scattered-cast": {"options": {**TWO_THREADS, "dtype": "bf16"}, "columns": True},
    "without-digests": {"options": {**TWO_THREADS, "digest": "none"}},
}


class Crasher:
    """The process of crash.py, which forks a run for each call."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(CRASH)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(CRASH.parents[2]), *filter(None, sys.path)]),
            },
        )

    def __call__(
        self,
        fatal: int,
        source: Path,
        output: Path,
        *,
        options: Mapping[str, Any],
        columns: bool = False,
        overwrite: bool = False,
    ) -> dict[str, Any]:
        """Run once; 0 is not fatal."""
        request = {"fatal": fatal, "source": str(source), "output": str(output), "columns": columns}
        assert self._process.stdin
        assert self._process.stdout
        print(
            json.dumps({**request, "options": {**options, "overwrite": overwrite}}),
            file=self._process.stdin,
            flush=True,
        )
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        assert answer["code"] in (0, -9)
        return answer

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def crash() -> Iterator[Crasher]:
    crasher = Crasher()
    yield crasher
    crasher.close()


@pytest.fixture
def source(make_hub: Callable[..., Path]) -> Path:
    torch.manual_seed(0)
    tensors = {f"layers.{index}.weight": torch.randn(600, 133) for index in range(6)}
    return make_hub({**tensors, "scalar": torch.tensor(1.0)})


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def points(num_calls: int) -> list[int]:
    return sorted({1 + index * (num_calls - 1) // (NUM_POINTS - 1) for index in range(NUM_POINTS)})


def assert_absent_or_whole(out: Path, expected: Mapping[str, bytes]) -> None:
    """Neither the destination nor what lies beside it opens as a checkpoint that it is not."""
    assert not out.exists() or content(out) == expected
    for staging in out.parent.glob(f".{out.name}.*"):
        for directory in (staging, staging / "data"):
            if (directory / ".metadata").exists():  # only the last rename was missing
                assert content(directory) == expected
            elif directory.exists():
                with pytest.raises(FileNotFoundError):
                    FileSystemReader(directory).read_metadata()
                assert complaints(directory)


def complaints(directory: Path) -> Sequence[str]:
    """What inspect has to say against a directory; there may be a manifest already, and no `.metadata`."""
    try:
        return shardkit.inspect(str(directory)).warnings
    except ShardkitError as error:
        return [error.message]


def assert_is_what_it_says(name: str, whole: Path, answer: Mapping[str, Any]) -> None:
    """The undisturbed run did what its name promises to crash."""
    described = manifest.read(str(whole))
    assert described is not None
    tensor = described["tensors"]["layers.3.weight"]
    dtypes = {"cast": "float16", "scattered-cast": "bfloat16"}
    assert tensor["dtype"] == dtypes.get(name, "float32")
    assert tensor["placements"] == ["S(1)" if "scattered" in name else "S(0)"]
    assert (answer["threads"] == 1) == (name == "one-thread")


@pytest.mark.parametrize("name", RUNS)
def test_killed_at_points_spread_over_the_run(
    crash: Crasher, source: Path, tmp_path: Path, name: str
) -> None:
    kind, whole = RUNS[name], tmp_path / "whole"
    answer = crash(0, source, whole, **kind)
    assert_is_what_it_says(name, whole, answer)
    expected, num_resumed = content(whole), 0
    for fatal in points(answer["calls"]):
        out = tmp_path / f"out{fatal}"
        killed = crash(fatal, source, out, **kind)
        assert killed["code"] == -9, f"call {fatal} of {answer['calls']} was not reached"
        assert_absent_or_whole(out, expected)
        num_resumed += crash(0, source, out, **kind, overwrite=out.exists())["resumed"]
        assert content(out) == expected
        assert not list(tmp_path.glob(".*")), "litter was left behind"
    assert num_resumed > 0


@pytest.mark.parametrize("name", ["two-threads", "scattered"])
def test_killed_again_and_again(crash: Crasher, source: Path, tmp_path: Path, name: str) -> None:
    kind, whole, out = RUNS[name], tmp_path / "whole", tmp_path / "out"
    num_calls = crash(0, source, whole, **kind)["calls"]
    expected, num_killed = content(whole), 0
    for fatal in [*points(num_calls), 0]:
        if not out.exists():
            num_killed += crash(fatal, source, out, **kind)["code"] == -9
            assert_absent_or_whole(out, expected)
    assert content(out) == expected
    assert num_killed > NUM_POINTS // 4


def test_killed_while_replacing_the_name_is_never_absent(
    crash: Crasher, source: Path, tmp_path: Path
) -> None:
    kind, out = RUNS["two-threads"], tmp_path / "out"
    crash(0, source, out, **kind)
    expected = content(out)
    old = {**expected, "from-before": b"", "__9_0.distcp": b"of a larger world"}
    num_calls = crash(0, source, out, **kind, overwrite=True)["calls"]
    killed = 0
    for fatal in points(num_calls)[-8:]:
        for name, data in old.items():
            (out / name).write_bytes(data)
        killed += crash(fatal, source, out, **kind, overwrite=True)["code"] == -9
        assert content(out) in (old, expected)
        crash(0, source, out, **kind, overwrite=True)
        assert content(out) == expected
        assert not list(tmp_path.glob(".*")), "litter was left behind"
    assert killed >= 6
