"""Models that transformers itself has parallelised, in real processes, and what has to lie in their memory."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import shardkit
from shardkit.core.mesh import Mesh, parse_mesh
from shardkit.core.regions import Region
from shardkit.layout import traced
from shardkit.training.fill.presharded import open_presharded
from tests.worlds.processes import forked_trace
from tests.worlds.ranks import on_all

_SIZES = {
    "hidden_size": 24,  # torch: grouped_mm wants 16 bytes
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 51,
    "dtype": "float32",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_SIZES, "model_type": "llama", "intermediate_size": 26, "tie_word_embeddings": False},
    "tied": {**_SIZES, "model_type": "llama", "intermediate_size": 26, "tie_word_embeddings": True},
    "moe": {
        **_SIZES,
        "model_type": "qwen3_moe",
        "intermediate_size": 26,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
}
# Ranks without rows, and rows that torch 2.13 gives another offset than they have: transformers cannot load it on these
# meshes, and stock torch does not load it right.
CONFIGS["uneven"] = {
    **CONFIGS["llama"],
    "num_hidden_layers": 1,
    "head_dim": 6,
    "intermediate_size": 9,
    "vocab_size": 9,
}
CONFIGS["deep"] = {**CONFIGS["llama"], "num_hidden_layers": 5}
CONFIGS["deep-tied"] = {**CONFIGS["deep"], "tie_word_embeddings": True}
CLASSES: dict[str, Any] = {
    "deep-tied": transformers.LlamaForCausalLM,
    "deep": transformers.LlamaForCausalLM,
    "uneven": transformers.LlamaForCausalLM,
    "llama": transformers.LlamaForCausalLM,
    "tied": transformers.LlamaForCausalLM,
    "moe": transformers.Qwen3MoeForCausalLM,
}


class Case(NamedTuple):
    """A model on a mesh."""

    name: str
    mesh: str

    @property
    def label(self) -> str:
        return f"{self.name}-{self.mesh.replace(',', '-').replace('=', '')}"

    @property
    def parsed(self) -> Mesh:
        return parse_mesh(self.mesh, None)

    @property
    def config(self) -> Any:
        """What transformers is asked for."""
        sizes = {axis.name: axis.size for axis in self.parsed.axes}
        return transformers.distributed.DistributedConfig(
            tp_size=sizes.get("tp", 1),
            fsdp_size=sizes.get("dp_shard", 1),
            dp_replicate_size=sizes.get("dp_replicate", 1),
            ep_size=self.parsed.ep,
            pp_size=self.parsed.pp,
        )


def preshard_all(cases: Iterable[Case], out: Path) -> None:
    """Write the models of some cases, and each case's layout of them."""
    torch.manual_seed(0)
    cases = tuple(cases)
    for name in dict.fromkeys(case.name for case in cases):
        model_class = CLASSES[name]
        config = {key: value for key, value in CONFIGS[name].items() if key != "model_type"}
        model = model_class(model_class.config_class(**config))
        model.save_pretrained(out / name, save_original_format=False)  # experts as the model holds them
    for case in cases:
        with mock.patch.object(traced, "_serve_request", forked_trace):
            result = shardkit.preshard(str(out / case.name), str(out / case.label), mesh=case.mesh)
        (out / f"{case.label}.json").write_text(json.dumps(result.to_json()))


def local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


@functools.cache
def made_mesh(device: str, shape: tuple[int, ...], *, mesh_dim_names: tuple[str, ...]) -> DeviceMesh:
    """Make a mesh once: its groups and their threads stay as long as the process, and each model would make more."""
    return init_device_mesh(device, shape, mesh_dim_names=mesh_dim_names)


def loaded_by_transformers(case: Case, out: Path) -> Any:
    with mock.patch.object(dist, "init_device_mesh", made_mesh):
        return CLASSES[case.name].from_pretrained(out / case.name, distributed_config=case.config)


