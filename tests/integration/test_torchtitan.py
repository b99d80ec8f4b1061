"""torchtitan's own model classes load what we write, and we export what they save; transformers judges by logits.

Needs torchtitan 0.3 (beside it: tyro, spmd_types, triton, torchdata, torch_checkpointing), which is not among the
project's own requirements: `pip install --no-deps torchtitan==0.3.0 ...`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import shardkit
from tests.formats.dcp.samples import quiet

llama3 = pytest.importorskip("torchtitan.models.llama3")
qwen3 = pytest.importorskip("torchtitan.models.qwen3")
attention = pytest.importorskip("torchtitan.models.common.attention")

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model of torchtitan, and the same one of transformers."""

    titan: Any
    """Its config."""
    config: Any
    """transformers' config."""


_SIZES = {"hidden_size": 256, "vocab_size": 2048, "num_attention_heads": 16, "dtype": "float32"}


def _llama(num_key_value_heads: int | None) -> Model:
    titan = llama3.model_registry("debugmodel", attn_backend="flex").model
    if num_key_value_heads is not None:
        # As _debugmodel, with fewer heads of keys and values: q and k are permuted by other numbers of heads.
        titan.layers = llama3._build_llama3_layers(
            **{"fuse_qkv": True, "n_layers": 2, "dim": 256, "n_heads": 16, "n_kv_heads": num_key_value_heads},
            hidden_dim=512,
            rope=titan.layers[0].attention.rope,
            attn_backend="flex",
        )
    config = transformers.LlamaConfig(
        **_SIZES,
        num_key_value_heads=num_key_value_heads or 16,
        intermediate_size=titan.layers[0].feed_forward.w1.out_features,
        num_hidden_layers=len(titan.layers),
        rms_norm_eps=titan.norm.eps,
        tie_word_embeddings=False,
        rope_parameters={
            **{"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0},
            **{"high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
        },
    )
    return Model(titan=titan, config=config)


def _qwen(*, is_tied: bool) -> Model:
    titan = qwen3.model_registry("debugmodel", attn_backend="flex").model
    titan.enable_weight_tying = is_tied
    config = transformers.Qwen3Config(
        **_SIZES,
        **{"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072},
        num_hidden_layers=len(titan.layers),
        rms_norm_eps=titan.norm.eps,
        tie_word_embeddings=is_tied,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    )
    return Model(titan=titan, config=config)


MODELS = {
    "llama3": lambda: _llama(None),
    "llama3-grouped": lambda: _llama(4),
    "qwen3": lambda: _qwen(is_tied=True),
    "qwen3-untied": lambda: _qwen(is_tied=False),
}
TOKENS = torch.arange(32).reshape(2, 16) * 57 % 2000


def built(model: Model, seed: int) -> Any:
    """Return torchtitan's model with random weights."""
    made, generator = model.titan.build(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            values = torch.randn(parameter.shape, generator=generator) * 0.05
            parameter.copy_(values if parameter.ndim > 1 else 1 + values)
    return made


def titans(model: Any) -> torch.Tensor:
    """Return the logits of torchtitan's model."""
    length = TOKENS.shape[1]
    mask = create_block_mask(lambda _b, _h, q, k: q >= k, None, None, length, length, device="cpu")
    with torch.no_grad():
        found: torch.Tensor = model(
            TOKENS, attention_masks=mask, positions=torch.arange(length)[None].expand(2, -1)
        )
    return found


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchtitan compiles its attention for GPUs; the same function runs without that."""
    monkeypatch.setattr(attention.FlexAttention, "_compiled_flex_attn", staticmethod(flex_attention))


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    trained = built(model, seed=1)
    with (
        quiet()
    ):  # as torchtitan's CheckpointManager: the model's names lie at the top, beside the other state
        dcp.save(
            {**trained.state_dict(), "train_state": {"step": 7}},
            checkpoint_id=tmp_path / "step-7",
            no_dist=True,
        )
    base, hub = tmp_path / "base", tmp_path / "hub"
    model.config.architectures = [f"{type(model.config).__name__.removesuffix('Config')}ForCausalLM"]
    model.config.save_pretrained(base)

    done = shardkit.consolidate(tmp_path / "step-7", hub, base=str(base))
    assert any("torchtitan" in note for note in done.notes)
    assert not done.warnings
    theirs = transformers.AutoModelForCausalLM.from_pretrained(hub).eval()
    with torch.no_grad():
        logits = theirs(TOKENS).logits
    torch.testing.assert_close(titans(trained), logits, rtol=0, atol=1e-5)

    keys = f"torchtitan-{name.partition('-')[0]}"
    shardkit.preshard(str(hub), str(tmp_path / "pre"), world_size=2, keys=keys)
    loaded = built(model, seed=2)
    state = loaded.state_dict()
    with quiet():
        dcp.load(state, checkpoint_id=tmp_path / "pre", no_dist=True)
    loaded.load_state_dict(
        state
    )  # as torchtitan's ModelWrapper does: its names are parts of what is fused in memory
    assert torch.equal(titans(loaded), titans(trained))
    for fqn, tensor in trained.state_dict().items():
        assert torch.equal(loaded.state_dict()[fqn], tensor), fqn
    assert json.loads((hub / "config.json").read_text())["dtype"] == "float32"
