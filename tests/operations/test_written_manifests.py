"""The manifests of preshard, consolidate and reshard: every file in them, sha256, and lying elsewhere."""

from __future__ import annotations

import hashlib
import json
import os
import random
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit.core.catalog import FileStamp
from shardkit.errors import Interrupted, ResourceError, UsageError
from shardkit.files import manifest
from shardkit.files.digest import crc32
from shardkit.operations import describe_dcp
from shardkit.operations.companions import FileToCopy, copy_file
from shardkit.operations.consolidate import run
from shardkit.operations.verify import verify
from tests.bits import flip_byte
from tests.formats.reading import chunk_list_of
from tests.operations.consolidate.checkpoints import hub, save, training_state, weights
from tests.operations.reshard.test_reshard import trainer_directory
from tests.operations.stops import interrupt
from tests.operations.verify.test_verify import flipped

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return hub(tmp_path / "model", weights(), tokenizer__json='{"a": 1}', README__md="# model")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(training_state(weights()), tmp_path / "step-3")


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A model without a config, whose layout is told from names and shapes alone."""
    return hub(tmp_path / "plain", weights(), None)


def names_in(directory: Path) -> list[str]:
    return sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file())


def entries(content: Mapping[str, Any], folder: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (name, entry) of every file that a manifest lists."""
    for entry in (*content["files"], *content.get("others", ())):
        yield os.path.join(folder, entry["name"]), entry
        if "chunks" in entry:
            yield os.path.join(folder, entry["chunks"]["name"]), entry["chunks"]
    if "metadata" in content:
        yield os.path.join(folder, content["metadata"]["name"]), content["metadata"]


def assert_all_listed(directory: Path, *folders: str, sha256: bool) -> None:
    """Every file but the manifests is in one, with what it holds."""
    listed: dict[str, Mapping[str, Any]] = {}
    for folder in folders:
        content = manifest.load(manifest.read_bytes(str(directory / folder)), manifest.NAME)
        assert content is not None
        listed |= dict(entries(content, folder))
    own = {os.path.join(folder, manifest.NAME) for folder in folders}
    assert listed.keys() | own == set(names_in(directory))
    for name, entry in listed.items():
        data = (directory / name).read_bytes()
        assert (entry["size"], entry["crc32"]) == (len(data), crc32(data)), name
        assert entry.get("sha256") == (hashlib.sha256(data).hexdigest() if sha256 else None), name


def assert_flips_found(directory: Path, **options: Any) -> None:
    pick = random.Random(0)
    for name in names_in(directory):
        size = os.path.getsize(directory / name)
        for _ in range(3):
            with flipped(directory / name, pick.randrange(size), pick.randrange(1, 256)):
                result = verify(directory, full=True, **options)
            assert name in {problem.file for problem in result.problems}, name
    assert verify(directory, full=True, **options).ok


@pytest.mark.parametrize("sha256", [False, True])
def test_all_of_preshard(plain: Path, tmp_path: Path, sha256: bool) -> None:
    shardkit.preshard(plain, tmp_path / "out", world_size=2, wrap="none", sha256=sha256)
    assert_all_listed(tmp_path / "out", "", sha256=sha256)
    if sha256:
        assert_flips_found(tmp_path / "out")


@pytest.mark.parametrize("sha256", [False, True])
def test_all_of_consolidate(checkpoint: Path, model: Path, tmp_path: Path, sha256: bool) -> None:
    out = tmp_path / "out"
    shardkit.consolidate(checkpoint, out, base=model, manifest=True, sha256=sha256, max_shard_size=9000)
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= set(names_in(out))
    assert_all_listed(out, "", sha256=sha256)
    assert_flips_found(out)
    os.remove(out / "tokenizer.json")
    (problem,) = verify(out).problems
    assert (problem.file, "no such file" in problem.message) == ("tokenizer.json", True)
    (out / "tokenizer.json").write_text('{"a": 1}')
    (out / "notes.txt").write_text("people put what they like beside a model")
    result = verify(out)
    assert result.ok
    assert any("notes.txt" in warning for warning in result.warnings)


@pytest.mark.parametrize("sha256", [False, True])
def test_all_of_reshard_with_folders(tmp_path: Path, sha256: bool) -> None:
    source, out = trainer_directory(tmp_path), tmp_path / "out"
    shardkit.reshard(source, out, world_size=2, sha256=sha256)
    assert_all_listed(out, "pytorch_model_fsdp_0", "optimizer_0", "", sha256=sha256)
    assert_flips_found(out)
    os.remove(out / "scheduler.pt")
    (out / "new").write_text("")
    found = {problem.file: problem.message for problem in verify(out).problems}
    assert "no such file" in found["scheduler.pt"]
    assert "does not list it" in found["new"]


def test_a_resharded_checkpoint_that_is_resharded_gets_its_own(tmp_path: Path) -> None:
    shardkit.reshard(trainer_directory(tmp_path), tmp_path / "one", world_size=2)
    result = shardkit.reshard(tmp_path / "one", tmp_path / "two", world_size=3)
    assert manifest.NAME not in result.copied
    assert_all_listed(tmp_path / "two", "pytorch_model_fsdp_0", "optimizer_0", "", sha256=False)
    assert verify(tmp_path / "two", full=True).ok
    shardkit.reshard(tmp_path / "one", tmp_path / "two", world_size=2, overwrite=True)
    assert verify(tmp_path / "two", full=True).ok


def test_all_of_reshard_with_files_beside_the_shards(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "train_state.json").write_text('{"step": 3}')
    shardkit.reshard(checkpoint, tmp_path / "out", world_size=2)
    assert_all_listed(tmp_path / "out", "", sha256=False)
    assert_flips_found(tmp_path / "out")


