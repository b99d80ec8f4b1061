"""Names and shapes of small models on the Hub, and what trainers' own converters do to rows, in a line each."""

from __future__ import annotations

from typing import Any

import numpy as np

Shapes = dict[str, tuple[int, ...]]

CONFIG: dict[str, Any] = {
    **{
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "vocab_size": 40,
    },
    **{"intermediate_size": 20, "moe_intermediate_size": 10, "num_experts": 3, "num_local_experts": 3},
    **{"n_routed_experts": 3, "num_hidden_layers": 2},
}
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 16, 4, 2, 6, 40


def config(model_type: str) -> dict[str, Any]:
    return {**CONFIG, "model_type": model_type}


def hub(
    model_type: str,
    *,
    biases: bool = False,
    norms: bool = False,
    experts: str = "",
    is_tied: bool = False,
    layer_norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm"),
) -> Shapes:
    """Return the names and shapes that a model has on the Hub."""
    found: Shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not is_tied:
        found["lm_head.weight"] = (VOCAB, HIDDEN)
    for layer in range(2):
        at = f"model.layers.{layer}."
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            found[f"{at}self_attn.{name}_proj.weight"] = (heads * HEAD_DIM, HIDDEN)
            if biases:
                found[f"{at}self_attn.{name}_proj.bias"] = (heads * HEAD_DIM,)
        found[f"{at}self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD_DIM)
        for name in "qk" if norms else "":
            found[f"{at}self_attn.{name}_norm.weight"] = (HEAD_DIM,)
        for name in layer_norms:
            found[f"{at}{name}.weight"] = (HIDDEN,)
        if not experts:
            found |= {f"{at}mlp.{name}_proj.weight": (20, HIDDEN) for name in ("gate", "up")}
            found[f"{at}mlp.down_proj.weight"] = (HIDDEN, 20)
        elif experts == "mixtral":
            found[f"{at}block_sparse_moe.gate.weight"] = (3, HIDDEN)
            for expert in range(3):
                for name in ("w1", "w3", "w2"):
                    shape = (HIDDEN, 10) if name == "w2" else (10, HIDDEN)
                    found[f"{at}block_sparse_moe.experts.{expert}.{name}.weight"] = shape
        else:
            found[f"{at}mlp.gate.weight"] = (3, HIDDEN)
            for expert in range(3):
                for name in ("gate", "up", "down"):
                    shape = (HIDDEN, 10) if name == "down" else (10, HIDDEN)
                    found[f"{at}mlp.experts.{expert}.{name}_proj.weight"] = shape
    return found


def deepseek() -> Shapes:
    """Return DeepSeek-V3's: latent attention, a dense layer, a layer of experts."""
    found = {name: shape for name, shape in hub("deepseek_v3").items() if "self_attn" not in name}
    for layer in range(2):
        at = f"model.layers.{layer}.self_attn."
        found |= {
            **{
                f"{at}q_a_proj.weight": (8, HIDDEN),
                f"{at}q_a_layernorm.weight": (8,),
                f"{at}q_b_proj.weight": (24, 8),
            },
            **{f"{at}kv_a_proj_with_mqa.weight": (10, HIDDEN), f"{at}kv_a_layernorm.weight": (8,)},
            **{f"{at}kv_b_proj.weight": (40, 8), f"{at}o_proj.weight": (HIDDEN, 24)},
        }
    at = "model.layers.1.mlp."
    found = {name: shape for name, shape in found.items() if not name.startswith(at)}
    found |= {f"{at}gate.weight": (3, HIDDEN), f"{at}gate.e_score_correction_bias": (3,)}
    for name in ("gate", "up", "down"):
        shape = (HIDDEN, 10) if name == "down" else (10, HIDDEN)
        found[f"{at}shared_experts.{name}_proj.weight"] = shape
        found |= {f"{at}experts.{expert}.{name}_proj.weight": shape for expert in range(3)}
    return found


def llama4() -> Shapes:
    """Return the text part of Llama 4's: fused and transposed experts."""
    dense = {f"language_model.{name}": shape for name, shape in hub("llama4").items() if ".mlp." not in name}
    for layer in range(2):
        at = f"language_model.model.layers.{layer}.feed_forward."
        dense |= {f"{at}router.weight": (3, HIDDEN), f"{at}experts.gate_up_proj": (3, HIDDEN, 20)}
        dense |= {
            f"{at}experts.down_proj": (3, 10, HIDDEN),
            f"{at}shared_expert.down_proj.weight": (HIDDEN, 10),
        }
        dense |= {f"{at}shared_expert.{name}_proj.weight": (10, HIDDEN) for name in ("gate", "up")}
    return dense


OLMO_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
SETS: dict[str, tuple[str, Shapes]] = {
    "torchtitan-llama3": ("llama", hub("llama")),
    "torchtitan-llama3-0.2": ("llama", hub("llama", is_tied=True)),
    "torchtitan-qwen3": ("qwen3_moe", hub("qwen3_moe", norms=True, experts="each")),
    "torchtitan-qwen3-0.2": ("qwen3", hub("qwen3", norms=True)),
    "torchtitan-deepseek-v3": ("deepseek_v3", deepseek()),
    "torchtitan-deepseek-v3-0.2": ("deepseek_v3", deepseek()),
    "torchtitan-llama4-0.2": ("llama4", llama4()),
    "torchtune-llama": ("llama", hub("llama")),
    "torchtune-qwen2": ("qwen2", hub("qwen2", biases=True)),
    "olmo-core": ("olmoe", hub("olmoe", norms=True, experts="each", layer_norms=OLMO_NORMS)),
    "olmo-core-llama": ("qwen3", hub("qwen3", norms=True)),
    "fms-llama": ("llama", hub("llama")),
    "fms-fsdp-llama": ("llama", hub("llama", biases=True)),
    "megatron-llama": ("qwen2", hub("qwen2", biases=True)),
    "megatron-mixtral": ("mixtral", hub("mixtral", experts="mixtral")),
    "megatron-qwen-moe": ("qwen3_moe", hub("qwen3_moe", norms=True, experts="each")),
    "nemo-automodel-moe": ("qwen3_moe", hub("qwen3_moe", norms=True, experts="each")),
}
"""Shipped set -> (model_type, names and shapes on the Hub)."""


def numbered(shapes: Shapes) -> dict[str, np.ndarray]:
    """Return tensors whose elements are all different."""
    found, start = {}, 1
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        found[name] = np.arange(start, start + size).reshape(shape)
        start += size
    return found


def pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows for rotary embeddings of pairs: torchtitan, `_reverse_permute`; torchtune, hf_to_tune."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def by_groups(parts: list[np.ndarray]) -> np.ndarray:
    """Put query, key and value together as Megatron does: for each key head its queries, the key and the value."""
    grouped = [part.reshape(KV_HEADS, -1, *part.shape[1:]) for part in parts]
    return np.concatenate(grouped, 1).reshape(-1, *parts[0].shape[1:])


def megatron(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return what Megatron-Core saves of a dense model, or one of experts: layers are stacked; rows are as many as tokens."""
    layers: dict[str, list[np.ndarray]] = {}
    for at in ("model.layers.0.", "model.layers.1."):
        found = {name.removeprefix(at): value for name, value in values.items() if name.startswith(at)}

        def fused(*names: str, found: dict[str, np.ndarray] = found) -> np.ndarray:
            return np.concatenate([found[name] for name in names])

        made = {
            "self_attention.linear_proj.weight": found["self_attn.o_proj.weight"],
            "self_attention.linear_qkv.layer_norm_weight": found["input_layernorm.weight"],
        }
        for kind in ("weight", "bias"):
            if f"self_attn.q_proj.{kind}" in found:
                parts = [found[f"self_attn.{letter}_proj.{kind}"] for letter in "qkv"]
                made[f"self_attention.linear_qkv.{kind}"] = by_groups(parts)
        for letter in "qk" if "self_attn.q_norm.weight" in found else "":
            made[f"self_attention.{letter}_layernorm.weight"] = found[f"self_attn.{letter}_norm.weight"]
        norm = found["post_attention_layernorm.weight"]
        if "mlp.gate.weight" in found:
            experts = [f"mlp.experts.{number}." for number in range(len(found["mlp.gate.weight"]))]
            made |= {"pre_mlp_layernorm.weight": norm, "mlp.router.weight": found["mlp.gate.weight"]}
            made["mlp.experts.experts.linear_fc1.weight"] = np.stack(
                [fused(f"{each}gate_proj.weight", f"{each}up_proj.weight") for each in experts]
            )
            made["mlp.experts.experts.linear_fc2.weight"] = np.stack(
                [found[f"{each}down_proj.weight"] for each in experts]
            )
        else:
            made |= {
                "mlp.linear_fc1.layer_norm_weight": norm,
                "mlp.linear_fc2.weight": found["mlp.down_proj.weight"],
            }
            made["mlp.linear_fc1.weight"] = fused("mlp.gate_proj.weight", "mlp.up_proj.weight")
        for name, value in made.items():
            layers.setdefault(f"decoder.layers.{name}", []).append(value)
    return {
        "embedding.word_embeddings.weight": values["model.embed_tokens.weight"],
        **{name: np.stack(each) for name, each in layers.items()},
        "decoder.final_layernorm.weight": values["model.norm.weight"],
        "output_layer.weight": values["lm_head.weight"],
    }


def layers_one_by_one(theirs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return what Megatron-Core saves where layers are not alike, as with a list in moe_layer_freq."""
    found: dict[str, np.ndarray] = {}
    for name, value in theirs.items():
        at, stacked, rest = name.partition("decoder.layers.")
        found |= (
            {f"{at}{stacked}{n}.{rest}": part for n, part in enumerate(value)} if stacked else {name: value}
        )
    return found


def padded(theirs: dict[str, np.ndarray], rows: int) -> dict[str, np.ndarray]:
    """Return tensors whose vocabulary has so many rows, 40 of them real."""
    ends = ("word_embeddings.weight", "output_layer.weight")
    return {
        name: np.concatenate([value[:40], np.zeros((rows - 40, *value.shape[1:]))])
        if name.endswith(ends)
        else value
        for name, value in theirs.items()
    }
