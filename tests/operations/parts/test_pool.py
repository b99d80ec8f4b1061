"""Pools of real processes carry out all parts of a job."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import shardkit
from shardkit.cli import main
from shardkit.errors import SourceError, UsageError
from tests.contents import contents

OPTIONS: dict[str, Any] = {"world_size": 4, "layout": "declared", "sha256": True}


@pytest.fixture(scope="module")
def pool() -> Iterator[Executor]:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as made:
        yield made


def test_the_whole_is_the_result(
    model: Path, tmp_path: Path, whole: dict[str, bytes], pool: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = shardkit.preshard("model", "out", executor=pool, num_parts=3, **OPTIONS)
    assert (result.part, result.num_files, result.output) == (None, 4, str(tmp_path / "out"))
    assert result.moving_s == 0, "this process moved nothing; what one worker took would give a false rate"
    assert contents(tmp_path / "out") == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out", "whole"]


def test_there_and_back(model: Path, tmp_path: Path, pool: Executor) -> None:
    told: list[str] = []
    shardkit.preshard(model, tmp_path / "sharded", executor=pool, num_parts=2, **OPTIONS)
    shardkit.reshard(tmp_path / "sharded", tmp_path / "other", world_size=3, executor=pool, num_parts=2)
    again = {"max_shard_size": 200, "ask_class": False, "manifest": True}
    shardkit.consolidate(tmp_path / "other", tmp_path / "one", **again)
    result = shardkit.consolidate(
        tmp_path / "other", tmp_path / "parts", executor=pool, num_parts=2, on_warning=told.append, **again
    )
    assert contents(tmp_path / "parts") == contents(tmp_path / "one")
    assert tuple(told) == result.warnings


@pytest.mark.parametrize("cache", ["off", "cache"])
def test_all_parts_again_are_no_work(
    cache: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process looks at what is there, once, and does what comes after it."""
    monkeypatch.setenv("SHARDKIT_CACHE", cache if cache == "off" else str(tmp_path / cache))
    (tmp_path / "w").mkdir()
    record = tmp_path / "w/record.json"
    calls: list[tuple[Any, Path, dict[str, Any]]] = [
        (shardkit.preshard, model, OPTIONS),
        (shardkit.reshard, tmp_path / "w/preshard", {"world_size": 3}),
        (shardkit.consolidate, tmp_path / "w/preshard", {"ask_class": False, "manifest_file": record}),
    ]
    for verb, source, more in calls:
        out = tmp_path / "w" / verb.__name__
        with ThreadPoolExecutor(2) as threads:
            assert not verb(source, out, executor=threads, num_parts=2, **more).was_there
        there, written = contents(out), record.read_bytes() if record.exists() else b""
        record.unlink(missing_ok=True)
        told: list[str] = []
        again = verb(source, out, executor=threads, num_parts=2, on_warning=told.append, **more)
        assert (again.was_there, again.part, contents(out)) == (True, None, there)
        assert tuple(told) == again.warnings
        assert (record.read_bytes() if record.exists() else b"") == written
        with pytest.raises(UsageError, match="is not what this command writes"):
            verb(source, out, executor=threads, num_parts=2, **{**more, "dtype": "fp16"})
    assert sorted(path.name for path in (tmp_path / "w").iterdir() if path != record) == [
        "consolidate",
        "preshard",
        "reshard",
    ]


def test_what_a_worker_raises_is_raised_here(model: Path, tmp_path: Path, pool: Executor) -> None:
    (model / "model.safetensors").write_bytes(b"")
    with pytest.raises(SourceError):
        shardkit.preshard(model, tmp_path / "out", executor=pool, num_parts=2, **OPTIONS)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_lost_worker(model: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    """The pool says that it is broken; another one goes on."""
    shardkit.preshard(model, tmp_path / "out", part="1/2", **OPTIONS)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as broken:
        broken.submit(die)
        with pytest.raises(BrokenProcessPool):
            shardkit.preshard(model, tmp_path / "out", executor=broken, num_parts=2, **OPTIONS)
    with ThreadPoolExecutor(2) as threads:
        shardkit.preshard(model, tmp_path / "out", executor=threads, num_parts=2, **OPTIONS)
    assert contents(tmp_path / "out") == whole


def test_a_dry_run_asks_no_worker(model: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as threads:
        threads.shutdown()
        assert shardkit.preshard(
            model, tmp_path / "out", executor=threads, num_parts=2, dry_run=True, **OPTIONS
        ).dry_run


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_parts": 2}, "num_parts goes with executor"),
        ({"num_parts": 0, "executor": "pool"}, "num_parts must be at least 1, not 0"),
        ({"num_parts": -1, "executor": "ray"}, "num_parts must be at least 1, not -1"),
        ({"executor": "pool"}, "executor goes with num_parts"),
        ({"executor": "dask", "num_parts": 2}, "executor='dask' is not ray"),
        ({"executor": "pool", "num_parts": 2, "part": "1/2"}, "exclude each other"),
        ({"executor": "ray", "part": "1/2"}, "exclude each other"),
        ({"executor": "pool", "num_parts": 2, "output": None}, "name the output"),
        ({"executor": "ray", "output": None}, "name the output"),
    ],
)
def test_what_is_refused(options: dict[str, Any], said: str, model: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as threads:
        given = {"output": tmp_path / "out", **options}
        if given.get("executor") == "pool":
            given["executor"] = threads
        with pytest.raises(UsageError, match=said):
            shardkit.preshard(model, **given, **OPTIONS)


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--executor", "ray"], 5, "error: --executor ray needs Ray\nhint: `pip install ray`"),
        (["--executor", "ray", "--dry-run"], 5, "error: --executor ray needs Ray"),
        (["--executor", "ray", "--part", "1/2"], 2, "error: --part and --executor exclude each other"),
        (["--num-parts", "2"], 2, "error: --num-parts goes with --executor"),
        (["--executor", "dask"], 2, "'dask' is not 'ray'"),
    ],
)
def test_what_is_refused_on_the_command_line(
    options: list[str], code: int, said: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as where it is not installed
    out = tmp_path / "out"
    done = CliRunner().invoke(main, ["preshard", str(model), str(out), "--world-size", "4", *options])
    assert (done.exit_code, done.stdout) == (code, "")
    assert said in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
