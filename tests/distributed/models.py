"""Tiny models of whose tensors some shard in odd ways, or not at all, and the meshes that shard them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.distributed.meshes import Shape, device_mesh

SHAPES: dict[int, dict[str, Shape]] = {2: {"2": (2,)}, 3: {"3": (3,)}, 4: {"4": (4,), "2x2": (2, 2)}}
"""Of the meshes for so many ranks, by name."""

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 21,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 2,  # k_proj has 2 rows: fewer than 3 or 4 ranks
    "vocab_size": 101,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 9,
    "n_layer": 2,
    "n_head": 3,
    "n_positions": 17,
    "vocab_size": 101,
}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


class Model(NamedTuple):
    config: dict[str, Any] | None
    """Without one it is `Edges`."""
    unit: str
    """Class of the layers that FSDP wraps."""
    is_tied: bool = False


MODELS = {
    "llama": Model(LLAMA, "LlamaDecoderLayer"),
    "llama-tied": Model(
        {**LLAMA, "tie_word_embeddings": True, "dtype": "bfloat16"}, "LlamaDecoderLayer", is_tied=True
    ),
    "qwen3": Model(QWEN3, "Qwen3DecoderLayer"),
    "gpt2": Model(GPT2, "GPT2Block", is_tied=True),
}
EDGES = Model(None, "Linear")


class Edges(nn.Module):
    """Fewer rows than ranks, no rows, odd rows; complex, fp8, bool, int and 0-d tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, rows) for rows in (1, 2, 3, 7))
        self.phase = nn.Parameter(torch.zeros(5, 3, dtype=torch.complex64))
        self.small = nn.Parameter(torch.zeros(3, 2, dtype=torch.float8_e4m3fn), requires_grad=False)
        self.odd = nn.Parameter(torch.zeros(9, 2, dtype=torch.bfloat16))
        self.nothing = nn.Parameter(torch.zeros(0, 4))
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("step", torch.zeros((), dtype=torch.float32).long())
        self.register_buffer("mask", torch.ones(5, 3, dtype=torch.bool))
        self.register_buffer("ids", torch.arange(7))


def random_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same kind with any bits at all, NaNs of every sort among them."""
    if tensor.dtype is torch.bool:
        return torch.randint(0, 2, tensor.shape).bool()
    data = torch.randint(0, 256, (tensor.numel() * tensor.itemsize,), dtype=torch.uint8)
    return data.view(tensor.dtype).reshape(tensor.shape)


def build(config: dict[str, Any] | None) -> nn.Module:
    """Build a model where the default device says."""
    if config is None:
        return Edges()
    model_class: Any = getattr(transformers, config["architectures"][0])
    model: nn.Module = model_class._from_config(transformers.AutoConfig.for_model(**config))
    return model


def shard(model: nn.Module, unit: str, shape: Shape) -> None:
    mesh = device_mesh(shape)
    for layer in [module for module in model.modules() if type(module).__name__ == unit]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