def test_records_pass_the_checks_of_other_zip_readers(checkpoint: Path, tmp_path: Path) -> None:
    """What `unzip -t` does, on each record of a resharded checkpoint, byte entries among them or not."""
    shardkit.reshard(checkpoint, tmp_path / "out", world_size=2, optimizer_dtype="bf16")
    num_records = 0
    for number in range(2):
        data = (tmp_path / "out" / f"__{number}_0.distcp").read_bytes()
        for chunk in chunk_list_of(str(tmp_path / "out"), f"__{number}_0.distcp").chunks:
            record = tmp_path / "record"
            record.write_bytes(data[chunk.record_start : chunk.record_start + chunk.record_nbytes])
            with zipfile.ZipFile(record) as archive:
                assert archive.testzip() is None
                infos = {info.filename.partition("/")[2]: info.CRC for info in archive.infolist()}
            assert infos["data/0"] == chunk.crc32
            num_records += 1
    assert num_records > 60


def test_sha256_without_crc32(plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shardkit.preshard(plain, out, world_size=2, wrap="none", digest="none", sha256=True)
    assert verify(out, full=True).num_unrecorded_chunks == 0
    flip_byte(out / "__1_0.distcp", chunk_list_of(str(out), "__1_0.distcp").chunks[0].data_start)
    (problem,) = verify(out, full=True).problems
    assert (problem.file, problem.message) == ("__1_0.distcp", "sha256 of the file")


def test_sha256_of_what_describes_the_rest(plain: Path, tmp_path: Path) -> None:
    """It is compared with the CRC-32, in one reading; somebody who mends the one must mend the other."""
    out = tmp_path / "out"
    shardkit.preshard(plain, out, world_size=2, wrap="none", sha256=True)
    content = manifest.load(manifest.read_bytes(str(out)), manifest.NAME)
    for entry in (content["metadata"], content["files"][1]["chunks"]):
        entry["sha256"] = "0" * 64
    (out / manifest.NAME).write_bytes(manifest.sign(content))
    found = {problem.file: problem.message for problem in verify(out).problems}
    assert found == dict.fromkeys((".metadata", "__1_0.chunks.json"), "sha256 of the file")


@pytest.mark.parametrize("job", ["preshard", "consolidate"])
def test_resumed_with_the_same_manifest(
    job: str, model: Path, plain: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(out: Path) -> Any:
        if job == "preshard":
            return shardkit.preshard(plain, out, world_size=3, wrap="none", sha256=True)
        return shardkit.consolidate(
            checkpoint, out, base=model, manifest=True, sha256=True, max_shard_size=9000
        )

    write(tmp_path / "whole")
    described = describe_dcp.DcpDescriptions if job == "preshard" else run.HubDescriptions
    with monkeypatch.context() as patch:
        patch.setattr(described, "finish", interrupt)
        with pytest.raises(Interrupted):
            write(tmp_path / "out")
    assert write(tmp_path / "out").resumed_files > 1
    assert (tmp_path / "out" / manifest.NAME).read_bytes() == (
        tmp_path / "whole" / manifest.NAME
    ).read_bytes()


def test_a_manifest_outside_of_the_model(checkpoint: Path, model: Path, tmp_path: Path) -> None:
    out, file = tmp_path / "out", tmp_path / "kept" / "out.json"
    file.parent.mkdir()
    options: dict[str, Any] = {"base": model, "sha256": True, "manifest_file": file}
    shardkit.consolidate(checkpoint, out, dry_run=True, **options)
    assert not file.exists()
    shardkit.consolidate(checkpoint, out, **options)
    assert manifest.NAME not in names_in(out)
    assert json.loads(file.read_bytes())["kind"] == "hub"
    assert_flips_found(out, manifest=file)
    assert verify(out).manifests == ()
    with pytest.raises(UsageError, match=r"out\.json exists"):
        shardkit.consolidate(checkpoint, tmp_path / "more", **options)
    assert not (tmp_path / "more").exists()
    shardkit.consolidate(checkpoint, out, **options, overwrite=True)
    assert verify(out, manifest=file, full=True).ok


def test_where_a_manifest_may_not_go(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="lies in"):
        shardkit.consolidate(checkpoint, tmp_path / "out", manifest_file=tmp_path / "out" / "m.json")
    with pytest.raises(UsageError, match="lies in"):
        shardkit.consolidate(checkpoint, tmp_path / "out", manifest_file=checkpoint / "m.json")
    with pytest.raises(ResourceError, match="does not exist"):
        shardkit.consolidate(checkpoint, tmp_path / "out", manifest_file=tmp_path / "absent" / "m.json")
    with pytest.raises(UsageError, match="--manifest"):
        shardkit.consolidate(checkpoint, tmp_path / "out", sha256=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-3"]


def test_digests_of_a_file_with_holes(tmp_path: Path) -> None:
    """Holes are copied as the zeros that a reader finds there."""
    with open(tmp_path / "file", "wb") as file:
        file.seek(3 << 20)
        file.write(b"x" * 5000)
        file.truncate(5 << 20)
    status = os.stat(tmp_path / "file")
    stamp = (status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev)
    beside = FileToCopy("file", FileStamp(*stamp), False)
    data = (tmp_path / "file").read_bytes()
    for name in ("out", "other"):
        (tmp_path / name).mkdir()
    found = copy_file(str(tmp_path / "file"), beside, str(tmp_path / "out"), digest=True, sha256=True)
    assert found == (crc32(data), hashlib.sha256(data).hexdigest())
    assert (tmp_path / "out" / "file").read_bytes() == data
    assert copy_file(str(tmp_path / "file"), beside, str(tmp_path / "other")) == (None, None)
