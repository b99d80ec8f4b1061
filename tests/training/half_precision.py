"""Models that hand on fp32, or keep parameters in it, and run in half precision as `from_pretrained` says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from tests.training import models

Inputs = dict[str, torch.Tensor]


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def text() -> Inputs:
    return models.inputs("")


def masked() -> Inputs:
    """A mask of floats, as it is added to scores: nobody sees the last two tokens."""
    mask = torch.zeros(2, 1, 7, 7)
    mask[..., 5:] = -1e4
    return {**text(), "attention_mask": mask + torch.full((7, 7), -1e4).triu(1)}


def translated(**inputs: torch.Tensor) -> Inputs:
    return {**(inputs or text()), "decoder_input_ids": text()["input_ids"]}


def with_image() -> Inputs:
    """One picture of 2 x 2 patches of Qwen-VL's, merged into one token, in each text."""
    found = text()
    found["input_ids"][:, 2:4] = torch.tensor([models.VOCABULARY + 3, models.VOCABULARY + 1])
    types = (found["input_ids"] == models.VOCABULARY + 1).long()
    grid = torch.tensor([[1, 2, 2]] * 2)
    return {**found, "pixel_values": noise(8, 96), "image_grid_thw": grid, "mm_token_type_ids": types}


class Case(NamedTuple):
    class_name: str
    config: Callable[[], Any]
    inputs: Callable[[], Inputs] = text
    half: str = "bf16"
    masters: tuple[str, ...] = ("bf16", "fp32")
    fp32: tuple[str, ...] = ()
    """Patterns of parameters that the class has in fp32."""


_SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_SPEECH = {
    **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": models.VOCABULARY},
    **{
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
    },
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
}
_WAVES = {
    **{"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2},
    **{"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "vocab_size": 32},
}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_EXPERTS = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}
_IMAGES = {"image_size": 8, "patch_size": 4}
_STATES = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": models.VOCABULARY, "state_size": 4}


def _config(name: str, *parts: dict[str, Any], **more: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, name)(
        **{key: value for part in (*parts, more) for key, value in part.items()}
    )


def _known(name: str) -> Callable[[], Any]:
    return lambda: models.config_of(name)


def _blip2() -> Any:
    return transformers.Blip2Config(
        vision_config={**_SMALL, **_IMAGES},
        qformer_config={**_SMALL, **_NO_DROPOUT, "vocab_size": 8, "encoder_hidden_size": 32},
        text_config={
            **{"model_type": "opt", "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "dropout": 0.0},
            **{"num_attention_heads": 4, "vocab_size": models.VOCABULARY + 10, "max_position_embeddings": 64},
            **{"word_embed_proj_dim": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        },
        num_query_tokens=4,
        image_token_index=models.VOCABULARY + 1,
    )


def pictured() -> Inputs:
    found = text()
    found["input_ids"][:, :4] = models.VOCABULARY + 1
    return {**found, "pixel_values": noise(2, 3, 8, 8).half()}


CASES: dict[str, Case] = {
    "llama": Case("LlamaForCausalLM", _known("llama")),
    "llama-mask": Case("LlamaForCausalLM", _known("llama"), masked),
    # These hand on in fp32: rotary tables, biases of attention, the residual.
    "olmo2": Case("Olmo2ForCausalLM", _config("Olmo2Config", models.decoder())),
    "ernie4_5": Case("Ernie4_5ForCausalLM", _config("Ernie4_5Config", models.decoder(head_dim=6))),
    "mpt": Case(
        "MptForCausalLM",
        _config("MptConfig", d_model=32, n_heads=4, n_layers=2, vocab_size=models.VOCABULARY),
    ),
    "mamba": Case("MambaForCausalLM", _config("MambaConfig", _STATES, time_step_rank=4)),
    "qwen2.5-vl": Case("Qwen2_5_VLForConditionalGeneration", _known("qwen2.5-vl"), with_image),
    # These get floats from outside.
    "whisper": Case(
        "WhisperForConditionalGeneration",
        _config("WhisperConfig", _SPEECH, num_mel_bins=8, max_source_positions=16, max_target_positions=32),
        lambda: translated(input_features=noise(2, 8, 32)),
    ),
    "wav2vec2": Case(
        "Wav2Vec2ForCTC",
        _config("Wav2Vec2Config", _SMALL, _WAVES),
        lambda: {"input_values": noise(2, 800)},
    ),
    # The embeddings are a unit, and get pixels in the dtype of their weights.
    "vit": Case(
        "ViTForImageClassification",
        _config("ViTConfig", _SMALL, _IMAGES),
        lambda: {"pixel_values": noise(2, 3, 8, 8)},
    ),
    "bert": Case(
        "BertForMaskedLM", _known("bert-lm"), lambda: {**text(), "attention_mask": torch.ones(2, 7).tril(5)}
    ),
    "bart": Case("BartForConditionalGeneration", _config("BartConfig", _SPEECH), translated),
    # Buffers that are in no file: positions, factors of a whole layer.
    "m2m": Case(
        "M2M100ForConditionalGeneration",
        _config("M2M100Config", _SPEECH, max_position_embeddings=64),
        translated,
    ),
    "falcon-h1": Case(
        "FalconH1ForCausalLM",
        _config(
            "FalconH1Config",
            models.decoder(hidden_size=32, head_dim=8, num_hidden_layers=2),
            {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
        ),
    ),
    "t5": Case(
        "T5ForConditionalGeneration",
        _config("T5Config", d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0),
        translated,
    ),
}


# Parameters in fp32 beside half precision: routers, outputs of feed-forward layers, biases, a whole Q-Former.
KEPT: dict[str, Case] = {
    "ernie4_5-moe": Case(
        "Ernie4_5_MoeForCausalLM",
        _config(
            "Ernie4_5_MoeConfig",
            models.decoder(head_dim=6, num_hidden_layers=2),
            _EXPERTS,
            moe_layer_start_index=1,
        ),
        fp32=(r"mlp\.gate\.",),
    ),
    "hunyuan-moe": Case(
        "HunYuanMoEV1ForCausalLM",
        _config(
            "HunYuanMoEV1Config",
            models.decoder(num_hidden_layers=2, intermediate_size=32),
            num_experts=4,
            moe_topk=2,
        ),
        fp32=(r"mlp\.gate\.wg\.",),
    ),
    "deberta": Case(
        "DebertaForMaskedLM",
        _config("DebertaConfig", _SMALL, _NO_DROPOUT, vocab_size=models.VOCABULARY, relative_attention=True),
        fp32=("q_bias", "v_bias"),
    ),
    "t5": Case(*CASES["t5"][:3], "fp16", ("fp16",), (r"\.wo\.",)),
    "blip2": Case(
        "Blip2ForConditionalGeneration", _blip2, pictured, "fp16", ("fp16",), ("query_tokens", "qformer")
    ),
}

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def save(out: Path, case: Case) -> None:
    """Save a model in half precision, each value of it random; experts as the model has them, in one tensor."""
    config = case.config()
    config.architectures, config.dtype = [case.class_name], DTYPES[case.half]
    model = getattr(transformers, case.class_name)._from_config(config, dtype=DTYPES[case.half])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator) * 0.05
            parameter.copy_(values + (1.0 if parameter.ndim == 1 else 0.0))
    model.save_pretrained(out)
    if "moe" in case.class_name.lower():
        save_file(model.state_dict(), out / "model.safetensors", metadata={"format": "pt"})


def logits(model: nn.Module, inputs: Inputs) -> torch.Tensor:
    return model(**inputs).logits


def halved(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """A model in half precision takes no fp32 from outside; the root casts it."""
    return {key: x.to(dtype) if x.is_floating_point() else x for key, x in inputs.items()}


def in_one_process(path: Path, case: Case) -> nn.Module:
    dtype = DTYPES[case.half]
    model = getattr(transformers, case.class_name).from_pretrained(path, dtype=dtype).eval()
    if case.class_name == "DebertaForMaskedLM":  # its forward fails in half precision but with these rounded
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(dtype) if name.endswith(case.fp32) else parameter.data
    return model
