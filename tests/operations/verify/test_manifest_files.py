"""Manifests of files, which earlier versions wrote for checkpoints that somebody else made: what verify finds with them."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from shardkit.errors import ResourceError, SourceError, UsageError
from shardkit.files import manifest, storage
from shardkit.operations.preshard import preshard
from shardkit.operations.verify import verify
from shardkit.operations.verify.result import VerifyResult
from tests.bits import flip, flip_byte
from tests.formats.dcp.samples import open_catalog
from tests.formats.reading import chunk_list_of
from tests.manifests import write_file_list
from tests.operations.verify.test_verify import flipped, state, tensors

# torch's own: a save without a process group.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning")

SHARD = "__0_0.distcp"


def rank_files(directory: Path) -> None:
    """What verl saves, of parameters that every rank has whole."""
    for rank in range(2):
        torch.save(tensors(), directory / f"model_world_size_2_rank_{rank}.pt")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of each: hub/, stock/, trainer/, ranks/, whole.ckpt, presharded/."""
    root = tmp_path_factory.mktemp("manifest")
    for name in ("hub", "ranks"):
        (root / name).mkdir()
    save_file(tensors(), root / "hub" / "model.safetensors", metadata={"format": "pt"})
    (root / "hub" / "config.json").write_text('{"model_type": "llama"}')
    (root / "hub" / "tokenizer.json").write_text("{}")
    dcp.save(state(), checkpoint_id=root / "stock", no_dist=True)
    dcp.save(state(), checkpoint_id=root / "trainer" / "pytorch_model_fsdp_0", no_dist=True)
    dcp.save(state(), checkpoint_id=root / "trainer" / "optimizer_0", no_dist=True)
    (root / "trainer" / "scheduler.bin").write_bytes(b"schedule")
    rank_files(root / "ranks")
    torch.save({"state_dict": tensors()}, root / "whole.ckpt")
    preshard(root / "hub", root / "presharded", world_size=2, wrap="none")
    return root


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Callable[[str], Path]:
    def copy(name: str) -> Path:
        (shutil.copytree if (made / name).is_dir() else shutil.copy)(made / name, tmp_path / name)
        return tmp_path / name

    return copy


def files_of(path: Path) -> list[str]:
    """Return the names of all files below a directory; of a file its own."""
    if path.is_file():
        return [path.name]
    return sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())


def at(path: Path, name: str) -> Path:
    return path if path.is_file() else path / name


NAMES = ("hub", "stock", "trainer", "ranks", "whole.ckpt", "presharded")


@pytest.mark.parametrize("name", NAMES)
def test_every_flipped_byte_of_a_listed_file_is_found(copied: Callable[[str], Path], name: str) -> None:
    path, pick = copied(name), random.Random(name)
    beside = write_file_list(path, sha256=True)
    content = json.loads(beside.read_bytes())
    assert [entry["name"] for entry in content["files"]] == files_of(path)
    whole = verify(path, full=True, manifest=beside)
    assert whole.problems == ()
    assert whole.manifests[-1] == str(beside)
    assert whole.num_unrecorded_chunks == 0
    assert not any("no checksum" in note for note in whole.notes)
    assert whole.num_checked_files == len(content["files"])
    for entry in content["files"]:
        for _ in range(6):
            place = pick.randrange(entry["size"])
            with flipped(at(path, entry["name"]), place, pick.randrange(1, 256)):
                problems = verify(path, full=True, manifest=beside).problems
            assert entry["name"] in {problem.file for problem in problems}, (entry["name"], place)
    assert verify(path, full=True).ok  # it is found beside the checkpoint, or there is one inside


def test_what_is_missing_what_is_new_and_what_has_another_size(copied: Callable[[str], Path]) -> None:
    path = copied("trainer")
    write_file_list(path)
    (path / "new").write_bytes(b"x")
    os.remove(path / "scheduler.bin")
    with open(path / "optimizer_0" / ".metadata", "ab") as file:
        file.write(b"x")
    found = {problem.file: problem.message for problem in verify(path).problems}
    assert "does not list it" in found["new"]
    assert "there is no such file" in found["scheduler.bin"]
    assert "optimizer_0/.metadata" in found


def test_what_has_no_checksum_of_its_own_is_named_too(tmp_path: Path) -> None:
    """Parts of tensors in safetensors files: the file's checksum alone would not tell which."""
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path / "out"), save_distributed=True)
    dcp.save({"a": torch.arange(300.0), "b": torch.ones(50)}, storage_writer=writer, no_dist=True)
    write_file_list(tmp_path / "out")
    (name,) = (name for name in files_of(tmp_path / "out") if name.endswith(".safetensors"))
    flip(tmp_path / "out" / name, torch.ones(50), 7)
    assert verify(tmp_path / "out").ok
    (problem,) = verify(tmp_path / "out", full=True).problems
    assert (problem.file, problem.tensor) == (name, "b")


