"""Architectures of transformers' last releases, of all kinds, and older ones that none of the others is like."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from tests.models.architecture import Architecture, Inputs, noise, text, tokens, translation
from tests.models.experts import LATENT, MOE
from tests.models.multimodal import IMAGE, LLAMA, QWEN_TEXT, QWEN_TOKENS, SIGLIP_VISION, flat_patches, seeing
from tests.models.text import DECODER, SEQ2SEQ

SOUND = 97
"""The token that a piece of sound takes the place of."""

SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
SPARSE = {"mlp_layer_types": ["dense", "sparse"]}
INDEXED = {**LATENT, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4}
DELTA = {
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8},
    "linear_value_head_dim": 8,
}
GEMMA = {
    **{**DECODER, "tie_word_embeddings": True, "sliding_window": 4, "query_pre_attn_scalar": 6},
    "layer_types": ["sliding_attention", "full_attention"],
}
GEMMA4_VISION = {
    **{"hidden_size": 16, "intermediate_size": 28, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "pooling_kernel_size": 2},
    "position_embedding_size": 20,
}
GEMMA4_TOKENS = {
    **{"boi_token_id": 93, "eoi_token_id": 94, "image_token_id": IMAGE, "video_token_id": 92},
    **{"boa_token_id": 95, "eoa_token_index": 96, "audio_token_id": SOUND},
}
QWEN_VISION = {
    **{"depth": 2, "hidden_size": 16, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 28},
    **{"patch_size": 4, "num_position_embeddings": 16},
}
BLT = {
    **{"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 6},
    **{"intermediate_size": 40, "max_position_embeddings": 64},
}
INKLING = {
    **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_head_dim": 8},
    **{"sliding_window_size": 4, "d_rel": 4, "rel_extent": 16},
}
INKLING2 = {
    **{**INKLING, "layer_types": ["hybrid_sliding", "hybrid"], "n_layers_per_attn_res_block": 1},
    "unpadded_vocab_size": 97,
}
INKLING2_VISION = {
    **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4},
    **{"posemb_grid_size": 4, "projection_hidden_dim": 20, "text_hidden_size": 32},
}
WHISPER = {
    **{"d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 28},
    "num_mel_bins": 8,
}


def hearing(num_tokens: int, **more: torch.Tensor) -> Inputs:
    """Return inputs of one text that begins with the tokens of a sound."""

    def make() -> dict[str, torch.Tensor]:
        sound = torch.full((1, num_tokens), SOUND)
        return {"input_ids": torch.cat([sound, tokens(6, batch=1)], dim=1), **more}

    return make


def placed_patches(side: int, width: int) -> Inputs:
    """Return inputs of a model that takes an image as rows of side x side patches, and where each of them was."""
    columns = torch.arange(side).repeat(side)
    return seeing(
        4,
        pixel_values=noise(1, side * side, width),
        image_position_ids=torch.stack([columns, columns.sort().values], dim=-1)[None],
        mm_token_type_ids=torch.tensor([[1] * 4 + [0] * 6]),
    )


def answering(inputs: Inputs) -> Inputs:
    """Return inputs of an encoder, and of its decoder."""
    return lambda: {**inputs(), "decoder_input_ids": tokens(5, batch=1, seed=2)}


def _other(name: str, kind: str, model_class: str, inputs: Inputs = text, **config: Any) -> Architecture:
    return Architecture(name=name, kind=kind, model_class=model_class, config=config, inputs=inputs)


def _decoder(name: str, model_class: str, **config: Any) -> Architecture:
    return _other(name, "decoder", model_class, **{**DECODER, **config})


def _moe(name: str, model_class: str, **config: Any) -> Architecture:
    return _other(name, "experts", model_class, **{**MOE, **config})


def _vlm(name: str, model_class: str, inputs: Inputs = text, **config: Any) -> Architecture:
    return _other(name, "vision and text", model_class, inputs, **config)


def _audio(name: str, model_class: str, inputs: Inputs = text, **config: Any) -> Architecture:
    return _other(name, "audio", model_class, inputs, **config)


_ALL = [
    _decoder("bitnet", "BitNetForCausalLM"),
    _decoder("doge", "DogeForCausalLM"),
    _decoder("hrm_text", "HrmTextForCausalLM", H_cycles=2, L_cycles=1),
    _decoder("jais2", "Jais2ForCausalLM"),
    _decoder("nanochat", "NanoChatForCausalLM"),
    _decoder("vaultgemma", "VaultGemmaForCausalLM", **GEMMA),
    _decoder("youtu", "YoutuForCausalLM", **{**LATENT, "tie_word_embeddings": True, "pad_token_id": None}),
    _decoder("youtu+padding", "YoutuForCausalLM", **LATENT, tie_word_embeddings=True),
    _moe(
        *("deepseek_v4", "DeepseekV4ForCausalLM"),
        **{"num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 8},
        **{
            "layer_types": [
                "sliding_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
            ]
        },
        **{"mlp_layer_types": ["hash_moe", "moe", "moe"], "partial_rotary_factor": 0.5, "sliding_window": 4},
        **{"compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}},
        **{"o_groups": 2, "o_lora_rank": 8, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4},
        hc_mult=2,
    ),
    _moe("glm_moe_dsa", "GlmMoeDsaForCausalLM", **INDEXED),
    _moe("hy_v3", "HYV3ForCausalLM"),
    _moe("hy_v4", "HYV4ForCausalLM", **INDEXED, hc_mult=2),
    _moe("mimo_v2_flash", "MiMoV2FlashForCausalLM", v_head_dim=6, **SLIDING),
    _moe(
        *("longcat_flash", "LongcatFlashForCausalLM"),
        **{**LATENT, "num_layers": 2, "ffn_hidden_size": 40, "expert_ffn_hidden_size": 16, "moe_topk": 2},
        zero_expert_num=2,
    ),
    _moe(
        *("minimax_m3_vl_text", "MiniMaxM3VLForCausalLM"),
        **{**SPARSE, "dense_intermediate_size": 40, "shared_intermediate_size": 24, "rotary_dim": 4},
        **{"index_n_heads": 2, "index_head_dim": 8, "index_block_size": 2, "index_topk_blocks": 2},
        layer_types=["full_attention", "minimax_m3_sparse"],
    ),
    _moe(
        *("qwen4_exp_text", "Qwen4ExpForCausalLM"),
        **{**DELTA, "shared_expert_intermediate_size": 24, "hc_count": 2, "hc_lowrank": 8},
        **{"layer_types": ["linear_attention", "indexed_attention"], "ple_layer_ids": [1]},
        **{"ple_embed_dim": 16, "ngram_vocab_size_base": 40, "heads_per_ngram": 2},
        **{"make_ngram_vocab_size_divisible_by": 4, "split_ngram_parts": 2, "indexer_n_heads": 2},
        **{"indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 4, "indexer_compress_ratio": 2},
    ),
    _moe("exaone_moe", "ExaoneMoeForCausalLM", **SLIDING),
    _moe("solar_open", "SolarOpenForCausalLM"),
    _moe("axk1", "AXK1ForCausalLM", **LATENT),
    _moe("axk2", "AXK2ForCausalLM", **INDEXED, gated_norm_rank=4),
    _moe(
        *("inkling_text", "InklingForCausalLM"),
        **{"num_key_value_heads": 2, **INKLING, **SPARSE, "layer_types": ["hybrid_sliding", "hybrid"]},
    ),
    _moe(
        *("inkling2_text", "Inkling2ForCausalLM"),
        **INKLING2,
    ),
    _moe(
        *("laguna", "LagunaForCausalLM"),
        **{**SLIDING, "num_attention_heads_per_layer": [6, 4], "shared_expert_intermediate_size": 24},
    ),
    _moe("mellum", "MellumForCausalLM", **SLIDING, **SPARSE),
    _moe("kolibri1", "Kolibri1ForCausalLM", **SLIDING, shared_expert_intermediate_size=24),
    _moe("mistral4", "Mistral4ForCausalLM", **{**LATENT, "qk_nope_head_dim": 4}),
    _moe("cohere2_moe", "Cohere2MoeForCausalLM", **{**SLIDING, **SPARSE, "tie_word_embeddings": True}),
    _moe("afmoe", "AfmoeForCausalLM", **SLIDING),
    _moe("granitemoe_swa", "GraniteMoeSWAForCausalLM", **SLIDING, shared_intermediate_size=24),
    _moe("flint", "FlintForCausalLM", **SLIDING, shared_expert_intermediate_size=24, mlp_only_layers=[0]),
    _moe("beam", "BeamForCausalLM", **SLIDING, **SPARSE, n_group=1, topk_group=1),
    _moe("zaya", "ZayaForCausalLM", num_experts_per_tok=1, tie_word_embeddings=True, router_hidden_size=12),
    _moe(
        *("lara_mini", "LaraMiniForCausalLM"),
        **{**DELTA, "shared_expert_intermediate_size": 24, "num_hidden_layers": 3, "sliding_window": 4},
        layer_types=["linear_attention", "sliding_attention", "full_attention"],
    ),
    _other(
        *("lfm3", "state space and hybrid", "Lfm3ForCausalLM"),
        **{**DECODER, "num_hidden_layers": 3, "sliding_window": 4, "tie_word_embeddings": True},
        **{"conv_L_cache": 3, "layer_types": ["conv", "sliding_attention", "full_attention"]},
    ),
    _other(
        *("t5gemma", "encoder-decoder", "T5GemmaForConditionalGeneration", translation),
        **{"encoder": GEMMA, "decoder": {**GEMMA, "intermediate_size": 44}, "vocab_size": 99},
    ),
    _other(
        *("t5gemma2", "encoder-decoder", "T5Gemma2ForConditionalGeneration"),
        answering(seeing(4, pixel_values=noise(1, 3, 16, 16))),
        encoder={
            **{"text_config": GEMMA, "vision_config": {**SIGLIP_VISION, "image_size": 16}},
            **{"mm_tokens_per_image": 4, "boi_token_index": 93, "eoi_token_index": 94},
        },
        **{"decoder": GEMMA, "image_token_index": IMAGE},
    ),
    _other(
        *("nllb-moe", "encoder-decoder", "NllbMoeForConditionalGeneration", translation),
        **{**SEQ2SEQ, "num_experts": 4, "expert_capacity": 8, "encoder_sparse_step": 2},
        decoder_sparse_step=2,
    ),
    _other(
        *("funnel", "encoder", "FunnelForMaskedLM"),
        **{"vocab_size": 99, "d_model": 24, "d_head": 6, "n_head": 4, "d_inner": 40, "block_sizes": [1, 1]},
        **{"num_decoder_layers": 1, "pad_token_id": 0},
    ),
    _other(
        *("blt", "decoder", "BltForCausalLM"),
        **{"vocab_size": 99, "patch_size": 4, "max_patch_length": 4, "encoder_hash_byte_group_vocab": 50},
        **{
            "encoder_hash_byte_group_size": [3, 4],
            "encoder_hash_byte_group_nb_functions": 1,
            "pad_token_id": 0,
        },
        **{"use_cache": False},
        patcher_config={**BLT, "intermediate_size": 40},
        encoder_config={**BLT, "vocab_size": 99},
        decoder_config={**BLT, "vocab_size": 99, "hidden_size_global": 24},
        global_config=BLT,
    ),
    _vlm(
        *("chinese_clip", "ChineseCLIPModel"),
        lambda: {"input_ids": tokens(6), "pixel_values": noise(2, 3, 16, 16)},
        text_config={
            **{"vocab_size": 99, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2},
            **{"num_attention_heads": 4, "max_position_embeddings": 32, "pad_token_id": 0},
        },
        **{"vision_config": {**SIGLIP_VISION, "image_size": 16}, "projection_dim": 20},
    ),
    _vlm(
        *("minimax_m3_vl", "MiniMaxM3SparseForConditionalGeneration", flat_patches(96)),
        text_config={
            **{**MOE, **SPARSE, "dense_intermediate_size": 40, "shared_intermediate_size": 24},
            **{"rotary_dim": 4, "index_n_heads": 2, "index_head_dim": 8, "index_block_size": 2},
            **{"index_topk_blocks": 2, "layer_types": ["full_attention", "minimax_m3_sparse"]},
        },
        vision_config={
            **{"hidden_size": 24, "intermediate_size": 28, "num_hidden_layers": 2, "num_attention_heads": 2},
            **{"image_size": 16, "patch_size": 4},
        },
        **{"image_token_index": IMAGE, "video_token_index": 92, "projector_hidden_size": 20},
    ),
    _vlm(
        *("step3p7", "Step3p7ForConditionalGeneration"),
        seeing(1, pixel_values=noise(1, 3, 16, 16)),
        text_config={
            **{**MOE, **SLIDING, **SPARSE, "share_expert_dim": 24, "num_sliding_attention_heads": 6},
        },
        vision_config={
            **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_ratio": 2.0},
            **{"image_size": 16, "patch_size": 4, "max_position_embeddings": 16},
        },
        image_token_id=IMAGE,
    ),
    _vlm(
        *("kimi_k25", "Kimi_K25ForConditionalGeneration"),
        seeing(4, pixel_values=noise(16, 3, 4, 4), image_grid_thw=torch.tensor([[1, 4, 4]])),
        text_config={**MOE, **LATENT, "model_type": "deepseek_v3"},
        vision_config={
            **{"hidden_size": 16, "intermediate_size": 28, "num_hidden_layers": 2, "num_attention_heads": 2},
            **{"patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4, "pos_emb_time": 2},
        },
        **{"image_token_id": IMAGE, "video_token_id": 92, "projection_hidden_size": 16},
        tie_word_embeddings=False,
    ),
    _vlm(
        *("gemma4", "Gemma4ForConditionalGeneration", placed_patches(4, 48)),
        text_config={
            **{**MOE, **SLIDING, "tie_word_embeddings": True, "vocab_size_per_layer_input": 99},
            **{"hidden_size_per_layer_input": 12, "global_head_dim": 16, "enable_moe_block": True},
            **{"num_hidden_layers": 4, "num_kv_shared_layers": 2, "top_k_experts": 2},
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        vision_config=GEMMA4_VISION,
        audio_config={
            **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "output_proj_dims": 20},
            "subsampling_conv_channels": [8, 4],
        },
        **GEMMA4_TOKENS,
    ),
    _vlm(
        *("gemma4_unified", "Gemma4UnifiedForConditionalGeneration", placed_patches(2, 192)),
        text_config={
            **{**DECODER, **SLIDING, "tie_word_embeddings": True, "global_head_dim": 12},
            "attention_k_eq_v": True,
        },
        vision_config={
            **{"patch_size": 4, "pooling_kernel_size": 2, "mm_embed_dim": 20, "mm_posemb_size": 16},
            "output_proj_dims": 20,
        },
        **{"audio_config": {"audio_embed_dim": 12}, **GEMMA4_TOKENS},
    ),
    _vlm(
        *("qwen3_omni_moe_thinker", "Qwen3OmniMoeThinkerForConditionalGeneration", flat_patches(96)),
        text_config={**QWEN_TEXT, **MOE},
        vision_config={**QWEN_VISION, "deepstack_visual_indexes": [0]},
        audio_config={**WHISPER, "output_dim": 32, "n_window": 4, "downsample_hidden_size": 4},
        **{**QWEN_TOKENS, "audio_token_id": 95, "audio_start_token_id": 96},
    ),
    _vlm(
        *("lfm2_vl", "Lfm2VlForConditionalGeneration"),
        seeing(
            4,
            pixel_values=noise(1, 16, 48),
            spatial_shapes=torch.tensor([[4, 4]]),
            pixel_attention_mask=torch.ones(1, 16, dtype=torch.long),
        ),
        text_config={**DECODER, "model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
        vision_config={
            **{"model_type": "siglip2_vision_model", "hidden_size": 16, "intermediate_size": 28},
            **{"num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4, "num_patches": 16},
        },
        **{"image_token_id": IMAGE, "projector_hidden_size": 20},
    ),
    _vlm(
        *("muse_glimmer", "MuseGlimmerForConditionalGeneration", flat_patches(96)),
        text_config={**DECODER, **SLIDING},
        vision_config={
            **{"hidden_size": 16, "intermediate_size": 28, "num_hidden_layers": 2, "num_attention_heads": 2},
            **{"patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4, "max_position_embeddings": 16},
        },
        **{"image_token_id": IMAGE, "video_token_id": 92, "out_hidden_size": 64},
        projector_hidden_size=20,
    ),
    _vlm(
        *("mistral_large4", "MistralLarge4ForConditionalGeneration"),
        seeing(4, pixel_values=noise(1, 3, 16, 16), image_sizes=torch.tensor([[16, 16]])),
        text_config={**MOE, **INDEXED},
        vision_config={
            **{"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 28, "num_hidden_layers": 2},
            **{"num_attention_heads": 2, "image_size": 16, "patch_size": 4, "head_dim": 8},
        },
        image_token_index=IMAGE,
    ),
    _vlm(
        *("aya_vision", "AyaVisionForConditionalGeneration"),
        seeing(4, pixel_values=noise(1, 3, 16, 16)),
        text_config={**DECODER, **SLIDING, "model_type": "cohere2", "tie_word_embeddings": True},
        **{"vision_config": {**SIGLIP_VISION, "image_size": 16}, "image_token_index": IMAGE},
    ),
    _vlm(
        *("ovis2", "Ovis2ForConditionalGeneration"),
        seeing(16, pixel_values=noise(1, 3, 16, 16)),
        text_config={**DECODER, "model_type": "qwen2"},
        vision_config={
            **{"hidden_size": 16, "intermediate_size": 28, "num_hidden_layers": 2, "num_attention_heads": 2},
            **{"image_size": 16, "patch_size": 4, "vocab_size": 30, "num_visual_indicator_tokens": 3},
        },
        **{"image_token_id": IMAGE, "visual_indicator_token_ids": [92, 93, 94], "vocab_size": 99},
        **{"hidden_size": 24, "tie_word_embeddings": False},
    ),
    _vlm(
        *("inkling2", "Inkling2ForConditionalGeneration"),
        seeing(4, pixel_values=noise(4, 8, 8, 3), image_grid_thw=torch.tensor([[1, 2, 2]])),
        text_config={**MOE, **INKLING2},
        **{"vision_config": INKLING2_VISION, "image_token_id": IMAGE},
    ),
    _vlm(
        *("inkling2_loop", "Inkling2LoopForConditionalGeneration"),
        seeing(4, pixel_values=noise(4, 8, 8, 3), image_grid_thw=torch.tensor([[1, 2, 2]])),
        text_config={
            **{**MOE, **INKLING2, "num_hidden_layers": 3, "layer_types": None},
            **{
                "loop_layer_index_start": 1,
                "loop_layer_index_end": 2,
                "loop_num_passes": 2,
                "loop_gate_rank": 4,
            },
        },
        vision_config={"model_type": "inkling2_vision", **INKLING2_VISION},
        image_token_id=IMAGE,
    ),
    _vlm(
        *("aria", "AriaForConditionalGeneration"),
        seeing(4, pixel_values=noise(1, 3, 16, 16)),
        text_config={**MOE, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
        vision_config={
            **{"model_type": "idefics3_vision", "hidden_size": 16, "intermediate_size": 28},
            **{"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 4},
        },
        **{"image_token_index": IMAGE, "projector_patch_to_query_dict": {"16": 4}},
    ),
    _vlm(
        *("diffusion_gemma", "DiffusionGemmaForBlockDiffusion", answering(placed_patches(4, 48))),
        text_config={
            **{**MOE, **SLIDING, "tie_word_embeddings": True, "global_head_dim": 16, "top_k_experts": 2},
        },
        **{"vision_config": {**GEMMA4_VISION, "model_type": "gemma4_vision"}, "canvas_length": 5},
        **{"boi_token_id": 93, "eoi_token_id": 94, "image_token_id": IMAGE},
    ),
    _audio(
        *("qwen2_audio", "Qwen2AudioForConditionalGeneration"),
        hearing(
            8, input_features=noise(1, 8, 32), feature_attention_mask=torch.ones(1, 32, dtype=torch.long)
        ),
        text_config={**DECODER, "model_type": "qwen2"},
        audio_config={**WHISPER, "model_type": "qwen2_audio_encoder", "max_source_positions": 16},
        audio_token_index=SOUND,
    ),
    _audio(
        *("qwen3_asr", "Qwen3ASRForConditionalGeneration"),
        hearing(
            13, input_features=noise(1, 8, 100), input_features_mask=torch.ones(1, 100, dtype=torch.long)
        ),
        text_config={**DECODER, "model_type": "qwen3"},
        audio_config={
            **{**WHISPER, "model_type": "qwen3_asr_encoder", "output_dim": 24},
            **{"n_window": 50, "n_window_infer": 100, "downsample_hidden_size": 4},
        },
        **{"audio_token_id": SOUND, "timestamp_token_id": 96, "pad_token_id": 0, "eos_token_id": 2},
        tie_word_embeddings=False,
    ),
    _audio(
        *("voxtral", "VoxtralForConditionalGeneration"),
        hearing(4, input_features=noise(1, 8, 32)),
        text_config=LLAMA,
        audio_config={
            **{
                "model_type": "voxtral_encoder",
                "hidden_size": 16,
                "intermediate_size": 64,
                "num_mel_bins": 8,
            },
            **{"num_hidden_layers": 2, "num_attention_heads": 2, "max_source_positions": 16},
        },
        audio_token_id=SOUND,
    ),
]
NEWER = [each for each in _ALL if each.model_type in CONFIG_MAPPING_NAMES]
"""Those that the installed transformers has. `inkling_mm_model` is left out: to build it takes scipy."""
LATER = [each for each in _ALL if each.model_type not in CONFIG_MAPPING_NAMES]
"""Those that came with a later one: `lara_mini` and `inkling2_loop` with 5.24."""
