"""Models that are in use are filled and saved right, or refused on all ranks.

In use: forward was called, parts are held by ranks of several axes, or ranks were called differently.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers import AutoModelForCausalLM

import shardkit
from tests.training import models
from tests.training.wrapping import logged, same, whole
from tests.worlds.ranks import Ranks, on_all

pytestmark = pytest.mark.prove

NUM_LARGE, ROWS = 16, 256


class Large(nn.Module):
    """Weights that are worth sending."""

    def __init__(self) -> None:
        super().__init__()
        self.ws = nn.ParameterList([nn.Parameter(torch.empty(ROWS, 1024)) for _ in range(NUM_LARGE)])


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(self.last(self.first(x)))
        return found


def make_sources(out: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    large = {f"ws.{at}": torch.randn(ROWS, 1024, generator=generator) for at in range(NUM_LARGE)}
    save_file(large, out / "large.safetensors")
    models.save("qwen3", out / "tied")
    for seed in (1, 2):
        torch.manual_seed(seed)
        save_file(Small().state_dict(), out / f"small-{seed}.safetensors")


two = Ranks(__name__, 2, first=make_sources)
four = Ranks(__name__, 4)


def small(source: Path | None) -> tuple[nn.Module, shardkit.ModelInitializationContext]:
    context = shardkit.prepare(Small, source)
    fully_shard(context.model.first)
    fully_shard(context.model, reshard_after_forward=False)
    return shardkit.finalize(context.model, context), context


@four.test_each(("1st", "2nd", "3rd", "4th"))
def test_tensors_that_two_axes_replicate(time: str, out: Path) -> None:
    """Each axis passes on what the one before has brought, never what is still on its way."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    with torch.device("meta"):
        model = Large()
    for at in range(NUM_LARGE):
        everywhere = [Replicate(), Replicate()]
        whole = DTensor.from_local(model.ws[at].detach(), mesh, everywhere, run_check=False)
        model.ws[at] = nn.Parameter(whole)
    shardkit.load_into(model, out / "large.safetensors", strategy="direct")
    wanted = torch.Generator().manual_seed(0)
    for weight in model.ws:
        assert torch.equal(weight.to_local(), torch.randn(ROWS, 1024, generator=wanted))


@two.test_each(("direct", "broadcast"))
def test_loading_after_a_forward_without_a_backward(strategy: Any, out: Path) -> None:
    model, _ = small(out / "small-1.safetensors")
    with torch.no_grad():
        model(torch.ones(4, 8))
    shardkit.load_into(model, out / "small-2.safetensors", strategy=strategy)
    model.eval()
    model(torch.ones(4, 8)).sum().backward()
    torch.manual_seed(2)
    wanted = Small().state_dict()
    found = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    assert [name for name, value in found.items() if not torch.equal(value, wanted[name])] == []


class Nothing(nn.Module):
    """A layer and a parameter of which FSDP2 gives no rank any row, as they have no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.nothing = nn.Linear(4, 3), nn.Parameter(torch.empty(5, 0))


@two.test_each(("direct", "broadcast"))
def test_a_parameter_without_elements(strategy: Any, out: Path) -> None:
    torch.manual_seed(0)
    wanted = Nothing().state_dict()
    if not dist.get_rank():
        save_file(wanted, out / f"nothing-{strategy}.safetensors")
    dist.barrier()
    context = shardkit.prepare(Nothing, out / f"nothing-{strategy}.safetensors")
    fully_shard(context.model)
    model = shardkit.finalize(context.model, context, strategy=strategy)
    shardkit.save(model, out / f"nothing-{strategy}")
    shardkit.load_into(model, out / f"nothing-{strategy}", strategy=strategy)
    assert torch.equal(whole(model)["layer.weight"], wanted["layer.weight"])


@four.test
def test_a_column_that_half_of_the_ranks_lack(out: Path) -> None:
    """`fully_shard` leaves these no rows."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, column = nn.Linear(1, 6), torch.arange(6.0).view(6, 1)
    parts = distribute_tensor(column, mesh["tp"], [Shard(1)], src_data_rank=None)
    model.weight = nn.Parameter(parts)
    fully_shard(model, mesh=mesh["dp"])
    shardkit.save(model, out / "column")
    with torch.no_grad():
        model.weight.to_local().zero_()
    shardkit.load_into(model, out / "column")
    rows = column.chunk(2)[mesh.get_local_rank("dp")]
    found = model.weight.to_local()
    assert torch.equal(found, rows) if mesh.get_local_rank("tp") == 0 else found.numel() == 0


@two.test
def test_a_new_optimizer_beside_an_old_one_has_made_no_step(out: Path) -> None:
    model, _ = small(out / "small-1.safetensors")
    old, new = (torch.optim.AdamW(part.parameters()) for part in (model.first, model.last))
    model(torch.randn(4, 8)).sum().backward()
    old.step()
    shardkit.save(model, out / "two", optimizer=[old, new])
    names = FileSystemReader(out / "two").read_metadata().state_dict_metadata
    steps = {name: torch.full((), -1.0) for name in names if name.endswith(".step")}
    load(steps, checkpoint_id=out / "two")
    assert steps == {
        "optimizer.state.first.weight.step": 1,
        "optimizer.state.first.bias.step": 1,
        "optimizer.state.last.weight.step": 0,
        "optimizer.state.last.bias.step": 0,
    }


