"""Experts from the Hub's single files into a trained, expert-parallel model and back, on 4 real ranks.

The directories have the names of mistralai/Mixtral-8x7B-v0.1 and Qwen/Qwen3-30B-A3B.
"""

from __future__ import annotations

import re
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardkit
from shardkit.layout import traced
from tests.models.zoo import ZOO, make_hub
from tests.models.zoo_world import bits, contents
from tests.worlds.processes import forked_trace
from tests.worlds.ranks import Ranks, on_all

MODELS = {"mixtral+repo": "mixtral+repo", "qwen3_moe+repo": "qwen3_moe+repo"}
PARTS = {
    "mixtral+repo": {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)},
    "qwen3_moe+repo": {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
}
"""Tensor of a model in memory -> the parts of each expert's rows, as the Hub has them."""
TRAINED = re.compile(r"lm_head|layers\.1\.(mlp|block_sparse_moe)\.experts")


def make(out: Path) -> None:
    for name in MODELS:
        make_hub(ZOO[name], out / name)
        with mock.patch.object(traced, "_serve_request", forked_trace):
            done = shardkit.preshard(str(out / name), str(out / f"{name}-pre"), mesh="dp_shard=4,ep=2")
        assert done.layout == "traced"


four = Ranks(__name__, 4, first=make)


@four.test_each(MODELS)
def test_a_trained_step_comes_back_as_single_experts(name: str, out: Path) -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))
    experts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    context = shardkit.prepare(str(out / name), str(out / f"{name}-pre"))
    for fqn, parameter in context.model.named_parameters():
        parameter.requires_grad_(TRAINED.search(fqn) is not None)
    model = shardkit.finalize(shardkit.wrap(context.model, mesh, expert_mesh=experts), context)
    held = model.state_dict()["model.layers.1.mlp.experts.gate_up_proj"]
    assert isinstance(held, DTensor)
    assert held.to_local().numel() * 4 == held.numel()

    step(model)
    shardkit.save(model, out / f"{name}-ours")
    state = shardkit.checkpointable({"model": model.state_dict()})
    dcp.save(state, checkpoint_id=out / f"{name}-stock")
    expected = trained(model.state_dict(), name)
    if dist.get_rank() == 0:
        for saved in ("ours", "stock"):
            shardkit.consolidate(out / f"{name}-{saved}", out / f"{name}-{saved}-hf", base=str(out / name))
    on_all(None)
    hub = contents(out / name)
    for saved in ("ours", "stock"):
        found = contents(out / f"{name}-{saved}-hf")
        assert found.keys() == hub.keys()
        changed = {fqn for fqn in hub if not torch.equal(bits(found[fqn]), bits(hub[fqn]))}
        assert {fqn for fqn in changed if not TRAINED.search(fqn)} == set()
        assert {fqn.split(".")[-2] for fqn in changed} > {
            part for each in PARTS[name].values() for part in each
        }
        assert expected.keys() >= changed
        for fqn, tensor in expected.items():
            assert torch.equal(bits(found[fqn]), bits(tensor)), fqn


def step(model: torch.nn.Module) -> None:
    """Let each rank see other tokens, and go a step along the gradients."""
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=1.0)
    tokens = torch.arange(16).reshape(2, 8) * 5 % 90 + dist.get_rank()
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()


def trained(state: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """Return what was trained, whole and under the Hub's names; taken apart by hand."""
    found = {}
    for fqn, tensor in state.items():
        if not TRAINED.search(fqn):
            continue
        assert isinstance(tensor, DTensor)
        whole, last = tensor.full_tensor(), fqn.rsplit(".", 1)[-1]
        if last not in PARTS[name]:
            found[fqn] = whole
            continue
        block = "block_sparse_moe" if name.startswith("mixtral") else "mlp"
        for at, expert in enumerate(whole):
            parts = PARTS[name][last]
            for part, rows in zip(parts, expert.chunk(len(parts)), strict=True):
                found[f"model.layers.1.{block}.experts.{at}.{part}.weight"] = rows
    return found


def test_the_models_have_experts_one_by_one(tmp_path: Path) -> None:
    for name in MODELS:
        make_hub(ZOO[name], tmp_path / name)
        assert sum(".experts." in fqn for fqn in contents(tmp_path / name)) == 2 * 4 * 3
