"""Tiny model directories."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 24,
    "intermediate_size": 37,
    "num_hidden_layers": 11,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "vocab_size": 101,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
BERT = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": 12,
    "intermediate_size": 19,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 17,
}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 12,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 17,
    "vocab_size": 101,
}
CONFIGS: dict[str, dict[str, object]] = {
    "llama": LLAMA,
    "llama-tied": {**LLAMA, "tie_word_embeddings": True},
    "qwen3": {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 2},
    "gpt2": GPT2,
    "bert": BERT,
    "t5": {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "d_model": 12,
        "d_kv": 4,
        "d_ff": 19,
        "num_layers": 1,
        "num_heads": 3,
        "vocab_size": 101,
        "tie_word_embeddings": True,
    },
    "bert-lm": {**BERT, "architectures": ["BertForMaskedLM"]},
}


@pytest.fixture
def model_dir(tmp_path: Path) -> Callable[..., str]:
    """Make a directory with the config of a name in CONFIGS, changed by keyword arguments."""

    def make(name: str, **changes: object) -> str:
        directory = tmp_path / name
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps({**CONFIGS[name], **changes}))
        return str(directory)

    return make
