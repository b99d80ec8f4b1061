"""Norms of gradients in parts are those of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from shardkit.errors import ShardkitError
from shardkit.training.extras.gradients import clip_grad_norm_, grad_norm
from shardkit.training.wrap import layer_policy, wrap
from tests.training.models import reference
from tests.training.wrapping import (
    TP_WIDTHS,
    full,
    loss_of,
    tensor_parallel,
    wrapped,
    wrapped_with_replicas,
)
from tests.worlds.ranks import Ranks, on_all, same_error

NORMS = (2.0, 1.0, 3.5, float("inf"))

two = Ranks(__name__, 2)
four = Ranks(__name__, 4)


class Case(NamedTuple):
    model: str
    wrap: Callable[[nn.Module], nn.Module]
    changes: dict[str, Any] = {}  # noqa: RUF012
    """Of the model's config."""


OF_TWO = {"fsdp": Case("llama-tied", wrapped)}
OF_FOUR = {
    "hsdp": Case("llama", wrapped_with_replicas),
    "tp": Case("llama", tensor_parallel, TP_WIDTHS),
}


def after_backward(case: Case) -> tuple[nn.Module, nn.Module]:
    """The wrapped model and the plain one, with gradients of all parameters but some."""
    plain = reference(case.model, **case.changes)
    model = case.wrap(copy.deepcopy(plain))
    for each in (model, plain):
        loss_of(case.model, each).backward()
        for name, parameter in each.named_parameters():
            if "k_proj" in name:
                parameter.grad = None
    return model, plain


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def check_norms(case: Case) -> None:
    model, plain = after_backward(case)
    assert type(grad_norm(model)) is torch.Tensor
    ours = [grad_norm(model, order).item() for order in NORMS]
    expected = [torch.nn.utils.get_total_norm(gradients(plain), order).item() for order in NORMS]
    assert ours == pytest.approx(expected, rel=1e-5)
    assert on_all(ours) == [ours] * dist.get_world_size()  # bit for bit on every rank


def check_clipping(case: Case) -> None:
    model, plain = after_backward(case)
    norm = grad_norm(model).item()
    assert clip_grad_norm_(model.parameters(), 0.01).item() == norm
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
        if expected.grad is not None:
            assert float((full(ours.grad) - expected.grad).abs().max()) < 1e-7
    assert grad_norm(list(model.parameters())).item() == pytest.approx(0.01, rel=1e-4)


@two.test_each(OF_TWO)
def test_norms_of_all_orders_equal_one_process(case: Case) -> None:
    check_norms(case)


@four.test_each(OF_FOUR)
def test_norms_of_all_orders_equal_one_process_on_meshes(case: Case) -> None:
    check_norms(case)


@two.test_each(OF_TWO)
def test_clipping_equals_one_process(case: Case) -> None:
    check_clipping(case)


@four.test_each(OF_FOUR)
def test_clipping_equals_one_process_on_meshes(case: Case) -> None:
    check_clipping(case)


