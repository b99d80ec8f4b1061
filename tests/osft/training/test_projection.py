"""Training stays out of the frozen subspace, and is that of one process whatever the mesh."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from math import isnan
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardkit
from shardkit.errors import LayoutError, UsageError
from shardkit.osft.modules import osft_modules
from shardkit.osft.plan import OsftPlan
from tests.osft.models import factored, shard
from tests.training.models import inputs, reference
from tests.training.wrapping import same, whole
from tests.worlds.ranks import Ranks, same_error

pytestmark = pytest.mark.prove

STEPS = 5
two = Ranks(__name__, 2)
three = Ranks(__name__, 3)
four = Ranks(__name__, 4)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other take longer than such small matrices."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


RANKS = {
    "ratio": OsftPlan(ratio=0.3),
    "1": OsftPlan(ratio=0.5, ranks={"*": 1}),
    "world - 1": OsftPlan(ratio=0.5, ranks={"*.mlp.*": 3, "*.self_attn.*": 2}),
    "uneven": OsftPlan(ratio=0.5, ranks={"*": 7}),
}


def model_of(plan: OsftPlan) -> Any:
    return factored(reference("llama", num_hidden_layers=1), plan)


def train(model: nn.Module, steps: int = STEPS, lr: float = 1e-2, **options: Any) -> list[float]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, **options)
    shardkit.osft_optimizer(model, optimizer)
    return [step(model, optimizer, number) for number in range(steps)]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    batch = inputs("llama", seed=number % 2)
    optimizer.zero_grad()
    loss = model(**batch, labels=batch["input_ids"]).loss
    loss.backward()
    shardkit.clip_grad_norm_(model, 1.0)
    optimizer.step()
    return float(loss.detach())


def frozen(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}


def test_two_hundred_steps_leave_the_frozen_subspace_alone() -> None:
    model = model_of(OsftPlan(ratio=0.3))
    before, start = frozen(model), shardkit.osft_leak(model)
    assert start <= 1e-6
    losses = train(model, 200, lr=1e-3)
    assert losses[-1] < losses[0]
    assert shardkit.osft_leak(model) <= 1e-6
    assert all(torch.equal(tensor, before[name]) for name, tensor in frozen(model).items())


def test_without_projections_it_leaks() -> None:
    """Else the test above could not fail."""
    model = model_of(OsftPlan(ratio=0.3))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for number in range(3):
        step(model, optimizer, number)
    assert shardkit.osft_leak(model) > 1e-4
    shardkit.project_parameters_(model)
    assert shardkit.osft_leak(model) <= 1e-6


def test_what_has_diverged_is_told() -> None:
    model = model_of(OsftPlan(ratio=0.3))
    with torch.no_grad():
        next(parameter for name, parameter in model.named_parameters() if "U_low" in name).mul_(float("nan"))
    assert isnan(shardkit.osft_leak(model))


def test_gradients_are_projected() -> None:
    model = model_of(OsftPlan(ratio=0.3))
    batch = inputs("llama")
    model(**batch, labels=batch["input_ids"]).loss.backward()
    free = {
        name: m.osft_params.S_low.grad.clone()
        for name, m in osft_modules(model).items()
        if m.osft_params.S_low.grad is not None
    }
    shardkit.project_gradients_(model)
    for name, module in osft_modules(model).items():
        low = module.osft_params
        assert low.U_low.grad is not None
        assert low.V_low.grad is not None
        assert low.S_low.grad is not None
        for inside, gradient in (
            (module.osft_U_high.T @ low.U_low.grad, low.U_low.grad),
            (low.V_low.grad @ module.osft_V_high.T, low.V_low.grad),
        ):
            assert float(inside.norm()) <= 1e-6 * float(gradient.norm())
        assert torch.equal(low.S_low.grad, free[name])


def test_a_closure_is_projected_too() -> None:
    model = model_of(OsftPlan(ratio=0.3))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    assert shardkit.osft_optimizer(model, optimizer) is optimizer
    shardkit.osft_optimizer(model, optimizer)  # once more does nothing

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        batch = inputs("llama")
        loss: torch.Tensor = model(**batch, labels=batch["input_ids"]).loss
        loss.backward()
        return loss

    optimizer.step(closure)
    module = next(iter(osft_modules(model).values()))
    gradient = module.osft_params.U_low.grad
    assert gradient is not None
    assert float((module.osft_U_high.T @ gradient).norm()) <= 1e-6 * float(gradient.norm())
    assert shardkit.osft_leak(model) <= 1e-6


def test_an_optimizer_of_accelerate_is_projected() -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    accelerator = Accelerator(cpu=True)
    model = model_of(OsftPlan(ratio=0.3))
    inside = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    optimizer = accelerator.prepare(inside)
    assert optimizer is not inside
    assert shardkit.osft_optimizer(model, optimizer) is optimizer
    shardkit.osft_optimizer(model, inside)  # the same one
    try:
        step(model, optimizer, 0)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    assert shardkit.osft_leak(model) <= 1e-6


def test_half_precision_is_projected_in_fp32() -> None:
    model = model_of(OsftPlan(ratio=0.3)).bfloat16()
    before = shardkit.osft_leak(model)
    shardkit.project_parameters_(model)
    assert shardkit.osft_leak(model) <= max(before, 5e-3)  # what bfloat16 can hold


def test_wrong_uses_are_refused() -> None:
    dense = reference("llama")
    for use in (shardkit.project_gradients_, shardkit.project_parameters_, shardkit.osft_leak):
        with pytest.raises(LayoutError, match="has no OSFT layers"):
            use(dense)
    model = model_of(OsftPlan(ratio=0.3))
    with pytest.raises(UsageError, match="none of the model's trained factors"):
        shardkit.osft_optimizer(model, torch.optim.SGD(dense.parameters()))
    model.requires_grad_(True)
    with pytest.raises(UsageError, match="would be trained"):
        shardkit.osft_optimizer(model, torch.optim.SGD(model.parameters()))


def check_same(model: Any, plain: Any) -> None:
    """Compare some steps of a sharded model with those of one process that sees the same batches."""
    expected = train(plain)
    before = frozen(model)
    found = train(model)
    assert found == pytest.approx(expected, abs=2e-5)
    assert shardkit.osft_leak(model) <= 1e-6
    assert shardkit.osft_leak(model) == pytest.approx(shardkit.osft_leak(plain), abs=1e-6)
    for name, tensor in frozen(model).items():
        assert isinstance(tensor, DTensor)
        assert torch.equal(tensor.to_local(), before[name].to_local())  # type: ignore[attr-defined]


def on_one_axis(plan: OsftPlan, *, along_columns: bool = True) -> None:
    plain = model_of(plan)
    model = copy.deepcopy(plain)
    shard(model, init_device_mesh("cpu", (dist.get_world_size(),)), along_columns=along_columns)
    check_same(model, plain)


def test_one_rank() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        on_one_axis(RANKS["ratio"])
    finally:
        dist.destroy_process_group()


@two.test_each({name: RANKS[name] for name in ("ratio", "uneven")})
def test_two_ranks(plan: OsftPlan) -> None:
    on_one_axis(plan)


@two.test
def test_two_ranks_of_a_trainer_that_cuts_rows() -> None:
    on_one_axis(RANKS["1"], along_columns=False)


@three.test_each({name: RANKS[name] for name in ("world - 1", "1")})
def test_three_ranks(plan: OsftPlan) -> None:
    on_one_axis(plan)


@four.test_each({name: RANKS[name] for name in ("world - 1", "1")})
def test_four_ranks(plan: OsftPlan) -> None:
    on_one_axis(plan)


@four.test_each({name: RANKS[name] for name in ("ratio", "1")})
def test_replicas(plan: OsftPlan) -> None:
    plain = model_of(plan)
    model = copy.deepcopy(plain)
    shard(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")))
    check_same(model, plain)


def test_a_rate_of_zero_moves_nothing() -> None:
    model = model_of(RANKS["ratio"])
    one = [p for name, p in model.named_parameters() if "layers.0.mlp" in name and p.requires_grad]
    own = set(map(id, one))
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in own]
    optimizer = torch.optim.AdamW([{"params": one, "lr": 0.0}, {"params": others}], lr=torch.tensor(1e-2))
    shardkit.osft_optimizer(model, optimizer)
    before = whole(model)
    step(model, optimizer, 0)
    still = {name for name, value in whole(model).items() if torch.equal(value, before[name])}
    assert {name for name in before if "layers.0.mlp" in name} <= still
    assert not any("self_attn" in name and "_low" in name for name in still)


@two.test
def test_a_rank_without_gradients_takes_part() -> None:
    """A gradient that one rank lacks counts as zero there, and nobody waits for it."""
    plain = model_of(RANKS["ratio"])
    model = copy.deepcopy(plain)
    shard(model, init_device_mesh("cpu", (2,)))
    batch = inputs("llama")
    model(**batch, labels=batch["input_ids"]).loss.backward()
    if dist.get_rank() == 1:
        for parameter in model.parameters():
            parameter.grad = None
    shardkit.project_gradients_(model)
    shardkit.project_parameters_(model)
    assert shardkit.osft_leak(model) <= 1e-6


@two.test
def test_an_optimizer_made_after_an_evaluation_is_refused(out: Path) -> None:
    """FSDP2 leaves the root gathered, so that `parameters()` gives copies, which backward frees."""
    model = model_of(RANKS["ratio"])
    shard(model, init_device_mesh("cpu", (2,)))
    with torch.no_grad():
        model(**inputs("llama"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    of_copies = torch.optim.AdamW(trained, lr=1e-2)
    for use in (
        lambda: shardkit.osft_optimizer(model, of_copies),
        lambda: shardkit.rebind_optimizer(model, of_copies),
        lambda: shardkit.save(model, out / "of-copies", optimizer=of_copies),
    ):
        told = same_error(use)
        assert f"3 of the {len(trained)} parameters that the optimizer steps are gathered" in told["message"]
        assert "call model.reshard() first" in told["hint"]
    model.reshard()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with torch.no_grad():
        model(**inputs("llama"))
    shardkit.osft_optimizer(model, optimizer)
    with torch.no_grad():
        model(**inputs("llama"))
    before = whole(model)
    shardkit.save(
        model, out / "own", optimizer=optimizer
    )  # torch makes the state by a step whose rates are 0
    get_optimizer_state_dict(model, optimizer)
    same(whole(model), before, "a step with rates of 0")
    step(model, optimizer, 0)
    still = [name for name, value in whole(model).items() if torch.equal(value, before[name])]
    assert {name.rpartition("_")[2] for name in still} == {"high"}, still


@two.test
def test_layers_torn_apart_are_refused_everywhere() -> None:
    model = model_of(RANKS["ratio"])
    mesh = init_device_mesh("cpu", (2,))
    layer = next(iter(osft_modules(model).values()))
    from torch.distributed.fsdp import fully_shard

    fully_shard(layer.osft_params, mesh=mesh)
    told = same_error(lambda: shardkit.project_parameters_(model))
    assert "are sharded differently" in str(told["problems"])
