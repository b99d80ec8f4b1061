"""What verify tells of bytes that no record and no reader needs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import shardkit
from shardkit.formats.trainers.verl import is_verl
from tests.formats.dcp.samples import quiet


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What training saves, by one process."""
    path = tmp_path_factory.mktemp("trained") / "step"
    with quiet():
        shardkit.save(torch.nn.Linear(7, 5), path)
    return path


def test_every_flip_in_the_metadata_of_a_saved_training_state_is_found(trained: Path) -> None:
    (entry,) = (json.loads((trained / "shardkit.json").read_text())["metadata"],)
    good = (trained / ".metadata").read_bytes()
    assert (entry["name"], entry["size"]) == (".metadata", len(good))
    assert shardkit.verify(trained, full=True).problems == ()
    for at in range(0, len(good), 3):
        data = bytearray(good)
        data[at] ^= 1 << at % 8
        (trained / ".metadata").write_bytes(data)
        assert ".metadata" in {problem.file for problem in shardkit.verify(trained).problems}, at
    (trained / ".metadata").write_bytes(good)
    assert shardkit.verify(trained).problems == ()


def test_bytes_behind_the_last_record_of_a_foreign_file_are_a_warning(tmp_path: Path) -> None:
    with quiet():
        dcp.save({"w": torch.ones(3), "step": 7}, checkpoint_id=tmp_path, no_dist=True)
    assert shardkit.verify(tmp_path).warnings == ()
    with open(tmp_path / "__0_0.distcp", "ab") as file:
        file.write(b"more!")
    found = shardkit.verify(tmp_path)
    assert found.problems == ()
    assert found.warnings == ("__0_0.distcp: 5 bytes behind its last record, which .metadata does not list",)


def test_directories_behind_links_are_not_listed(tmp_path: Path) -> None:
    """A checkpoint may be damaged, and its parts lie in directories of it: not in others."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "__0_0.distcp").write_bytes(b"x")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "model").symlink_to("../outside")
    with pytest.raises(shardkit.SourceError, match="no checkpoint in it opens whole"):
        shardkit.verify(tmp_path / "in")
    (tmp_path / "in" / "model").unlink()
    (tmp_path / "outside").rename(tmp_path / "in" / "model")
    assert shardkit.verify(tmp_path / "in").problems


def test_links_inside_a_snapshot_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    """A checkpoint that was uploaded as it is: what lies in it are links to blobs, at any depth."""
    repo = tmp_path / "models--a--b"
    snapshot = repo / "snapshots" / "0123"
    (repo / "blobs").mkdir(parents=True)
    (snapshot / "actor").mkdir(parents=True)
    torch.save({"w": torch.ones(3)}, repo / "blobs" / "abc")
    link = snapshot / "actor" / "model_world_size_1_rank_0.pt"
    link.symlink_to("../../../blobs/abc")
    assert is_verl(str(snapshot))
    assert shardkit.inspect(snapshot).tensor_bytes == 12
    link.unlink()
    (repo / "elsewhere").mkdir()
    (repo / "blobs" / "abc").rename(repo / "elsewhere" / "abc")
    link.symlink_to("../../../elsewhere/abc")
    with pytest.raises(shardkit.SourceError) as caught:
        shardkit.inspect(snapshot)
    assert "cp -rL" in str(caught.value)
    assert link.name in str(caught.value)


def test_integers_of_thousands_of_digits_are_refused_in_our_own_words(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "config.json").write_bytes(b'{"hidden_size": ' + b"9" * 5000 + b"}")
    torch.save({"w": torch.ones(3)}, tmp_path / "in" / "pytorch_model.bin")
    with pytest.raises(
        shardkit.SourceError, match=r"config\.json: not valid JSON: an integer of 5000 digits"
    ):
        shardkit.preshard(tmp_path / "in", tmp_path / "out", world_size=2, wrap="none")
