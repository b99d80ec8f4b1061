"""Train a Hub model with transformers' Trainer and FSDP2, which accelerate sets up and saves.

    torchrun --nproc-per-node 8 trainer_run.py my-model out

Runs on CUDA, and on CPU with gloo.
"""

from __future__ import annotations

import sys

import torch
from accelerate import DistributedType, PartialState
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments


def allow_cpu() -> dict[str, bool]:
    """Have accelerate shard on CPUs too, which it leaves whole otherwise; return what the arguments need for it."""
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    return {"use_configured_state": True}


def main(model_directory: str, output: str) -> None:
    """Train two steps on made-up data; the Trainer saves the second."""
    on_cpu = not torch.cuda.is_available()
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
    arguments = TrainingArguments(
        output_dir=output,
        fsdp=True,
        fsdp_config={"version": 2, "state_dict_type": "SHARDED_STATE_DICT"},
        max_steps=2,
        save_steps=2,
        per_device_train_batch_size=2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=on_cpu,
        accelerator_config=allow_cpu() if on_cpu else None,
    )
    data = torch.randint(0, 60, (16, 16), generator=torch.Generator().manual_seed(0))
    Trainer(
        model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in data]
    ).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
