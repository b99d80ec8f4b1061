"""Quantised weights as torchao's own helpers give them to save_file: names, numbers and types in the header.

Usage: python make.py, in this directory. Made with torchao 0.18.0, torch 2.13.0, safetensors 0.8.0.
"""

from __future__ import annotations

import torch
from safetensors.torch import save_file
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

for name, config in (("int8", Int8WeightOnlyConfig(version=2)), ("fp8", Float8WeightOnlyConfig())):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.LayerNorm(8)).to(torch.bfloat16)
    quantize_(model, config)
    tensors, metadata = flatten_tensor_state_dict(model.state_dict())
    save_file(tensors, f"{name}.safetensors", {"format": "pt", **metadata})
