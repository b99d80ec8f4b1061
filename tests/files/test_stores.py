"""Checkpoints in an object store are read as local ones, from real servers, with faults on the way.

The servers are those of `tests.worlds.stores`; each test is skipped where one is not installed.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import shardkit
from shardkit.errors import IntegrityError, ResourceError, SourceError
from shardkit.files import stores
from shardkit.files.remote import contract, kinds, ranges
from shardkit.files.remote.cloud import answer_of
from tests.cases import but_first
from tests.contents import contents
from tests.files.conftest import S3, Model, check_verbs, client, make
from tests.operations.reshard.test_left_out import save_pair, veomni
from tests.training import models
from tests.worlds import stores as servers

MIB = 1 << 20


WRITES: dict[str, Callable[[str, Path], Any]] = {
    "preshard of a model": lambda home, out: shardkit.preshard(f"{home}/hub", out, world_size=2),
    "preshard": lambda home, out: shardkit.preshard(f"{home}/hub", out, world_size=2, wrap="none"),
}


def test_every_verb_reads_from_it(served: servers.Served, tmp_path: Path) -> None:
    check_verbs(S3, served.home, tmp_path)


def test_what_reshard_leaves_behind_is_named_as_on_a_disk(served: servers.Served, tmp_path: Path) -> None:
    veomni(tmp_path / "run/global_step_2", is_finished=True)
    for step in (10, 20):
        save_pair(tmp_path / "steps", f"model_step{step}", f"optim_step{step}")
    servers.upload(tmp_path, "s3://bucket/beside")
    for number, name in enumerate(["run", "run/global_step_2/model/ckpt", "steps"]):
        here, there = (
            shardkit.reshard(f"{home}/{name}", str(tmp_path / f"{number}-{home[0] == '/'}"), world_size=2)
            for home in (str(tmp_path), "s3://bucket/beside")
        )
        assert (there.folders, there.copied) == (here.folders, here.copied)
        assert there.warnings == here.warnings
        assert bool(here.warnings) == (name != "run")


def test_parts_read_from_a_store(
    served: servers.Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they record names the object, wherever they are started; another version of it is another plan."""
    WRITES["preshard"](str(served.home), tmp_path / "whole")
    monkeypatch.chdir(tmp_path)
    options: dict[str, Any] = {"world_size": 2, "wrap": "none"}
    shardkit.preshard(f"{S3}/hub", "out", part="1/2", **options)
    plan = tmp_path / ".out.shardkit" / "draft" / "0"
    assert json.loads(plan.read_text())["command"]["options"]["source"] == f"{S3}/hub"
    with monkeypatch.context() as other:
        other.setattr(stores, "_status", lambda said, path, ask=stores._status: ask(said, path + "?"))
        stores.forget()
        with pytest.raises(shardkit.UsageError, match="another job is under way"):
            shardkit.preshard(f"{S3}/hub", "out", part="2/2", **options)
    stores.forget()
    last = shardkit.preshard(f"{S3}/hub", "out", part="2/2", **options)
    assert last.part is not None
    assert last.part.is_committed
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.prove
def test_a_whole_bucket_may_be_a_checkpoint(tmp_path: Path) -> None:
    """Its manifest is not looked for beside it: another bucket may have that name."""
    make(tmp_path)
    with servers.reached("moto", tmp_path / "served"):
        servers.put("model.safetensors", (tmp_path / "hub/model.safetensors").read_bytes())
        found = shardkit.verify("s3://bucket")
        assert (found.problems, found.num_tensors) == ((), shardkit.verify(tmp_path / "hub").num_tensors)


def test_the_config_is_read_there_too(served: servers.Served, tmp_path: Path, fast_trace: None) -> None:
    """transformers opens files by itself: without them the layout would be another, and nobody would hear of it."""
    models.save("qwen3", tmp_path / "hub")
    servers.upload(tmp_path / "hub", "s3://bucket/real/hub")
    WRITES["preshard of a model"]("s3://bucket/real", tmp_path / "remote")
    WRITES["preshard of a model"](str(tmp_path), tmp_path / "local")
    assert contents(tmp_path / "remote") == contents(tmp_path / "local")
    assert b'"traced"' in (tmp_path / "remote/shardkit.json").read_bytes()