@two.test
def test_plain_empty_half_and_missing_gradients() -> None:
    """Half precision, empty parts, plain parameters beside sharded ones, no gradients at all, not finite ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 3))
    extra = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    wrap(model, init_device_mesh("cpu", (2,)), policy="none", mixed_precision=None)
    assert grad_norm(model).item() == 0.0
    model(torch.ones(2, 3)).sum().backward()
    extra.grad = torch.full((5,), 0.3, dtype=torch.bfloat16)
    everything = [*model.parameters(), extra]
    expected = torch.cat([full(p.grad).flatten().double() for p in everything]).norm().item()
    assert grad_norm(everything).item() == pytest.approx(expected, rel=1e-5)
    # In bf16 the sum of 100,000 equal squares would stop growing at a small part of this.
    many = nn.Parameter(torch.zeros(100_000, dtype=torch.bfloat16))
    many.grad = torch.full((100_000,), 0.01, dtype=torch.bfloat16)
    assert grad_norm(many).item() == pytest.approx(many.grad.double().norm().item(), rel=1e-3)
    # A gradient that only one rank has: no rank waits for the other.
    if dist.get_rank() == 1:
        model[0].weight.grad = None
    assert grad_norm(model).item() > 0
    extra.grad.fill_(float("nan"))
    with pytest.raises(ShardkitError) as caught:
        clip_grad_norm_(everything, 1.0, error_if_nonfinite=True)
    assert "is nan" in caught.value.message


@two.test_each({"flat": False, "orig": True})
def test_fsdp1_alone(use_orig_params: bool) -> None:
    plain = reference("llama-tied")
    loss_of("llama-tied", plain).backward()
    model = FullyShardedDataParallel(
        reference("llama-tied"),
        auto_wrap_policy=ModuleWrapPolicy(
            layer_policy("transformers.models.llama.modeling_llama.LlamaDecoderLayer")
        ),
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )
    loss_of("llama-tied", model).backward()
    norm = grad_norm(model).item()
    assert norm == pytest.approx(torch.nn.utils.get_total_norm(gradients(plain)).item(), rel=1e-5)
    assert clip_grad_norm_(model, 0.1).item() == norm


class Holder(nn.Module):
    """Holds what others wrapped, as a LightningModule does."""

    def __init__(self, **held: nn.Module) -> None:
        super().__init__()
        for name, module in held.items():
            self.add_module(name, module)


def flat(module: nn.Module, use_orig: bool, strategy: ShardingStrategy | None = None) -> nn.Module:
    return FullyShardedDataParallel(
        module, sharding_strategy=strategy, use_orig_params=use_orig, device_id=torch.device("cpu")
    )


def of_every_kind() -> tuple[dict[str, nn.Module], dict[str, nn.Module], torch.Tensor]:
    """Plain modules, the same as somebody has wrapped them, both with gradients, and what they were given."""
    torch.manual_seed(0)
    plain = {
        kind: nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 5))
        for kind in ("fsdp1", "fsdp1-orig", "fsdp1-whole", "ddp", "fsdp2", "plain")
    }
    batch = torch.randn(3, 5)
    model = copy.deepcopy(plain)
    held = {
        "fsdp1": flat(model["fsdp1"], False),
        "fsdp1-orig": flat(model["fsdp1-orig"], True),
        "fsdp1-whole": flat(model["fsdp1-whole"], True, ShardingStrategy.NO_SHARD),
        "ddp": DistributedDataParallel(model["ddp"]),
        "fsdp2": fully_shard(model["fsdp2"], mesh=init_device_mesh("cpu", (2,))),
        "plain": model["plain"],
    }
    for modules in (plain, held):
        torch.stack([module(batch).pow(2).sum() for module in modules.values()]).sum().backward()
    return plain, held, batch


@two.test
def test_roots_of_every_kind_may_be_held_at_any_depth() -> None:
    """Alone and together, two modules deep."""
    plain, held, _ = of_every_kind()

    def expected(kinds: Iterable[str], order: float) -> float:
        found = [gradient for kind in kinds for gradient in gradients(plain[kind])]
        return torch.nn.utils.get_total_norm(found, order).item()

    for kinds in [*([kind] for kind in plain), ["fsdp1", "fsdp1-orig"], list(plain)]:
        holder = Holder(inner=Holder(**{kind: held[kind] for kind in kinds}))
        ours = [grad_norm(holder, order).item() for order in NORMS]
        assert ours == pytest.approx([expected(kinds, order) for order in NORMS], rel=1e-5)
        assert on_all(ours) == [ours] * 2
    assert clip_grad_norm_(holder, 0.01).item() == ours[0]
    assert grad_norm(holder).item() == pytest.approx(0.01, rel=1e-4)


@two.test
def test_gradients_of_fsdp1_that_cannot_be_summed_are_refused() -> None:
    _, held, batch = of_every_kind()
    for kind in ("fsdp1", "fsdp1-orig"):
        module = held[kind]
        loose = same_error(lambda module=module: grad_norm(module.parameters()))
        assert loose["error"] == "UsageError"
        assert "do not say which ranks hold" in loose["message"]
        module.zero_grad()
        with module.no_sync():
            module(batch).sum().backward()
        early = same_error(lambda module=module: clip_grad_norm_(Holder(it=module), 1))
        assert early["error"] == "UsageError"
        assert "are not reduced yet" in early["message"]
