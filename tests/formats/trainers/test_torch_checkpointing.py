"""torch_checkpointing's directories, written by hand as version 0.1.1 writes them."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from shardkit import formats
from shardkit.errors import SourceError
from shardkit.formats.registry import format_of
from shardkit.formats.trainers.torch_checkpointing import is_torch_checkpointing, open_torch_checkpointing
from tests.formats.rankfiles.samples import copy_ranks
from tests.formats.reading import contents, expected


def describe(directory: Path, items: dict[str, Any], num_ranks: int = 4) -> None:
    """Write `metadata.pkl`: of an item, how its files are named; None for the default."""
    metadata = {
        name: {
            "nested_path_to_metadata": {'["a"]': [{"sharding_metadata": {"type": "T"}, "ranks": (0, 1)}]},
            "rank_to_layout_info": {rank: layout for rank in range(num_ranks)},
        }
        for name, layout in items.items()
    }
    content = {"metadata": metadata, "world_size": num_ranks, "version": "2.0"}
    (directory / "metadata.pkl").write_bytes(pickle.dumps(content))


@pytest.fixture
def saved(rank_files: Path, tmp_path: Path) -> Path:
    """A model of four ranks, and an item without tensors."""
    copy_ranks("fsdp2", rank_files, lambda rank: tmp_path / f"model_{rank}.pt")
    for rank in range(4):
        torch.save(3, tmp_path / f"step_{rank}.pt")
    describe(tmp_path, {"model": None})
    return tmp_path


@pytest.mark.dist
def test_one_item_keeps_its_names(saved, rank_files):
    assert format_of(str(saved)) == "torch-checkpointing"
    checkpoint = formats.open(str(saved))
    assert contents(checkpoint) == expected(torch.load(rank_files / "fsdp2.truth"))
    assert checkpoint.contents.roots == {"model": ()}
    assert ("step_2.pt", "holds no tensors") in checkpoint.remarks.skipped


@pytest.mark.dist
def test_several_items(saved, rank_files):
    for rank in range(4):
        shutil.copy(saved / f"model_{rank}.pt", saved / f"optimizer_{rank}.pt")
    describe(saved, {"model": None, "optimizer": None})
    checkpoint = open_torch_checkpointing(str(saved))
    truth = torch.load(rank_files / "fsdp2.truth")
    twice = {f"{item}.{name}": tensor for item in ("model", "optimizer") for name, tensor in truth.items()}
    assert contents(checkpoint) == expected(twice)
    assert checkpoint.contents.roots == {"model": ("model",), "optimizer": ("optimizer",)}


@pytest.mark.dist
def test_other_names_of_files(saved, rank_files):
    for rank in range(4):
        (saved / f"rank_{rank}").mkdir()
        os.rename(saved / f"model_{rank}.pt", saved / f"rank_{rank}" / "weights.pt")
    layout = {"file_path": "rank_{rank}/weights.pt", "serialization_format": {"type": "TorchSerialization"}}
    describe(saved, {"model": layout})
    checkpoint = open_torch_checkpointing(str(saved))
    assert contents(checkpoint) == expected(torch.load(rank_files / "fsdp2.truth"))


@pytest.mark.dist
def test_missing_files_are_named(saved):
    (saved / "model_1.pt").unlink()
    (saved / "model_2.pt").unlink()
    with pytest.raises(SourceError) as caught:
        open_torch_checkpointing(str(saved))
    assert caught.value.problems == (
        "item model, rank 1: model_1.pt is missing",
        "item model, rank 2: model_2.pt is missing",
    )


@pytest.mark.parametrize("path", ["../model.pt", "/etc/passwd", "link/model.pt"])
def test_paths_stay_inside(tmp_path, path):
    directory = tmp_path / "saved"
    directory.mkdir()
    (tmp_path / "model.pt").touch()
    (directory / "link").symlink_to(tmp_path)
    layout = {"file_path": path, "serialization_format": {"type": "TorchSerialization"}}
    describe(directory, {"model": layout}, 1)
    with pytest.raises(SourceError) as caught:
        open_torch_checkpointing(str(directory))
    assert "lies outside" in caught.value.problems[0]


def test_another_serialization(tmp_path):
    layout = {"file_path": "m.safetensors", "serialization_format": {"type": "SafetensorsSerialization"}}
    describe(tmp_path, {"model": layout}, 1)
    with pytest.raises(SourceError) as caught:
        open_torch_checkpointing(str(tmp_path))
    assert "saved with SafetensorsSerialization" in caught.value.problems[0]


class Runs:
    def __reduce__(self) -> Any:
        return os.system, ("touch was-executed",)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a pickle",
        pickle.dumps([1]),
        pickle.dumps({"metadata": {}, "world_size": -1}),
        pickle.dumps({"metadata": {}, "world_size": 1 << 40}),
        pickle.dumps({"metadata": Runs(), "world_size": 1}),
    ],
)
def test_other_metadata(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "metadata.pkl").write_bytes(content)
    assert not is_torch_checkpointing(str(tmp_path))
    assert not (tmp_path / "was-executed").exists()


def test_a_pipe_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "metadata.pkl")
    assert not is_torch_checkpointing(str(tmp_path))