def test_a_header_is_two_requests_and_a_directory_is_listed_once(served: servers.Served) -> None:
    shardkit.inspect(f"{S3}/hub")
    assert sum("model.safetensors" in path for method, path, *_ in served.proxy.seen if method == "GET") <= 2
    listed = Counter(path for _, path, *_ in served.proxy.seen if "list-type" in path)
    assert max(listed.values()) == 1


def test_a_dry_run_moves_no_data(served: servers.Served, tmp_path: Path) -> None:
    shardkit.preshard(f"{S3}/hub", tmp_path / "out", world_size=2, wrap="none", dry_run=True)
    assert sum(seen.nbytes for seen in served.proxy.seen) < MIB


def test_large_reads_are_coalesced(served: servers.Served) -> None:
    """Piece by piece, from front to back: no more than a tenth over what requests of 8 MiB need, and one."""
    path = f"{S3}/hub/model.safetensors"
    size, number, found = stores.status(path).st_size, stores.open_number(path, os.O_RDONLY), bytearray()
    served.proxy.seen.clear()
    try:
        while piece := stores.read(number, MIB, len(found)):
            found += piece
    finally:
        stores.close_number(number)
    assert bytes(found) == (served.home / "hub/model.safetensors").read_bytes()
    assert len(served.proxy.seen) <= 1.1 * -(-size // ranges.MAX_REQUEST_NBYTES) + 1
    assert max(seen.nbytes for seen in served.proxy.seen) <= ranges.MAX_REQUEST_NBYTES


def test_what_is_held_is_bounded_and_let_go(served: servers.Served) -> None:
    with ranges.limited(20 * MIB):
        number = stores.open_number(f"{S3}/hub/model.safetensors", os.O_RDONLY)
        for start in range(0, 36 * MIB, 3 * MIB):
            stores.read(number, MIB, start)
            assert ranges._memory.used <= 20 * MIB
        stores.close_number(number)
        settle()
    assert not ranges._memory.filled_spans


def settle() -> None:
    """Wait until nothing is under way."""
    memory = ranges._memory
    with memory.changed:
        assert memory.changed.wait_for(lambda: not memory.num_under_way, timeout=600)


@pytest.mark.parametrize("fault", but_first(["500", "503", "reset", "short"]))
def test_a_fault_that_passes_is_tried_again(served: servers.Served, tmp_path: Path, fault: str) -> None:
    served.proxy.faults[:] = [fault] * 2
    shardkit.consolidate(f"{S3}/dcp", tmp_path / "out")
    assert not served.proxy.faults
    assert load_file(tmp_path / "out/model.safetensors").keys() == Model().state_dict().keys()
    assert shardkit.diff(tmp_path / "out", served.home / "hub").is_equal


def test_a_wrong_body_is_caught_by_the_crc(served: servers.Served, tmp_path: Path) -> None:
    served.proxy.spoils = lambda seen: seen.nbytes > MIB  # tensors; headers and directories are shorter
    with pytest.raises(IntegrityError, match="CRC-32"):
        shardkit.consolidate(f"{S3}/dcp", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_object_that_changes_is_refused(served: servers.Served) -> None:
    import obstore

    store = client()
    obstore.put(store, "changing/a.bin", bytes(100))
    number = stores.open_number("s3://bucket/changing/a.bin", os.O_RDONLY)
    obstore.put(store, "changing/a.bin", b"x" * 100)
    with pytest.raises(IntegrityError, match=r"changing/a\.bin: the object changed"):
        stores.read(number, 10, 0)
    obstore.delete(store, "changing/a.bin")
    with pytest.raises(IntegrityError, match="removed"):
        stores.read(number, 10, 0)
    stores.close_number(number)


@pytest.mark.parametrize("is_removed", but_first([False, True]))
@pytest.mark.parametrize(
    "read",
    but_first(
        [
            lambda path, out: shardkit.consolidate(path, out),
            lambda path, _: shardkit.verify(path),
            lambda path, _: shardkit.verify(path, full=True),
        ]
    ),
    ids=["consolidate", "verify", "full"],
)
def test_a_checkpoint_that_changes_is_not_called_damaged(
    served: servers.Served, tmp_path: Path, read: Callable[[str, Path], object], is_removed: bool
) -> None:
    """Records are opened before anything is moved: one that was fine when the directory was listed may change."""
    servers.upload(served.home / "dcp", "s3://bucket/moving")
    todo = ["moving/__1_0.distcp"]

    def change(seen: servers.Seen) -> bool:
        if seen.is_range and ".metadata" in seen.path and todo:
            data = (served.home / "dcp/__1_0.distcp").read_bytes()
            store: Any = kinds.store_of("s3://bucket")[0]
            if is_removed:
                store.delete(todo)
            else:
                servers.put(todo[0], bytes(100) + data[100:])
            todo.clear()
        return False

    served.proxy.spoils = change
    with pytest.raises(IntegrityError, match=r"object (changed|was removed) while it was read") as refused:
        read("s3://bucket/moving", tmp_path / "out")
    assert "no longer changes" in (refused.value.hint or "")


def test_what_is_wrong_is_said_without_a_secret(served: servers.Served, tmp_path: Path) -> None:
    said = list[str]()
    for path, kind, message in (
        ("s3://no-such-bucket/x", ResourceError, "no such bucket"),
        (f"{S3}/dcp/nothing", SourceError, "no such file"),
    ):
        with pytest.raises(kind, match=message) as refused:
            shardkit.inspect(path)
        said.append(str(refused.value))
    served.proxy.faults[:] = ["403"]
    with pytest.raises(ResourceError, match="denies access") as refused:
        shardkit.inspect(f"{S3}/hub")
    said.append(str(refused.value))
    assert servers.SECRET not in "".join(said)


def test_a_name_that_is_no_path_is_said_at_once(tmp_path: Path) -> None:
    """Copying to a prefix that ends with a slash makes such names. They hide whatever lies beside them."""
    with servers.reached("moto", tmp_path) as proxy:
        for name in ("a//x", "b/./x", "c/../x"):
            servers.put(name, b"x")
        for path in ("s3://bucket/a", "s3://bucket/b", "s3://bucket/c", "s3://bucket/other/./x"):
            proxy.reset()
            with pytest.raises(ResourceError, match="cannot be read as a path") as refused:
                shardkit.inspect(path)
            assert "rename or remove" in (refused.value.hint or "")
            assert len(proxy.seen) <= 1


def test_a_bucket_of_another_region_is_said_at_once(served: servers.Served) -> None:
    served.proxy.strikes, served.proxy.faults = (lambda seen: True), ["301"]
    with pytest.raises(ResourceError, match="another region") as refused:
        shardkit.inspect(f"{S3}/hub")
    assert "AWS_REGION" in (refused.value.hint or "")


def test_a_bucket_may_be_called_credentials(served: servers.Served) -> None:
    servers.upload(served.home / "hub", "s3://bucket/credentials/hub")
    served.proxy.faults[:] = ["reset"] * 2
    assert shardkit.inspect("s3://bucket/credentials/hub").tensors
    assert not served.proxy.faults


@pytest.mark.parametrize(
    ("path", "settings"),
    [
        ("s3://bucket/x", {"AWS_ENDPOINT_URL": "localhost:9000"}),
        ("s3://bucket/x", {"AWS_PROFILE": "nobody's", "AWS_ACCESS_KEY_ID": ""}),
        ("az://container/x", {"AZURE_STORAGE_ACCOUNT_KEY": "no key", "AZURE_STORAGE_ACCOUNT_NAME": "name"}),
    ],
)
def test_settings_that_lead_to_no_store_are_said(
    monkeypatch: pytest.MonkeyPatch, path: str, settings: dict[str, str]
) -> None:
    pytest.importorskip("boto3")
    for name, value in {**servers.environment("http://127.0.0.1:1"), **settings}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(kinds, "_stores", {})
    with pytest.raises(ResourceError, match="settings of this machine") as refused:
        shardkit.inspect(path)
    assert next(iter(settings)) in (refused.value.hint or "")


def test_an_endpoint_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore", reason="obstore is not installed: pip install 'shardkit[stores]'")
    monkeypatch.setattr(kinds, "_stores", {})
    monkeypatch.setattr(contract, "FIRST_WAIT_S", 0.0)
    with socket.socket() as taken:  # nobody can listen there meanwhile
        taken.bind(("127.0.0.1", 0))
        for name, value in servers.environment(f"http://127.0.0.1:{taken.getsockname()[1]}").items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ResourceError, match="cannot be reached") as refused:
            shardkit.inspect("s3://bucket/x")
    assert "AWS_ENDPOINT_URL" in (refused.value.hint or "")
    assert servers.SECRET not in str(refused.value)


def test_obstore_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "_stores", {})
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(ResourceError, match="need obstore") as refused:
        shardkit.inspect("s3://bucket/x")
    assert refused.value.hint == "`pip install obstore boto3`"


