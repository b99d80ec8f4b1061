"""Writes lora.json beside it: the names and shapes of adapters as PEFT 0.21 saves them, their settings and their bases.

pip install peft==0.21.0 && python tests/data/peft/make_lora.py
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import peft
import torch
from torch import nn


class Experts(nn.Module):
    """Three experts in one tensor each."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = (
            nn.Parameter(torch.ones(3, 12, 8)),
            nn.Parameter(torch.ones(3, 8, 6)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Net(nn.Module):
    """A little of everything that LoRA adapts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"q": nn.Linear(8, 16), "v": nn.Linear(8, 4)}) for _ in range(2)
        )
        self.experts, self.conv, self.grouped = Experts(), nn.Conv2d(4, 6, 3), nn.Conv2d(4, 6, 3, groups=2)
        self.head = nn.Linear(8, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


KINDS: dict[str, Any] = {
    "linear": peft.LoraConfig(r=4, target_modules=["q", "v"]),
    "rank_pattern": peft.LoraConfig(r=4, target_modules=["q", "v"], rank_pattern={"layers.1.q": 2, "v": 6}),
    "rslora": peft.LoraConfig(r=4, target_modules=["q"], use_rslora=True, lora_bias=True),
    "embedding": peft.LoraConfig(r=4, target_modules=["embed", "head"]),
    "conv": peft.LoraConfig(r=4, target_modules=["conv", "grouped"]),
    "experts": peft.LoraConfig(
        r=4, target_modules=["q"], target_parameters=["experts.gate_up_proj", "experts.down_proj"]
    ),
    "saved": peft.LoraConfig(r=4, target_modules=["q"], modules_to_save=["head"]),
    "tokens": peft.LoraConfig(r=4, target_modules=["q"], trainable_token_indices={"embed": [1, 2]}),
    "dora": peft.LoraConfig(r=4, target_modules=["q"], use_dora=True),
    "vera": peft.VeraConfig(r=4, target_modules=["q"]),
    "loha": peft.LoHaConfig(r=4, target_modules=["q"]),
    "adalora": peft.AdaLoraConfig(init_r=4, target_r=2, total_step=10, target_modules=["q"]),
}


def main() -> None:
    warnings.simplefilter("ignore")
    found = {
        "peft": peft.__version__,
        "base": {name: list(x.shape) for name, x in Net().state_dict().items()},
    }
    for kind, config in KINDS.items():
        model = peft.get_peft_model(Net(), config)
        state = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
        said = {
            key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()
        }
        kept = {key: value for key, value in said.items() if value not in (None, {}, [], False)}
        shapes = {name: list(x.shape) for name, x in state.items()}
        found[kind] = {"settings": json.loads(json.dumps(kept, default=str)), "shapes": shapes}
    Path(__file__).with_name("lora.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
