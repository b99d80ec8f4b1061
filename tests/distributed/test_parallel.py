"""Tensor and expert parallelism: what we write loads bit-equal into models that transformers itself has parallelised.

The truth is `from_pretrained(distributed_config=...)` in the same real processes: its own code cuts and reads.
"""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh

import shardkit
from tests.distributed.parallel import (
    ALL_LOADS,
    CLASSES,
    SOME_LOADS,
    Case,
    blank,
    check_load_into,
    check_loads,
    check_regions,
    check_stock,
    local,
    made_mesh,
    mine,
    packed,
    preshard_all,
    shared_model,
    wrong,
)
from tests.worlds.ranks import Ranks, on_all


def cases(*meshes: str, experts: tuple[str, ...] = ()) -> dict[str, Case]:
    found = [Case(name, mesh) for mesh in meshes for name in ("llama", "tied", "moe")]
    return {case.label: case for case in (*found, *(Case("moe", mesh) for mesh in experts))}


FOUR = cases(
    "dp_shard=2,tp=2", "tp=4", experts=("dp_shard=4,ep=2", "dp_shard=2,tp=2,ep=2", "dp_shard=2,tp=2,ep=4")
)
UNEVEN = [
    Case("uneven", "dp_shard=4,tp=2"),
    Case("uneven", "dp_replicate=2,dp_shard=2,tp=2"),
    Case("uneven", "tp=8"),
]
EIGHT = {  # ties are the same on any mesh: four ranks have them
    label: case
    for label, case in cases(
        "dp_shard=4,tp=2", "dp_replicate=2,dp_shard=2,tp=2", experts=("dp_replicate=2,dp_shard=4,ep=2",)
    ).items()
    if case.name != "tied"
}
BF16 = ("llama-dp_shard2-tp2", "moe-tp4", "moe-dp_shard4-ep2", "moe-dp_shard2-tp2-ep2")
"""Each kind of mesh once: in what order gradients are summed is not a matter of how many there are."""


def every_case(out: Path) -> None:
    preshard_all((*FOUR.values(), *EIGHT.values(), *UNEVEN), out)


four = Ranks(__name__, 4, first=every_case)
eight = Ranks(__name__, 8)


@functools.cache
def trained(case: Case, out: Path) -> tuple[Any, torch.optim.Optimizer]:
    """Return a model whose optimizer has taken a step that left the weights as they were; loading leaves it as it was."""
    model = shared_model(case, out)
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
    is_equal = dist.get_rank() != 0 or shardkit.diff(str(ours), str(out / case.name)).is_equal
    assert all(on_all(is_equal))
    written = reshard(case, [str(ours), str(theirs)], out)
    for other, source in ((case, ours), (case, theirs), *written.items()):
        state = states(*trained(other, out))
        truth = blank(tensors(state))
        dcp.load(shardkit.checkpointable(state), checkpoint_id=source)
        assert wrong(tensors(state), truth) == set(), (other, source)


def device_meshes(case: Case) -> tuple[DeviceMesh, DeviceMesh | None]:
    mesh, experts = case.parsed, case.parsed.experts
    view = experts and made_mesh("cpu", experts.shape, mesh_dim_names=experts.names)
    return made_mesh("cpu", mesh.shape, mesh_dim_names=mesh.names), view


