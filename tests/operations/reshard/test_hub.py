"""What reshard keeps, so that its output becomes the Hub's model without a base: config, tokenizer, what names stand for."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import shardkit
from tests.cases import but_first
from tests.models.zoo import ZOO, from_pretrained, make_hub
from tests.models.zoo_world import compare

pytestmark = [
    pytest.mark.usefixtures("fast_trace"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning"),
]
MODEL = ZOO["qwen3_moe"]  # one expert by one on the Hub, and fused in memory


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("kept") / "hub"
    make_hub(MODEL, directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory


def in_form_of(trainer: str, hub: Path, directory: Path) -> None:
    """Write the model as a trainer without shardkit saves it."""
    if trainer == "verl":
        shutil.copytree(hub, directory / "huggingface", ignore=shutil.ignore_patterns("*.safetensors"))
        torch.save(from_pretrained(MODEL, hub).state_dict(), directory / "model_world_size_1_rank_0.pt")
        return
    dcp.save(from_pretrained(MODEL, hub).state_dict(), checkpoint_id=directory, no_dist=True)
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(hub / name, directory)


@pytest.mark.parametrize("trainer", but_first(["torch", "verl"]))
def test_it_becomes_the_hubs_model(trainer: str, hub: Path, tmp_path: Path) -> None:
    in_form_of(trainer, hub, tmp_path / "saved")
    result = shardkit.reshard(tmp_path / "saved", tmp_path / "first", world_size=3)
    assert {"config.json", "tokenizer.json"} <= set(result.copied)
    shardkit.reshard(tmp_path / "first", tmp_path / "second", world_size=2)
    shardkit.consolidate(tmp_path / "second", tmp_path / "stock-hf")
    (tmp_path / "hub").symlink_to(hub)
    compare(tmp_path, "stock")
    assert (tmp_path / "stock-hf/tokenizer.json").read_text() == "{}"
    assert shardkit.verify(tmp_path / "second", full=True).ok


def test_names_that_were_fused_in_the_files_stay(tmp_path: Path) -> None:
    """The manifest tells that the files had the model's own names: the class is not asked for others."""
    make_hub(ZOO["qwen3_moe+fused"], tmp_path / "hub")
    shardkit.preshard(tmp_path / "hub", tmp_path / "sharded", world_size=2)
    shardkit.reshard(tmp_path / "sharded", tmp_path / "other", world_size=3)
    shardkit.consolidate(tmp_path / "other", tmp_path / "stock-hf")
    compare(tmp_path, "stock")
