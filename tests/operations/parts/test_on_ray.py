"""`--executor ray`: every part is a task, and the call returns the result of the whole."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import shardkit
from shardkit.cli import main
from shardkit.errors import IncompleteError, ResourceError, SourceError, UsageError
from shardkit.operations.write import Writer
from tests.contents import contents
from tests.operations.parts.stand_in import Ray

OPTIONS: dict[str, Any] = {"world_size": 4, "layout": "declared", "sha256": True}


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    return Ray.installed(monkeypatch, 0, 8, 6)


def test_the_whole_is_the_result(
    model: Path, tmp_path: Path, whole: dict[str, bytes], ray: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = shardkit.preshard("model", "out", executor="ray", **OPTIONS)
    assert (result.part, result.num_files, result.output) == (None, 4, str(tmp_path / "out"))
    assert result.moving_s == 0, "this process moved nothing; the time of one worker would give a false rate"
    assert result.notes[0] == "the parts ran on Ray: 2 nodes with 14 CPUs"
    assert ray.parts == ["1/3", "2/3", "3/3"], "four CPUs for each"
    assert ray.settings == {"num_cpus": 4, "max_retries": 3, "scheduling_strategy": "SPREAD"}
    assert (ray.num_connected, ray.is_running) == (1, False)
    assert contents(tmp_path / "out") == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out", "whole"]


def test_there_and_back(model: Path, tmp_path: Path, ray: Ray) -> None:
    warnings: list[str] = []
    on_ray: dict[str, Any] = {"executor": "ray", "num_parts": 2}
    ray.init()
    shardkit.preshard(model, tmp_path / "sharded", jobs=1, **on_ray, **OPTIONS)
    assert (ray.parts, ray.settings["num_cpus"]) == (["1/2", "2/2"], 1)
    shardkit.reshard(tmp_path / "sharded", tmp_path / "other", world_size=3, **on_ray)
    again: dict[str, Any] = {"max_shard_size": 200, "ask_class": False, "manifest": True}
    shardkit.consolidate(tmp_path / "other", tmp_path / "one", **again)
    result = shardkit.consolidate(
        tmp_path / "other", tmp_path / "parts", on_warning=warnings.append, **on_ray, **again
    )
    assert contents(tmp_path / "parts") == contents(tmp_path / "one")
    assert tuple(warnings) == result.warnings
    assert (ray.num_connected, ray.is_running) == (1, True), "the caller's connection is used, and stays open"


def test_no_part_sees_the_files_of_all_others(
    model: Path, tmp_path: Path, whole: dict[str, bytes], ray: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Writer, "_finished", lambda *_: {0})
        shardkit.preshard(model, tmp_path / "out", executor="ray", **OPTIONS)
    assert contents(tmp_path / "out") == whole


def test_the_error_of_a_part(model: Path, tmp_path: Path, ray: Ray) -> None:
    (model / "model.safetensors").write_bytes(b"")
    with pytest.raises(SourceError):
        shardkit.preshard(model, tmp_path / "out", executor="ray", **OPTIONS)
    assert (ray.cancelled, ray.is_running) == (3, False)


def test_a_lost_worker(model: Path, tmp_path: Path, whole: dict[str, bytes], ray: Ray) -> None:
    ray.lost = {"2/3"}
    with pytest.raises(IncompleteError) as caught:
        shardkit.preshard(model, tmp_path / "out", executor="ray", **OPTIONS)
    assert caught.value.message == "part 2/3 failed on Ray: The worker died unexpectedly."
    ray.lost = set()
    assert shardkit.preshard(model, tmp_path / "out", executor="ray", **OPTIONS).num_files == 4
    assert contents(tmp_path / "out") == whole


def test_ray_does_not_answer(model: Path, tmp_path: Path, ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**options: Any) -> None:
        raise ConnectionError("nobody at 10.0.0.1:6379\nmore")

    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(ResourceError, match=r"cannot connect to Ray: nobody at 10.0.0.1:6379\n") as caught:
        shardkit.preshard(model, tmp_path / "out", executor="ray", **OPTIONS)
    assert "RAY_ADDRESS" in (caught.value.hint or "")


def test_a_dry_run_needs_no_worker(model: Path, tmp_path: Path, ray: Ray) -> None:
    result = shardkit.preshard(model, tmp_path / "out", executor="ray", dry_run=True, **OPTIONS)
    assert (result.dry_run, ray.parts) == (True, [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_parts": 2}, "--num-parts goes with --executor"),
        ({"num_parts": 0, "executor": "ray"}, "--num-parts must be at least 1, not 0"),
        ({"executor": "dask", "num_parts": 2}, "--executor 'dask' is not ray"),
        ({"executor": object(), "num_parts": 2}, "--executor 'object' is not ray"),
        ({"executor": "ray", "part": "1/2"}, "exclude each other"),
        ({"executor": "ray", "output": None}, "name the output"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        shardkit.preshard(model, **{"output": tmp_path / "out", **options}, **OPTIONS)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--executor", "ray"], 5, "error: --executor ray needs Ray\nhint: `pip install ray`"),
        (["--executor", "ray", "--dry-run"], 5, "error: --executor ray needs Ray"),
        (["--executor", "ray", "--part", "1/2"], 2, "error: --part and --executor exclude each other"),
        (["--num-parts", "2"], 2, "error: --num-parts goes with --executor"),
        (["--executor", "dask"], 2, "'dask' is not 'ray'"),
    ],
)
def test_what_is_refused_on_the_command_line(
    options: list[str], code: int, message: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as where it is not installed
    out = tmp_path / "out"
    done = CliRunner().invoke(main, ["preshard", str(model), str(out), "--world-size", "4", *options])
    assert (done.exit_code, done.stdout) == (code, "")
    assert message in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
