"""Tiny real models with random weights, saved as Hub directories by transformers itself."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 101

Save = Callable[["str | os.PathLike[str]"], None]


def decoder(**changes: Any) -> dict[str, Any]:
    return {
        "hidden_size": 24,
        "intermediate_size": 37,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }


def llama(**changes: Any) -> Any:
    """Return an untied Llama's config."""
    from transformers import LlamaConfig

    return LlamaConfig(**decoder(**changes))


def qwen3(**changes: Any) -> Any:
    """Return a tied Qwen3's config: norms of queries and keys."""
    from transformers import Qwen3Config

    return Qwen3Config(**decoder(**{"tie_word_embeddings": True, **changes}))


def gpt2(**changes: Any) -> Any:
    """Return a GPT-2's config: tied, Conv1D, files whose names lack `transformer.`."""
    from transformers import GPT2Config

    small = {"n_embd": 12, "n_layer": 3, "n_head": 2, "n_positions": 64, "vocab_size": VOCABULARY}
    return GPT2Config(**{**small, "bos_token_id": 1, "eos_token_id": 2, **changes})


def bert(**changes: Any) -> Any:
    """Return a BERT's config: persistent and other buffers, biases everywhere."""
    from transformers import BertConfig

    small = {"hidden_size": 12, "intermediate_size": 19, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertConfig(**{**small, "vocab_size": VOCABULARY, "max_position_embeddings": 64, **changes})


def _qwen_vl(vision: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """What the configs of all Qwen VLs have in common, around a vision tower's."""
    text = decoder(
        rope_parameters={"rope_type": "default", "mrope_section": [1, 1, 1], "rope_theta": 10000.0},
        vocab_size=VOCABULARY + 10,
    )
    tokens = {
        "image_token_id": VOCABULARY + 1,
        "video_token_id": VOCABULARY + 2,
        "vision_start_token_id": VOCABULARY + 3,
        "vision_end_token_id": VOCABULARY + 4,
    }
    return {"text_config": text, "vision_config": vision, **tokens, "tie_word_embeddings": False, **changes}


def qwen2_vl(**changes: Any) -> Any:
    """Return a Qwen2-VL's config: a vision tower; its file has the names of before transformers 4.52."""
    from transformers import Qwen2VLConfig

    vision = {"depth": 2, "embed_dim": 16, "hidden_size": 24, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    return Qwen2VLConfig(**_qwen_vl(vision, changes))


def qwen2_5_vl(**changes: Any) -> Any:
    """Return a Qwen2.5-VL's config: as Qwen2-VL, with another tower."""
    from transformers import Qwen2_5_VLConfig

    vision = {
        **{"depth": 2, "hidden_size": 16, "out_hidden_size": 24, "num_heads": 2, "intermediate_size": 24},
        **{"patch_size": 4, "fullatt_block_indexes": [0], "window_size": 8},
    }
    return Qwen2_5_VLConfig(**_qwen_vl(vision, changes))


def llava(**changes: Any) -> Any:
    """Return a Llava's config: in its file even the output layer stands below `language_model`."""
    from transformers import CLIPVisionConfig, LlavaConfig

    tied = {"tie_word_embeddings": changes.get("tie_word_embeddings", False)}
    vision = {
        **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"image_size": 8, "patch_size": 4, "projection_dim": 16},
    }
    return LlavaConfig(
        text_config=llama(vocab_size=VOCABULARY + 10, **tied),
        vision_config=CLIPVisionConfig(**vision),
        **{"image_token_id": VOCABULARY + 1, **tied, **changes},
    )


def gpt_neox(**changes: Any) -> Any:
    """Return a GPT-NeoX's config: its file has the output layer as `embed_out`."""
    from transformers import GPTNeoXConfig

    small = {"hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 4}
    return GPTNeoXConfig(
        **{**small, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "bos_token_id": 1, **changes}
    )


def qwen3_vl(**changes: Any) -> Any:
    """Return a Qwen3-VL's config: a vision tower whose names in the file are the model's."""
    from transformers import Qwen3VLConfig

    vision = {
        **{"depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "patch_size": 4},
        **{"out_hidden_size": 24, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    }
    return Qwen3VLConfig(**_qwen_vl(vision, changes))


def qwen3_moe(**changes: Any) -> Any:
    """Return a Qwen3-MoE's config: its file has one tensor for each expert, the model all of them in one."""
    from transformers import Qwen3MoeConfig

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return Qwen3MoeConfig(**decoder(**{"num_hidden_layers": 2, **experts, **changes}))


def mixtral(**changes: Any) -> Any:
    """Return a Mixtral's config: as Qwen3-MoE, with other names on both sides."""
    from transformers import MixtralConfig

    # Grouped products of experts want rows that are multiples of 16 bytes.
    small = {"num_hidden_layers": 2, "num_local_experts": 4, "intermediate_size": 32}
    return MixtralConfig(**decoder(**{**small, **changes}))


# (class, config) of each.
_MODELS: dict[str, tuple[str, Callable[..., Any], dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", llama, {}),
    "llama-tied": ("LlamaForCausalLM", llama, {"tie_word_embeddings": True}),
    "llama-base": ("LlamaModel", llama, {}),
    "qwen3": ("Qwen3ForCausalLM", qwen3, {}),
    "gpt2": ("GPT2LMHeadModel", gpt2, {}),
    "bert": ("BertModel", bert, {}),
    "bert-lm": ("BertForMaskedLM", bert, {}),
    "qwen2-vl": ("Qwen2VLForConditionalGeneration", qwen2_vl, {}),
    "qwen2-vl-tied": ("Qwen2VLForConditionalGeneration", qwen2_vl, {"tie_word_embeddings": True}),
    "qwen2.5-vl": ("Qwen2_5_VLForConditionalGeneration", qwen2_5_vl, {}),
    "llava": ("LlavaForConditionalGeneration", llava, {}),
    "llava-tied": ("LlavaForConditionalGeneration", llava, {"tie_word_embeddings": True}),
    "gpt-neox": ("GPTNeoXForCausalLM", gpt_neox, {}),
    "qwen3-vl": ("Qwen3VLForConditionalGeneration", qwen3_vl, {}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", qwen3_moe, {}),
    "mixtral": ("MixtralForCausalLM", mixtral, {}),
}


def config_of(name: str, **changes: Any) -> Any:
    """Return the config of a model by its name in `SAVE`, changed by keyword arguments."""
    class_name, make, own = _MODELS[name]
    config = make(**{**own, **changes})
    config.architectures = [class_name]
    return config


def reference(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Return a model by its name in `SAVE`, with random weights that the seed decides, no parameter constant."""
    import transformers

    generator = torch.Generator().manual_seed(seed)
    model = getattr(transformers, _MODELS[name][0])(config_of(name, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms would be all ones and biases all zeros: equal to one another, and to what nobody loaded.
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.05 + (1.0 if parameter.ndim == 1 else 0.0))
    return model.to(dtype).eval()


def save(
    name: str,
    directory: str | os.PathLike[str],
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **changes: Any,
) -> Any:
    """Save a model as a Hub directory and return it.

    Args:
        name: one of `SAVE`.
        directory: made where it is not there.
        seed: of the weights.
        dtype: of the weights in the file.
        max_shard_size: "20KB" gives several files and an index.
        changes: of the config.
    """
    model = reference(name, seed=seed, dtype=dtype, **changes)
    Path(directory).mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model


def _saver(name: str) -> Save:
    def run(directory: str | os.PathLike[str]) -> None:
        save(name, directory)

    return run


SAVE: dict[str, Save] = {name: _saver(name) for name in _MODELS}
"""Name -> function that saves that model, fp32, in one file, as a Hub directory."""

save_llama, save_llama_tied = SAVE["llama"], SAVE["llama-tied"]
save_qwen3, save_gpt2, save_bert = SAVE["qwen3"], SAVE["gpt2"], SAVE["bert"]
save_qwen2_vl, save_qwen3_vl = SAVE["qwen2-vl"], SAVE["qwen3-vl"]
save_qwen3_moe, save_mixtral = SAVE["qwen3-moe"], SAVE["mixtral"]


def inputs(name: str, *, batch: int = 2, length: int = 7, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return text inputs for a model's forward."""
    generator = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(3, VOCABULARY, (batch, length), generator=generator)}


def forget_dtype(directory: Path) -> str:
    """Take the dtype out of a model's config, as old ones have none, and return it."""
    content = json.loads((directory / "config.json").read_text())
    dtype: str = content.pop("dtype")
    (directory / "config.json").write_text(json.dumps(content))
    return dtype
