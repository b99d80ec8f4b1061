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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
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
        "moe_intermediate_size": 32,  # torch: grouped_mm wants 16 bytes
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
}
# Ranks without rows, and rows that torch 2.13 gives another offset than they have: transformers cannot load it on these
# meshes, and stock torch does not load it right.
CONFIGS["uneven"] = {**CONFIGS["llama"], "head_dim": 6, "intermediate_size": 9, "vocab_size": 9}
CLASSES: dict[str, Any] = {
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
        )


def cases(*meshes: str, experts: tuple[str, ...] = ()) -> dict[str, Case]:
    found = [Case(name, mesh) for mesh in meshes for name in CONFIGS if name != "uneven"]
    return {case.label: case for case in (*found, *(Case("moe", mesh) for mesh in experts))}


FOUR = cases(
    "dp_shard=2,tp=2", "tp=4", experts=("dp_shard=4,ep=2", "dp_shard=2,tp=2,ep=2", "dp_shard=2,tp=2,ep=4")
)
UNEVEN = [
    Case("uneven", "dp_shard=4,tp=2"),
    Case("uneven", "dp_replicate=2,dp_shard=2,tp=2"),
    Case("uneven", "tp=8"),
]
EIGHT = cases(
    "dp_shard=4,tp=2", "dp_replicate=2,dp_shard=2,tp=2", experts=("dp_replicate=2,dp_shard=4,ep=2",)
)


def preshard_all(out: Path) -> None:
    torch.manual_seed(0)
    for name, model_class in CLASSES.items():
        config = {key: value for key, value in CONFIGS[name].items() if key != "model_type"}
        model = model_class(model_class.config_class(**config))
        model.save_pretrained(out / name, save_original_format=False)  # experts as the model holds them
    for case in (*FOUR.values(), *EIGHT.values(), *UNEVEN):
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
    model = loaded_by_transformers(case, out)
    state = model.state_dict()
    truth = blank(state)
    dcp.load(state, checkpoint_id=out / case.label)
    # Stock torch fills packed tensors wrong and says nothing.
    assert wrong(state, truth) == packed(case)
    (line, *_) = [*json.loads((out / f"{case.label}.json").read_text())["warnings"], ""]
    assert all(name in line for name in packed(case))
    assert ("stock dcp.load" in line) == bool(packed(case))


def mine(case: Case, out: Path, whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what the manifest says that this rank has in its memory of whole tensors."""
    found = open_presharded(str(out / case.label))
    assert found is not None
    held = {}
    for name, placements in found.placements.items():
        parts = found.meshes.get(name, found.mesh).held(tuple(whole[name].shape), placements, dist.get_rank())
        ends = [map(sum, zip(corner, region.sizes, strict=True)) for region, corner in parts]
        held[name] = torch.full(tuple(map(max, zip(*ends, strict=True))), torch.nan)
        for region, corner in parts:
            held[name][window(Region(corner, region.sizes))] = whole[name][window(region)]
    return held


def check_regions(case: Case, out: Path) -> None:
    """The manifest's arithmetic says which elements lie in the memory of a real rank, and in which order."""
    whole = CLASSES[case.name].from_pretrained(out / case.name).state_dict()
    state = loaded_by_transformers(case, out).state_dict()
    for name, held in mine(case, out, whole).items():
        assert torch.equal(local(state[name]), held), name


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


def targets(case: Case) -> list[Case]:
    """Every other mesh of a model, on which it has its own plans, and one without them."""
    known = [other for other in FOUR.values() if other.name == case.name and other.parsed.ep != 4]
    return [other for other in (*known, Case(case.name, "dp_shard=4")) if other.mesh != case.mesh]


def reshard(case: Case, sources: list[str], out: Path, suffix: str = "") -> dict[Case, Path]:
    """Write the sources, in turn, for the other meshes."""
    written = {other: out / f"{case.label}-to-{other.label}{suffix}" for other in targets(case)}
    problem = None
    if dist.get_rank() == 0:  # the others wait, whatever happens
        try:
            for (other, path), source in zip(written.items(), itertools.cycle(sources)):
                shardkit.reshard(source, str(path), mesh=other.mesh)
        except Exception as error:
            problem = repr(error)
    problem = on_all(problem)[0]
    assert problem is None, problem
    return written


def check_saved(case: Case, out: Path) -> None:
    """What is saved on one mesh, by us or stock torch, is resharded for the others, and loads there and on its own."""
    ours, theirs = out / f"saved-{case.label}", out / f"stock-{case.label}"
    model, optimizer = trained(case, out)
    shardkit.save(model, ours, optimizer=optimizer)
    dcp.save(shardkit.checkpointable(states(model, optimizer)), checkpoint_id=theirs)
    assert all(on_all(shardkit.diff(str(ours), str(out / case.name)).is_equal))
    written = reshard(case, [str(ours), str(theirs)], out)
    for other, source in ((case, ours), (case, theirs), *written.items()):
        state = states(*trained(other, out))
        truth = blank(tensors(state))
        dcp.load(shardkit.checkpointable(state), checkpoint_id=source)
        assert wrong(tensors(state), truth) == set(), (other, source)


def device_meshes(case: Case) -> tuple[DeviceMesh, DeviceMesh | None]:
    mesh, experts = case.parsed, case.parsed.experts
    view = experts and init_device_mesh("cpu", experts.shape, mesh_dim_names=experts.names)
    return init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.names), view


