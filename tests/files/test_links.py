"""Links that lead out of a checkpoint are refused, and read where the person asks for it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import shardkit
from shardkit.errors import SourceError
from tests.formats.dcp.samples import save

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
    save(WEIGHTS, tmp_path / "store")
    (tmp_path / "linked").mkdir()
    for file in (tmp_path / "store").iterdir():
        (tmp_path / "linked" / file.name).symlink_to(file)
    return tmp_path / "linked"


@pytest.mark.parametrize("verb", READERS)
@pytest.mark.parametrize("are_all", [True, False], ids=["every file", "the shards"])
def test_files_that_are_links(verb: str, are_all: bool, linked: Path, tmp_path: Path) -> None:
    if not are_all:
        (linked / ".metadata").unlink()
        shutil.copy(tmp_path / "store/.metadata", linked)
    with pytest.raises(SourceError, match="symbolic link") as caught:
        READERS[verb](linked, tmp_path / "refused", False)
    assert "--follow-links" in str(caught.value)
    assert not (tmp_path / "refused").exists()
    READERS[verb](linked, tmp_path / "out", True)


def test_verify_reads_them_in_its_threads(linked: Path) -> None:
    result = shardkit.verify(linked, full=True, follow_links=True, jobs=2)
    assert not result.problems
    assert result.read_bytes >= 2400 + 28
