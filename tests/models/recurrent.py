"""State-space and hybrid text models."""

from __future__ import annotations

from typing import Any

from tests.models.architecture import VOCABULARY, Architecture
from tests.models.experts import LATENT, MOE
from tests.models.text import DECODER

HYBRID = {**DECODER, "hidden_size": 32, "head_dim": 8, "intermediate_size": 48}
MAMBA = {
    **{
        "vocab_size": VOCABULARY,
        "hidden_size": 24,
        "state_size": 4,
        "num_hidden_layers": 2,
        "conv_kernel": 3,
    },
    **{"expand": 2, "time_step_rank": 3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}


def _hybrid(name: str, model_class: str, **config: Any) -> Architecture:
    return Architecture(name=name, kind="state space and hybrid", model_class=model_class, config=config)


RECURRENT = [
    _hybrid("mamba", "MambaForCausalLM", **MAMBA),
    _hybrid("falcon_mamba", "FalconMambaForCausalLM", **MAMBA),
    _hybrid(
        *("mamba2", "Mamba2ForCausalLM"),
        **{**MAMBA, "num_heads": 6, "head_dim": 8, "n_groups": 2, "chunk_size": 4},
    ),
    _hybrid(
        *("bamba", "BambaForCausalLM"),
        **{**HYBRID, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1},
        **{"mamba_d_state": 8, "mamba_d_conv": 3, "mamba_chunk_size": 4},
    ),
    _hybrid(
        *("falcon_h1", "FalconH1ForCausalLM"),
        **{**HYBRID, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_ssm": 64},
        **{"mamba_d_state": 8, "mamba_d_conv": 3, "mamba_chunk_size": 4},
    ),
    _hybrid(
        *("zamba2", "Zamba2ForCausalLM"),
        **{
            **HYBRID,
            "tie_word_embeddings": True,
            "num_key_value_heads": 4,
            "attention_head_dim": 16,
            "mamba_d_state": 8,
            "mamba_d_conv": 3,
        },
        **{"mamba_headdim": 8, "n_mamba_heads": 8, "mamba_ngroups": 1, "chunk_size": 4, "num_mem_blocks": 1},
        **{"layers_block_type": ["mamba", "hybrid"], "hybrid_layer_ids": [1], "adapter_rank": 4},
    ),
    _hybrid(
        *("recurrent_gemma", "RecurrentGemmaForCausalLM"),
        **{
            **HYBRID,
            "tie_word_embeddings": True,
            "lru_width": 32,
            "attention_window_size": 8,
            "block_types": ["recurrent", "attention"],
        },
        **{"conv1d_width": 3},
    ),
    _hybrid(
        "rwkv",
        "RwkvForCausalLM",
        vocab_size=VOCABULARY,
        hidden_size=24,
        num_hidden_layers=2,
        context_length=32,
    ),
    _hybrid(
        *("granitemoehybrid", "GraniteMoeHybridForCausalLM"),
        **{**HYBRID, "layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 8},
        **{"mamba_n_groups": 1, "mamba_d_state": 8, "mamba_d_conv": 3, "mamba_chunk_size": 4},
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16},
    ),
    _hybrid(
        *("jamba", "JambaForCausalLM"),
        **{**HYBRID, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
        **{"expert_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 4},
        **{"mamba_d_conv": 3, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    ),
    _hybrid(
        *("nemotron_h", "NemotronHForCausalLM"),
        **{
            **HYBRID,
            "num_hidden_layers": 3,
            "layers_block_type": ["mamba", "attention", "moe"],
            "mamba_num_heads": 8,
        },
        **{"mamba_head_dim": 8, "n_groups": 1, "ssm_state_size": 8, "conv_kernel": 3, "chunk_size": 4},
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        **{"moe_shared_expert_intermediate_size": 16, "n_group": 1, "topk_group": 1},
    ),
    _hybrid(
        *("kimi_linear", "KimiLinearForCausalLM"),
        **{**MOE, **LATENT, "layer_types": ["linear_attention", "full_attention"]},
        **{"linear_head_dim": 8, "linear_num_heads": 4},
    ),
    _hybrid(
        *("olmo_hybrid", "OlmoHybridForCausalLM"),
        **{**HYBRID, "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4},
        **{"linear_num_key_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 8},
    ),
    _hybrid("lfm2", "Lfm2ForCausalLM", **{**HYBRID, "layer_types": ["conv", "full_attention"]}),
]
