#!/bin/bash
# PEFT: LoRA on nn.MultiheadAttention adds what the output projection learned twice, in training and when it is merged.
#
# PEFT adapts in_proj and out_proj, each by scaling * B A. Its wrapper adds out_proj's, and then has out_proj add its own
# once more. So forward() and merge_and_unload() agree with each other, and the model that was trained is another than
# the adapter's file says: whoever merges W + scaling * B A by that file gets a model that nobody has trained.
# nn.TransformerEncoderLayer has such a module.
#
# Output seen with torch 2.13.0 and peft 0.21.2 (largest difference):
#   added 1 time:  forward differs by 3.95, merged by 3.95
#   added 2 times: forward differs by 0.00, merged by 0.00
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 peft==0.21.2
"$place/venv/bin/python" -W ignore - <<'PYTHON'
import sys

import peft
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 2)

    def forward(self, x):
        return self.attn(x, x, x)[0]


print("torch", torch.__version__, "peft", peft.__version__)
torch.manual_seed(0)
settings = peft.LoraConfig(r=2, lora_alpha=8, target_modules=["attn"], init_lora_weights=False)
model = peft.get_peft_model(Net(), settings).eval()
state = {name.removeprefix("base_model.model.attn."): value.clone() for name, value in model.state_dict().items()}
x = torch.randn(5, 1, 16)
with torch.no_grad():
    forward = model(x)
    merged = model.merge_and_unload()(x)


def learned(module):
    return settings.lora_alpha / settings.r * state[f"{module}lora_B.default.weight"] @ state[f"{module}lora_A.default.weight"]


def differences(times):
    net, out = Net().eval(), "base_layer.out_proj."
    net.load_state_dict({
        "attn.in_proj_weight": state["base_layer.in_proj_weight"] + learned(""),
        "attn.in_proj_bias": state["base_layer.in_proj_bias"],
        "attn.out_proj.weight": state[f"{out}base_layer.weight"] + times * learned(out),
        "attn.out_proj.bias": state[f"{out}base_layer.bias"],
    })
    with torch.no_grad():
        return [(net(x) - other).abs().max().item() for other in (forward, merged)]


once, twice = differences(1), differences(2)
print("added 1 time:  forward differs by {:.2f}, merged by {:.2f}".format(*once))
print("added 2 times: forward differs by {:.2f}, merged by {:.2f}".format(*twice))
sys.exit(0 if min(once) > 1 and max(twice) < 1e-4 else 1)
PYTHON
