"""A source is parsed once in a run: choosing, checking and reading it share what was opened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import shardkit
from shardkit.formats.dcp import directory


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Directories whose `.metadata` was read, one entry for each time."""
    seen: list[str] = []
    read = directory._read_metadata

    def spy(path: str) -> Any:
        seen.append(Path(path).name)
        return read(path)

    monkeypatch.setattr(directory, "_read_metadata", spy)
    return seen


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's directory with one pre-sharded checkpoint, `step-2`."""
    (tmp_path / "hub").mkdir()
    save_file({"a.weight": torch.ones(8, 4), "b.bias": torch.arange(8.0)}, tmp_path / "hub/model.safetensors")
    (tmp_path / "run").mkdir()
    shardkit.preshard(tmp_path / "hub", tmp_path / "run/step-2", world_size=2, wrap="none")
    return tmp_path / "run"


@pytest.mark.parametrize(
    "verb",
    [
        lambda run, out: shardkit.consolidate(run, out),
        lambda run, out: shardkit.consolidate(run, out, dry_run=True),
        lambda run, out: shardkit.reshard(run, out, world_size=3, dry_run=True),
        lambda run, out: shardkit.verify(run / "step-2", full=True),
        lambda run, out: shardkit.write_manifest(run / "step-2", output=out),
        lambda run, out: shardkit.diff(run, run.parent / "hub"),
        lambda run, out: shardkit.verify(run / "step-2", against=run.parent / "hub"),
        lambda run, out: shardkit.verify(run.parent / "hub", against=run, strict=True),
    ],
)
def test_one_source_is_parsed_once(
    verb: Callable[[Path, Path], object], run: Path, tmp_path: Path, parsed: list[str]
) -> None:
    parsed.clear()
    verb(run, tmp_path / "out")
    assert parsed == ["step-2"]