def test_profiles_are_read_with_boto3(
    served: servers.Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys, region and endpoint of a profile, as the aws tool takes them; boto3 renews what expires."""
    pytest.importorskip("boto3")
    (tmp_path / "config").write_text(
        f"[profile lab]\nregion = us-east-1\nendpoint_url = {served.proxy.url}\ncredential_process = {tmp_path}/keys\n"
    )
    keys = {"Version": 1, "AccessKeyId": "anyone", "SecretAccessKey": servers.SECRET, "SessionToken": "t"}
    (tmp_path / "keys").write_text(
        f"#!/bin/sh\necho asked >> {tmp_path}/asked\n"
        f"echo '{json.dumps(keys | {'Expiration': '2000-01-01T00:00:00Z'})}'\n"
    )
    (tmp_path / "keys").chmod(0o700)
    for name in servers.environment(""):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    monkeypatch.setattr(kinds, "_stores", {})
    with pytest.raises(ResourceError) as refused:  # what the tool gave had expired in 2000
        shardkit.inspect(f"{S3}/hub")
    assert servers.SECRET not in f"{refused.value} {refused.value.hint}"
    script = (tmp_path / "keys").read_text().replace("2000-01-01", "2100-01-01")
    (tmp_path / "keys").write_text(script)
    monkeypatch.setattr(kinds, "_stores", {})
    assert shardkit.inspect(f"{S3}/hub").tensors
    assert len((tmp_path / "asked").read_text().split()) >= 2


def test_new_credentials_are_taken_once_the_old_ones_have_expired(served: servers.Served) -> None:
    """Whoever goes on after an expired credential asks for new ones: nothing of the old ones is kept."""
    served.proxy.strikes, served.proxy.faults = (lambda seen: True), ["expired"]
    with pytest.raises(ResourceError, match="credentials have expired"):
        shardkit.inspect(f"{S3}/hub")
    assert shardkit.inspect(f"{S3}/hub").tensors


FORK = """
import gc, os, sys, weakref
import shardkit
from shardkit.errors import ShardkitError
from shardkit.files import storage
from shardkit.files.remote import kinds
path = sys.argv[1]
fd = storage.open_fd(path + "/hub/model.safetensors", os.O_RDONLY)
storage.pread(fd, 10, 0)
client = weakref.ref(kinds.store_of(path)[0].client())
if os.fork() == 0:
    gc.collect()
    assert client() is not None, "whoever drops it waits for a lock that a thread of the parent may hold"
    for ask in (lambda: shardkit.inspect(path + "/hub"), lambda: storage.pread(fd, 10, 0)):
        try:
            ask()
        except ShardkitError as error:
            print(error.message, error.hint, flush=True)
    os._exit(0)
assert os.wait()[1] == 0
storage.close_fd(fd)
assert shardkit.inspect(path + "/hub").tensors
"""


@pytest.mark.prove
def test_a_fork_is_refused_instead_of_waiting_for_ever(served: servers.Served) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORK, S3], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert "was forked" in first
    assert "spawn" in first
    assert "another process" in second


def test_a_service_that_gives_credentials_is_known_by_its_address() -> None:
    """Of ECS and EKS; names of buckets and objects say nothing of credentials."""
    obstore = pytest.importorskip("obstore.exceptions")
    for url, code in (
        ("http://169.254.170.23/v1/credentials", contract.NO_CREDENTIALS),
        ("s3://bucket/credentials", ""),
    ):
        error = obstore.GenericError(f"Generic S3 error: error sending request for url ({url})")
        assert answer_of(error).code == code