def test_parts_of_tensors_without_checksums_are_named(made: Path, tmp_path: Path) -> None:
    """As a writer leaves them that has CRC-32s switched off."""
    out = tmp_path / "out"
    preshard(made / "hub", out, world_size=2, wrap="none", digest="none")
    for name in files_of(out):
        if name.endswith(".json"):
            os.remove(out / name)
    write_file_list(out)
    assert verify(out).num_unrecorded_chunks == 0
    catalog = open_catalog(str(out), records=True)
    row = catalog.tensors["model.big.weight"].chunk_ids[1]
    name, start = catalog.files[catalog.chunks.file[row]].name, catalog.chunks.start[row]
    flip_byte(out / name, start + 99)
    (problem,) = verify(out, full=True).problems
    assert (problem.file, problem.tensor, problem.start_byte) == (name, "model.big.weight", start)
    assert problem.region == ((65, 0), (65, 300))


def test_inside(copied: Callable[[str], Path]) -> None:
    path = copied("stock")
    writer = verify(path).writer
    write_file_list(path, inside=True)
    result = verify(path, full=True)
    assert (result.ok, result.manifests, result.writer) == (True, (manifest.NAME,), writer)
    with flipped(path / ".metadata", 60, 1):
        assert ".metadata" in {problem.file for problem in verify(path, full=True).problems}
    flip_byte(path / manifest.NAME, 200)
    assert manifest.NAME in {problem.file for problem in verify(path).problems}


def test_somebodys_directory_with_a_manifest_in_it_is_not_replaced(copied: Callable[[str], Path]) -> None:
    ranks, hub = copied("ranks"), copied("hub")
    write_file_list(ranks, inside=True)
    with pytest.raises(UsageError, match="holds what shardkit did not write"):
        preshard(hub, ranks, world_size=2, wrap="none", overwrite=True)


def test_the_hubs_cache(made: Path, tmp_path: Path) -> None:
    """All of it is links; what lies beside a snapshot is the cache's own."""
    home, blobs = tmp_path / "models--a--b" / "snapshots" / "c0ffee", tmp_path / "models--a--b" / "blobs"
    home.mkdir(parents=True)
    blobs.mkdir()
    for name in files_of(made / "hub"):
        shutil.copy(made / "hub" / name, blobs / name)
        os.symlink(f"../../blobs/{name}", home / name)
    os.symlink("/etc/hostname", home / "elsewhere.json")
    write_file_list(home, tmp_path / "m.json")
    assert verify(home, manifest=tmp_path / "m.json", full=True).ok
    assert verify(made / "hub", manifest=tmp_path / "m.json", full=True).ok
    flip_byte(blobs / "tokenizer.json", 1)
    (problem,) = verify(home, manifest=tmp_path / "m.json", full=True).problems
    assert problem.file == "tokenizer.json"


def test_links_and_pipes_are_not_listed_and_never_waited_for(copied: Callable[[str], Path]) -> None:
    path = copied("stock")
    os.mkfifo(path / "pipe")
    os.symlink("/etc/hostname", path / "link")
    os.symlink(SHARD, path / "same")
    (path / ".git").mkdir()
    (path / ".git" / "HEAD").write_text("x")
    write_file_list(path)
    assert verify(path, full=True).ok
    os.mkfifo(path / "other")
    os.remove(path / ".metadata")
    os.mkfifo(path / ".metadata")
    found = {problem.file: problem.message for problem in verify(path, full=True).problems}
    assert "does not list it" in found["other"]
    assert "no regular file" in found[".metadata"] or "pipe" in found[".metadata"]


def test_a_manifest_that_lies_elsewhere(copied: Callable[[str], Path], tmp_path: Path) -> None:
    path = copied("hub")
    write_file_list(path, tmp_path / "m.json")
    flip_byte(path / "config.json", 3)
    assert verify(path, full=True).ok  # nobody said which manifest
    (problem,) = verify(path, full=True, manifest=tmp_path / "m.json").problems
    assert problem.file == "config.json"
    with pytest.raises(SourceError, match="no such file"):
        verify(path, manifest=tmp_path / "absent.json")
    flip_byte(tmp_path / "m.json", 40)
    (problem,) = verify(path, manifest=tmp_path / "m.json").problems
    assert problem.file == str(tmp_path / "m.json")


