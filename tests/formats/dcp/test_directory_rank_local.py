"""Rank-local metadata, as `dcp.save(..., use_collectives=False)` writes it, is one checkpoint or an error."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.device_mesh import DeviceMesh

from shardkit.errors import SourceError
from shardkit.formats.dcp.directory import is_dcp, open_dcp
from shardkit.operations.verify import verify
from tests.formats.dcp.samples import (
    alter,
    assert_holds,
    open_catalog,
    replicate,
    save,
    save_rank_local,
    shard,
)

FULL = {
    "model.w": torch.arange(28.0).reshape(7, 4),
    "model.few": torch.arange(3).reshape(1, 3),
    "model.columns": torch.arange(15, dtype=torch.bfloat16).reshape(3, 5),
    "model.same": torch.arange(3.0),
    "model.scale": torch.tensor(4.0),
}


def make(mesh: DeviceMesh) -> dict[str, Any]:
    model: dict[str, Any] = {
        "w": shard(FULL["model.w"], mesh),
        "few": shard(FULL["model.few"], mesh),
        "columns": shard(FULL["model.columns"], mesh, dim=1),
        "same": replicate(FULL["model.same"], mesh),
        "scale": FULL["model.scale"],
    }
    return {"model": model, "step": 7}


@pytest.fixture
def directory(tmp_path: Path) -> str:
    return save_rank_local(make, 3, tmp_path / "c")


@pytest.mark.parametrize("world", [1, 3])
def test_all_ranks_make_one_checkpoint(tmp_path: Path, world: int) -> None:
    directory = save_rank_local(make, world, tmp_path / "c")
    assert is_dcp(directory)
    opened = open_dcp(directory)
    assert_holds(opened.select(tuple(opened.catalog.tensors)), FULL)
    assert opened.catalog.objects == ("step",)
    assert opened.catalog.paths is not None
    assert opened.catalog.paths["model.w"] == ("model", "w")
    assert opened.catalog.notes == ()
    assert list(opened.check(tuple(FULL))) == []


def test_names_that_one_rank_alone_has(tmp_path: Path) -> None:
    def stage(mesh: DeviceMesh) -> dict[str, Any]:
        return {f"layers.{mesh.get_rank()}": torch.full((2,), float(mesh.get_rank()))}

    directory = save_rank_local(stage, 3, tmp_path / "c")
    expected = {f"layers.{rank}": torch.full((2,), float(rank)) for rank in range(3)}
    assert_holds(open_catalog(directory, records=True), expected)


def test_more_than_ten_ranks_are_counted_as_numbers(tmp_path: Path) -> None:
    wide = torch.arange(24.0).reshape(12, 2)
    directory = save_rank_local(lambda mesh: {"w": shard(wide, mesh)}, 12, tmp_path / "c")
    assert_holds(open_catalog(directory, records=True), {"w": wide})


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("__1.metadata", r"not of every rank\n  __1\.metadata: no such file"),
        ("__2.metadata", r"model\.w: chunks hold 24 of 28"),
        ("__1_0.distcp", r"__1_0\.distcp: no such file .*model\.w"),
    ],
)
def test_a_missing_file_is_named(directory: str, missing: str, message: str) -> None:
    os.remove(os.path.join(directory, missing))
    with pytest.raises(SourceError, match=message):
        open_catalog(directory)


def test_a_rank_that_did_not_finish(directory: str) -> None:
    os.rename(os.path.join(directory, "__2.metadata"), os.path.join(directory, "__2.metadata.tmp"))
    with pytest.raises(SourceError, match=r"__2\.metadata\.tmp: this rank's save did not finish"):
        open_catalog(directory)


def test_ranks_of_another_world_overlap(directory: str) -> None:
    """Saved by three, then by two into the same directory: the third is stale."""
    save_rank_local(make, 2, Path(directory))
    with pytest.raises(SourceError, match=r"model\.w: chunks .* overlap") as error:
        open_catalog(directory)
    assert "files of a rank may be missing" not in str(error.value.hint)
    result = verify(directory)
    assert not result.ok
    assert result.bring_again == ()
    assert error.value.hint in result.notes


@pytest.mark.parametrize("is_older", [True, False])
def test_files_of_an_older_save_by_more_ranks_are_named(directory: str, is_older: bool) -> None:
    save_rank_local(make, 5, Path(directory))
    save_rank_local(make, 3, Path(directory))
    for name in os.listdir(directory):
        when = 1e9 if is_older and name.startswith(("__3", "__4")) else 2e9
        os.utime(os.path.join(directory, name), (when, when))
    os.remove(os.path.join(directory, "__4_0.distcp"))  # of the save that is not wanted
    with pytest.raises(SourceError, match="overlap") as error:
        open_catalog(directory)
    hint = str(error.value.hint)
    assert hint.startswith("move __3.metadata to __4.metadata and the .distcp files of the same ranks away: ")
    assert "the 3 ranks before them have every tensor whole" in hint
    assert ("interrupted" in hint) is not is_older


def test_a_missing_rank_behind_whole_stages_is_missing(tmp_path: Path) -> None:
    """The ranks of the first stage have every tensor of theirs whole, and still are not all."""

    def stage(mesh: DeviceMesh) -> dict[str, Any]:
        number, half = divmod(mesh.get_rank(), 2)
        return {f"layers.{number}": shard(torch.arange(8.0), mesh) if number else torch.ones(2), "half": half}

    directory = save_rank_local(stage, 4, tmp_path / "c")
    with pytest.raises(SourceError, match="do not make up the tensor") as error:
        open_catalog(directory)
    assert "files of a rank may be missing" in str(error.value.hint)


def test_a_damaged_metadata_is_never_replaced_by_a_rank_s(directory: str) -> None:
    Path(directory, ".metadata").write_bytes(b"damaged")
    with pytest.raises(SourceError, match=r"^\.metadata is damaged"):
        open_catalog(directory)


def test_beside_metadata_they_are_left_alone(directory: str) -> None:
    save({"other": torch.ones(2)}, Path(directory))
    catalog = open_catalog(directory, records=True)
    assert_holds(catalog, {"other": torch.ones(2)})
    assert catalog.notes[0].startswith(
        "3 rank-local metadata files of another save were left alone: __0.metadata"
    )


def dtype(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.w"].properties.dtype = torch.float64


def shape(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.w"].size = torch.Size([8, 4])


def path(metadata: Metadata) -> None:
    metadata.planner_data["model.w"] = ("elsewhere",)


def kind(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.w"] = metadata.state_dict_metadata["step"]
    index = next(index for index in metadata.storage_data if index.fqn == "model.w")
    del metadata.storage_data[index]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dtype, r"model\.w: __1\.metadata has float64 \[7, 4\], another rank float32 \[7, 4\]"),
        (shape, r"model\.w: __1\.metadata has float32 \[8, 4\]"),
        (path, r"model\.w: __1\.metadata gives it another path"),
        (kind, r"model\.w: an object in __1\.metadata, a tensor elsewhere"),
    ],
)
def test_ranks_that_contradict_each_other(
    directory: str, change: Callable[[Metadata], None], message: str
) -> None:
    alter(directory, change, "__1.metadata")
    with pytest.raises(SourceError, match=message):
        open_catalog(directory)


def test_a_rank_s_metadata_may_not_be_a_pipe(directory: str) -> None:
    os.remove(os.path.join(directory, "__1.metadata"))
    os.mkfifo(os.path.join(directory, "__1.metadata"))
    with pytest.raises(SourceError, match=r"__1\.metadata: expected a regular file"):
        open_catalog(directory)
