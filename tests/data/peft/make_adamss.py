"""Writes adamss.json beside it: AdaMSS's names in memory, and those in PEFT 0.21.2's file. PEFT needs scikit-learn for it.

pip install peft==0.21.2 scikit-learn==1.9.1 && python tests/data/peft/make_adamss.py
"""

from __future__ import annotations

import json
from pathlib import Path

import peft
import torch
from torch import nn


class Net(nn.Module):
    """Two layers, one of them with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.v = nn.Linear(8, 16, bias=False), nn.Linear(8, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q(x), self.v(x)


def main() -> None:
    config = peft.AdamssConfig(r=4, num_subspaces=2, subspace_rank=2, target_modules=["q", "v"])
    model = peft.get_peft_model(Net(), config)
    held = {name: tensor for name, tensor in model.state_dict().items() if "base_layer" not in name}
    for number, tensor in enumerate(held.values()):
        tensor.fill_(number)
    saved = {float(tensor.max()): name for name, tensor in peft.get_peft_model_state_dict(model).items()}
    assert len(saved) == len(held)
    names = {name: saved[float(tensor.max())] for name, tensor in held.items()}
    Path(__file__).with_name("adamss.json").write_text(json.dumps(names, indent=1) + "\n")


if __name__ == "__main__":
    main()
