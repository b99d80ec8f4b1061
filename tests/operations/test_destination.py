"""What --overwrite of a sharded checkpoint may replace, and what never."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import shardkit
from shardkit.core.mesh import parse_mesh
from shardkit.errors import ResourceError, UsageError
from shardkit.operations.destination import check_replaceable, default_output, is_sharded_checkpoint
from tests.operations.consolidate.checkpoints import hub, save, weights

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:torch.distributed is disabled")


@pytest.fixture
def trainers(tmp_path: Path) -> Path:
    """Model and optimizer in folders of their own, and a file beside."""
    home = tmp_path / "run" / "checkpoint-2"
    save({"model": weights()}, home / "pytorch_model_fsdp_0")
    save({"optimizer": {"x": torch.zeros(2)}}, home / "optimizer_0")
    (home / "trainer_state.json").write_text("{}")
    return home


def test_what_reshard_wrote_in_folders_is_replaced(trainers: Path, tmp_path: Path) -> None:
    out = tmp_path / "checkpoint-2"
    shardkit.reshard(trainers, str(out), world_size=3)
    shardkit.reshard(trainers, str(out), world_size=2, overwrite=True)
    assert len(list(out.glob("pytorch_model_fsdp_0/*.distcp"))) == 2


def test_what_a_trainer_wrote_in_folders_is_not(trainers: Path, tmp_path: Path) -> None:
    assert is_sharded_checkpoint(str(trainers))
    shardkit.reshard(trainers, str(tmp_path / "checkpoint-2"), world_size=3)
    shutil.rmtree(trainers / "optimizer_0")
    shutil.copytree(tmp_path / "checkpoint-2" / "optimizer_0", trainers / "optimizer_0")  # half of it is ours
    assert is_sharded_checkpoint(str(trainers))


def test_a_run_around_one_is_not(trainers: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    shardkit.reshard(trainers, str(tmp_path / "other" / "checkpoint-2"), world_size=3)
    shardkit.reshard(trainers / "pytorch_model_fsdp_0", str(tmp_path / "other" / "model"), world_size=3)
    assert is_sharded_checkpoint(str(tmp_path / "other"))


def test_a_hub_model_is_not(trainers: Path, tmp_path: Path) -> None:
    out = shardkit.consolidate(trainers, str(tmp_path / "out"), manifest=True).output
    with pytest.raises(UsageError, match="holds a Hub model"):
        shardkit.reshard(trainers, out, world_size=2, overwrite=True)
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_what_another_run_puts_there_between_two_looks_is_looked_at_anew(tmp_path: Path) -> None:
    ours, others, seen = tmp_path / "ours", tmp_path / "others", list[str]()
    for path in (ours, others):
        path.mkdir()
        (path / path.name).touch()

    def why_not(path: str) -> str | None:
        seen.append("".join(os.listdir(path)))
        if len(seen) == 1:
            ours.rename(tmp_path / "aside")
            others.rename(ours)
            return "was half looked at"
        return None

    check_replaceable(str(ours), "ours", overwrite=True, why_not=why_not)
    assert seen == ["ours", "others"]


def test_what_may_not_be_replaced_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is somebody else's: it is not replaced"):
        check_replaceable(str(tmp_path), "it", overwrite=True, why_not=lambda _: "is somebody else's")


@pytest.mark.parametrize(
    ("label", "mesh", "name"),
    [
        ("last", "dp_shard=3", "last-dp_shard3"),
        ("last-dp_shard2", "dp_shard=3", "last-dp_shard3"),
        ("last-dp_replicate2-dp_shard16", "dp_shard=4,tp=2", "last-dp_shard4-tp2"),
        ("last-dp_shard2-hf", "dp_shard=3", "last-dp_shard2-hf-dp_shard3"),
        ("last-dp_shard2", "dp_shard=2", "last-dp_shard2-dp_shard2"),
        ("-tp2", "dp_shard=2", "-tp2-dp_shard2"),
    ],
)
def test_a_mesh_in_a_default_name_takes_the_place_of_another(label: str, mesh: str, name: str) -> None:
    assert default_output(label, None, parse_mesh(mesh, None)) == name


def test_what_is_resharded_again_has_the_name_of_its_mesh_alone(
    trainers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = shardkit.reshard(trainers, world_size=3).output
    assert shardkit.reshard(first, world_size=2).output == str(tmp_path / "checkpoint-2-dp_shard2")


def test_of_two_runs_with_one_default_name_the_second_is_told_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("run1", "run2", "run3/run1"):
        save({"model": weights()}, tmp_path / place / "step-30")
    monkeypatch.chdir(tmp_path)
    name = Path(shardkit.reshard("run1/step-30", world_size=2).output).name
    assert name == "step-30-dp_shard2"
    with pytest.raises(UsageError, match="step-30-dp_shard2 exists") as caught:
        shardkit.reshard("run2", world_size=2)  # as it stands for its newest checkpoint
    wording = "choose another name, such as {}, or replace it with overwrite=True"
    assert caught.value.hint == wording.format("run2-step-30-dp_shard2")
    for source, other in (
        ("run1/step-30", "run1-step-30-dp_shard2"),
        ("run2/step-30", "run2-step-30-dp_shard2"),
        ("run3/run1/step-30", "run3-run1-step-30-dp_shard2"),
    ):
        with pytest.raises(UsageError) as caught:
            shardkit.reshard(source, world_size=2)
        assert caught.value.hint == wording.format(other)
        shardkit.reshard(source, other, world_size=2)
    with pytest.raises(UsageError) as caught:
        shardkit.reshard("run2/step-30", name, world_size=2)  # a person's own
    assert caught.value.hint == "choose another name, or replace it with overwrite=True"


def test_of_two_models_with_one_default_name_the_second_is_told_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("run1", "run2"):
        (tmp_path / place).mkdir()
        hub(tmp_path / place / "final", weights())
    monkeypatch.chdir(tmp_path)
    shardkit.preshard("run1/final", world_size=2, wrap="none")
    for source in ("run2/final", "run2/final/model.safetensors"):
        with pytest.raises(UsageError, match="final-dp_shard2 exists") as caught:
            shardkit.preshard(source, world_size=2, wrap="none")
        assert "such as run2-final-dp_shard2, or" in (caught.value.hint or "")


def test_an_empty_directory_that_no_rename_can_replace(
    trainers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before anything is moved."""
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to("out")
    monkeypatch.chdir(tmp_path / "out")
    for place, why in (
        (tmp_path / "link", "is a symbolic link"),
        (Path("/proc"), "is a mount point"),
        (tmp_path / "out", "is the working directory"),
    ):
        with pytest.raises(UsageError, match=why):
            shardkit.reshard(trainers, str(place), world_size=2)
    assert list((tmp_path / "out").iterdir()) == []


def test_an_empty_path_is_not_the_default(
    trainers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script whose variable is not set must not write somewhere else."""
    monkeypatch.chdir(tmp_path)
    hub(tmp_path / "model", weights())
    for write in (
        lambda: shardkit.preshard("model", "", world_size=2),
        lambda: shardkit.consolidate(trainers, ""),
        lambda: shardkit.reshard(trainers, "", world_size=2),
    ):
        with pytest.raises(UsageError, match="the output is an empty path"):
            write()
    assert sorted(os.listdir(tmp_path)) == ["model", "run"]


def test_the_command_that_makes_a_missing_parent_works(trainers: Path, tmp_path: Path) -> None:
    output = tmp_path / "a b" / "it's $HOME" / "out"
    with pytest.raises(ResourceError, match="does not exist") as caught:
        shardkit.consolidate(trainers, output)
    subprocess.run(["bash", "-c", str(caught.value.hint).partition(": ")[2]], check=True, timeout=60)
    assert shardkit.consolidate(trainers, output).output == str(output)
