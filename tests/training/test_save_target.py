"""A save into a store is there as a whole, or not at all; from real ranks, with faults on the way."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

import shardkit
from shardkit.errors import ResourceError, UsageError
from shardkit.files import manifest, storage, stores
from shardkit.files.home import home_of
from shardkit.files.location import location_of
from shardkit.training.save_target import SaveJob
from tests.formats.dcp.samples import quiet
from tests.training import models
from tests.worlds import stores as servers
from tests.worlds.processes import run_script

S3 = f"s3://{servers.BUCKET}"
RANGE_BASED = "reader_constructor=S3ReaderConstructor.range_based"
PARTS = ("__0_0.distcp", "__1_0.distcp")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Served]:
    home = tmp_path_factory.mktemp("saved")
    with servers.reached("any", home) as proxy:
        yield servers.Served(home, proxy)


def save(served: servers.Served, out: Path, path: str, **request: Any) -> list[dict[str, Any]]:
    """Have two ranks save, and return what each says; None of one that was killed."""
    out.mkdir()
    given = {"verb": "save", "source": path, "out": str(out), "num_ranks": 2, **request}
    env = {**servers.environment(served.proxy.url), "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    run_script("training/stores_world.py", json.dumps(given), env=env)
    stores.forget()
    return [json.loads(file.read_text()) for file in sorted(out.glob("*.json"))]


@pytest.mark.prove
@pytest.mark.parametrize("at", [2, 4])
def test_torch_does_not_hide_why_a_part_was_refused(served: servers.Served, at: int) -> None:
    """Its writer closes its archive after a failed write, which fails with words of its own."""
    model = torch.nn.Linear(1 << 10, 10 << 10)  # 40 MiB: a tensor is several parts
    puts = 0

    def strikes(seen: servers.Seen) -> bool:
        nonlocal puts
        puts += seen.sent_nbytes > 1 << 20
        return puts >= at

    served.proxy.reset()
    served.proxy.strikes, served.proxy.faults[:] = strikes, ["403"] * 100
    try:
        with pytest.raises(ResourceError, match="denies access"):
            shardkit.save(model, f"{S3}/refused-{at}")
    finally:
        served.proxy.reset()


def keys(path: str) -> set[str]:
    stores.forget()
    return {
        os.path.relpath(os.path.join(here, name), path)
        for here, _, names in stores.walk(path)
        for name in names
    }


def download(path: str, directory: Path) -> None:
    for key in keys(path):
        fd = storage.open_fd(f"{path}/{key}", os.O_RDONLY)
        (directory / key).parent.mkdir(parents=True, exist_ok=True)
        (directory / key).write_bytes(storage.pread(fd, storage.fstat(fd).st_size, 0))
        storage.close_fd(fd)


@pytest.mark.dist
def test_what_is_saved_there_is_what_is_saved_here(served: servers.Served, tmp_path: Path) -> None:
    path = f"{S3}/run/step-7"
    told = save(served, tmp_path / "far", path)
    near = save(served, tmp_path / "near", str(tmp_path / "local"))
    assert told[0] == told[1] == {**near[0], "path": path}
    home = home_of(path)
    folder = os.path.basename(home)
    assert keys(path) == {".metadata", *(f"{folder}/{name}" for name in (*PARTS, "shardkit.json"))}
    report = shardkit.verify(path, full=True)
    assert (report.problems, report.warnings, report.manifests) == ((), (), ("shardkit.json",))
    assert shardkit.diff(path, tmp_path / "local", all_tensors=True).is_equal
    assert shardkit.resolve_checkpoint(f"{S3}/run").path == path
    shardkit.consolidate(path, tmp_path / "hub")
    assert shardkit.diff(tmp_path / "hub", tmp_path / "local").is_equal


@pytest.mark.prove
@pytest.mark.dist
def test_stock_load_reads_a_copy(served: servers.Served, tmp_path: Path) -> None:
    save(served, tmp_path / "far", f"{S3}/stock")
    download(f"{S3}/stock", tmp_path / "copy")
    save(served, tmp_path / "near", str(tmp_path / "local"))
    states = []
    for name in ("copy", "local"):
        state = {"model": {"wide.weight": torch.zeros(5120, 1024)}, "extra": {"job": {"step": 0}}}
        with quiet():
            dcp.load(state, storage_reader=FileSystemReader(str(tmp_path / name)), no_dist=True)
        states.append(state)
    assert torch.equal(states[0]["model"]["wide.weight"], states[1]["model"]["wide.weight"])
    assert states[0]["model"]["wide.weight"].any()
    assert states[0]["extra"] == {"job": {"step": 7}}


@pytest.mark.prove
@pytest.mark.dist
def test_a_save_is_replaced_on_request_alone(served: servers.Served, tmp_path: Path) -> None:
    path = f"{S3}/last"
    save(served, tmp_path / "first", path)
    before = keys(path)
    errors = save(served, tmp_path / "second", path)
    assert {error["error"] for error in errors} == {"UsageError"}
    assert sum("overwrite=True" in error["message"] for error in errors) == 1
    assert all("s3://bucket/last exists" in error["message"] for error in errors)
    assert keys(path) == before
    save(served, tmp_path / "third", path, overwrite=True)
    assert keys(path) > before
    assert shardkit.verify(path, full=True).problems == ()
    assert len(shardkit.status(path).replaced) == 1
    after = keys(path)
    shardkit.abort(path)
    assert keys(path) == after
    assert shardkit.verify(path, full=True).problems == ()


def test_tied_models_in_s3_come_with_what_awss_reader_needs(served: servers.Served, tmp_path: Path) -> None:
    hub = str(tmp_path / "hub")
    models.save("llama-tied", hub)
    made = shardkit.preshard(hub, f"{S3}/tied", world_size=2, layout="declared")
    told = [note for note in made.notes if RANGE_BASED in note]
    assert len(told) == 1
    assert "tied names share one record (" in told[0]
    again = shardkit.reshard(f"{S3}/tied", f"{S3}/tied-4", world_size=4)
    assert [note for note in again.notes if RANGE_BASED in note] == told
    near = (
        shardkit.preshard(hub, tmp_path / "two", world_size=2, layout="declared"),
        shardkit.reshard(f"{S3}/tied", tmp_path / "four", world_size=4),
    )
    assert not any(RANGE_BASED in note for result in near for note in result.notes)
    models.save("llama", str(tmp_path / "untied"))
    other = shardkit.preshard(tmp_path / "untied", f"{S3}/untied", world_size=2, layout="declared")
    assert not any(RANGE_BASED in note for note in other.notes)
    assert location_of("gs://bucket/tied").of_shared_records == ""  # of other stores no such reader is known


@pytest.mark.prove
@pytest.mark.parametrize("source", ["disk", "store"])
def test_config_and_tokenizer_are_kept_there(served: servers.Served, source: str, tmp_path: Path) -> None:
    path, hub = f"{S3}/kept-{source}", str(tmp_path / "hub")
    models.save("llama-tied", hub)
    (tmp_path / "hub/tokenizer.json").write_text("{}")
    if source == "store":
        shardkit.consolidate(hub, f"{S3}/kept-hub")
        hub = f"{S3}/kept-hub"
    model = shardkit.load_into(models.reference("llama-tied", seed=7), hub)
    with pytest.warns(UserWarning, match=RANGE_BASED):
        shardkit.save(model, path)
    with pytest.warns(UserWarning, match=RANGE_BASED):
        shardkit.save(model, path, overwrite=True)
    folder = os.path.basename(home_of(path))
    kept = {f"{folder}/huggingface/{name}" for name in ("config.json", "tokenizer.json")}
    assert kept < keys(path)
    assert shardkit.verify(path, full=True).problems == ()
    shardkit.abort(path)
    assert kept < keys(path)
    done = shardkit.consolidate(path, tmp_path / "out")
    assert done.warnings == ()
    assert {"config.json", "tokenizer.json"} <= set(done.assets)


@pytest.mark.prove
@pytest.mark.dist
def test_a_rank_that_fails_leaves_nothing(served: servers.Served, tmp_path: Path) -> None:
    path = f"{S3}/failed"
    for told in save(served, tmp_path / "out", path, fault="error"):
        assert "this rank cannot" in told["message"]
        assert "rank 1" in told["message"]
    assert keys(path) == set()


@pytest.mark.prove
@pytest.mark.dist
def test_a_store_that_refuses_one_rank_leaves_nothing(served: servers.Served, tmp_path: Path) -> None:
    path = f"{S3}/refused"
    served.proxy.strikes = lambda seen: seen.method == "PUT" and "__1_0.distcp" in seen.path
    served.proxy.faults[:] = ["403"] * 100
    try:
        for told in save(served, tmp_path / "out", path):
            assert told["error"] == "ResourceError"
            assert "denies access" in told["message"]
    finally:
        served.proxy.reset()
    assert keys(path) == set()


@pytest.mark.prove
@pytest.mark.dist
def test_faults_that_pass_are_tried_again(served: servers.Served, tmp_path: Path) -> None:
    path = f"{S3}/faulty"
    served.proxy.strikes = lambda seen: seen.method in ("PUT", "POST")
    served.proxy.faults[:] = ["503", "reset", "", "500", "lost", "", "503"]
    try:
        told = save(served, tmp_path / "out", path)
        assert len(served.proxy.struck) == 5
    finally:
        served.proxy.reset()
    assert told[0]["path"] == path
    assert shardkit.verify(path, full=True).problems == ()


@pytest.mark.prove
@pytest.mark.dist
def test_a_rank_that_is_killed_leaves_nothing_that_is_seen(served: servers.Served, tmp_path: Path) -> None:
    path = f"{S3}/killed"
    (told,) = save(served, tmp_path / "out", path, fault="kill")
    assert "error" in told
    assert ".metadata" not in keys(path)
    with pytest.raises(shardkit.ShardkitError):
        shardkit.inspect(path)
    save(served, tmp_path / "again", path)
    assert shardkit.verify(path, full=True).problems == ()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_save_that_another_was_faster_than_stays_whole(served: servers.Served) -> None:
    """Where its files are; `abort` does not take it for what a dead run left."""
    path, model = f"{S3}/faster", torch.nn.Linear(3, 2)

    class Faster:
        def state_dict(self) -> dict[str, int]:
            shardkit.save(torch.nn.Linear(2, 2), path)
            return {"step": 7}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise AssertionError

    with pytest.raises(UsageError, match="the new save is whole, and lies in") as caught:
        shardkit.save(model, path, extra={"job": Faster()})
    place = caught.value.message.rpartition(" ")[2]
    shardkit.abort(path)
    for each in (path, place):
        report = shardkit.verify(each, full=True)
        assert (report.problems, report.warnings, report.manifests) == ((), (), ("shardkit.json",))
    target = torch.nn.Linear(3, 2)
    shardkit.load_into(target, place)
    assert torch.equal(target.weight, model.weight)


def test_of_two_saves_one_is_committed(served: servers.Served) -> None:
    """The other says so, and leaves what the first has made."""
    path = f"{S3}/two"
    one, two = (SaveJob(path, overwrite=False) for _ in range(2))
    for lead in (one, two):
        storage.write_file(os.path.join(lead.local_directory, "shardkit.json"), manifest.sign({"format": 1}))
    first, second = (lead.place.rpartition("/")[2] for lead in (one, two))
    one.commit(b"first", b"")
    with pytest.raises(UsageError, match="the new save is whole, and lies in") as caught:
        two.commit(b"second", b"whole")
    assert "appeared while it was being written" in caught.value.problems[0]
    two.close()
    one.close()
    kept = {f"{second}/{name}" for name in (".metadata", "shardkit.json")}
    assert keys(path) == {".metadata", f"{first}/shardkit.json", *kept}


@pytest.mark.parametrize("fault", ["lost", "reset"])
def test_a_save_that_ends_with_an_unclear_answer_is_not_removed(served: servers.Served, fault: str) -> None:
    """Nobody knows whether `.metadata` is there, for as long as the store does not answer."""
    path = f"{S3}/unclear-{fault}"
    shardkit.save(torch.nn.Linear(2, 2), path)
    before, hit = keys(path), list[str]()

    def strikes(seen: servers.Seen) -> bool:
        hit.extend(["marker"] * (seen.method == "PUT" and seen.path.endswith(f"unclear-{fault}/.metadata")))
        return bool(hit)

    served.proxy.reset()
    served.proxy.strikes, served.proxy.faults[:] = strikes, [fault] * 100
    try:
        with pytest.raises(ResourceError, match="cannot be reached or fails"):
            shardkit.save(torch.nn.Linear(2, 2), path, overwrite=True)
    finally:
        served.proxy.reset()
    assert keys(path) >= before
    assert shardkit.verify(path, full=True).problems == ()
