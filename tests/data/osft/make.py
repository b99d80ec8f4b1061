r"""Factors of OSFT that shardkit computed before training, as early versions of 0.1.0 did: `preshard --osft 0.3`.

    python make.py OUT        # the last version that had the option; torch 2.13, transformers 5.24, CPU
    tar -C OUT -cJf presharded.tar.xz dense factors

`dense` is a tiny Llama of transformers. `factors` has the factors of its 7 linear layers, for a mesh of dp_shard=2;
13 columns of down_proj make rows of its V what is cut, columns are cut of the others. No version writes it any more.
"""

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import shardkit

CONFIG = LlamaConfig(
    hidden_size=8,
    intermediate_size=13,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    vocab_size=16,
    max_position_embeddings=16,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
)


def main() -> None:
    out = Path(sys.argv[1])
    torch.manual_seed(58)
    LlamaForCausalLM(CONFIG).to(torch.bfloat16).save_pretrained(out / "dense")
    shardkit.preshard(out / "dense", out / "factors", world_size=2, osft=0.3)


if __name__ == "__main__":
    main()
