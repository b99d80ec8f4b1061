"""Tensor and expert parallelism: what we write loads bit-equal into models that transformers itself has parallelised.

The truth is `from_pretrained(distributed_config=...)` in the same real processes: its own code cuts and reads.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor

import shardkit
from shardkit.core.mesh import Mesh, parse_mesh
from shardkit.core.regions import Region
from shardkit.layout import traced
from shardkit.training.fill.presharded import open_presharded
from tests.worlds.processes import forked_trace
from tests.worlds.ranks import Ranks, on_all

_SIZES = {
    "hidden_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
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
        "moe_intermediate_size": 12,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
}
CLASSES: dict[str, Any] = {
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
        )


def cases(*meshes: str, experts: tuple[str, ...] = ()) -> dict[str, Case]:
    found = [Case(name, mesh) for mesh in meshes for name in CONFIGS]
    return {case.label: case for case in (*found, *(Case("moe", mesh) for mesh in experts))}


FOUR = cases(
    "dp_shard=2,tp=2", "tp=4", experts=("dp_shard=4,ep=2", "dp_shard=2,tp=2,ep=2", "dp_shard=2,tp=2,ep=4")
)
EIGHT = cases(
    "dp_shard=4,tp=2", "dp_replicate=2,dp_shard=2,tp=2", experts=("dp_replicate=2,dp_shard=4,ep=2",)
)


def preshard_all(out: Path) -> None:
    torch.manual_seed(0)
    for name, model_class in CLASSES.items():
        config = {key: value for key, value in CONFIGS[name].items() if key != "model_type"}
        model = model_class(model_class.config_class(**config))
        model.save_pretrained(out / name, save_original_format=False)  # experts as the model holds them
    for case in (*FOUR.values(), *EIGHT.values()):
        with mock.patch.object(traced, "_spawn", forked_trace):
            result = shardkit.preshard(str(out / case.name), str(out / case.label), mesh=case.mesh)
        (out / f"{case.label}.json").write_text(json.dumps(result.to_json()))


four = Ranks(__name__, 4, first=preshard_all)
eight = Ranks(__name__, 8)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def loaded_by_transformers(case: Case, out: Path) -> Any:
    return CLASSES[case.name].from_pretrained(out / case.name, distributed_config=case.config)


def blank(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what each rank holds, and overwrite it with what no source has."""
    truth = {name: local(tensor).clone() for name, tensor in state.items()}
    with torch.no_grad():
        for tensor in state.values():
            local(tensor).fill_(77)
    return truth


