"""Write configs_4.json: configs of small models as transformers 4.57.3 saves them.

python tests/data/transformers/make_configs.py    (pip install transformers==4.57.3)
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import transformers

HERE = Path(__file__).parent
WIDE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 37,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
VISION = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2}
MROPE = {"type": "mrope", "mrope_section": [2, 1, 1]}
LONG = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": (
        "ForCausalLM",
        {**WIDE, "rope_theta": 5e5, "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64}},
    ),
    "Qwen2": ("ForCausalLM", {**WIDE, "rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0}}),
    "Gemma3Text": (
        "",
        {
            **WIDE,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "GPTNeoX": ("ForCausalLM", {**WIDE, "rotary_pct": 0.5, "rotary_emb_base": 20000}),
    "Qwen2VL": (
        "ForConditionalGeneration",
        {"text_config": {**WIDE, "rope_theta": 1e6, "rope_scaling": MROPE}, "vision_config": VISION},
    ),
    "GPT2": ("LMHeadModel", {"n_embd": 12, "n_layer": 1, "n_head": 2, "vocab_size": 37}),
    "ModernBert": ("ForMaskedLM", {**WIDE, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0}),
    "Mixtral": ("ForCausalLM", {**WIDE, "rope_theta": 1e6}),
    "Phi3": ("ForCausalLM", {**WIDE, "rope_scaling": LONG, "original_max_position_embeddings": 64}),
}


def saved(name: str, head: str, options: dict[str, Any]) -> dict[str, Any]:
    config = getattr(transformers, f"{name}Config")(**options)
    config.architectures, config.dtype = [f"{name.removesuffix('Text')}{head or 'ForCausalLM'}"], "bfloat16"
    with tempfile.TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        content: dict[str, Any] = json.loads((Path(directory) / "config.json").read_text())
    return content


if __name__ == "__main__":
    assert transformers.__version__ == "4.57.3"
    made = [saved(name, head, options) for name, (head, options) in MODELS.items()]
    (HERE / "configs_4.json").write_text(json.dumps(made, indent=1, sort_keys=True) + "\n")
