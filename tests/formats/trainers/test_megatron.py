"""Megatron-Core's torch_dist: DCP beside metadata.json, tensors under Megatron's names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from shardkit.errors import SourceError
from shardkit.formats.trainers.megatron import is_megatron, open_megatron
from tests.formats.dcp.samples import alter, assert_holds, save

TENSORS = {
    "decoder.layers.mlp.linear_fc1.weight": torch.arange(24.0).reshape(2, 4, 3),
    "embedding.word_embeddings.weight": torch.ones(4, 3),
}


@pytest.fixture
def directory(tmp_path: Path) -> str:
    extra = "decoder.layers.mlp.linear_fc1._extra_state/shard_0_2"
    directory = save({**TENSORS, extra: b"state"}, tmp_path / "iter_0000002")

    def as_megatron(metadata: Metadata) -> None:
        metadata.planner_data = None
        metadata.mcore_data = {}

    alter(directory, as_megatron)
    Path(directory, "common.pt").write_bytes(b"never opened")
    write_config(directory, "torch_dist")
    return directory


def write_config(directory: str, backend: object) -> None:
    content = {"sharded_backend": backend, "sharded_backend_version": 1, "common_backend": "torch"}
    Path(directory, "metadata.json").write_text(json.dumps(content))


def test_tensors_are_given_as_they_are_stored(directory: str) -> None:
    assert is_megatron(directory)
    checkpoint = open_megatron(directory)
    assert checkpoint.format == "megatron"
    assert_holds(checkpoint.select(tuple(TENSORS)), TENSORS)
    assert checkpoint.catalog.objects == ("decoder.layers.mlp.linear_fc1._extra_state/shard_0_2",)
    assert checkpoint.catalog.paths is None
    assert [name for name, _ in checkpoint.remarks.skipped] == ["common.pt"]
    assert "stacked" in checkpoint.remarks.notes[-1]


def test_other_backends_are_refused(directory: str) -> None:
    write_config(directory, "zarr")
    assert is_megatron(directory)
    with pytest.raises(SourceError, match="the backend zarr"):
        open_megatron(directory)


def test_a_save_that_did_not_finish(directory: str) -> None:
    Path(directory, ".metadata").unlink()
    with pytest.raises(SourceError, match=r"no \.metadata"):
        open_megatron(directory)


@pytest.mark.parametrize("content", ["[]", "{", '{"sharded_backend": 1}', '{"other": "torch_dist"}', ""])
def test_other_files_of_that_name(tmp_path: Path, content: str) -> None:
    (tmp_path / "metadata.json").write_text(content)
    assert not is_megatron(str(tmp_path))
