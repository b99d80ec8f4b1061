"""Manifests of checkpoints that somebody else made: what is in them, and what verify finds with them."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from shardkit.core.catalog import Catalog, SourceFile
from shardkit.core.dtypes import BY_NAME
from shardkit.core.regions import Region
from shardkit.errors import IntegrityError, ResourceError, SourceError, UsageError
from shardkit.files import manifest, storage
from shardkit.files.digest import FileBytes, crc32
from shardkit.operations.manifest import Digests, write_manifest
from shardkit.operations.preshard import preshard
from shardkit.operations.verify import verify
from shardkit.operations.verify.result import Report, VerifyResult
from tests.formats.dcp.samples import open_catalog
from tests.formats.reading import chunk_list_of
from tests.operations.verify.test_verify import flip, flipped, state, tensors

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
def test_every_file_is_listed_and_every_flipped_byte_found(copied: Callable[[str], Path], name: str) -> None:
    path, pick = copied(name), random.Random(name)
    result = write_manifest(path, sha256=True)
    assert result.manifest == f"{path}.shardkit.json"
    assert (result.num_tensor_digests, result.num_tensors) == (result.num_tensors, result.num_tensors)
    content = json.loads(Path(result.manifest).read_bytes())
    for entry in content["files"]:
        data = at(path, entry["name"]).read_bytes()
        found = (len(data), crc32(data), hashlib.sha256(data).hexdigest())
        assert (entry["size"], entry["crc32"], entry["sha256"]) == found
    assert [entry["name"] for entry in content["files"]] == files_of(path)
    assert (result.num_files, result.read_bytes) == (
        len(content["files"]),
        sum(e["size"] for e in content["files"]),
    )
    whole = verify(path, full=True, manifest=result.manifest)
    assert whole.problems == ()
    assert whole.manifests[-1] == result.manifest
    assert whole.num_unrecorded_chunks == 0
    assert not any("no checksum" in note for note in whole.notes)
    assert whole.num_checked_files == len(content["files"])
    for entry in content["files"]:
        for _ in range(6):
            place = pick.randrange(entry["size"])
            with flipped(at(path, entry["name"]), place, pick.randrange(1, 256)):
                problems = verify(path, full=True, manifest=result.manifest).problems
            assert entry["name"] in {problem.file for problem in problems}, (entry["name"], place)
    assert verify(path, full=True).ok  # it is found beside the checkpoint, or there is one inside


def test_tensors_have_the_same_checksum_in_every_layout(made: Path, tmp_path: Path) -> None:
    expected = {
        name: crc32(value.contiguous().view(-1).view(torch.uint8).numpy())
        for name, value in tensors().items()
    }
    for name in ("hub", "ranks", "presharded"):
        result = write_manifest(made / name, tmp_path / name)
        content = json.loads(Path(result.manifest).read_bytes())
        assert {fqn: entry["crc32"] for fqn, entry in content["tensors"].items()} == expected
    assert content["tensors"]["model.norm.weight"] == {
        "dtype": "bfloat16",
        "shape": [33],
        "crc32": expected["model.norm.weight"],
    }


def test_a_tensor_cut_into_columns_has_none(tmp_path: Path) -> None:
    """Its bytes lie in no order that one pass would give; its chunks are covered by the file's."""
    data = random.Random(0).randbytes(24)
    (tmp_path / "file").write_bytes(data)
    catalog = Catalog(format="x", directory=str(tmp_path))
    catalog.files.append(SourceFile(name="file", path=str(tmp_path / "file"), size=24))
    halves = [Region((0, 0), (2, 3)), Region((0, 3), (2, 3))]
    rows = [Region((2, 0), (2, 3)), Region((0, 0), (2, 3))]  # the second lies first
    catalog.add_tensor_columns("columns", BY_NAME["uint8"], (2, 6), [0, 0], [0, 6], [6, 6], halves)
    catalog.add_tensor_columns("rows", BY_NAME["uint8"], (4, 3), [0, 0], [12, 18], [6, 6], rows)
    digests, report = Digests(catalog, sha256=False), Report()
    digests.take("file", FileBytes(name="file", path=str(tmp_path / "file"), size=24), report)
    assert not report.problems
    found = digests.tensors(catalog)
    assert found["columns"].crc32 is None
    assert found["rows"].crc32 == crc32(data[18:24] + data[12:18])


