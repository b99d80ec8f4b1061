"""Save a tiny Qwen3-MoE with random weights in bf16: a Hub model to try the guide with, on one machine.

python moe_model.py my-moe
"""

from __future__ import annotations

import sys

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM


def main(directory: str) -> None:
    """Save the model in a directory."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=67,
        hidden_size=32,
        intermediate_size=72,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)


if __name__ == "__main__":
    main(*sys.argv[1:])