def check_three_phases(case: Case, out: Path) -> None:
    """`wrap` parallelises as transformers does; the filled model computes and learns what one process does."""
    mesh, experts = device_meshes(case)
    context = shardkit.prepare(str(out / case.name), str(out / case.label))
    model = shardkit.wrap(context.model, mesh, mixed_precision=None, expert_mesh=experts)
    model = shardkit.finalize(model, context)
    truth = {name: local(tensor) for name, tensor in shared_model(case, out).state_dict().items()}
    assert wrong(model.state_dict(), truth) == set()
    same_batch = next((axis.size for axis in case.parsed.axes if axis.name == "tp"), 1)
    (*losses, norm), weights = trained_plain(case.name, dist.get_world_size(), same_batch, out)
    batch = token_ids(dist.get_world_size(), same_batch)[dist.get_rank() // same_batch, None]
    *parts, our_norm = train(model, batch)
    assert torch.tensor(on_all(parts)).mean(dim=0).tolist() == pytest.approx(losses, rel=1e-4)
    assert our_norm == pytest.approx(norm, rel=1e-4)
    assert losses[-1] < 0.99 * losses[0]
    for name, held in mine(case, out, weights).items():
        torch.testing.assert_close(local(model.state_dict()[name]), held, rtol=1e-4, atol=1e-5)


def token_ids(num_rows: int, every: int = 1) -> torch.Tensor:
    return torch.arange(6 * num_rows).reshape(-1, 6)[::every] % 51


@functools.cache
def trained_plain(
    name: str, num_rows: int, every: int, out: Path
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return what one process learns from some token ids, as `train` does, and its weights, for all cases to read."""
    plain = CLASSES[name].from_pretrained(out / name)
    return train(plain, token_ids(num_rows, every)), plain.state_dict()


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
    check_loads(model, case, out, ALL_LOADS)
    path = out / f"saved-{case.label}"
    shardkit.save(model, path)
    truth = blank(model.state_dict())
    dcp.load(shardkit.checkpointable({"model": model.state_dict()}), checkpoint_id=path)
    assert wrong(model.state_dict(), truth) == set()


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
    check_load_into(case, out, SOME_LOADS)


@four.test_each({label: case for label, case in FOUR.items() if case.name != "tied"})
def test_what_is_saved_loads_on_every_mesh_with_its_optimizer(case: Case, out: Path) -> None:
    check_saved(case, out)


@four.test_each(FOUR)
def test_presharded_weights_are_resharded_for_every_mesh(case: Case, out: Path) -> None:
    for other, path in reshard(case, [str(out / case.label)], out, "-weights").items():
        model, _ = trained(other, out)
        truth = blank(model.state_dict())
        shardkit.load_into(model, path)
        assert wrong(model.state_dict(), truth) == set(), other


@four.test
def test_stock_torch_refuses_to_save_packed_tensors(out: Path) -> None:
    """torch 2.13: so `shardkit.checkpointable` is needed; where it is not, it changes nothing."""
    state = shared_model(FOUR["moe-tp4"], out).state_dict()
    with pytest.raises(dcp.api.CheckpointException):
        dcp.save(dict(state), checkpoint_id=out / "refused")
    assert {
        name for name, value in shardkit.checkpointable(state).items() if value is not state[name]
    } == packed(FOUR["moe-tp4"])


@four.test_each(FOUR)
def test_three_phases_train_on_four_ranks(case: Case, out: Path) -> None:
    check_three_phases(case, out)


@four.test_each({label: FOUR[label] for label in BF16})
def test_bf16_and_checkpointing_learn_the_same_but_for_rounding(case: Case, out: Path) -> None:
    mesh, experts = device_meshes(case)
    context = shardkit.prepare(str(out / case.name), str(out / case.label))
    model = shardkit.wrap(context.model, mesh, activation_checkpointing=True, expert_mesh=experts)
    (*losses, _), _ = trained_plain(case.name, 1, 1, out)
    *ours, _ = train(shardkit.finalize(model, context), token_ids(1))
    assert max(on_all(max(abs(a - b) / b for a, b in zip(ours, losses, strict=True)))) < 2e-2
    assert losses[-1] < 0.9 * losses[0]


@eight.test_each(
    {label: case for label, case in EIGHT.items() if case.name == "moe" and "replicate" in label}
)
def test_three_phases_train_on_eight_ranks(case: Case, out: Path) -> None:
    check_three_phases(case, out)


@four.test
def test_wrap_refuses_meshes_that_do_not_fit(out: Path) -> None:
    config = CLASSES["moe"].config_class.from_pretrained(out / "moe")
    with torch.device("meta"):
        model = CLASSES["moe"](config)
    both = made_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    experts = made_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    with pytest.raises(shardkit.MeshError, match="the last one has to be ep"):
        shardkit.wrap(model, both, expert_mesh=both)
    with pytest.raises(shardkit.MeshError, match="has 4 ranks, and not those of the mesh, which has 2"):
        shardkit.wrap(model, both["dp_shard"], expert_mesh=experts)
    with pytest.raises(shardkit.UsageError, match="the mesh has tp alone"):
        shardkit.wrap(
            model,
            made_mesh("cpu", (4,), mesh_dim_names=("tp",)),
            cpu_offload=True,
            expert_mesh=experts,
        )
    with torch.device("meta"):
        planless = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1))
    with pytest.raises(shardkit.PolicyError, match="has no tp_plan and no ep_plan"):
        shardkit.wrap(planless, both, expert_mesh=experts)
    parallel = shared_model(FOUR["llama-tp4"], out)
    with pytest.raises(shardkit.UsageError, match="parallelised already"):
        shardkit.wrap(parallel, both, expert_mesh=experts)


@eight.test_each({case.label: case for case in UNEVEN})
def test_uneven_sizes_on_eight_ranks(case: Case, out: Path) -> None:
    check_uneven(case, out)
