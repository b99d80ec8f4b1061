#!/bin/bash
# transformers' Trainer with optim="schedule_free_adamw": `trainer.train()` and then `trainer.save_model()` publish y, the
# weights of training mode, and not x, which the optimizer evaluates and which its authors say to save. The Trainer calls
# `optimizer.train()` before each step and `optimizer.eval()` before an evaluation, and neither after the last step nor
# before a save. Checkpoints between two evaluations have y too, and say so: train_mode is True in optimizer.pt.
#
# Seen with torch 2.13.0, transformers 5.24.0, accelerate 1.15.0 and schedulefree 1.4.1, on 28 Nov 2026:
#
#     torch 2.13.0 transformers 5.24.0 schedulefree 1.4.1
#     train_mode in checkpoint-8/optimizer.pt: [True, True]
#     save_model after train() differs from the weights after optimizer.eval(): 12 of 12 tensors, by up to 0.030
#     loss: 2.34 as save_model wrote it, 2.33 as optimizer.eval() leaves it
#
# Exits with 1 if save_model writes the weights that optimizer.eval() gives.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 schedulefree==1.4.1
cd "$place"
cat > run.py <<'PYTHON'
import sys
import warnings
from importlib.metadata import version

import torch
import transformers
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
names = ("torch", "transformers", "schedulefree")
print(*(f"{name} {version(name).partition('+')[0]}" for name in names))
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )
)
data = [{"input_ids": torch.arange(8) + n, "labels": torch.arange(8) + n} for n in range(32)]
arguments = TrainingArguments(
    "run", optim="schedule_free_adamw", lr_scheduler_type="constant", learning_rate=0.05, max_steps=8,
    per_device_train_batch_size=4, save_steps=8, report_to=[], use_cpu=True, disable_tqdm=True, logging_strategy="no",
)
trainer = Trainer(model=model, args=arguments, train_dataset=data)
trainer.train()
trainer.save_model("published")
groups = torch.load("run/checkpoint-8/optimizer.pt", weights_only=False)["param_groups"]
print("train_mode in checkpoint-8/optimizer.pt:", [group["train_mode"] for group in groups])


def loss() -> float:
    batch = torch.stack([item["input_ids"] for item in data])
    with torch.no_grad():
        return model(input_ids=batch, labels=batch).loss.item()


saved, before = load_file("published/model.safetensors"), loss()
trainer.optimizer.eval()
state = model.state_dict()
gaps = {name: (tensor - state[name]).abs().max().item() for name, tensor in saved.items()}
others = [name for name, gap in gaps.items() if gap]
print(
    f"save_model after train() differs from the weights after optimizer.eval(): {len(others)} of {len(saved)} tensors, "
    f"by up to {max(gaps.values()):.3f}"
)
print(f"loss: {before:.2f} as save_model wrote it, {loss():.2f} as optimizer.eval() leaves it")
sys.exit(not others)
PYTHON
"$place/venv/bin/python" run.py 2>/dev/null
