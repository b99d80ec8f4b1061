"""Sets of names: read from `tests/data/keys`, and made up to look like models of the Hub."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shardkit.core.catalog import TensorEntry
from shardkit.core.dtypes import BY_NAME

DATA = Path(__file__).parent.parent / "data" / "keys"


@dataclass(frozen=True)
class KeySet:
    tensors: dict[str, TensorEntry]
    objects: tuple[str, ...]
    paths: dict[str, tuple[str | int, ...]] | None
    names: frozenset[str]


def load(name: str) -> KeySet:
    """Return what a trainer wrote, and the names that the model had in memory."""
    content = json.loads((DATA / f"{name}.json").read_text())
    tensors, paths = {}, {}
    for path, dtype, shape in content["tensors"]:
        stored = ".".join(map(str, path))
        tensors[stored] = entry(stored, shape, dtype)
        paths[stored] = tuple(path)
    return KeySet(
        tensors=tensors,
        objects=tuple(content["objects"]),
        paths=paths if content["paths_known"] else None,
        names=frozenset(content["names"] or ()),
    )


def entry(name: str, shape: Iterable[int] = (4, 4), dtype: str = "bfloat16") -> TensorEntry:
    return TensorEntry(fqn=name, dtype=BY_NAME[dtype], shape=tuple(shape), first_chunk=0, num_chunks=1)


def entries(names: Iterable[str]) -> dict[str, TensorEntry]:
    return {name: entry(name) for name in names}


def optimizer(root: str, names: Iterable[str]) -> dict[str, TensorEntry]:
    """Return AdamW's state as `get_optimizer_state_dict` names it."""
    state = {
        key: entry(key, dtype="float32")
        for name in names
        for key in (f"{root}.state.{name}.exp_avg", f"{root}.state.{name}.exp_avg_sq")
    }
    return state | {key: entry(key, (), "float32") for name in names for key in [f"{root}.state.{name}.step"]}


def layered(template: str, leaves: Iterable[str], num_layers: int = 3) -> list[str]:
    return [f"{template}.{layer}.{leaf}" for layer in range(num_layers) for leaf in leaves]


_LLAMA = [
    "model.embed_tokens.weight",
    *layered("model.layers", ["self_attn.q_proj.weight", "mlp.up_proj.weight", "input_layernorm.weight"]),
    "model.norm.weight",
]
_BERT = [
    "embeddings.word_embeddings.weight",
    *layered("encoder.layer", ["attention.self.query.weight", "attention.self.query.bias"]),
]

# Names as `save_pretrained` gives them.
MODELS: Mapping[str, list[str]] = {
    "llama": [*_LLAMA, "lm_head.weight"],
    "llama, tied": _LLAMA,
    "llama, rewards": [*_LLAMA, "score.weight"],
    "llama, twelve layers": [*layered("model.layers", ["mlp.up_proj.weight"], 12), "lm_head.weight"],
    "gpt2, tied": [
        "transformer.wte.weight",
        "transformer.wpe.weight",
        *layered("transformer.h", ["attn.c_attn.weight", "ln_1.bias"]),
        "transformer.ln_f.weight",
    ],
    "neox": [
        "gpt_neox.embed_in.weight",
        *layered("gpt_neox.layers", ["mlp.dense.weight"]),
        "embed_out.weight",
    ],
    "inkling, text": [
        "model.llm.embed.weight",
        *layered("model.llm.layers", ["attn.wq_du.weight", "mlp_norm.weight"]),
        "model.llm.norm.weight",
        "model.llm.unembed.weight",
    ],
    "mamba, tied": [
        "backbone.embeddings.weight",
        *layered("backbone.layers", ["mixer.A_log", "norm.weight"]),
        "backbone.norm_f.weight",
    ],
    "bert classifier": [*(f"bert.{name}" for name in _BERT), "classifier.weight", "classifier.bias"],
    "bert, bare": [*_BERT, "pooler.dense.weight"],
    "t5": [
        "shared.weight",
        *layered("encoder.block", ["layer.0.SelfAttention.q.weight", "layer.1.DenseReluDense.wi.weight"]),
        *layered("decoder.block", ["layer.0.SelfAttention.q.weight"]),
        "lm_head.weight",
    ],
    "whisper": [
        "model.encoder.conv1.weight",
        *layered("model.encoder.layers", ["self_attn.q_proj.weight"]),
        "model.decoder.embed_tokens.weight",
        *layered("model.decoder.layers", ["self_attn.q_proj.weight"]),
        "proj_out.weight",
    ],
    "qwen2-vl": [
        *layered("visual.blocks", ["attn.qkv.weight"]),
        "visual.patch_embed.proj.weight",
        *_LLAMA,
        "lm_head.weight",
    ],
    "llava": [
        *layered("vision_tower.vision_model.encoder.layers", ["mlp.fc1.weight"]),
        "multi_modal_projector.linear_1.weight",
        *(f"language_model.{name}" for name in _LLAMA),
        "language_model.lm_head.weight",
    ],
    "llava, in memory": [
        *layered("model.vision_tower.encoder.layers", ["mlp.fc1.weight"]),
        "model.multi_modal_projector.linear_1.weight",
        *(f"model.language_model.{name.removeprefix('model.')}" for name in _LLAMA),
        "lm_head.weight",
    ],
    "clip": [
        "logit_scale",
        *layered("text_model.encoder.layers", ["mlp.fc1.weight"]),
        *layered("vision_model.encoder.layers", ["mlp.fc1.weight"]),
        "text_projection.weight",
    ],
    "lora": [
        *(f"base_model.model.{name}" for name in _LLAMA if "q_proj" not in name),
        *layered(
            "base_model.model.model.layers",
            [
                "self_attn.q_proj.base_layer.weight",
                "self_attn.q_proj.lora_A.default.weight",
                "self_attn.q_proj.lora_B.default.weight",
            ],
        ),
        "base_model.model.lm_head.weight",
    ],
    "adapter alone": layered(
        "base_model.model.model.layers", ["self_attn.q_proj.lora_A.weight", "self_attn.q_proj.lora_B.weight"]
    ),
}