def check_three_phases(case: Case, out: Path) -> None:
    """`wrap` parallelises as transformers does; the filled model computes and learns what one process does."""
    mesh, experts = device_meshes(case)
    context = shardkit.prepare(str(out / case.name), str(out / case.label))
    model = shardkit.wrap(context.model, mesh, mixed_precision=None, expert_mesh=experts)
    model = shardkit.finalize(model, context)
    truth = {name: local(tensor) for name, tensor in loaded_by_transformers(case, out).state_dict().items()}
    assert wrong(model.state_dict(), truth) == set()
    plain = CLASSES[case.name].from_pretrained(out / case.name)
    batches = torch.arange(6 * dist.get_world_size()).reshape(-1, 6) % 51
    same_batch = next((axis.size for axis in case.parsed.axes if axis.name == "tp"), 1)
    batches = batches[::same_batch]
    *losses, norm = train(plain, batches)
    *parts, our_norm = train(model, batches[dist.get_rank() // same_batch, None])
    assert torch.tensor(on_all(parts)).mean(dim=0).tolist() == pytest.approx(losses, rel=1e-4)
    assert our_norm == pytest.approx(norm, rel=1e-4)
    assert losses[-1] < 0.99 * losses[0]
    for name, held in mine(case, out, plain.state_dict()).items():
        torch.testing.assert_close(local(model.state_dict()[name]), held, rtol=1e-4, atol=1e-5)


def train(model: torch.nn.Module, batch: torch.Tensor) -> list[float]:
    """Return the losses of steps, and the norm of the last gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return [*found, shardkit.grad_norm(model).item()]


def check_uneven(case: Case, out: Path) -> None:
    """The truth is torch's own cutting of whole weights."""
    mesh, _ = device_meshes(case)
    model = shardkit.wrap(CLASSES[case.name].from_pretrained(out / case.name), mesh, mixed_precision=None)
    for source in (case.label, case.name):
        for strategy in ("direct", "broadcast"):
            truth = blank(model.state_dict())
            shardkit.load_into(model, out / source, strategy=strategy)
            assert wrong(model.state_dict(), truth) == set(), (source, strategy)
    path = out / f"saved-{case.label}"
    shardkit.save(model, path)
    truth = blank(model.state_dict())
    dcp.load(shardkit.checkpointable({"model": model.state_dict()}), checkpoint_id=path)
    assert wrong(model.state_dict(), truth) == set()


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


@four.test_each(FOUR)
def test_presharded_weights_are_resharded_for_every_mesh(case: Case, out: Path) -> None:
    for other, path in reshard(case, [str(out / case.label)], out, "-weights").items():
        model = loaded_by_transformers(other, out)
        truth = blank(model.state_dict())
        shardkit.load_into(model, path)
        assert wrong(model.state_dict(), truth) == set(), other


@four.test
def test_stock_torch_refuses_to_save_packed_tensors(out: Path) -> None:
    """torch 2.13: so `shardkit.checkpointable` is needed; where it is not, it changes nothing."""
    state = loaded_by_transformers(FOUR["moe-tp4"], out).state_dict()
    with pytest.raises(dcp.api.CheckpointException):
        dcp.save(dict(state), checkpoint_id=out / "refused")
    assert {
        name for name, value in shardkit.checkpointable(state).items() if value is not state[name]
    } == packed(FOUR["moe-tp4"])


@four.test_each(FOUR)
def test_three_phases_train_on_four_ranks(case: Case, out: Path) -> None:
    check_three_phases(case, out)


@eight.test_each({label: case for label, case in EIGHT.items() if case.name == "moe"})
def test_three_phases_train_on_eight_ranks(case: Case, out: Path) -> None:
    check_three_phases(case, out)


@four.test
def test_wrap_refuses_meshes_that_do_not_fit(out: Path) -> None:
    config = CLASSES["moe"].config_class.from_pretrained(out / "moe")
    with torch.device("meta"):
        model = CLASSES["moe"](config)
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    experts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    with pytest.raises(shardkit.MeshError, match="the last one has to be ep"):
        shardkit.wrap(model, both, expert_mesh=both)
    with pytest.raises(shardkit.MeshError, match="has 4 ranks, and not those of the mesh, which has 2"):
        shardkit.wrap(model, both["dp_shard"], expert_mesh=experts)
    with pytest.raises(shardkit.UsageError, match="the mesh has tp alone"):
        shardkit.wrap(
            model,
            init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)),
            cpu_offload=True,
            expert_mesh=experts,
        )
    with torch.device("meta"):
        planless = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1))
    with pytest.raises(shardkit.PolicyError, match="has no tp_plan and no ep_plan"):
        shardkit.wrap(planless, both, expert_mesh=experts)
    parallel = loaded_by_transformers(FOUR["llama-tp4"], out)
    with pytest.raises(shardkit.UsageError, match="parallelised already"):
        shardkit.wrap(parallel, both, expert_mesh=experts)


@eight.test_each({case.label: case for case in UNEVEN})
def test_uneven_sizes_on_eight_ranks(case: Case, out: Path) -> None:
    check_uneven(case, out)
