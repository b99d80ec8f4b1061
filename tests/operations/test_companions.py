"""What lies beside the shards: copied as it is, named where it is not, and never half of it."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import shardkit
from shardkit.errors import IntegrityError, ResourceError, SourceError, UsageError
from shardkit.operations import companions, describe
from shardkit.operations.companions import copy_file, survey
from tests.contents import contents
from tests.operations.stops import failing, interrupt

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning")


def save(path: Path, **trees: Any) -> None:
    dcp.save(trees, checkpoint_id=path, no_dist=True)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path, weight = tmp_path / "checkpoint-2", torch.arange(24.0).reshape(6, 4)
    save(path / "pytorch_model_fsdp_0", model={"weight": weight})
    save(
        path / "optimizer_0", optimizer={"state": {"weight": {"exp_avg": weight, "step": torch.tensor(3.0)}}}
    )
    (path / "scheduler.pt").write_bytes(b"schedule")
    return path


def test_files_keep_what_they_are(source: Path, tmp_path: Path) -> None:
    (source / "run.sh").write_text("#!/bin/sh\n")
    (source / "run.sh").chmod(0o750)
    (source / "empty/inner").mkdir(parents=True)
    (source / "a/b").mkdir(parents=True)
    (source / "a/b/notes\x1b[31m").write_text("deep")
    with (source / "sparse.bin").open("wb") as file:
        file.truncate(1 << 24)
        file.seek(5 << 20)
        file.write(b"in the middle")
    out = tmp_path / "out"
    result = shardkit.reshard(source, str(out), world_size=2)
    assert result.copied == ("a/b/notes\x1b[31m", "run.sh", "scheduler.pt", "sparse.bin")
    for name in result.copied:
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert os.access(out / "run.sh", os.X_OK)
    assert not (out / "scheduler.pt").stat().st_mode & 0o111
    assert (out / "empty/inner").is_dir()


def test_what_is_no_file_is_named(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(source / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        monkeypatch.chdir(source)  # the address of a socket is short
        listening.bind("sock")
        (source / "away").symlink_to("/etc/hostname")
        (source / "folder").symlink_to("optimizer_0")
        result = shardkit.reshard(source, str(tmp_path / "out"), world_size=2)
    assert result.copied == ("scheduler.pt",)
    assert "2 symbolic links are not copied: away, folder" in result.notes
    assert "pipes, sockets and devices are not copied: pipe, sock" in result.notes


def test_links_beside_are_copied_on_request(source: Path, tmp_path: Path) -> None:
    (tmp_path / "store").write_text("x")
    (source / "away").symlink_to(tmp_path / "store")
    (source / "folder").symlink_to("optimizer_0")
    (source / "dangling").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    (source / "piped").symlink_to(tmp_path / "pipe")
    result = shardkit.reshard(source, str(tmp_path / "out"), world_size=2, follow_links=True)
    assert result.copied == ("away", "scheduler.pt")
    assert "2 symbolic links are not copied: dangling, folder" in result.notes
    assert "pipes, sockets and devices are not copied: piped" in result.notes
    copied = tmp_path / "out" / "away"
    assert (copied.read_text(), copied.is_symlink()) == ("x", False)
    assert shardkit.verify(tmp_path / "out", full=True).ok


def test_dcp_directories_are_found_however_deep(tmp_path: Path) -> None:
    """NeMo-RL: step_3/policy/weights/model, policy/optimizer/optim."""
    path, weight = tmp_path / "step_3", torch.ones(6, 4)
    save(path / "policy/weights/model", model={"weight": weight})
    save(path / "policy/optimizer/optim", optim={"state": {"weight": {"custom": weight}}})
    result = shardkit.reshard(path, str(tmp_path / "out"), world_size=3, dtype="bf16")
    assert result.folders == ("policy/optimizer/optim", "policy/weights/model")
    assert (result.copied, result.num_tensors, result.num_optimizer_tensors) == ((), 1, 1)
    assert (tmp_path / "out/policy/weights/model/__2_0.distcp").exists()


def test_several_models_are_all_resharded(source: Path, tmp_path: Path) -> None:
    save(source / "pytorch_model_fsdp_1", model={"critic": torch.ones(6)})
    save(source / "optimizer_1", optimizer={"state": {"critic": {"exp_avg": torch.ones(6)}}})
    result = shardkit.reshard(source.parent, str(tmp_path / "out"), world_size=3)
    assert result.folders == ("optimizer_0", "optimizer_1", "pytorch_model_fsdp_0", "pytorch_model_fsdp_1")
    assert result.checkpoint == str(source)


def test_an_optimizer_that_was_not_saved_to_its_end_is_refused(source: Path, tmp_path: Path) -> None:
    (source / "optimizer_0/.metadata").rename(source / "optimizer_0/.metadata.tmp")
    with pytest.raises(SourceError, match="the save did not finish in 1 folder") as caught:
        shardkit.reshard(source, str(tmp_path / "out"), world_size=2)
    assert caught.value.problems == ("optimizer_0: .distcp files without .metadata",)


def test_weights_that_fit_any_world_are_named_and_not_converted(source: Path, tmp_path: Path) -> None:
    """NeMo Automodel: model/ holds torch's safetensors shards, optim/ is DCP."""
    run = tmp_path / "epoch_0_step_2"
    with pytest.warns(UserWarning, match="no_dist|torch.distributed"):
        dcp.save(
            {"weight": torch.ones(4, 4)},
            storage_writer=dcp.HuggingFaceStorageWriter(str(run / "model"), save_distributed=True),
            no_dist=True,
        )
    save(run / "optim", optim={"state": {"weight": {"exp_avg": torch.ones(4, 4)}}})
    result = shardkit.reshard(run, str(tmp_path / "out"), world_size=2)
    assert any("weights in model are copied as they are" in note for note in result.notes)
    assert contents(tmp_path / "out/model") == contents(run / "model")
    with pytest.raises(UsageError, match="the weights in model are copied"):
        shardkit.reshard(run, str(tmp_path / "other"), world_size=2, dtype="bf16")


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "meta.pt"])
def test_a_file_stands_for_its_checkpoint(tmp_path: Path, name: str) -> None:
    """Byte entries and files beside come along, and nothing is written into it."""
    path = tmp_path / "last.ckpt"
    save(path, state_dict={"weight": torch.ones(6)}, optimizer_0={"param_groups": [{"lr": 0.1}]})
    torch.save({"epoch": 3}, path / "meta.pt")
    result = shardkit.reshard(path / name, str(tmp_path / "out"), world_size=2)
    assert result.copied == ("meta.pt",)
    assert result.num_objects == 1
    assert result.checkpoint == str(path)
    with pytest.raises(UsageError, match="inside the source"):
        shardkit.reshard(path / name, str(path / "out"), world_size=2)


