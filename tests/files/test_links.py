"""Links that lead out of a checkpoint are refused, and read where the person asks for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import shardkit
from shardkit.errors import SourceError

WEIGHTS = {"a.weight": torch.arange(600.0).view(20, 30), "b.bias": torch.arange(7.0)}
READERS: dict[str, Callable[[Path, Path, bool], object]] = {
    "inspect": lambda path, out, follow: shardkit.inspect(path, follow_links=follow),
    "consolidate": lambda path, out, follow: shardkit.consolidate(path, out, follow_links=follow),
    "reshard": lambda path, out, follow: shardkit.reshard(path, out, world_size=2, follow_links=follow),
    "diff": lambda path, out, follow: shardkit.diff(path, path, follow_links=follow),
    "verify": lambda path, out, follow: shardkit.verify(path, follow_links=follow),
}


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """A DCP checkpoint, each file of which is a link to another directory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it saves in a single process, as asked
        dcp.save(WEIGHTS, checkpoint_id=tmp_path / "store", no_dist=True)
    (tmp_path / "linked").mkdir()
    for file in (tmp_path / "store").iterdir():
        (tmp_path / "linked" / file.name).symlink_to(file)
    return tmp_path / "linked"


@pytest.mark.parametrize("verb", READERS)
def test_every_file_is_a_link(verb: str, linked: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="symbolic link") as caught:
        READERS[verb](linked, tmp_path / "refused", False)
    assert "--follow-links" in str(caught.value)
    assert not (tmp_path / "refused").exists()
    READERS[verb](linked, tmp_path / "out", True)


@pytest.mark.parametrize("verb", READERS)
def test_the_shards_are_links(verb: str, linked: Path, tmp_path: Path) -> None:
    marker = linked / ".metadata"
    content = marker.read_bytes()
    marker.unlink()
    marker.write_bytes(content)
    with pytest.raises(SourceError) as caught:
        READERS[verb](linked, tmp_path / "refused", False)
    assert "symbolic link" in str(caught.value)
    assert "--follow-links" in str(caught.value)
    READERS[verb](linked, tmp_path / "out", True)


def test_verify_reads_them_in_its_threads(linked: Path) -> None:
    result = shardkit.verify(linked, full=True, follow_links=True, jobs=2)
    assert not result.problems
    assert result.read_bytes >= 2400 + 28
