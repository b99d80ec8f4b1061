"""Factors of dense weights, computed by the ranks of a job: the same on any mesh, and read again without computing."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardkit
from shardkit.core.factored import FACTORS, factor_of
from shardkit.errors import ResourceError
from shardkit.keys.names import clean_name
from shardkit.osft.modules import osft_modules
from shardkit.osft.plan import OsftPlan
from shardkit.osft.svd import Factors
from shardkit.osft.training import factorise
from shardkit.osft.training.orthogonal import prove_orthogonal
from shardkit.training.prepare import prepare
from shardkit.training.ranks.local import local_shards, reshard
from shardkit.training.wrap import wrap
from tests.osft.models import factored
from tests.osft.presharded import unpacked
from tests.training.models import inputs, reference, save
from tests.training.wrapping import logged, same, whole
from tests.worlds.ranks import Ranks, on_all, same_error

pytestmark = [pytest.mark.prove, pytest.mark.dist]

# Of worlds of 1 to 4: fewer directions than ranks, as many, and numbers that do not divide.
PLAN = OsftPlan(
    ratio=0.3,
    ranks={"*.0.*.q_proj": 1, "*.0.*.k_proj": 2, "*.0.*.v_proj": 3, "*.0.*.o_proj": 4, "*.1.*.o_proj": 23},
)
CHANGES = {"num_hidden_layers": 2}


def make_source(out: Path) -> None:
    (out / "kills").mkdir()
    save("llama", out / "dense", **CHANGES)
    dense = reference("llama", **CHANGES)
    new = factored(dense, PLAN)
    torch.save(new.state_dict(), out / "expected.pt")
    save_file(new.state_dict(), out / "factored.safetensors")
    shardkit.preshard(out / "dense", out / "recorded", world_size=4, layout="declared")
    damaged = shutil.copytree(out / "recorded", out / "damaged") / "__2_0.distcp"
    row = 21  # of 37, on the third rank; in a target
    place = damaged.read_bytes().find(
        dense.model.layers[1].mlp.up_proj.weight.detach()[row].numpy().tobytes()
    )
    assert place > 0
    with damaged.open("r+b") as file:
        file.seek(place)
        file.write(b"\x01")
    (out / "earlier").mkdir()
    unpacked(out / "earlier")
    torch.save(losses(shardkit.finalize(*prepared(out))), out / "losses.pt")


def prepared(out: Path, source: Any = None, **options: Any) -> tuple[nn.Module, Any]:
    ctx = prepare(str(out / "dense"), source or str(out / "dense"), **{"osft": PLAN, **options})
    return ctx.model, ctx


def losses(model: nn.Module) -> list[float]:
    """Of a few steps; each rank sees the same batch."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = shardkit.osft_optimizer(model, torch.optim.AdamW(trained, lr=1e-3))
    found = []
    for _ in range(4):
        logits = model(**inputs("llama")).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), inputs("llama")["input_ids"].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    assert found[-1] < found[0]
    assert shardkit.osft_leak(model) < 1e-6
    return found


one = Ranks(__name__, 1, first=make_source)
two = Ranks(__name__, 2)
three = Ranks(__name__, 3)
four = Ranks(__name__, 4)


def wrapped(model: nn.Module) -> nn.Module:
    return wrap(model, init_device_mesh("cpu", (dist.get_world_size(),)), mixed_precision=None)


