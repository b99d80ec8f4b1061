"""A layout that is declared because no model can be traced: not of single experts, which models fuse."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import shardkit
from shardkit.errors import LayoutError
from shardkit.layout import traced

MOE = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
EXPERTS = {
    "Qwen3-MoE": "model.layers.0.mlp.experts.{}.gate_proj.weight",
    "Mixtral": "model.layers.0.block_sparse_moe.experts.{}.w1.weight",
    "Jamba": "model.layers.0.feed_forward.experts.{}.up_proj.weight",
    "a block by itself": "experts.{}.down_proj.weight",
}


def weights(name: str) -> dict[str, torch.Tensor]:
    return {"norm.weight": torch.ones(4)} | {name.format(n): torch.rand(4, 4) for n in range(3)}


@pytest.mark.parametrize("model", EXPERTS)
def test_single_experts_are_refused_without_the_model(
    model: str, make_hub: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = make_hub(weights(EXPERTS[model]), config=MOE)
    is_there = importlib.util.find_spec
    monkeypatch.setattr(
        traced.importlib.util, "find_spec", lambda name: None if name == "transformers" else is_there(name)
    )
    with pytest.raises(LayoutError, match="3 tensors of single experts") as caught:
        shardkit.preshard(hub, tmp_path / "out", world_size=2)
    assert "transformers is not installed" in caught.value.message
    assert "--layout declared stores them as they are" in str(caught.value.hint)
    shardkit.preshard(hub, tmp_path / "out", world_size=2, layout="declared")
    assert EXPERTS[model].format(2) in _stored(tmp_path / "out")


@pytest.mark.parametrize("config", [None, {"model_type": "mine"}], ids=["no config", "no class"])
def test_whatever_the_reason_is(
    config: dict[str, Any] | None, make_hub: Callable[..., Path], tmp_path: Path
) -> None:
    hub = make_hub(weights(EXPERTS["Mixtral"]), config=config)
    with pytest.raises(LayoutError, match="single experts"):
        shardkit.preshard(hub, tmp_path / "out", world_size=2)
    assert "norm.weight" in _stored(_made(hub, tmp_path / "hub", names="hub"))


def test_fused_and_shared_experts_are_declared(make_hub: Callable[..., Path], tmp_path: Path) -> None:
    fused = {
        "layers.0.mlp.experts.gate_up_proj": torch.rand(3, 4, 4),
        "layers.0.mlp.shared_experts.0.up_proj.weight": torch.rand(4, 4),
    }
    assert _stored(_made(make_hub(fused), tmp_path / "out")) == fused.keys()


def _made(hub: Path, out: Path, **options: Any) -> Path:
    shardkit.preshard(hub, out, world_size=2, **options)
    return out


def _stored(path: Path) -> set[str]:
    return set(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)
