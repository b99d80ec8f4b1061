"""Quantised weights as quanto's safetensors have them: no config beside them.

Usage: python make.py, in this directory. Made with optimum-quanto 0.2.7, torch 2.13.0, safetensors 0.8.0.
"""

from __future__ import annotations

import torch
from optimum.quanto import freeze, qfloat8, qint4, qint8, quantize
from safetensors.torch import save_file

for name, kind in (("int8", qint8), ("int4", qint4), ("fp8", qfloat8)):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(128, 4), torch.nn.LayerNorm(4)).to(torch.bfloat16)
    quantize(model, weights=kind)
    freeze(model)
    save_file(model.state_dict(), f"{name}.safetensors", {"format": "pt"})