def test_the_same_bytes_for_the_same_checkpoint(made: Path, tmp_path: Path) -> None:
    """No clock, no path, no trace of the number of threads."""
    shutil.copytree(made / "trainer", tmp_path / "moved")
    one = write_manifest(made / "trainer", tmp_path / "one.json", jobs=1)
    two = write_manifest(tmp_path / "moved", tmp_path / "two.json", jobs=5)
    data = Path(one.manifest).read_bytes()
    assert data == Path(two.manifest).read_bytes()
    assert str(tmp_path).encode() not in data


def test_what_is_missing_what_is_new_and_what_has_another_size(copied: Callable[[str], Path]) -> None:
    path = copied("trainer")
    write_manifest(path)
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
    write_manifest(tmp_path / "out")
    (name,) = (name for name in files_of(tmp_path / "out") if name.endswith(".safetensors"))
    data = (tmp_path / "out" / name).read_bytes()
    flip(tmp_path / "out" / name, data.index(torch.ones(50).numpy().tobytes()) + 7)
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
    write_manifest(out)
    assert verify(out).num_unrecorded_chunks == 0
    catalog = open_catalog(str(out), records=True)
    row = catalog.tensors["model.big.weight"].chunk_ids[1]
    name, start = catalog.files[catalog.chunks.file[row]].name, catalog.chunks.start[row]
    flip(out / name, start + 99)
    (problem,) = verify(out, full=True).problems
    assert (problem.file, problem.tensor, problem.start_byte) == (name, "model.big.weight", start)
    assert problem.region == ((65, 0), (65, 300))


def test_what_is_damaged_gets_none(copied: Callable[[str], Path]) -> None:
    path = copied("stock")
    place = (path / SHARD).read_bytes().index(b"run")
    flip(path / SHARD, place)
    with pytest.raises(IntegrityError, match="damaged") as caught:
        write_manifest(path)
    assert any(SHARD in line and "epoch.name" in line for line in caught.value.problems)
    assert not Path(f"{path}.shardkit.json").exists()
    os.remove(path / SHARD)
    with pytest.raises(IntegrityError, match="damaged"):
        write_manifest(path)