def wrong(state: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> set[str]:
    assert state.keys() == truth.keys()
    return {name for name, tensor in state.items() if not torch.equal(local(tensor), truth[name])}


def packed(case: Case) -> set[str]:
    """Gate and up projections of experts lie in one tensor; tp cuts each of them, ep neither."""
    if case.name != "moe" or case.parsed.ep > 1:
        return set()
    return {f"model.layers.{layer}.mlp.experts.gate_up_proj" for layer in range(2)}


def check_stock(case: Case, out: Path) -> None:
    model = loaded_by_transformers(case, out)
    state = model.state_dict()
    truth = blank(state)
    dcp.load(state, checkpoint_id=out / case.label)
    # Every rank holds packed tensors; stock torch fills them wrong on all of them and says nothing.
    assert wrong(state, truth) == packed(case)
    (line, *_) = [*json.loads((out / f"{case.label}.json").read_text())["warnings"], ""]
    assert all(name in line for name in packed(case))
    assert ("stock dcp.load" in line) == bool(packed(case))


def check_regions(case: Case, out: Path) -> None:
    """The manifest's arithmetic says which elements lie in the memory of a real rank, and in which order."""
    found = open_presharded(str(out / case.label))
    assert found is not None
    whole = CLASSES[case.name].from_pretrained(out / case.name).state_dict()
    state = loaded_by_transformers(case, out).state_dict()
    assert set(found.placements) <= set(state)
    for name, placements in found.placements.items():
        held = local(state[name])
        parts = found.meshes.get(name, found.mesh).held(tuple(whole[name].shape), placements, dist.get_rank())
        assert sum(part.region.num_elements for part in parts) == held.numel()
        for region, corner in parts:
            assert torch.equal(held[window(Region(corner, region.sizes))], whole[name][window(region)]), name


def check_load_into(case: Case, out: Path) -> None:
    """Ours is right for packed tensors too, from either form of the weights, read by each rank or sent by one."""
    model = loaded_by_transformers(case, out)
    for source in (case.label, case.name):
        for strategy in ("direct", "broadcast"):
            truth = blank(model.state_dict())
            shardkit.load_into(model, out / source, strategy=strategy)
            assert wrong(model.state_dict(), truth) == set(), (source, strategy)


def trained(case: Case, out: Path) -> tuple[Any, torch.optim.Optimizer]:
    """Return a model whose optimizer has taken a step that left the weights as they were."""
    model = loaded_by_transformers(case, out)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()  # so that the state is as distinct as the weights
    optimizer.step()
    return model, optimizer


def states(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}


def tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    found = {f"model.{name}": tensor for name, tensor in state["model"].items()}
    for name, each in state["optimizer"]["state"].items():
        found |= {f"{name}.{key}": value for key, value in each.items() if key != "step"}
    return found


def check_saved(case: Case, out: Path) -> None:
    """What is saved on one mesh loads on it and on others, with the optimizer; stock torch reads it."""
    path = out / f"saved-{case.label}"
    model, optimizer = trained(case, out)
    shardkit.save(model, path, optimizer=optimizer)
    resharded = out / f"resharded-{case.label}"
    problem = None
    if dist.get_rank() == 0:  # the others wait, whatever happens
        try:
            assert shardkit.diff(str(path), str(out / case.name)).is_equal
            shardkit.reshard(str(path), str(resharded), mesh=case.mesh)
        except Exception as error:
            problem = repr(error)
    assert on_all(problem)[0] is None
    others = [other for other in FOUR.values() if other.name == case.name and other.parsed.ep != 4]
    for other, source in zip(others, itertools.cycle((path, resharded))):
        state = states(*trained(other, out))
        truth = blank(tensors(state))
        dcp.load(shardkit.checkpointable(state), checkpoint_id=source)
        assert wrong(tensors(state), truth) == set(), (other, source)


def window(box: Region) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(*box, strict=True))


@four.test_each(FOUR)
def test_stock_load_fills_what_transformers_would_have_on_four_ranks(case: Case, out: Path) -> None:
    check_stock(case, out)


@eight.test_each(EIGHT)
def test_stock_load_fills_what_transformers_would_have_on_eight_ranks(case: Case, out: Path) -> None:
    check_stock(case, out)


@four.test_each(FOUR)
def test_regions_are_those_of_four_ranks(case: Case, out: Path) -> None:
    check_regions(case, out)


@eight.test_each(EIGHT)
def test_regions_are_those_of_eight_ranks(case: Case, out: Path) -> None:
    check_regions(case, out)


@four.test_each(FOUR)
def test_load_into_fills_every_region_on_four_ranks(case: Case, out: Path) -> None:
    check_load_into(case, out)


@eight.test_each(EIGHT)
def test_load_into_fills_every_region_on_eight_ranks(case: Case, out: Path) -> None:
    check_load_into(case, out)


@four.test_each({label: case for label, case in FOUR.items() if case.name != "tied"})
def test_what_is_saved_loads_on_every_mesh_with_its_optimizer(case: Case, out: Path) -> None:
    check_saved(case, out)


@four.test
def test_stock_torch_refuses_to_save_packed_tensors(out: Path) -> None:
    """torch 2.13: so `shardkit.checkpointable` is needed; where it is not, it changes nothing."""
    state = loaded_by_transformers(FOUR["moe-tp4"], out).state_dict()
    with pytest.raises(dcp.api.CheckpointException):
        dcp.save(dict(state), checkpoint_id=out / "refused")
    assert {
        name for name, value in shardkit.checkpointable(state).items() if value is not state[name]
    } == packed(FOUR["moe-tp4"])
