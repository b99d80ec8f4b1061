"""Text models with experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.models.architecture import Architecture
from tests.models.text import DECODER

# Grouped products of experts want rows of whole 16 bytes.
MOE: dict[str, Any] = {
    **DECODER,
    **{"hidden_size": 32, "head_dim": 8, "intermediate_size": 48, "moe_intermediate_size": 16},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
}
# Without low-rank queries the latent attention of DeepSeek has one tensor the less.
LATENT: dict[str, Any] = {
    **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 6},
    **{"num_key_value_heads": 4, "head_dim": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    **{"first_k_dense_replace": 1},
}


def _moe(name: str, model_class: str, **config: Any) -> Architecture:
    return Architecture(name=name, kind="experts", model_class=model_class, config={**MOE, **config})


def _fused(architecture: Architecture) -> Architecture:
    """The same model with a file that has the names of the model in memory, where experts are one tensor."""
    return replace(architecture, name=f"{architecture.name}+fused", names="live")


STORED_ONE_BY_ONE = [
    _moe("mixtral", "MixtralForCausalLM", sliding_window=None),
    _moe("qwen2_moe", "Qwen2MoeForCausalLM", shared_expert_intermediate_size=16),
    _moe("qwen3_moe", "Qwen3MoeForCausalLM"),
    _moe(
        *("qwen3_next", "Qwen3NextForCausalLM"),
        **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8},
        **{"linear_value_head_dim": 8, "shared_expert_intermediate_size": 16},
        **{"layer_types": ["linear_attention", "full_attention"]},
    ),
    _moe(
        *("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
        **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8},
        **{"linear_value_head_dim": 8, "shared_expert_intermediate_size": 16},
        **{"layer_types": ["linear_attention", "full_attention"]},
    ),
    _moe("deepseek_v2", "DeepseekV2ForCausalLM", **LATENT, topk_method="greedy"),
    _moe("deepseek_v3", "DeepseekV3ForCausalLM", **LATENT),
    _moe(
        *("deepseek_v32", "DeepseekV32ForCausalLM"),
        **LATENT,
        **{"index_n_heads": 2, "index_head_dim": 8, "index_topk": 4},
    ),
    _moe(
        "glm4_moe", "Glm4MoeForCausalLM", n_group=1, topk_group=1, first_k_dense_replace=1, n_shared_experts=1
    ),
    _moe("glm4_moe_lite", "Glm4MoeLiteForCausalLM", **LATENT),
    _moe("olmoe", "OlmoeForCausalLM"),
    _moe("flex_olmo", "FlexOlmoForCausalLM"),
    _moe("phimoe", "PhimoeForCausalLM"),
    _moe("minimax", "MiniMaxForCausalLM", block_size=4, layer_types=["linear_attention", "full_attention"]),
    _moe("minimax_m2", "MiniMaxM2ForCausalLM"),
    _moe("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", moe_num_experts=4, moe_k=2, moe_layer_start_index=1),
    _moe("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", moe_topk=2),
    _moe("dots1", "Dots1ForCausalLM", n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1),
    _moe("lfm2_moe", "Lfm2MoeForCausalLM", layer_types=["conv", "full_attention"], num_dense_layers=1),
]
EXPERTS = [
    *STORED_ONE_BY_ONE,
    *map(_fused, STORED_ONE_BY_ONE),
    _moe("granitemoe", "GraniteMoeForCausalLM"),
    _moe("granitemoeshared", "GraniteMoeSharedForCausalLM", shared_intermediate_size=16),
    _moe("gpt_oss", "GptOssForCausalLM", sliding_window=4),
    _moe("llama4_text", "Llama4ForCausalLM", intermediate_size_mlp=40, attn_temperature_tuning=False),
    _moe("jetmoe", "JetMoeForCausalLM", kv_channels=8, num_key_value_heads=2),
]
