"""Checkpoints for the tests of consolidate: tiny models saved by stock torch, and the models themselves."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file

from tests.bits import raw

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "float32",
    "head_dim": 8,
    "hidden_size": 16,
    "intermediate_size": 24,
    "model_type": "llama",
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
    "transformers_version": "5.23.0",
    "use_cache": True,
    "vocab_size": 37,
}
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def weights(dtype: torch.dtype = torch.float32, *, tied: bool = False) -> dict[str, torch.Tensor]:
    """Return what CONFIG describes, with random values."""
    torch.manual_seed(0)
    state = {EMBED: torch.randn(37, 16)}
    for layer in range(2):
        at = f"model.layers.{layer}."
        for name, shape in {
            "self_attn.q_proj": (16, 16),
            "self_attn.k_proj": (8, 16),
            "self_attn.v_proj": (8, 16),
            "self_attn.o_proj": (16, 16),
            "mlp.gate_proj": (24, 16),
            "mlp.up_proj": (24, 16),
            "mlp.down_proj": (16, 24),
        }.items():
            state[f"{at}{name}.weight"] = torch.randn(shape)
        state[f"{at}input_layernorm.weight"] = torch.randn(16)
        state[f"{at}post_attention_layernorm.weight"] = torch.randn(16)
    state["model.norm.weight"] = torch.randn(16)
    state[HEAD] = state[EMBED].clone() if tied else torch.randn(37, 16)
    return {name: value.to(dtype) for name, value in state.items()}


def training_state(model: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Put an optimizer and trainer state beside a model, as torch's tutorial saves them."""
    moments = {
        name: {"exp_avg": torch.randn_like(value), "exp_avg_sq": value * value, "step": torch.tensor(2.0)}
        for name, value in model.items()
    }
    groups = [{"lr": 0.1, "params": list(model)}]
    return {"model": dict(model), "optim": {"state": moments, "param_groups": groups}, "epoch": 3}


def save(state: Mapping[str, Any], directory: Path) -> Path:
    """Save with stock DCP, in a single process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it saves in a single process, as asked
        dcp.save(dict(state), checkpoint_id=directory, no_dist=True)
    return directory


def hub(
    directory: Path,
    tensors: Mapping[str, torch.Tensor] | None = None,
    config: Mapping[str, Any] | None = CONFIG,
    **files: str,
) -> Path:
    """Make the directory of a Hub model; `files` are written under their names, `__` standing for a dot."""
    directory.mkdir(parents=True)
    if tensors is not None:
        save_file(dict(tensors), directory / "model.safetensors", metadata={"format": "pt"})
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text)
    return directory


def tokenizer(directory: Path, tokens: int) -> Path:
    """Write a tokenizer of so many tokens, the last of them added."""
    directory.mkdir()
    vocab = {f"t{number}": number for number in range(tokens - 1)}
    content = {
        "model": {"type": "BPE", "vocab": vocab},
        "added_tokens": [{"id": tokens - 1, "content": "<new>"}],
    }
    (directory / "tokenizer.json").write_text(json.dumps(content))
    return directory


def tiny_moe() -> Any:
    """Return a mixture of experts of transformers, which has them fused in memory and single on the Hub."""
    import transformers

    shape = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64}
    sizes = {"intermediate_size": 32, "moe_intermediate_size": 8, "num_experts": 4, "num_hidden_layers": 2}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**shape, **sizes, head_dim=8))


def load(directory: Path | str) -> dict[str, torch.Tensor]:
    """Read a Hub directory with the stock reader, every tensor once."""
    found: dict[str, torch.Tensor] = {}
    for name in sorted(os.listdir(directory)):
        if name.endswith(".safetensors"):
            with safe_open(os.path.join(directory, name), "pt") as file:
                for fqn in file.keys():
                    assert fqn not in found
                    found[fqn] = file.get_tensor(fqn)
    return found


def assert_bit_equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Compare names, dtypes, shapes and bits."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert raw(found[name]) == raw(tensor), name
