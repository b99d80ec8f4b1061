"""Make osf.safetensors: an OSF adapter of PEFT, the weights that it was trained on, and what PEFT makes of both.

python tests/data/peft/make_osf.py    # with peft 0.21
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import peft
import torch
from safetensors.torch import load_file, save_file
from torch import nn

torch.manual_seed(0)
model = nn.ModuleDict({"q": nn.Linear(16, 12, bias=False), "up": nn.Linear(12, 20, bias=False)})
model.forward = lambda x: model["up"](model["q"](x))  # type: ignore[method-assign]
held = {f"base.{name}": value.clone() for name, value in model.state_dict().items()}
wrapped = peft.get_peft_model(
    model, peft.OSFConfig(effective_rank=0.5, rank_pattern={"up": 3}, target_modules=["q", "up"])
)
optimizer = torch.optim.SGD([each for each in wrapped.parameters() if each.requires_grad], lr=0.05)
for _ in range(5):
    (wrapped(torch.randn(8, 16)) - 1).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
with tempfile.TemporaryDirectory() as folder:
    wrapped.save_pretrained(folder)
    adapter = load_file(Path(folder) / "adapter_model.safetensors")
held |= {f"adapter.{name}": value for name, value in adapter.items()}
held |= {f"merged.{name}": value for name, value in wrapped.merge_and_unload().state_dict().items()}
save_file(
    {name: value.contiguous() for name, value in held.items()}, Path(__file__).with_name("osf.safetensors")
)
