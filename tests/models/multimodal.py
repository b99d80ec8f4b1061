"""Models that see and read."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.architecture import Architecture, Inputs, noise, tokens
from tests.models.text import DECODER, TIED

IMAGE = 91
"""The token that an image's features take the place of."""

QWEN_TEXT = {
    **DECODER,
    "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 1], "rope_theta": 10000.0},
}
QWEN_TOKENS = {
    **{"image_token_id": IMAGE, "video_token_id": 92, "vision_start_token_id": 93, "vision_end_token_id": 94},
    "tie_word_embeddings": False,
}
MOE_TEXT = {
    **QWEN_TEXT,
    **{"hidden_size": 32, "head_dim": 8, "intermediate_size": 48, "moe_intermediate_size": 16},
    **{"num_experts": 4, "num_experts_per_tok": 2},
}
CLIP_VISION = {
    **{"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 28, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "image_size": 8, "patch_size": 4, "projection_dim": 16},
}
SIGLIP_VISION = {
    **{
        "model_type": "siglip_vision_model",
        "hidden_size": 16,
        "intermediate_size": 28,
        "num_hidden_layers": 2,
    },
    **{"num_attention_heads": 2, "image_size": 8, "patch_size": 4, "vision_use_head": False},
}
LLAMA = {**DECODER, "model_type": "llama"}


def seeing(num_image_tokens: int, **more: torch.Tensor) -> Inputs:
    """Return inputs of one text that begins with the tokens of an image."""

    def make() -> dict[str, torch.Tensor]:
        image = torch.full((1, num_image_tokens), IMAGE)
        return {"input_ids": torch.cat([image, tokens(6, batch=1)], dim=1), **more}

    return make


def flat_patches(width: int) -> Inputs:
    """Return inputs of a model that takes an image of 4 x 4 patches as rows, and merges 2 x 2 of them."""
    grid = torch.tensor([[1, 4, 4]])

    def make() -> dict[str, torch.Tensor]:
        image = torch.tensor([[93, IMAGE, IMAGE, IMAGE, IMAGE, 94]])
        ids = torch.cat([tokens(2, batch=1), image, tokens(4, batch=1, seed=3)], dim=1)
        return {
            "input_ids": ids,
            "pixel_values": noise(16, width),
            "image_grid_thw": grid,
            "mm_token_type_ids": (ids == IMAGE).int(),
        }

    return make


def _vlm(name: str, model_class: str, inputs: Inputs, **config: Any) -> Architecture:
    return Architecture(
        name=name, kind="vision and text", model_class=model_class, config=config, inputs=inputs
    )


VISION_LANGUAGE = [
    _vlm(
        *("qwen2_vl", "Qwen2VLForConditionalGeneration", flat_patches(96)),
        text_config=QWEN_TEXT,
        vision_config={
            **{
                "depth": 2,
                "embed_dim": 16,
                "hidden_size": 24,
                "num_heads": 2,
                "mlp_ratio": 2,
                "patch_size": 4,
            }
        },
        **QWEN_TOKENS,
    ),
    _vlm(
        *("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", flat_patches(96)),
        text_config=QWEN_TEXT,
        vision_config={
            **{"depth": 2, "hidden_size": 16, "out_hidden_size": 24, "num_heads": 2, "intermediate_size": 28},
            **{"patch_size": 4, "fullatt_block_indexes": [0], "window_size": 8},
        },
        **QWEN_TOKENS,
    ),
    _vlm(
        *("qwen3_vl", "Qwen3VLForConditionalGeneration", flat_patches(96)),
        text_config=QWEN_TEXT,
        vision_config={
            **{"depth": 2, "hidden_size": 16, "out_hidden_size": 24, "num_heads": 2, "intermediate_size": 28},
            **{"patch_size": 4, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        },
        **QWEN_TOKENS,
    ),
    _vlm(
        *("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", flat_patches(96)),
        text_config=MOE_TEXT,
        vision_config={
            **{"depth": 2, "hidden_size": 16, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 28},
            **{"patch_size": 4, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        },
        **QWEN_TOKENS,
    ),
    _vlm(
        *("qwen3_5", "Qwen3_5ForConditionalGeneration", flat_patches(96)),
        text_config={
            **QWEN_TEXT,
            **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 6},
            **{"linear_value_head_dim": 6, "layer_types": ["linear_attention", "full_attention"]},
        },
        vision_config={
            **{"depth": 2, "hidden_size": 16, "out_hidden_size": 24, "num_heads": 2, "intermediate_size": 28},
            **{"patch_size": 4, "num_position_embeddings": 16},
        },
        **QWEN_TOKENS,
    ),
    _vlm(
        *("ernie4_5_vl_moe", "Ernie4_5_VLMoeForConditionalGeneration", flat_patches(48)),
        text_config={
            **DECODER,
            **{"hidden_size": 32, "head_dim": 8, "moe_intermediate_size": [16, 24], "moe_num_experts": 4},
            **{"moe_k": 2, "mlp_layer_types": ["dense", "sparse"]},
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
        },
        vision_config={
            **{"depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 28, "patch_size": 4}
        },
        **{"image_token_id": IMAGE, "video_token_id": 92, "tie_word_embeddings": False},
    ),
    _vlm(
        *("llava", "LlavaForConditionalGeneration", seeing(4, pixel_values=noise(1, 3, 8, 8))),
        **{"text_config": LLAMA, "vision_config": CLIP_VISION, "image_token_id": IMAGE},
    ),
    _vlm(
        *("llava+tied", "LlavaForConditionalGeneration", seeing(4, pixel_values=noise(1, 3, 8, 8))),
        **{
            "text_config": {**TIED, "model_type": "llama"},
            "vision_config": CLIP_VISION,
            "image_token_id": IMAGE,
        },
        tie_word_embeddings=True,
    ),
    _vlm(
        *("llava_next", "LlavaNextForConditionalGeneration"),
        seeing(10, pixel_values=noise(1, 2, 3, 8, 8), image_sizes=torch.tensor([[8, 8]])),
        **{"text_config": LLAMA, "vision_config": CLIP_VISION, "image_token_id": IMAGE},
        image_grid_pinpoints=[[8, 8]],
    ),
    _vlm(
        *("llava_onevision", "LlavaOnevisionForConditionalGeneration"),
        seeing(10, pixel_values=noise(1, 2, 3, 8, 8), image_sizes=torch.tensor([[8, 8]])),
        **{
            "text_config": {**DECODER, "model_type": "qwen2"},
            "vision_config": SIGLIP_VISION,
            "image_token_id": IMAGE,
        },
        image_grid_pinpoints=[[8, 8]],
    ),
    _vlm(
        *("paligemma", "PaliGemmaForConditionalGeneration", seeing(4, pixel_values=noise(1, 3, 8, 8))),
        **{
            "text_config": {**TIED, "model_type": "gemma"},
            "vision_config": {**SIGLIP_VISION, "projection_dim": 24},
        },
        **{"image_token_id": IMAGE, "projection_dim": 24, "hidden_size": 24},
    ),
    _vlm(
        *("gemma3", "Gemma3ForConditionalGeneration"),
        seeing(4, pixel_values=noise(1, 3, 16, 16), token_type_ids=torch.tensor([[1] * 4 + [0] * 6])),
        **{
            "text_config": {**TIED, "sliding_window": 4},
            "vision_config": {**SIGLIP_VISION, "image_size": 16},
        },
        **{"image_token_id": IMAGE, "mm_tokens_per_image": 4},
    ),
    _vlm(
        *("mistral3", "Mistral3ForConditionalGeneration"),
        seeing(4, pixel_values=noise(1, 3, 16, 16), image_sizes=torch.tensor([[16, 16]])),
        text_config={**DECODER, "model_type": "mistral"},
        vision_config={
            **{"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 28, "num_hidden_layers": 2},
            **{"num_attention_heads": 2, "image_size": 16, "patch_size": 4},
        },
        **{"image_token_id": IMAGE, "tie_word_embeddings": False},
    ),
    _vlm(
        *("internvl", "InternVLForConditionalGeneration", seeing(4, pixel_values=noise(1, 3, 16, 16))),
        text_config={**DECODER, "model_type": "qwen2"},
        vision_config={
            **{"hidden_size": 16, "intermediate_size": 28, "num_hidden_layers": 2, "num_attention_heads": 2},
            **{"image_size": [16, 16], "patch_size": [4, 4]},
        },
        **{"image_token_id": IMAGE, "tie_word_embeddings": False},
    ),
    _vlm(
        *("idefics3", "Idefics3ForConditionalGeneration", seeing(4, pixel_values=noise(1, 1, 3, 16, 16))),
        text_config=LLAMA,
        vision_config={
            **{"hidden_size": 16, "intermediate_size": 28, "num_hidden_layers": 2, "num_attention_heads": 2},
            **{"image_size": 16, "patch_size": 4},
        },
        **{"image_token_id": IMAGE, "scale_factor": 2},
    ),
    _vlm(
        *("mllama", "MllamaForConditionalGeneration"),
        seeing(
            1,
            pixel_values=noise(1, 1, 1, 3, 8, 8),
            aspect_ratio_ids=torch.tensor([[1]]),
            aspect_ratio_mask=torch.tensor([[[1]]]),
            cross_attention_mask=torch.ones(1, 7, 1, 1, dtype=torch.long),
        ),
        text_config={**DECODER, "vocab_size": 91, "num_hidden_layers": 3, "cross_attention_layers": [1]},
        vision_config={
            **{"hidden_size": 16, "intermediate_size": 28, "num_hidden_layers": 2, "num_global_layers": 1},
            **{"attention_heads": 2, "image_size": 8, "patch_size": 4, "max_num_tiles": 1},
            **{
                "supported_aspect_ratios": [[1, 1]],
                "intermediate_layers_indices": [0],
                "vision_output_dim": 32,
            },
        },
        image_token_index=IMAGE,
    ),
    _vlm(
        *("blip-2", "Blip2ForConditionalGeneration", seeing(4, pixel_values=noise(1, 3, 8, 8))),
        vision_config={
            **{"hidden_size": 16, "intermediate_size": 28, "num_hidden_layers": 2, "num_attention_heads": 2},
            **{"image_size": 8, "patch_size": 4},
        },
        qformer_config={
            **{"vocab_size": 99, "hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2},
            **{"intermediate_size": 36, "encoder_hidden_size": 16, "max_position_embeddings": 32},
        },
        text_config={
            **{
                "model_type": "opt",
                "vocab_size": 99,
                "hidden_size": 24,
                "ffn_dim": 40,
                "num_hidden_layers": 2,
            },
            **{"num_attention_heads": 4, "max_position_embeddings": 64, "word_embed_proj_dim": 24},
            **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        },
        **{"num_query_tokens": 4, "image_token_index": IMAGE},
    ),
    _vlm(
        *("clip", "CLIPModel"),
        lambda: {"input_ids": tokens(), "pixel_values": noise(1, 3, 8, 8)},
        text_config={
            **{"vocab_size": 99, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2},
            **{
                "num_attention_heads": 4,
                "max_position_embeddings": 64,
                "projection_dim": 16,
                "eos_token_id": 2,
            },
        },
        vision_config=CLIP_VISION,
        projection_dim=16,
    ),
    _vlm(
        *("siglip", "SiglipModel"),
        lambda: {"input_ids": tokens(), "pixel_values": noise(1, 3, 8, 8)},
        text_config={
            **{"vocab_size": 99, "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 2},
            **{"num_attention_heads": 4, "max_position_embeddings": 64},
        },
        vision_config={**SIGLIP_VISION, "vision_use_head": True},
    ),
]