def replicated(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    return wrap(model, mesh, mixed_precision=None, activation_checkpointing="LlamaMLP")


def plain(model: nn.Module) -> nn.Module:
    return model


class Way(NamedTuple):
    wrap: Callable[[nn.Module], nn.Module]
    options: dict[str, Any]


DIRECT = {"direct": Way(wrapped, {"strategy": "direct"})}
BROADCAST = {"broadcast": Way(wrapped, {"strategy": "broadcast"})}
HYBRID = {
    "hybrid": Way(replicated, {"strategy": "direct"}),
    "two sources": Way(replicated, {"strategy": "broadcast", "source_rank": "replica"}),
}


def check(way: Way, out: Path) -> None:
    """All ranks together hold what one process computes, bit for bit, and train as it does."""
    model, ctx = prepared(out)
    assert {name for name, _ in model.named_parameters()} == set(torch.load(out / "expected.pt"))
    computed, compute = list[str](), factorise.factorise
    factorise.factorise = lambda weight, target, svd: (
        computed.append(target.path) or compute(weight, target, svd)
    )
    try:
        model = shardkit.finalize(way.wrap(model), ctx, **way.options)
    finally:
        factorise.factorise = compute
    every = on_all(computed) if dist.is_initialized() else [computed]
    assert sorted(path for each in every for path in each) == sorted(
        target.path for target in ctx.factoring.targets
    )  # each once
    assert {len(each) for each in every} <= {14 // len(every), -(-14 // len(every))}
    same(whole(model), torch.load(out / "expected.pt"), "factors")
    with torch.no_grad():
        logits = model(**inputs("llama")).logits
        assert (logits - reference("llama", **CHANGES)(**inputs("llama")).logits).abs().max() < 1e-5
    reshard(model)
    found, expected = losses(model), torch.load(out / "losses.pt")
    assert found == pytest.approx(expected, abs=1e-5), (found, expected)


@one.test
def test_one_process(out: Path) -> None:
    check(Way(plain, {}), out)


@two.test_each({**DIRECT, **BROADCAST})
def test_two_ranks(way: Way, out: Path) -> None:
    check(way, out)


@three.test_each(DIRECT)
def test_three_ranks(way: Way, out: Path) -> None:
    check(way, out)


@four.test_each({**DIRECT, **HYBRID})
def test_four_ranks(way: Way, out: Path) -> None:
    factorise._NUM_PEERS = 2  # of three others
    check(way, out)


@two.test
def test_what_was_saved_is_read_without_computing(out: Path) -> None:
    model, ctx = prepared(out)
    model = shardkit.finalize(wrapped(copy.deepcopy(model)), ctx)
    expected = whole(model)
    shardkit.save(model, out / "saved")

    def refuse(*_: Any) -> Factors:
        raise AssertionError("computed again")

    factorise.factorise, computing = refuse, factorise.factorise
    try:
        for osft in (None, PLAN):  # the second agrees
            for options in ({"strategy": "direct"}, {"strategy": "broadcast"}):
                other, ctx = prepared(out, str(out / "saved"), osft=osft)
                assert ctx.factoring.svd is None
                same(whole(shardkit.finalize(wrapped(other), ctx, **options)), expected, "resumed")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        same(whole(shardkit.load_into(model, out / "saved")), expected, "loaded")
    finally:
        factorise.factorise = computing


def check_presharded(wrap: Callable[[nn.Module], nn.Module], out: Path) -> None:
    """What an earlier version pre-sharded is read as it is, and is cut as the ranks cut it."""
    stored = out / "earlier" / "factors"
    ctx = prepare(str(out / "earlier" / "dense"), str(stored))
    assert ctx.factoring.svd is None
    model = shardkit.finalize(wrap(ctx.model), ctx)
    state = {name: torch.full_like(value, 7) for name, value in whole(model).items()}
    dcp.load(state, checkpoint_id=stored)
    same(whole(model), state, "pre-sharded")
    said = json.loads((stored / "shardkit.json").read_text())["tensors"]
    for fqn, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        assert [str(parameter.placements[-1])] == said[clean_name(fqn)]["placements"], fqn


@two.test
def test_presharded_for_two(out: Path) -> None:
    check_presharded(wrapped, out)


@four.test
def test_presharded_with_replicas(out: Path) -> None:
    check_presharded(replicated, out)


@two.test_each({"by all": None, "by the second": 0})
def test_a_live_model_of_factors_takes_dense_weights(blind: int | None, out: Path) -> None:
    model = wrapped(prepared(out)[0])
    source = out / ("nowhere" if dist.get_rank() == blind else "dense")
    same(whole(shardkit.load_into(model, source)), torch.load(out / "expected.pt"), "loaded")


def as_mini_trainer_makes(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Put plain linear layers with factors into a model on meta, and all its buffers into its state dict.

    Source: mini_trainer 0.9.0, osft_utils.py, _initialize_osft_parameters, _pre_fsdp2_wrap_synchronize_buffers.
    """
    for path, layer in osft_modules(model).items():
        plain, low = nn.Linear(1, 1, bias=False, device="meta"), nn.Module()
        del plain.weight
        plain.add_module("osft_params", low)
        for name in FACTORS:
            value = layer.get_parameter(name)
            owner = low if "low" in name else plain
            owner.register_parameter(name.rpartition(".")[2], nn.Parameter(value.to(dtype), owner is low))
        model.set_submodule(path, plain)
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            module.register_buffer(name, buffer.clone(), persistent=True)
    return model


@two.test_each({"fp32": torch.float32, "bf16": torch.bfloat16})
def test_a_live_model_of_another_trainer_takes_dense_weights(dtype: torch.dtype, out: Path) -> None:
    model = wrapped(as_mini_trainer_makes(prepared(out)[0], dtype))
    rotary = model.get_submodule("model.rotary_emb")
    computed = {f"model.rotary_emb.{name}": value.clone() for name, value in rotary.named_buffers()}
    if dist.get_rank() == 0:
        for buffer in rotary.buffers():
            buffer.fill_(7)  # as after to_empty()
    source = out / ("nowhere" if dist.get_rank() else "dense")
    said, others = logged(partial(shardkit.load_into, model, source))
    expected = {
        name: value.to(dtype) if factor_of(name) else value
        for name, value in torch.load(out / "expected.pt").items()
    }
    found = whole(model)
    same({name: found[name] for name in (*expected, *computed)}, expected | computed, "loaded")
    assert len(found) == len(expected) + 2
    assert "inv_freq" not in str(others)
    assert (
        f"weights: not in the source, buffers that the model's class computes: {', '.join(computed)}" in said
    )
    other = "weights: these held other values than the class computes, and have those now: "
    assert f"{other}{', '.join(computed)}" in said
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    shardkit.osft_optimizer(model, torch.optim.AdamW(trained, lr=1e-2)).step()
    assert shardkit.osft_leak(model) < (1e-6 if dtype is torch.float32 else 5e-3)


@two.test
def test_weights_in_the_memory_of_one_rank(out: Path) -> None:
    state = reference("llama", **CHANGES).state_dict() if dist.get_rank() == 1 else None
    model, ctx = prepared(out, shardkit.from_rank(state, rank=1))
    same(whole(shardkit.finalize(wrapped(model), ctx)), torch.load(out / "expected.pt"), "sent")
    factors = load_file(out / "factored.safetensors") if dist.get_rank() == 0 else None
    model, ctx = prepared(out, shardkit.from_rank(factors), osft=None)
    assert len(osft_modules(model)) == 14
    same(whole(shardkit.finalize(wrapped(model), ctx)), torch.load(out / "expected.pt"), "sent factors")


@two.test
def test_a_weight_without_singular_values_is_named_on_all_ranks(out: Path) -> None:
    state = reference("llama", **CHANGES).state_dict()
    state["model.layers.1.mlp.up_proj.weight"][3, 3] = float("nan")
    for rank in (0, 1):  # the owner's own source, and another's
        given = shardkit.from_rank(state if dist.get_rank() == rank else None, rank=rank)
        model, ctx = prepared(out, given)
        error = same_error(partial(shardkit.finalize, wrapped(model), ctx))
        assert error["error"] == "SourceError"
        assert error["message"].startswith(
            "model.layers.1.mlp.up_proj.weight: has values that are not finite"
        )


@two.test
def test_a_lost_slice_is_found(out: Path) -> None:
    model, ctx = prepared(out)
    model = shardkit.finalize(wrapped(model), ctx)
    held = {shard.fqn: shard for shard in local_shards(model)}
    lost = "model.layers.1.mlp.down_proj.osft_params.V_low"
    if dist.get_rank() == 1:
        held[lost].tensor[-1].mul_(0.9)
    error = same_error(lambda: prove_orthogonal(held, ctx.factoring.targets, "exact"))
    assert error["message"] == "the factors on the ranks are not orthonormal"
    assert len(error["problems"]) == 1
    assert error["problems"][0].startswith("ranks 0-1: model.layers.1.mlp.down_proj: ")


@two.test
def test_no_rank_has_two_weights(out: Path) -> None:
    deliver, had = factorise._deliver, list[weakref.ref[torch.Tensor]]()

    def watched(*args: Any) -> Any:
        assert not any(each() is not None for each in had)
        weight, error = deliver(*args)
        had.append(weakref.ref(weight))
        return weight, error

    with mock.patch.object(factorise, "_deliver", watched):
        model, ctx = prepared(out)
        shardkit.finalize(wrapped(model), ctx, strategy="broadcast")
    assert len(had) == 7


@two.test
def test_factors_beside_weights_in_bf16(out: Path) -> None:
    model, ctx = prepared(out, dtype="bf16")
    model = shardkit.finalize(wrap(model, init_device_mesh("cpu", (2,))), ctx)
    expected = torch.load(out / "expected.pt")
    for name, value in whole(model).items():
        wanted = expected[name] if factor_of(name) else expected[name].bfloat16()
        assert value.dtype is wanted.dtype
        assert torch.equal(value, wanted), name
    logits = model(**inputs("llama")).logits
    assert (logits.float() - reference("llama", **CHANGES)(**inputs("llama")).logits).abs().max() < 0.1
    logits.float().pow(2).mean().backward()


@two.test_each(("direct", "broadcast"))
def test_weights_are_compared_with_their_checksums(strategy: str, out: Path) -> None:
    model, ctx = prepared(out, str(out / "recorded"))
    same(
        whole(shardkit.finalize(wrapped(model), ctx, strategy=strategy)),
        torch.load(out / "expected.pt"),
        "read",
    )
    assert ctx.checked is not None
    assert not ctx.checked.unchecked
    assert ctx.checked.checked_bytes == sum(p.nbytes for p in reference("llama", **CHANGES).parameters())
    model, ctx = prepared(out, str(out / "damaged"))
    error = same_error(partial(shardkit.finalize, wrapped(model), ctx, strategy=strategy))
    assert error["error"] == "IntegrityError"
    assert "model.layers.1.mlp.up_proj.weight" in str(error)


class Kill(NamedTuple):
    place: str
    victim: int = 1

    def prepare(self) -> None:
        def kill(*_: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        if self.place == "decomposing":
            factorise.factorise = kill
        else:
            factorise._Exchange._move = kill


@two.test_each_killing({each.place: each for each in (Kill("decomposing"), Kill("sending"))})
def test_a_killed_rank_ends_all(kill: Kill, out: Path) -> None:
    model, ctx = prepared(out)
    model = wrapped(model)
    if dist.get_rank() == kill.victim:
        kill.prepare()
    with pytest.raises(ResourceError) as caught:
        shardkit.finalize(model, ctx)
    assert "another rank was lost during computing factors" in str(caught.value)
