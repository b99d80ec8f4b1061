"""An HF-DCP save does not show how many ranks wrote it: the shapes of a base, or of the class, do."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from shardkit.errors import LayoutError, SourceError
from shardkit.operations.consolidate import consolidate
from tests.formats.dcp.samples import save_shards, shard
from tests.operations.consolidate.checkpoints import CONFIG, hub, load, weights

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning"),
    pytest.mark.usefixtures("fast_trace"),
]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    def make(mesh: DeviceMesh) -> dict[str, Any]:
        return {name: shard(value, mesh, 0) for name, value in weights().items()}

    return Path(save_shards(make, 2, tmp_path / "saved"))


def lose_the_last(saved: Path) -> None:
    os.remove(saved / "shard-00002-model-00001-of-00001.safetensors")


def check(output: str) -> None:
    found, expected = load(Path(output)), weights()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_base_is_compared(saved: Path, tmp_path: Path) -> None:
    base = hub(tmp_path / "base", weights())
    result = consolidate(saved, tmp_path / "out", base=base)
    check(result.output)
    assert not any("last ranks" in note for note in result.notes)
    lose_the_last(saved)
    with pytest.raises(LayoutError, match="21 differences"):
        consolidate(saved, tmp_path / "out2", base=base)


def test_the_class_is_compared(saved: Path, tmp_path: Path) -> None:
    (saved / "config.json").write_text(json.dumps(CONFIG))
    result = consolidate(saved, tmp_path / "out")
    check(result.output)
    assert result.held_against == "class"
    assert not any("last ranks" in note for note in result.notes)
    lose_the_last(saved)
    for is_dry_run in (True, False):
        with pytest.raises(SourceError, match="those of the last ranks may be missing") as caught:
            consolidate(saved, tmp_path / "out2", dry_run=is_dry_run)
        assert "LlamaForCausalLM.from_pretrained would refuse" in caught.value.problems[0]
    assert not (tmp_path / "out2").exists()


@pytest.mark.parametrize("config", [True, False])
def test_without_either_it_is_refused(saved: Path, tmp_path: Path, config: bool) -> None:
    if config:
        (saved / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(SourceError, match="those of the last ranks may be missing") as caught:
        consolidate(saved, tmp_path / "out", ask_class=False)
    assert "--base MODEL" in (caught.value.hint or "") or "base" in (caught.value.hint or "")
    assert not (tmp_path / "out").exists()
