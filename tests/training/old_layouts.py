"""Tiny real models in the layouts that old files on the Hub have, each written by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.training import models

Tensors = dict[str, torch.Tensor]


def _gpt2(tensors: Tensors) -> Tensors:
    """gpt2: names without `transformer.`, and the causal mask of each layer."""
    found = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 64, 64).tril() for layer in range(3)}
    return {**found, **masks, "h.0.attn.masked_bias": torch.tensor(-1e4)}


def _bert(tensors: Tensors) -> Tensors:
    """bert-base-uncased: gamma and beta, positions, and the heads of both objectives beside a pooler."""
    found = {}
    for name, value in tensors.items():
        norm = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        found[norm] = value
    spare = {
        "bert.embeddings.position_ids": torch.arange(17)[None],
        "bert.pooler.dense.weight": torch.randn(12, 12),
        "bert.pooler.dense.bias": torch.randn(12),
        "cls.seq_relationship.weight": torch.randn(2, 12),
        "cls.seq_relationship.bias": torch.randn(2),
    }
    return {**found, **spare}


def _llama(tensors: Tensors) -> Tensors:
    """The first Llamas: rotary frequencies in each layer."""
    old = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.rand(3) for layer in range(3)}
    return {**tensors, **old}


def _two_values(tensors: Tensors) -> Tensors:
    """A config that ties, and a file with an output layer of its own: flan-t5, and fine-tunes of tied models."""
    return {**tensors, "lm_head.weight": torch.randn(101, 24)}


def _marian(tensors: Tensors) -> Tensors:
    """opus-mt as transformers saves it: without the sinusoids, which are parameters of the model."""
    return {name: value for name, value in tensors.items() if "embed_positions" not in name}


def _marian_with_all(tensors: Tensors) -> Tensors:
    """opus-mt as it was converted: sinusoids, and the shared embedding under each name."""
    sinusoids = {
        f"model.{side}.embed_positions.weight": torch.randn(17, 12) for side in ("encoder", "decoder")
    }
    return {**tensors, **sinusoids}


_BERT = {
    "vocab_size": 101,
    "hidden_size": 12,
    "intermediate_size": 19,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 17,
}
_MARIAN = {
    "vocab_size": 101,
    "d_model": 12,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 19,
    "decoder_ffn_dim": 19,
    "max_position_embeddings": 17,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": None,
    "scale_embedding": True,
}
OLD: dict[str, tuple[str, Callable[[], Any], Callable[[Tensors], Tensors]]] = {
    "gpt2": ("GPT2LMHeadModel", models.gpt2, _gpt2),
    "bert": ("BertForMaskedLM", lambda: _config("bert", _BERT), _bert),
    "llama": ("LlamaForCausalLM", models.llama, _llama),
    "llama-untied": ("LlamaForCausalLM", lambda: models.llama(tie_word_embeddings=True), _two_values),
    "marian": ("MarianMTModel", lambda: _config("marian", _MARIAN), _marian),
    "marian-all": ("MarianMTModel", lambda: _config("marian", _MARIAN), _marian_with_all),
}


def _config(model_type: str, settings: Mapping[str, Any]) -> Any:
    import transformers

    return transformers.AutoConfig.for_model(model_type, **settings)


def write(name: str, directory: Path) -> Path:
    """Make a Hub directory with a model of OLD, every parameter random."""
    import transformers

    class_name, config, change = OLD[name]
    torch.manual_seed(0)
    model = getattr(transformers, class_name)(config())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(directory)
    path = directory / "model.safetensors"
    save_file(
        {key: value.contiguous() for key, value in change(load_file(path)).items()},
        path,
        metadata={"format": "pt"},
    )
    return directory


def judge(name: str, directory: Path) -> tuple[Any, Tensors]:
    """Return the model as `from_pretrained` loads it, and its state dict."""
    import transformers

    model, info = getattr(transformers, OLD[name][0]).from_pretrained(directory, output_loading_info=True)
    assert not info["missing_keys"]
    return model, {key: value.detach().clone() for key, value in model.state_dict().items()}


def inputs(model: Any) -> dict[str, torch.Tensor]:
    """Return what a model's forward takes."""
    ids = torch.arange(3, 14)[None]
    return {"input_ids": ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})}
