#!/bin/bash
# Reading a LoRA of diffusers with safetensors.torch.load_file and writing it with save_file changes what it does: the scale.
#
# diffusers keeps rank and alpha as JSON in the header of the file (`__metadata__`), not beside it. load_file returns the
# tensors alone. For a file without that header, load_lora_adapter takes alpha to be the rank: here 4 instead of 32, so a
# scale of 1 instead of 8, with equal tensors and without a warning.
#
# Output seen with diffusers 0.42.1, peft 0.21.2, torch 2.13.0:
#   as diffusers wrote it:      scale 8.0
#   after load_file, save_file: scale 1.0
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q torch==2.13.0 diffusers==0.42.1 peft==0.21.2 transformers==5.24.0 safetensors==0.8.0 numpy==2.4.6
HF_HUB_OFFLINE=1 "$place/venv/bin/python" - "$place" 2> "$place/log" <<'PYTHON' || { tail -n 20 "$place/log"; exit 1; }
import os
import sys

import diffusers
import peft
import torch
from safetensors.torch import load_file, save_file

NAME = "pytorch_lora_weights.safetensors"


def make_model():
    torch.manual_seed(0)
    return diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=4,
    )


def scale(directory):
    model = make_model()
    model.load_lora_adapter(directory, weight_name=NAME, prefix=None)
    return next(module.scaling["default_0"] for module in model.modules() if hasattr(module, "scaling"))


written, copied = f"{sys.argv[1]}/written", f"{sys.argv[1]}/copied"
model = make_model()
model.add_adapter(peft.LoraConfig(r=4, lora_alpha=32, target_modules=["to_q"]))
model.save_lora_adapter(written, weight_name=NAME)
os.makedirs(copied)
save_file(load_file(f"{written}/{NAME}"), f"{copied}/{NAME}", metadata={"format": "pt"})
scales = scale(written), scale(copied)
print("diffusers", diffusers.__version__, "peft", peft.__version__, "torch", torch.__version__)
print("as diffusers wrote it:     ", "scale", scales[0])
print("after load_file, save_file:", "scale", scales[1])
sys.exit(0 if scales == (8.0, 1.0) else 1)
PYTHON
