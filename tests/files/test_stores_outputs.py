"""Outputs as they lie in a real store: read by every verb, cleaned up, found in runs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import shardkit
from shardkit.files import stores
from shardkit.files.remote.objects import Objects
from shardkit.operations.watch import WatchOptions, watch
from tests.contents import contents
from tests.nested import FOLDER, OLDER, Model, nest
from tests.worlds import stores as servers

S3 = f"s3://{servers.BUCKET}"


@pytest.fixture(scope="module", params=servers.PARAMS)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[servers.Served]:
    home = tmp_path_factory.mktemp("outputs")
    with servers.reached(request.param, home) as proxy:
        make(home)
        yield servers.Served(home, proxy)


def make(home: Path) -> None:
    (home / "hub").mkdir()
    torch.manual_seed(0)
    save_file(Model().state_dict(), home / "hub/model.safetensors")
    (home / "hub/config.json").write_text("{}")
    shardkit.preshard(home / "hub", home / "flat", world_size=2, wrap="none")
    nest(home / "flat", home / "nested")
    shutil.copytree(home / "nested" / FOLDER, home / "nested" / OLDER)


def keys(path: str) -> set[str]:
    stores.forget()
    return {os.path.join(here, name) for here, _, names in stores.walk(path) for name in names}


def test_every_verb_reads_it(served: servers.Served, tmp_path: Path) -> None:
    path, want = f"{S3}/one", load_file(served.home / "hub/model.safetensors")
    servers.upload(served.home / "nested", path)
    assert shardkit.inspect(path).kind == "presharded"
    report = shardkit.verify(path, full=True)
    assert (report.problems, report.warnings, report.manifests) == ((), (), ("shardkit.json",))
    assert shardkit.diff(path, served.home / "flat").is_equal
    for name, source in (("far", path), ("near", str(served.home / "flat"))):
        shardkit.consolidate(source, tmp_path / name)
        shardkit.reshard(source, tmp_path / f"{name}-3", world_size=3)
    for kind in ("", "-3"):
        assert contents(tmp_path / f"far{kind}") == contents(tmp_path / f"near{kind}")
    context = shardkit.prepare(Model, path)
    first, second = shardkit.finalize(context.model, context), Model()
    shardkit.load_into(second, path)
    for model in (first, second):
        assert all(torch.equal(tensor, want[name]) for name, tensor in model.state_dict().items())


def test_a_run_is_searched(served: servers.Served, tmp_path: Path) -> None:
    for step in (2, 10, 20):
        servers.upload(served.home / "nested", f"{S3}/run/step-{step}")
    Objects(f"{S3}/run/step-20").delete([".metadata"])
    stores.forget()
    found = shardkit.resolve_checkpoint(f"{S3}/run")
    assert (found.path, found.step) == (f"{S3}/run/step-10", 10)
    assert found.skipped[0][0] == "step-20"
    listed = shardkit.latest(f"{S3}/run", list_all=True)
    assert listed.path == found.path
    assert [(each.step, each.missing is None) for each in listed.checkpoints or ()] == [
        (20, False),
        (10, True),
        (2, True),
    ]
    result = shardkit.consolidate(f"{S3}/run", tmp_path / "out")
    assert result.resolved == f"{S3}/run/step-10"
    assert shardkit.diff(tmp_path / "out", served.home / "hub").is_equal


def test_a_run_is_watched(served: servers.Served, tmp_path: Path) -> None:
    for step in (2, 10):
        servers.upload(served.home / "nested", f"{S3}/watched/step-{step}")
    options = WatchOptions(run=f"{S3}/watched", directory=str(tmp_path / "out"), consolidate={}, once=True)
    lines = list[str]()
    assert watch(options, lines.append, progress=False).converted == ("step-2", "step-10")
    shardkit.consolidate(f"{S3}/watched/step-10", tmp_path / "expected")
    assert contents(tmp_path / "out/step-10") == contents(tmp_path / "expected")
    servers.upload(served.home / "nested", f"{S3}/watched/step-20")
    Objects(f"{S3}/watched/step-2").delete([".metadata"])
    assert watch(options, lines.append, progress=False).converted == ("step-20",)
    assert {path.name for path in (tmp_path / "out").glob("step-*")} == {"step-2", "step-10", "step-20"}


def test_what_nobody_names_is_shown_and_stays(served: servers.Served) -> None:
    path = f"{S3}/old"
    servers.upload(served.home / "nested", path)
    before = keys(path)
    assert shardkit.status(path).replaced == (f"{path}/{OLDER}/",)
    assert not shardkit.abort(path).aborted
    assert keys(path) == before
    assert shardkit.verify(path, full=True).problems == ()


def test_the_prefix_of_replaced_data_is_printed(served: servers.Served) -> None:
    hub, shards, model = str(served.home / "hub"), f"{S3}/replaced/shards", f"{S3}/replaced/model"
    for size in (2, 3):
        sharded = shardkit.preshard(hub, shards, world_size=size, wrap="none", overwrite=True)
        merged = shardkit.consolidate(
            str(served.home / "flat"), model, overwrite=True, dtype="fp32" if size == 2 else "bf16"
        )
        if size == 2:
            assert sharded.replaced == merged.replaced == ()
    for path, result in ((shards, sharded), (model, merged)):
        (prefix,) = result.replaced
        assert shardkit.status(path).replaced == result.replaced
        assert f"{prefix}* stays for its readers" in str(result)
        assert [key for key in keys(path) if key.startswith(prefix)]
        report = shardkit.verify(path, full=True)
        assert report.problems == ()
        assert all("not among the model's weight files" in line for line in report.warnings), "the old ones"
    assert shardkit.inspect(shards).world_size == 3
    assert shardkit.diff(shards, hub).is_equal
    assert shardkit.diff(hub, model, as_dtype="bf16").is_equal