def test_entries_of_single_ranks_are_named(tmp_path: Path) -> None:
    path = tmp_path / "step-2"
    save(path, weight=torch.ones(6), dataloader={"dp_rank_0": b"a", "dp_rank_1": b"b", "world_size": 2})
    result = shardkit.reshard(path, str(tmp_path / "out"), world_size=3)
    assert any("dataloader.dp_rank_0, dataloader.dp_rank_1" in note for note in result.notes)


def test_a_file_that_changes_meanwhile(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def copy_later(path: str, file: Any, directory: str, **options: bool) -> tuple[int | None, str | None]:
        (source / "scheduler.pt").write_bytes(b"rewritten")
        return copy_file(path, file, directory, **options)

    monkeypatch.setattr(describe, "copy_file", copy_later)
    with pytest.raises(IntegrityError, match=r"scheduler\.pt changed"):
        shardkit.reshard(source, str(tmp_path / "out"), world_size=2)
    assert sorted(os.listdir(tmp_path)) == [".out.shardkit", "checkpoint-2"], "its shards are finished"


@pytest.mark.parametrize("replacement", ["pipe", "gone", "link"])
def test_a_file_that_is_replaced_never_hangs(source: Path, tmp_path: Path, replacement: str) -> None:
    (file,) = survey(str(source)).files
    (source / file.name).unlink()
    if replacement == "pipe":
        os.mkfifo(source / file.name)
    elif replacement == "link":
        (source / file.name).symlink_to("/etc/hostname")
    (tmp_path / "target").mkdir()
    with pytest.raises(IntegrityError, match="changed"):
        copy_file(str(source / file.name), file, str(tmp_path / "target"))


def test_a_full_disk_while_files_are_copied(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(companions, "_copy_data", failing(errno.ENOSPC))
    with pytest.raises(ResourceError, match=r"cannot copy scheduler\.pt: No space left"):
        shardkit.reshard(source, str(tmp_path / "out"), world_size=2)
    assert sorted(os.listdir(tmp_path)) == [".out.shardkit", "checkpoint-2"], "its shards are finished"


def test_ctrl_c_while_files_are_copied_keeps_the_shards(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(companions, "_copy_data", interrupt)
        with pytest.raises(shardkit.Interrupted):
            shardkit.reshard(source, str(tmp_path / "out"), world_size=2)
    result = shardkit.reshard(source, str(tmp_path / "out"), world_size=2)
    assert result.resumed_files == 4
    assert (tmp_path / "out/scheduler.pt").read_bytes() == b"schedule"
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-2", "out"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read_is_said_before_a_byte_moves(source: Path, tmp_path: Path) -> None:
    (source / "scheduler.pt").chmod(0)
    with pytest.raises(ResourceError, match="1 file beside the checkpoint cannot be read"):
        shardkit.reshard(source, str(tmp_path / "out"), world_size=2, dry_run=True)
    (source / "scheduler.pt").chmod(0o600)
    (source / "closed").mkdir(mode=0)
    with pytest.raises(ResourceError, match="closed cannot be listed"):
        shardkit.reshard(source, str(tmp_path / "out"), world_size=2, dry_run=True)


def test_a_directory_that_cannot_be_listed(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source / "closed").mkdir()
    scandir = os.scandir

    def refusing(path: Any) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(ResourceError, match="closed cannot be listed: Permission denied"):
        survey(str(source))
