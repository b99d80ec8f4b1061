"""Wrapping models of factors: what is a unit, what is computed in which dtype, where a factor is cut."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from shardkit.core.factored import FACTORS, factor_of
from shardkit.osft.modules import osft_modules
from shardkit.osft.plan import OsftPlan
from shardkit.training.wrap import wrap
from tests.osft.models import factored
from tests.training.models import inputs, reference
from tests.worlds.ranks import Ranks, same_error

pytestmark = pytest.mark.prove

two = Ranks(__name__, 2)

PLAN = OsftPlan(ratio=0.4)
LAYERS = {"", "model.layers.0", "model.layers.1"}


class Case(NamedTuple):
    dense: torch.dtype
    options: dict[str, Any]
    units: set[str]
    near: float
    """How far logits may lie from those in fp32."""


BESIDE = {f"model.layers.{at}.{part}" for at in (0, 1) for part in ("self_attn", "mlp")}
CASES = {
    "fp32, computed in bf16": Case(torch.float32, {}, LAYERS, 0.1),
    "bf16": Case(torch.bfloat16, {}, LAYERS | BESIDE, 0.1),
    "bf16 without a policy": Case(torch.bfloat16, {"mixed_precision": None}, LAYERS | BESIDE, 0.1),
    "units of factors alone": Case(
        torch.bfloat16,
        {"mixed_precision": None, "policy": {"LlamaMLP", "LlamaAttention"}},
        {"", *BESIDE},
        0.1,
    ),
    "fp32": Case(torch.float32, {"mixed_precision": None}, LAYERS, 1e-5),
    "checkpointed": Case(torch.bfloat16, {"activation_checkpointing": True}, LAYERS | BESIDE, 0.1),
    "one unit": Case(torch.bfloat16, {"policy": "none"}, {"", "model"}, 0.1),
}


def with_dense_in(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    for name, parameter in model.named_parameters():
        if factor_of(name) is None:
            parameter.data = parameter.data.to(dtype)
    return model


def model() -> Any:
    return reference("llama", num_hidden_layers=2)


@two.test_each(CASES)
def test_it_computes_what_the_dense_one_does(case: Case) -> None:
    dense = model()
    new = with_dense_in(factored(dense, PLAN), case.dense)
    wrapped = wrap(new, init_device_mesh("cpu", (2,)), **case.options)
    assert {path for path, module in wrapped.named_modules() if isinstance(module, FSDPModule)} == case.units
    # Equal inputs, so that the gradients are those of one process.
    logits = wrapped(**inputs("llama")).logits
    expected = dense(**inputs("llama")).logits
    assert (logits.float() - expected).abs().max() < case.near
    logits.float().pow(2).mean().backward()
    layers = osft_modules(wrapped)
    assert len(layers) == 14
    for layer in layers.values():
        for name in FACTORS:
            parameter = layer.get_parameter(name)
            assert parameter.dtype is torch.float32
            assert (parameter.grad is not None) is ("low" in name), name
            assert parameter.grad is None or parameter.grad.dtype is torch.float32


@two.test
def test_v_is_cut_along_its_columns_unless_the_caller_says_otherwise() -> None:
    plain = model()
    ask: Any
    for ask, dims in (
        (None, {"model.layers.0.self_attn.q_proj": 1, "model.layers.0.mlp.down_proj": 0}),
        (lambda _: Shard(0), {"model.layers.0.self_attn.q_proj": 0}),
    ):
        new = wrap(factored(plain, PLAN), init_device_mesh("cpu", (2,)), shard_placement_fn=ask)
        for path, dim in dims.items():  # 24 columns, and 37
            factors = {name: osft_modules(new)[path].get_parameter(name) for name in FACTORS}
            for name, parameter in factors.items():
                assert isinstance(parameter, DTensor)
                assert parameter.placements == (
                    Shard(dim if ".V_" in f".{name.replace('osft_', '')}" else 0),
                )


@two.test
def test_factors_are_not_cut_over_other_axes() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
    error = same_error(lambda: wrap(factored(model(), PLAN), mesh))
    assert "not cut over tp" in error["message"]