def test_what_changes_while_it_is_read_gets_none(
    copied: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, plain = copied("hub"), storage.preadv

    def grown(fd: int, buffers: Any, start: int) -> int:
        (path / "tokenizer.json").write_text("{ }")
        return plain(fd, buffers, start)

    monkeypatch.setattr(storage, "preadv", grown)
    with pytest.raises(IntegrityError) as caught:
        write_manifest(path, jobs=1)
    assert "changed while it was read" in str(caught.value)
    assert "tokenizer.json" in str(caught.value)


def test_where_it_goes(copied: Callable[[str], Path], tmp_path: Path) -> None:
    path = copied("stock")
    before = files_of(path)
    write_manifest(path)
    with pytest.raises(UsageError, match="exists"):
        write_manifest(path)
    write_manifest(f"{path}/", overwrite=True)
    write_manifest(path / ".metadata", overwrite=True)  # a file that stands for its directory
    with pytest.raises(UsageError, match="lies in"):
        write_manifest(path, path / "mine.json")
    with pytest.raises(UsageError, match="either"):
        write_manifest(path, tmp_path / "x", inside=True)
    with pytest.raises(ResourceError, match="does not exist"):
        write_manifest(path, tmp_path / "absent" / "x")
    (tmp_path / "directory").mkdir()
    with pytest.raises(UsageError, match="not a regular file"):
        write_manifest(path, tmp_path / "directory", overwrite=True)
    assert files_of(path) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["directory", "stock", "stock.shardkit.json"]


def test_a_file_that_is_no_manifest_is_not_replaced(copied: Callable[[str], Path], tmp_path: Path) -> None:
    notes, other = tmp_path / "notes.txt", tmp_path / "m.json"
    notes.write_text('{"a person": "wrote this"}')
    with pytest.raises(UsageError, match="shardkit did not write it"):
        write_manifest(copied("stock"), notes, overwrite=True)
    assert "wrote this" in notes.read_text()
    write_manifest(tmp_path / "stock", other)
    other.write_bytes(other.read_bytes()[:100])  # damaged
    write_manifest(tmp_path / "stock", other, overwrite=True)


def test_a_dry_run_writes_nothing(copied: Callable[[str], Path], tmp_path: Path) -> None:
    path = copied("hub")
    result = write_manifest(path, dry_run=True)
    assert (result.num_files, result.num_tensors, result.num_tensor_digests) == (3, 4, 0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hub"]


def test_inside(copied: Callable[[str], Path]) -> None:
    path = copied("stock")
    writer = verify(path).writer
    write_manifest(path, inside=True)
    write_manifest(path, inside=True, overwrite=True)
    result = verify(path, full=True)
    assert (result.ok, result.manifests, result.writer) == (True, (manifest.NAME,), writer)
    with flipped(path / ".metadata", 60, 1):
        assert ".metadata" in {problem.file for problem in verify(path, full=True).problems}
    flip(path / manifest.NAME, 200)
    assert manifest.NAME in {problem.file for problem in verify(path).problems}
    with pytest.raises(UsageError, match="was written with"):
        write_manifest(copied("presharded"), inside=True, overwrite=True)


def test_somebodys_directory_with_a_manifest_in_it_is_not_replaced(copied: Callable[[str], Path]) -> None:
    ranks, hub = copied("ranks"), copied("hub")
    write_manifest(ranks, inside=True)
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
    with pytest.raises(UsageError, match="cache"):
        write_manifest(home)
    assert f"`shardkit manifest {home} --output FILE`" in verify(home).notes[-1]
    result = write_manifest(home, tmp_path / "m.json")
    assert result.num_files == 3
    assert any("elsewhere.json" in note for note in result.notes)
    assert verify(home, manifest=tmp_path / "m.json", full=True).ok
    assert verify(made / "hub", manifest=tmp_path / "m.json", full=True).ok
    flip(blobs / "tokenizer.json", 1)
    (problem,) = verify(home, manifest=tmp_path / "m.json", full=True).problems
    assert problem.file == "tokenizer.json"


def test_links_and_pipes_are_not_listed_and_never_waited_for(copied: Callable[[str], Path]) -> None:
    path = copied("stock")
    os.mkfifo(path / "pipe")
    os.symlink("/etc/hostname", path / "link")
    os.symlink(SHARD, path / "same")
    (path / ".git").mkdir()
    (path / ".git" / "HEAD").write_text("x")
    result = write_manifest(path)
    assert any("link, pipe, same" in note for note in result.notes)
    assert verify(path, full=True).ok
    os.mkfifo(path / "other")
    os.remove(path / ".metadata")
    os.mkfifo(path / ".metadata")
    found = {problem.file: problem.message for problem in verify(path, full=True).problems}
    assert "does not list it" in found["other"]
    assert "no regular file" in found[".metadata"] or "pipe" in found[".metadata"]


def test_a_manifest_that_lies_elsewhere(copied: Callable[[str], Path], tmp_path: Path) -> None:
    path = copied("hub")
    write_manifest(path, tmp_path / "m.json")
    flip(path / "config.json", 3)
    assert verify(path, full=True).ok  # nobody said which manifest
    (problem,) = verify(path, full=True, manifest=tmp_path / "m.json").problems
    assert problem.file == "config.json"
    with pytest.raises(SourceError, match="no such file"):
        verify(path, manifest=tmp_path / "absent.json")
    flip(tmp_path / "m.json", 40)
    (problem,) = verify(path, manifest=tmp_path / "m.json").problems
    assert problem.file == str(tmp_path / "m.json")


def test_one_beside_what_has_one_inside_is_mentioned(copied: Callable[[str], Path]) -> None:
    path = copied("presharded")
    beside = write_manifest(path).manifest
    result = verify(path)
    assert result.manifests == (manifest.NAME,)
    assert any("--manifest takes it" in note for note in result.notes)
    assert verify(path, manifest=beside).manifests == (manifest.NAME, beside)


def test_what_cannot_be_opened_any_more_is_verified_by_its_manifest(copied: Callable[[str], Path]) -> None:
    path = copied("hub")
    write_manifest(path)
    flip(path / "model.safetensors", 9)  # its header
    flip(path / "tokenizer.json", 1)
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
    flip(path / "__1_0.distcp", os.path.getsize(path / "__1_0.distcp") // 2)
    both = verify(path, full=True)
    assert {problem.file for problem in both.problems} == {SHARD, "__1_0.distcp"}
    assert not both.is_only_unreadable
    with pytest.raises((ResourceError, IntegrityError)):
        write_manifest(path)


def test_metadata_that_cannot_be_read(copied: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path, plain = copied("trainer"), storage.pread
    inode = os.stat(path / "optimizer_0" / ".metadata").st_ino

    def pread(fd: int, nbytes: int, start: int) -> bytes:
        if os.fstat(fd).st_ino == inode:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return plain(fd, nbytes, start)

    flip(
        path / "pytorch_model_fsdp_0" / SHARD,
        (path / "pytorch_model_fsdp_0" / SHARD).read_bytes().index(b"run"),
    )
    monkeypatch.setattr(storage, "pread", pread)
    found = {problem.file: problem.is_unreadable for problem in verify(path, full=True).problems}
    assert found == {"optimizer_0/.metadata": True, f"pytorch_model_fsdp_0/{SHARD}": False}


@pytest.mark.parametrize("name", ["presharded", "trainer", "ranks"])
def test_the_number_of_threads_changes_nothing(copied: Callable[[str], Path], name: str) -> None:
    path = copied(name)
    for file in files_of(path):
        if file.endswith((".distcp", ".pt")):
            flip(path / file, os.path.getsize(path / file) // 2)

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
    flip(path / name, start + 5)
    (problem,) = verify(path, full=True).problems
    assert (problem.file, problem.tensor) == (name, "model.big.weight")
    assert (problem.start_byte, problem.num_bytes) == (start, len(data))
    assert problem.expected != problem.found
    (path / name).write_bytes((path / name).read_bytes()[:-40])
    (problem,) = verify(path, full=True).problems
    assert problem.file == name


def test_a_storage_that_tensors_share(tmp_path: Path) -> None:
    """DeepSpeed's flat partitions, and views: damage is somewhere in all of them."""
    flat = torch.arange(100.0)
    torch.save({"a": flat[:40], "b": flat[40:], "turned": torch.ones(3, 5).t()}, tmp_path / "x.ckpt")
    assert verify(tmp_path / "x.ckpt", full=True).ok
    whole = (tmp_path / "x.ckpt").read_bytes()
    flip(tmp_path / "x.ckpt", whole.index(flat.numpy().tobytes()) + 300)
    (problem,) = verify(tmp_path / "x.ckpt", full=True).problems
    assert (problem.file, problem.tensor, problem.num_bytes) == ("x.ckpt", "a", 400)
    assert "1 more tensor" in problem.message
    (tmp_path / "x.ckpt").write_bytes(whole)
    flip(tmp_path / "x.ckpt", whole.index(torch.ones(15).numpy().tobytes()) + 3)
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


def test_torch_is_not_imported(made: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from shardkit.operations.manifest import write_manifest\n"
        "for number, path in enumerate(sys.argv[2:]): write_manifest(path, f'{sys.argv[1]}/{number}')\n"
        "assert 'torch' not in sys.modules"
    )
    paths = [str(made / name) for name in NAMES]
    subprocess.run([sys.executable, "-c", code, str(tmp_path), *paths], check=True)
    assert len(list(tmp_path.iterdir())) == len(NAMES)


@pytest.mark.parametrize("name", ["open_fd", "pread"])
def test_a_call_that_fails_once_costs_the_manifest_and_never_its_tensors(
    name: str, copied: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted while it is opened, a checkpoint of DCP can be whole when its folders are looked at."""
    path, plain = copied("stock"), getattr(storage, name)
    write_manifest(path, tmp_path / "whole")
    for fatal in range(1, 12):
        calls = iter(range(1, 1_000_000))

        def failing(*arguments: Any, calls: Any = calls, fatal: int = fatal, **options: Any) -> Any:
            if next(calls) == fatal:
                raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
            return plain(*arguments, **options)

        monkeypatch.setattr(storage, name, failing)
        with contextlib.suppress(ResourceError):
            write_manifest(path, tmp_path / "again", overwrite=True, jobs=1)
            assert (tmp_path / "again").read_bytes() == (tmp_path / "whole").read_bytes()


@pytest.mark.parametrize("inside", [True, False])
def test_the_manifest_of_an_adapter_has_its_config(tmp_path: Path, inside: bool) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file({"base_model.model.a.lora_A.weight": torch.rand(2, 4)}, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text('{"r": 2}')
    write_manifest(adapter, inside=inside)
    assert verify(adapter, full=True).num_checked_files == 2
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        before = (adapter / name).read_bytes()
        (adapter / name).write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
        (problem,) = verify(adapter, full=True).problems
        assert problem.file == name
        (adapter / name).write_bytes(before)
    os.remove(adapter / "adapter_config.json")
    assert any(problem.file == "adapter_config.json" for problem in verify(adapter).problems)


def test_an_index_stands_for_its_model(tmp_path: Path) -> None:
    weights = {
        "model.norm.weight": "model-00001-of-00002.safetensors",
        "lm_head.weight": "model-00002-of-00002.safetensors",
    }
    for name, file in weights.items():
        save_file({name: torch.rand(8)}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    result = write_manifest(index, inside=True)
    assert (result.num_files, result.num_tensor_digests) == (3, 2)
    data = (tmp_path / "model-00002-of-00002.safetensors").read_bytes()
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    (problem,) = verify(index, full=True).problems
    assert (problem.file, problem.tensor) == ("model-00002-of-00002.safetensors", "lm_head.weight")


@pytest.mark.parametrize("kind", ["dcp", "torch.save"])
def test_another_save_in_the_same_place_is_seen_without_reading_its_bytes(tmp_path: Path, kind: str) -> None:
    def save(fill: float) -> Path:
        held = {
            "changed": torch.full((4, 4), fill),
            "kept": torch.ones(3),
            "turned": torch.arange(6.0).view(3, 2).T,
        }
        if kind == "torch.save":
            torch.save(held, tmp_path / "last.ckpt")
            return tmp_path / "last.ckpt"
        shutil.rmtree(tmp_path / "last", ignore_errors=True)
        dcp.save(held, checkpoint_id=str(tmp_path / "last"), no_dist=True)
        return tmp_path / "last"

    path = save(1.0)
    write_manifest(path)
    assert verify(path).ok
    save(2.0)
    for result in (verify(path), verify(path, full=True)):
        named = [problem for problem in result.problems if problem.tensor is not None]
        assert [problem.tensor for problem in named] == ["changed"]
        assert "bytes outside" not in "".join(problem.message for problem in result.problems)