@two.test
def test_gradients_and_optimizers_after_a_forward_without_a_backward(out: Path) -> None:
    """Copies that forward gathered are neither counted in a norm nor stepped."""
    context = shardkit.prepare(Small, out / "small-1.safetensors")
    optimizer = torch.optim.SGD(context.model.named_parameters(), lr=1.0)
    fully_shard(context.model, reshard_after_forward=False)
    model = shardkit.finalize(context.model, context).eval()
    model(torch.ones(4, 8)).sum().backward()
    norm = float(shardkit.grad_norm(model))
    with torch.no_grad():
        model(torch.ones(4, 8))
    assert float(shardkit.grad_norm(model)) == norm > 0
    with torch.no_grad():
        model(torch.ones(4, 8))
    shardkit.rebind_optimizer(model, optimizer)
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    model(torch.ones(4, 8)).sum().backward()
    assert stepped == {id(p) for p in model.parameters()}


@two.test
def test_buffers_start_anew_with_a_second_finalize() -> None:
    model, context = small(None)
    model(torch.ones(4, 8)).sum().backward()
    shardkit.finalize(model, context)
    assert model.norm.running_mean.tolist() == [0.0] * 8


def tied_on_meta() -> Any:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(models.config_of("qwen3"))
    model.tie_weights()
    return model


def shard_first_layer(model: Any) -> nn.Module:
    fully_shard(model.model.layers[0])
    return fully_shard(model)


@two.test
def test_buffers_that_nobody_wrote_are_warned_of(out: Path) -> None:
    source, model = out / "tied/model.safetensors", shard_first_layer(tied_on_meta())
    assert logged(partial(shardkit.load_into, model, source), logging.WARNING) == [[], []]
    emptied = shard_first_layer(tied_on_meta()).to_empty(device="cpu")  # has whatever the memory held
    for buffer in emptied.buffers():
        buffer.fill_(7)
    first, second = logged(partial(shardkit.load_into, emptied, source), logging.WARNING)
    assert second == []  # rank 0 says it, once
    (said,) = first
    assert "buffers are in no checkpoint, and not what the model's class computes: " in said
    assert "model.rotary_emb.inv_freq" in said
    assert "leave the model on meta" in said


@two.test
def test_computed_buffers_that_another_trainer_made_persistent(out: Path) -> None:
    """Source: mini_trainer 0.9.0, fsdp2_lazy_init.py; no checkpoint has them, nor has the state dict that rank 0 keeps."""
    stored = load_file(out / "tied/model.safetensors")
    computed = dict(AutoModelForCausalLM.from_config(models.config_of("qwen3")).named_buffers())
    kept = stored if dist.get_rank() == 0 else None
    for source in (out / "tied", shardkit.from_rank(kept, rank=0)):
        model = tied_on_meta()
        for name, value in computed.items():
            path, _, last = name.rpartition(".")
            model.get_submodule(path).register_buffer(last, value.clone(), persistent=True)
        said = logged(partial(shardkit.load_into, shard_first_layer(model), source))[0]
        told = "not in the source, buffers that the model's class computes: model.rotary_emb.inv_freq"
        assert any(told in line for line in said)
        found = whole(model)
        assert found.keys() == {*stored, *computed, "lm_head.weight"}
        same({name: found[name] for name in (*stored, *computed)}, stored | computed, "loaded")


def wrapped_apart() -> nn.Module:
    """Return a tied model whose head is a unit of its own: `fully_shard` has made two parameters of one."""
    model = tied_on_meta()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    fully_shard(model.lm_head)
    return fully_shard(model)


def finalize_by_a_strategy_for_each_rank(source: Path) -> None:
    context = shardkit.prepare(Small, source)
    shardkit.finalize(context.model, context, strategy="direct" if dist.get_rank() else "broadcast")


class Mistake(NamedTuple):
    work: Callable[[Path], object]
    """Called with the folder of sources."""
    text: str
    """Is in the error."""


@two.test_each(
    {
        "source": Mistake(
            lambda out: shardkit.prepare(Small, None if dist.get_rank() else out / "small-1.safetensors"),
            "the ranks do not have the same model, seed or options",
        ),
        "strategy": Mistake(
            lambda out: finalize_by_a_strategy_for_each_rank(out / "small-1.safetensors"),
            "rank 1: direct, global",
        ),
        "type": Mistake(
            lambda out: shardkit.load_into(Small(), 3 if dist.get_rank() else out / "small-1.safetensors"),  # type: ignore[arg-type]
            "rank 1: TypeError",
        ),
        "head": Mistake(
            lambda out: shardkit.load_into(Large(), out / "small-1.safetensors"), "prepare(..., missing=...)"
        ),
        "apart": Mistake(
            lambda out: shardkit.load_into(wrapped_apart(), out / "tied/model.safetensors"),
            "lm_head.weight and model.embed_tokens.weight",
        ),
        "other": Mistake(
            lambda out: shardkit.finalize(nn.Linear(2, 2), shardkit.prepare(Small, None)),
            "first.weight: was prepared and is not in the wrapped model",
        ),
    }
)
def test_ranks_end_together(mistake: Mistake, out: Path) -> None:
    try:
        mistake.work(out)
    except shardkit.ShardkitError as error:
        # `str` is one line on other ranks.
        said = "\n".join((error.message, *error.problems, error.hint or ""))
    else:
        said = ""
    for each in on_all(said):
        assert mistake.text in each