@functools.cache
def shared_model(case: Case, out: Path) -> Any:
    """Load a model once for all tests of a case: each leaves its values as it found them."""
    return loaded_by_transformers(case, out)


def blank(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what each rank holds, and overwrite it with what no source has."""
    truth = {name: local(tensor).clone() for name, tensor in state.items()}
    with torch.no_grad():
        for tensor in state.values():
            local(tensor).fill_(77)
    return truth


def wrong(state: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> set[str]:
    """Return what differs on any rank: then all of them fail, and none waits for another."""
    assert state.keys() == truth.keys()
    here = {name for name, tensor in state.items() if not torch.equal(local(tensor), truth[name])}
    return set[str]().union(*on_all(here))


def packed(case: Case) -> set[str]:
    """Gate and up projections of experts lie in one tensor; tp cuts each of them, ep neither."""
    if case.name != "moe" or case.parsed.ep > 1:
        return set()
    return {f"model.layers.{layer}.mlp.experts.gate_up_proj" for layer in range(2)}


def check_stock(case: Case, out: Path) -> None:
    state = shared_model(case, out).state_dict()
    truth = blank(state)
    dcp.load(state, checkpoint_id=out / case.label)
    differ = wrong(state, truth)
    for name, tensor in state.items():
        local(tensor).copy_(truth[name])
    # Stock torch fills packed tensors wrong and says nothing.
    assert differ == packed(case)
    (line, *_) = [*json.loads((out / f"{case.label}.json").read_text())["warnings"], ""]
    assert all(name in line for name in packed(case))
    assert ("stock dcp.load" in line) == bool(packed(case))


def mine(case: Case, out: Path, whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what the manifest says that this rank has in its memory of whole tensors."""
    found = open_presharded(str(out / case.label))
    assert found is not None
    held = {}
    for name, tensor in found.layout.tensors.items():
        parts = found.meshes[name].held(tuple(whole[name].shape), tensor.placements, dist.get_rank())
        if not parts:  # on another stage
            continue
        ends = [map(sum, zip(corner, region.sizes, strict=True)) for region, corner in parts]
        held[name] = torch.full(tuple(map(max, zip(*ends, strict=True))), torch.nan)
        for region, corner in parts:
            held[name][window(Region(corner, region.sizes))] = whole[name][window(region)]
    return held


@functools.cache
def whole_weights(name: str, out: Path) -> dict[str, torch.Tensor]:
    """Return what `from_pretrained` makes of a model, for all tests to read."""
    weights: dict[str, torch.Tensor] = CLASSES[name].from_pretrained(out / name).state_dict()
    return weights


def check_regions(case: Case, out: Path) -> None:
    """The manifest's arithmetic says which elements lie in the memory of a real rank, and in which order."""
    state = shared_model(case, out).state_dict()
    held = mine(case, out, whole_weights(case.name, out))
    # Tied names are one tensor, which lies where its first name does.
    assert set(held) == set(state) or CONFIGS[case.name]["tie_word_embeddings"]
    for name, tensor in held.items():
        assert torch.equal(local(state[name]), tensor), name


ALL_LOADS = tuple(itertools.product(("presharded", "hub"), ("direct", "broadcast")))
SOME_LOADS = (("presharded", "direct"), ("hub", "broadcast"))
"""Each source and each strategy: on four ranks they are tried in all pairs."""


def check_load_into(case: Case, out: Path, loads: Iterable[tuple[str, str]] = ALL_LOADS) -> None:
    """Ours is right for packed tensors too, from either form of the weights, read by each rank or sent by one."""
    check_loads(shared_model(case, out), case, out, loads)


def check_loads(model: torch.nn.Module, case: Case, out: Path, loads: Iterable[tuple[str, str]]) -> None:
    for source, strategy in loads:
        truth = blank(model.state_dict())
        path = out / (case.label if source == "presharded" else case.name)
        shardkit.load_into(model, path, strategy=strategy)
        assert wrong(model.state_dict(), truth) == set(), (source, strategy)


def window(box: Region) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(*box, strict=True))
