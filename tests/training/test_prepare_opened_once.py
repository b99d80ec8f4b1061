"""A source is parsed once while a model is prepared, also where its stored dtype decides what is built."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import shardkit
from shardkit.formats.dcp import directory as dcp_directory
from shardkit.formats.hub import safetensors
from shardkit.training.fill import presharded
from shardkit.training.fill.from_rank import RankSource
from tests.training import models


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was opened, one entry for each time: headers, manifests of shards, `.metadata`, state dicts."""
    seen: list[str] = []

    def spy(holder: Any, name: str, label: str) -> None:
        original = getattr(holder, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append(label)
            return original(*args, **kwargs)

        monkeypatch.setattr(holder, name, call)

    spy(safetensors, "check_header", "header")
    spy(dcp_directory, "_read_metadata", ".metadata")
    spy(presharded, "_build_source", "manifest")
    spy(RankSource, "open", "state dict")
    return seen


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A model's directory, in one file, whose config names no dtype."""
    models.save("llama", tmp_path / "hub", dtype=torch.bfloat16)
    assert models.forget_dtype(tmp_path / "hub") == "bfloat16"
    return tmp_path / "hub"


def test_a_hub_model_is_its_own_source(config: Path, opened: list[str]) -> None:
    context = shardkit.prepare(config, config)
    assert {p.dtype for p in context.model.parameters()} == {torch.bfloat16}
    assert opened == ["header"]


def test_a_model_is_listed_once(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On storage over a network each listing, and each look for a file that is not there, is a wait."""
    listed, looked, listing, look = list[str](), list[str](), os.listdir, os.path.lexists
    monkeypatch.setattr(os, "listdir", lambda path: listed.append(str(path)) or listing(path))
    monkeypatch.setattr(os.path, "lexists", lambda path: looked.append(str(path)) or look(path))
    shardkit.prepare(config, config)
    assert listed == [str(config)]
    absent = [path for path in looked if os.path.dirname(path) == str(config) and not look(path)]
    assert absent == [str(config / "shardkit.json")]  # before it is listed


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # nothing but one process is meant
def test_another_source_tells_the_dtype(
    config: Path, tmp_path: Path, opened: list[str], fast_trace: object
) -> None:
    shardkit.preshard(config, tmp_path / "sharded", world_size=2, wrap="none")
    state = models.reference("llama").to(torch.bfloat16).state_dict()
    shardkit.save(models.reference("llama").to(torch.bfloat16), tmp_path / "saved")
    (config / "model.safetensors").unlink()
    for source, times in (
        (tmp_path / "saved", [".metadata"]),
        (shardkit.from_rank(state), ["state dict"]),
        (tmp_path / "sharded", ["manifest"]),
    ):
        opened.clear()
        context = shardkit.prepare(config, source)
        assert {p.dtype for p in context.model.parameters()} == {torch.bfloat16}
        assert opened == times
