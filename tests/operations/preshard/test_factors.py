"""A source whose weights are factors of OSFT is stored as it is, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import shardkit
from shardkit.core.factored import FACTORS, Target
from shardkit.errors import LayoutError, UsageError
from shardkit.osft.svd import factorise


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_source_of_factors_is_stored_as_it_is_or_refused(
    make_hub: Callable[..., Path], tmp_path: Path
) -> None:
    path = "model.layers.0.self_attn.q_proj"
    tensors = factorise(torch.eye(4), Target(path=path, rows=4, columns=4, rank=2)).tensors
    state = {f"{path}.{name}": tensor for name, tensor in tensors.items()}
    source = make_hub(state)
    shardkit.preshard(source, tmp_path / "out", world_size=2)
    read = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    dcp.load(read, checkpoint_id=tmp_path / "out")
    assert all(torch.equal(read[name], tensor) for name, tensor in state.items())
    cut = make_hub({f"{path}.{name}": tensors[name] for name in FACTORS[1:]}, name="cut")
    with pytest.raises(LayoutError, match="are incomplete"):
        shardkit.preshard(cut, tmp_path / "none", world_size=2)
    (source / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    with pytest.raises(UsageError, match=f"1 weight as factors of OSFT: {path}") as caught:
        shardkit.preshard(source, tmp_path / "more", world_size=2)
    assert "--layout declared" in str(caught.value)
