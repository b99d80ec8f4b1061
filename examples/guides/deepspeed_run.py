"""Train a Hub model with DeepSpeed ZeRO 3 in bf16, and save.

    torchrun --nproc-per-node 8 deepspeed_run.py my-model output_dir

Runs on CUDA; on CPU with gloo where DS_ACCELERATOR=cpu is set.
"""

from __future__ import annotations

import sys

import deepspeed
import torch
from transformers import AutoModelForCausalLM

SETTINGS = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 3},
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}


def main(model_directory: str, output: str) -> None:
    """Train two steps on made-up data, and save after the second."""
    deepspeed.init_distributed()
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.bfloat16)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=SETTINGS)
    for _ in range(2):
        tokens = torch.randint(0, 60, (2, 16), device=engine.device)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    engine.save_checkpoint(output)


if __name__ == "__main__":
    main(*sys.argv[1:])
