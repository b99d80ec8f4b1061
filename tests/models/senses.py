"""Models of sound and of images alone."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.architecture import Architecture, Inputs, noise, tokens
from tests.models.text import SEQ2SEQ

VIT = {
    **{"hidden_size": 16, "intermediate_size": 28, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"image_size": 16, "patch_size": 4, "num_labels": 5},
}
WAVE = {
    **{"vocab_size": 32, "hidden_size": 16, "intermediate_size": 28, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "conv_dim": [8, 8], "conv_stride": [5, 2], "conv_kernel": [10, 3]},
    **{"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2},
}


def pixels() -> dict[str, torch.Tensor]:
    """Return two images."""
    return {"pixel_values": noise(2, 3, 16, 16)}


def wave() -> dict[str, torch.Tensor]:
    """Return sound as it was sampled."""
    return {"input_values": noise(2, 400)}


def _one(name: str, kind: str, model_class: str, inputs: Inputs, **config: Any) -> Architecture:
    return Architecture(name=name, kind=kind, model_class=model_class, config=config, inputs=inputs)


SENSES = [
    _one("vit", "vision", "ViTForImageClassification", pixels, **VIT),
    _one("deit", "vision", "DeiTForImageClassification", pixels, **VIT),
    _one("beit", "vision", "BeitForImageClassification", pixels, **VIT),
    _one("dinov2", "vision", "Dinov2ForImageClassification", pixels, **VIT, mlp_ratio=2),
    _one(
        "dinov2+swiglu",
        "vision",
        "Dinov2ForImageClassification",
        pixels,
        **VIT,
        mlp_ratio=2,
        use_swiglu_ffn=True,
    ),
    _one(
        *("swin", "vision", "SwinForImageClassification", pixels),
        **{"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2]},
        **{"window_size": 4, "num_labels": 5},
    ),
    _one(
        *("convnext", "vision", "ConvNextForImageClassification", pixels),
        **{"hidden_sizes": [8, 12], "depths": [1, 1], "num_stages": 2, "num_labels": 5},
    ),
    _one(
        *("resnet", "vision", "ResNetForImageClassification", pixels),
        **{"embedding_size": 8, "hidden_sizes": [8, 12], "depths": [1, 1], "num_labels": 5},
    ),
    _one("wav2vec2", "audio", "Wav2Vec2ForCTC", wave, **WAVE),
    _one("hubert", "audio", "HubertForCTC", wave, **WAVE),
    _one(
        *("whisper", "audio", "WhisperForConditionalGeneration"),
        lambda: {"input_features": noise(1, 8, 32), "decoder_input_ids": tokens(5, batch=1)},
        **{key: value for key, value in SEQ2SEQ.items() if key != "max_position_embeddings"},
        **{"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32},
    ),
    _one(
        *("audio-spectrogram-transformer", "audio", "ASTForAudioClassification"),
        lambda: {"input_values": noise(1, 16, 8)},
        **{"hidden_size": 16, "intermediate_size": 28, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"patch_size": 4, "num_mel_bins": 8, "max_length": 16, "frequency_stride": 4, "time_stride": 4},
        num_labels=5,
    ),
    _one(
        *("speech_to_text", "audio", "Speech2TextForConditionalGeneration"),
        lambda: {"input_features": noise(1, 24, 8), "decoder_input_ids": tokens(5, batch=1)},
        **{key: value for key, value in SEQ2SEQ.items() if key != "max_position_embeddings"},
        **{"num_conv_layers": 1, "conv_kernel_sizes": [3], "conv_channels": 12, "input_feat_per_channel": 8},
        **{"max_source_positions": 32, "max_target_positions": 32},
    ),
]