def test_one_beside_what_has_one_inside_is_mentioned(copied: Callable[[str], Path]) -> None:
    path = copied("presharded")
    beside = write_file_list(path)
    result = verify(path)
    assert result.manifests == (manifest.NAME,)
    assert any("--manifest uses it" in note for note in result.notes)
    assert verify(path, manifest=beside).manifests == (manifest.NAME, str(beside))


def test_what_cannot_be_opened_any_more_is_verified_by_its_manifest(copied: Callable[[str], Path]) -> None:
    path = copied("hub")
    write_file_list(path)
    flip_byte(path / "model.safetensors", 9)  # its header
    flip_byte(path / "tokenizer.json", 1)
    found = {problem.file for problem in verify(path, full=True).problems}
    assert {"model.safetensors", "tokenizer.json"} <= found


def hold_io_back(monkeypatch: pytest.MonkeyPatch, *inodes: int) -> None:
    """Let reading some files fail as a dying disk does, past what opening needs."""
    plain = storage.preadv

    def preadv(fd: int, buffers: Any, start: int) -> int:
        if os.fstat(fd).st_ino in inodes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return plain(fd, buffers, start)

    monkeypatch.setattr(storage, "preadv", preadv)


def test_a_file_that_cannot_be_read_is_a_problem_of_that_file(
    copied: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copied("presharded")
    hold_io_back(monkeypatch, os.stat(path / SHARD).st_ino)
    result = verify(path, full=True)
    (problem,) = result.problems
    assert (problem.file, problem.is_unreadable, result.is_only_unreadable) == (SHARD, True, True)
    assert "Input/output error" in problem.message
    assert result.num_checked_files == 3  # the other shard was read, and config and generation config
    flip_byte(path / "__1_0.distcp", os.path.getsize(path / "__1_0.distcp") // 2)
    both = verify(path, full=True)
    assert {problem.file for problem in both.problems} == {SHARD, "__1_0.distcp"}
    assert not both.is_only_unreadable


def test_metadata_that_cannot_be_read(copied: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path, plain = copied("trainer"), storage.pread
    inode = os.stat(path / "optimizer_0" / ".metadata").st_ino

    def pread(fd: int, nbytes: int, start: int) -> bytes:
        if os.fstat(fd).st_ino == inode:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return plain(fd, nbytes, start)

    damaged = path / "pytorch_model_fsdp_0" / SHARD
    flip_byte(damaged, damaged.read_bytes().index(b"run"))
    monkeypatch.setattr(storage, "pread", pread)
    found = {problem.file: problem.is_unreadable for problem in verify(path, full=True).problems}
    assert found == {"optimizer_0/.metadata": True, f"pytorch_model_fsdp_0/{SHARD}": False}


@pytest.mark.parametrize("name", ["presharded", "trainer", "ranks"])
def test_the_number_of_threads_changes_nothing(copied: Callable[[str], Path], name: str) -> None:
    path = copied(name)
    for file in files_of(path):
        if file.endswith((".distcp", ".pt")):
            flip_byte(path / file, os.path.getsize(path / file) // 2)

    def seen(result: VerifyResult) -> Any:
        return result.problems, result.read_bytes, result.num_checked_chunks, result.notes

    one = verify(path, full=True, jobs=1)
    assert len(one.problems) > 1
    assert seen(one) == seen(verify(path, full=True, jobs=2)) == seen(verify(path, full=True, jobs=16))
    with pytest.raises(UsageError, match="jobs"):
        verify(path, jobs=0)


def test_problems_of_rank_files_name_file_tensor_and_place(copied: Callable[[str], Path]) -> None:
    path, name = copied("ranks"), "model_world_size_2_rank_0.pt"
    data = tensors()["model.big.weight"].numpy().tobytes()
    start = (path / name).read_bytes().index(data)
    flip_byte(path / name, start + 5)
    (problem,) = verify(path, full=True).problems
    assert (problem.file, problem.tensor) == (name, "model.big.weight")
    assert (problem.start_byte, problem.num_bytes) == (start, len(data))
    assert problem.expected != problem.found
    os.truncate(path / name, os.path.getsize(path / name) - 40)
    (problem,) = verify(path, full=True).problems
    assert problem.file == name


def test_a_storage_that_tensors_share(tmp_path: Path) -> None:
    """DeepSpeed's flat partitions, and views: damage is somewhere in all of them."""
    flat = torch.arange(100.0)
    torch.save({"a": flat[:40], "b": flat[40:], "turned": torch.ones(3, 5).t()}, tmp_path / "x.ckpt")
    assert verify(tmp_path / "x.ckpt", full=True).ok
    whole = (tmp_path / "x.ckpt").read_bytes()
    flip(tmp_path / "x.ckpt", flat, 300)
    (problem,) = verify(tmp_path / "x.ckpt", full=True).problems
    assert (problem.file, problem.tensor, problem.num_bytes) == ("x.ckpt", "a", 400)
    assert "1 more tensor" in problem.message
    (tmp_path / "x.ckpt").write_bytes(whole)
    flip(tmp_path / "x.ckpt", torch.ones(15), 3)
    (problem,) = verify(tmp_path / "x.ckpt", full=True).problems
    assert problem.tensor == "turned"


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_manifests_and_chunk_lists_that_are_no_files(copied: Callable[[str], Path], kind: str) -> None:
    """Neither waited for nor followed out of the directory."""
    for name in (manifest.NAME, "__0_0.chunks.json", SHARD, ".metadata"):
        path = copied("presharded")
        os.rename(path / name, path.parent / "kept")
        os.mkfifo(path / name) if kind == "pipe" else os.symlink("../kept", path / name)
        if kind == "link" and name in (SHARD, ".metadata"):  # it may be whole
            with pytest.raises(SourceError, match=f"{name}.* a symbolic link"):
                verify(path, full=True)
        else:
            found = {problem.file for problem in verify(path, full=True).problems}
            assert name in found, (name, found)
        if name in (manifest.NAME, "__0_0.chunks.json"):
            with pytest.raises(SourceError):
                read_presharded(path)
        shutil.rmtree(path)
        (path.parent / "kept").unlink()


def read_presharded(path: Path) -> None:
    manifest.load(manifest.read_bytes(str(path)), manifest.NAME)
    chunk_list_of(str(path), SHARD)


@pytest.mark.parametrize("name", ["open_fd", "pread"])
def test_a_call_that_fails_once_is_a_problem_and_never_half_an_answer(
    name: str, copied: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted while it is opened, a checkpoint of DCP can be whole when its folders are looked at."""
    path, plain = copied("stock"), getattr(storage, name)
    whole = verify(path, full=True, jobs=1)
    for fatal in range(1, 12):
        calls = iter(range(1, 1_000_000))

        def failing(*arguments: Any, calls: Any = calls, fatal: int = fatal, **options: Any) -> Any:
            if next(calls) == fatal:
                raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
            return plain(*arguments, **options)

        monkeypatch.setattr(storage, name, failing)
        with contextlib.suppress(ResourceError):
            result = verify(path, full=True, jobs=1)
            assert not result.ok or result == whole
            assert result.ok or result.is_only_unreadable


@pytest.mark.parametrize("inside", [True, False])
def test_the_manifest_of_an_adapter_has_its_config(tmp_path: Path, inside: bool) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file({"base_model.model.a.lora_A.weight": torch.rand(2, 4)}, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text('{"r": 2}')
    write_file_list(adapter, inside=inside)
    assert verify(adapter, full=True).num_checked_files == 2
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        before = (adapter / name).read_bytes()
        flip_byte(adapter / name, -1)
        (problem,) = verify(adapter, full=True).problems
        assert problem.file == name
        (adapter / name).write_bytes(before)
    os.remove(adapter / "adapter_config.json")
    assert any(problem.file == "adapter_config.json" for problem in verify(adapter).problems)


def test_an_index_stands_for_its_model(tmp_path: Path) -> None:
    first, second = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    weights = {"model.norm.weight": first, "lm_head.weight": second}
    for name, file in weights.items():
        save_file({name: torch.rand(8)}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    write_file_list(index, inside=True)
    flip_byte(tmp_path / second, -1)
    (problem,) = verify(index, full=True).problems
    assert (problem.file, problem.tensor) == (second, "lm_head.weight")


@pytest.mark.parametrize("kind", ["dcp", "torch.save"])
def test_another_save_in_the_same_place_is_seen_without_reading_its_bytes(tmp_path: Path, kind: str) -> None:
    def save(fill: float) -> Path:
        held = {"changed": torch.full((4, 4), fill), "kept": torch.ones(3)}
        held["turned"] = torch.arange(6.0).view(3, 2).T
        if kind == "torch.save":
            torch.save(held, tmp_path / "last.ckpt")
            return tmp_path / "last.ckpt"
        shutil.rmtree(tmp_path / "last", ignore_errors=True)
        dcp.save(held, checkpoint_id=str(tmp_path / "last"), no_dist=True)
        return tmp_path / "last"

    path = save(1.0)
    write_file_list(path)
    assert verify(path).ok
    save(2.0)
    for result in (verify(path), verify(path, full=True)):
        named = [problem for problem in result.problems if problem.tensor is not None]
        assert [problem.tensor for problem in named] == ["changed"]
        assert "bytes outside" not in "".join(problem.message for problem in result.problems)
