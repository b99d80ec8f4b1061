"""Write states.json: weights and states of schedule-free optimizers in training mode, and what their `eval()` gives.

python make.py    (schedulefree 1.4.1, pytorch_optimizer 3.8.0, torch 2.13.0)

Two groups with betas on both sides of the one at which torch.lerp changes its formula, tied embeddings, a parameter
that no gradient reaches, and a frozen one. Tensors are [dtype, shape, bytes as hex].
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_optimizer
import schedulefree
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict


class Tiny(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Module()
        self.model.embed_tokens = torch.nn.Embedding(7, 4)
        self.model.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])
        self.model.norm = torch.nn.LayerNorm(4)
        self.lm_head = torch.nn.Linear(4, 7, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight
        self.model.layers[1].requires_grad_(False)
        self.model.unused = torch.nn.Parameter(torch.randn(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            hidden = layer(hidden).tanh()
        return self.lm_head(self.model.norm(hidden))


def groups(model: Tiny, **settings: tuple[Any, Any]) -> list[dict[str, Any]]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.dim() > 1]
    vectors = [parameter for parameter in trained if parameter.dim() == 1]
    pairs = ((matrices, 0), (vectors, 1))
    return [{"params": part, **{key: value[n] for key, value in settings.items()}} for part, n in pairs]


BETAS = {"betas": ((0.9, 0.999), (0.6, 0.99))}
MOMENTUM = {"momentum": (0.95, 0.5)}
KINDS: dict[str, tuple[torch.dtype, Callable[[Tiny], Any]]] = {
    f"AdamW {name}": (dtype, lambda model: schedulefree.AdamWScheduleFree(groups(model, **BETAS), lr=0.05))
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
}
KINDS |= {
    "RAdam": (
        torch.float32,
        lambda model: schedulefree.RAdamScheduleFree(groups(model, **BETAS), lr=0.05),
    ),
    "SGD": (torch.float32, lambda model: schedulefree.SGDScheduleFree(groups(model, **MOMENTUM), lr=0.5)),
    "SGD fp16": (
        torch.float16,
        lambda model: schedulefree.SGDScheduleFree(groups(model, **MOMENTUM), lr=0.5),
    ),
    "AdamW, the reference": (
        torch.float32,
        lambda model: schedulefree.AdamWScheduleFreeReference(groups(model, **BETAS), lr=0.05),
    ),
    "AdamW of pytorch_optimizer": (
        torch.float32,
        lambda model: pytorch_optimizer.ScheduleFreeAdamW(groups(model, **BETAS), lr=0.05),
    ),
    "the wrapper": (
        torch.float32,
        lambda model: schedulefree.ScheduleFreeWrapper(torch.optim.SGD(groups(model), lr=0.5), momentum=0.9),
    ),
    "Lookahead": (
        torch.float32,
        lambda model: pytorch_optimizer.Lookahead(torch.optim.SGD(groups(model), lr=0.5), k=3),
    ),
}


KEPT = ({"z", "x", "slow_params"}, {"z", "exp_avg_sq"})  # of the states; by whether all are kept


def plain(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        content = tree.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {"tensor": [str(tree.dtype).removeprefix("torch."), list(tree.shape), content.hex()]}
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    return [plain(value) for value in tree] if isinstance(tree, (list, tuple)) else tree


def state_of(model: Tiny, optimizer: Any) -> dict[str, Any]:
    """Return the state by FQN; the two wrappers' own `state` is what they keep beside that of the inner optimizer."""
    inner = getattr(optimizer, "optimizer", None) or getattr(optimizer, "base", None)
    if inner is None:
        return get_state_dict(model, optimizer)[1]
    names = {parameter: name for name, parameter in model.named_parameters()}
    outer = getattr(optimizer, "state", {})
    state = {
        names[parameter]: dict(inner.state[parameter]) | dict(outer.get(parameter, {}))
        for group in inner.param_groups
        for parameter in group["params"]
    }
    listed = [
        {**group, "params": [names[parameter] for parameter in group["params"]]}
        for group in inner.param_groups
    ]
    return {"state": state, "param_groups": listed}


def trained(kind: str) -> dict[str, Any]:
    torch.manual_seed(0)
    dtype, make = KINDS[kind]
    model = Tiny().to(dtype)
    optimizer = make(model)
    if hasattr(optimizer, "train"):
        optimizer.train()
    for _ in range(8):  # RAdam has no rate before the sixth
        model(torch.arange(7)).float().logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optim = state_of(model, optimizer)
    for values in optim["state"].values():
        for leaf in values.keys() - KEPT[kind == "AdamW fp32"]:
            del values[leaf]
    content = {"model": plain(model.state_dict()), "optim": plain(optim)}
    if hasattr(optimizer, "eval"):
        optimizer.eval()
        content["eval"] = plain(model.state_dict())
    return content


if __name__ == "__main__":
    written = {kind: trained(kind) for kind in KINDS}
    (Path(__file__).parent / "states.json").write_text(json.dumps(written, separators=(",", ":")) + "\n")
