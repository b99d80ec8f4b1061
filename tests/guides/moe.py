"""The two models of docs/guides/moe.md: one with the names and shapes of Qwen3-30B-A3B, and a tiny one."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from math import prod
from pathlib import Path

from transformers import Qwen3MoeConfig

LARGE = Qwen3MoeConfig(
    architectures=["Qwen3MoeForCausalLM"],
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    moe_intermediate_size=768,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
    tie_word_embeddings=False,
    dtype="bfloat16",
)
FILE_BYTES = 4_000_000_000


def shapes(config: Qwen3MoeConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of the Hub's files."""
    hidden, head, width = config.hidden_size, config.head_dim, config.moe_intermediate_size
    rows = {"q": config.num_attention_heads * head, "k": config.num_key_value_heads * head}
    rows["v"] = rows["k"]
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}."
        yield from ((f"{at}self_attn.{name}_proj.weight", (size, hidden)) for name, size in rows.items())
        yield f"{at}self_attn.o_proj.weight", (hidden, rows["q"])
        yield from ((f"{at}self_attn.{name}_norm.weight", (head,)) for name in "qk")
        yield from ((f"{at}{name}_layernorm.weight", (hidden,)) for name in ("input", "post_attention"))
        yield f"{at}mlp.gate.weight", (config.num_experts, hidden)
        for expert in range(config.num_experts):
            yield f"{at}mlp.experts.{expert}.gate_proj.weight", (width, hidden)
            yield f"{at}mlp.experts.{expert}.up_proj.weight", (width, hidden)
            yield f"{at}mlp.experts.{expert}.down_proj.weight", (hidden, width)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (config.vocab_size, hidden)


def make_large(directory: Path) -> None:
    """Write a Hub directory whose files have headers, and zeros that take no disk."""
    LARGE.save_pretrained(directory)
    files: list[dict[str, dict[str, object]]] = [{}]
    end = 0
    for name, shape in shapes(LARGE):
        if end + 2 * prod(shape) > FILE_BYTES:
            files, end = [*files, {}], 0
        offsets = [end, end := end + 2 * prod(shape)]
        files[-1][name] = {"dtype": "BF16", "shape": shape, "data_offsets": offsets}
    places = dict[str, str]()
    for number, header in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        text = json.dumps(header).encode()
        size = max(entry["data_offsets"][1] for entry in header.values())  # type: ignore[index]
        with open(directory / name, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + size)
        places.update(dict.fromkeys(header, name))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def make_small(directory: Path) -> None:
    """Save the tiny model that the page makes."""
    script = Path(__file__).parents[2] / "examples" / "guides" / "moe_model.py"
    runpy.run_path(str(script))["main"](str(directory))
