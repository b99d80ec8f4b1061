"""Between prepare and finalize: what a model holds beside its names is refused, ties and buffers are kept or named."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

import shardkit
from tests.worlds.ranks import Ranks, same_error

pytestmark = pytest.mark.prove

Build = Callable[[], nn.Module]
HIDDEN = "a forward would read memory that nobody has written"
ELSEWHERE: list[Any] = []


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.register_buffer("table", torch.arange(4.0), persistent=False)


def holding(hold: Callable[[Any], object]) -> Build:
    """Build a net that holds something else too."""

    def build() -> nn.Module:
        net = Net()
        hold(net)
        return net

    return build


def in_closure(net: Any) -> None:
    weight = net.a.weight
    net.run = lambda x: F.linear(x, weight)


def in_hook(net: Any) -> None:
    inner = nn.Linear(4, 4)
    net.b.register_forward_hook(lambda module, args, output: inner(output))


def on_meta(net: Any) -> None:
    with torch.device("meta"):
        net.teacher = [nn.Linear(4, 4, bias=False)]


class Slots:
    __slots__ = ("kept",)

    def __init__(self, kept: Any) -> None:
        self.kept = kept


STALE = ", which was a.weight"
REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "list": (lambda net: setattr(net, "teacher", [nn.Linear(4, 4, bias=False)]), "teacher[0].weight: [4, 4]"),
    "dict": (lambda net: setattr(net, "ops", {"p": nn.Conv1d(4, 2, 1, bias=False)}), "ops['p'].weight: [2, 4, 1]"),
    "past setattr": (lambda net: object.__setattr__(net, "ema", copy.deepcopy(net.a)), "ema.weight: [4, 4]"),
    "slots": (lambda net: setattr(net, "held", Slots(nn.Linear(4, 1, bias=False))), "held.weight: [1, 4]"),
    "built on meta": (on_meta, "teacher[0].weight: [4, 4]"),
    "hook": (in_hook, "inner.bias: [4]"),
    "elsewhere": (lambda net: ELSEWHERE.append(copy.deepcopy(net.a)), "ELSEWHERE of "),
    "data": (lambda net: setattr(net, "ns", types.SimpleNamespace(w={"x": (net.a.weight.data,)})), "ns.w['x'][0]: [4, 4]"),
    "namespace": (lambda net: setattr(net, "ns", types.SimpleNamespace(w=net.a.weight)), f"ns.w: [4, 4]{STALE}"),
    "partial": (lambda net: setattr(net, "run", partial(F.linear, weight=net.a.weight)), f"run.keywords['weight']: [4, 4]{STALE}"),
    "closure": (in_closure, f"run.weight: [4, 4]{STALE}"),
}  # fmt: skip


def own_weight(net: Any) -> None:
    net.a.weight = nn.Parameter(torch.ones(4, 4))
    net.itself, net.view = [net], {"a": net.a}


def like_lightning(net: Any) -> None:
    net._hparams_initial = {"net": copy.deepcopy(net.a)}


PASS: dict[str, Callable[[Any], object]] = {
    "its own modules": lambda net: object.__setattr__(net, "view", [net.a, net]),
    "a replaced weight": own_weight,
    "constants": lambda net: setattr(net, "ns", types.SimpleNamespace(deep=[{"t": torch.ones(3)}])),
    "a copy that nothing runs": like_lightning,
}

WEIGHT = torch.arange(16.0).reshape(4, 4)


def make_sources(out: Path) -> None:
    save_file({"a.weight": WEIGHT, "b.weight": WEIGHT + 1}, out / "two.safetensors")
    save_file({"a.weight": WEIGHT, "b.weight": WEIGHT.clone()}, out / "same.safetensors")
    save_file({"a.weight": WEIGHT}, out / "one.safetensors")
    save_file({"a.weight": WEIGHT, "b.weight": WEIGHT + 1, "table": WEIGHT[1].clone()}, out / "t.safetensors")
    ctx = shardkit.prepare(Net, out / "two.safetensors")
    shardkit.finalize(ctx.model, ctx)  # imports what is imported late, once for all


two = Ranks(__name__, 2, first=make_sources)


def shard(model: nn.Module) -> nn.Module:
    """As somebody's own code does it."""
    return fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


def wrap(model: nn.Module) -> nn.Module:
    return shardkit.wrap(model, init_device_mesh("cpu", (2,)), policy="none", mixed_precision=None)


def start(
    build: Build,
    source: Path,
    wrapped: Callable[[nn.Module], nn.Module] = shard,
    between: Callable[[Any], object] = lambda model: None,
    **options: Any,
) -> shardkit.ModelInitializationContext:
    ctx = shardkit.prepare(build, source, **options)
    between(ctx.model)
    ctx.model = shardkit.finalize(wrapped(ctx.model), ctx)
    return ctx


def value(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.full_tensor().detach()
    return found


@two.test_each(REFUSED)
def test_what_nothing_fills_is_refused_by_name(case: tuple[Any, str], out: Path) -> None:
    hold, where = case
    error = same_error(lambda: start(holding(hold), out / "two.safetensors"))
    assert error["error"] == "LayoutError"
    assert HIDDEN in error["message"]
    assert any(where in problem for problem in error["problems"]), error
    ELSEWHERE.clear()


@two.test_each(PASS)
def test_what_a_model_has_by_name_may_be_held_twice(hold: Any, out: Path) -> None:
    for wrapped in (shard, wrap):
        model = start(holding(hold), out / "two.safetensors", wrapped).model
        assert torch.equal(value(model.a.weight), WEIGHT)


@two.test
def test_a_model_given_on_meta(out: Path) -> None:
    with torch.device("meta"):
        net = holding(REFUSED["list"][0])()
    net.table = torch.arange(4.0)
    error = same_error(lambda: start(net, out / "two.safetensors"))  # type: ignore[arg-type]
    assert error["problems"] == ["ranks 0-1: teacher[0].weight: [4, 4]"]


@two.test
def test_load_into_fills_what_holds_its_own_modules_or_real_ones_twice(out: Path) -> None:
    for wrapped in (lambda net: net, shard, wrap):
        with torch.device("meta"):
            net: Any = holding(PASS["its own modules"])()
        net.table, net.teacher = torch.arange(4.0), [nn.Linear(4, 4)]
        model = shardkit.load_into(wrapped(net), out / "two.safetensors")
        weight = model.a.weight
        assert torch.equal(value(weight) if isinstance(weight, DTensor) else weight, WEIGHT)


@two.test
def test_what_some_ranks_train_and_others_do_not_is_refused(out: Path) -> None:
    def freeze(net: Any) -> None:
        net.b.weight.requires_grad_(dist.get_rank() != 0)

    said = ["ranks 0-1: b.weight: trained on rank 1, frozen on rank 0"]
    for run in (
        lambda: start(Net, out / "two.safetensors", between=freeze),
        lambda: start(holding(freeze), out / "two.safetensors", wrap),
        lambda: fsdp1(Net, out / "two.safetensors", freeze),
    ):
        error = same_error(run)
        assert error["message"] == "requires_grad of 1 parameter is not the same on all ranks"
        assert error["problems"] == said
    frozen = start(Net, out / "two.safetensors", between=lambda net: net.b.requires_grad_(False)).model
    assert (frozen.a.weight.requires_grad, frozen.b.weight.requires_grad) == (True, False)


@two.test
def test_expanded_buffers_get_memory_and_expanded_parameters_are_refused(out: Path) -> None:
    def expand(net: Any) -> None:
        net.register_buffer("rows", torch.arange(4.0).expand(3, 4), persistent=False)

    model = start(holding(expand), out / "two.safetensors").model
    assert torch.equal(model.rows, torch.arange(4.0).expand(3, 4))
    net = Net()
    net.register_buffer("table", torch.ones(1).expand(4))
    assert torch.equal(shardkit.load_into(net, out / "t.safetensors").table, WEIGHT[1])
    net.b.weight = nn.Parameter(torch.ones(4).expand(4, 4))
    error = same_error(lambda: shardkit.load_into(net, out / "t.safetensors"))
    assert error["problems"] == ["ranks 0-1: b.weight: [4, 4] with strides [0, 1]"]
    assert "parameter.data.clone()" in error["hint"]
    net.b.weight.data = net.b.weight.data.clone()
    assert torch.equal(shardkit.load_into(net, out / "t.safetensors").b.weight, WEIGHT + 1)


@two.test
def test_what_is_given_values_first_passes(out: Path) -> None:
    def fill(net: Any) -> None:
        net.teacher[0].to_empty(device="cpu").load_state_dict({"weight": WEIGHT})

    def load(net: Any) -> None:
        shardkit.load_into(net.teacher[0], out / "weight.safetensors")

    if dist.get_rank() == 0:
        save_file({"weight": WEIGHT}, out / "weight.safetensors")
    dist.barrier()
    for between in (fill, load, lambda net: net.teacher.clear()):
        start(holding(REFUSED["list"][0]), out / "two.safetensors", between=between)


@two.test
def test_two_prepared_models_in_one_process(out: Path) -> None:
    teacher = shardkit.prepare(Net, out / "same.safetensors")
    build = holding(lambda net: setattr(net, "t", [teacher.model]))
    student = shardkit.prepare(build, out / "two.safetensors")
    shardkit.finalize(shard(student.model), student)
    assert torch.equal(value(shardkit.finalize(shard(teacher.model), teacher).b.weight), WEIGHT)
    # One that was built with the student, and has a source of its own.
    student = shardkit.prepare(holding(lambda net: setattr(net, "t", [Net()])), out / "two.safetensors")
    teacher = shardkit.prepare(student.model.t[0], out / "same.safetensors")
    shardkit.finalize(shard(student.model), student)
    assert torch.equal(value(shardkit.finalize(shard(teacher.model), teacher).b.weight), WEIGHT)


@two.test_each((shard, wrap))
def test_the_model_of_another_context_is_refused(wrapped: Any, out: Path) -> None:
    """Both have the same names and shapes: each would get the values of the other."""
    policy, reference = (shardkit.prepare(Net, out / f"{name}.safetensors") for name in ("two", "same"))
    models = wrapped(policy.model), wrapped(reference.model)
    error = same_error(lambda: shardkit.finalize(models[1], policy))
    assert error["error"] == "UsageError"
    assert "this model was prepared with another context than <prepared " in error["message"]
    assert "two.safetensors: " in error["message"]
    for model, ctx, b in zip(models, (policy, reference), (WEIGHT + 1, WEIGHT), strict=True):
        assert torch.equal(value(shardkit.finalize(model, ctx).b.weight), b)


@two.test
def test_originals_that_others_keep_are_no_part_of_the_model(out: Path) -> None:
    def keep(net: Any) -> None:
        ELSEWHERE.extend([torch.optim.AdamW(net.parameters()), list(net.parameters())])
        net.trainer = types.SimpleNamespace(model=net, optimizer=ELSEWHERE[0])

    for wrapped in (shard, wrap, lambda model: shard(copy.deepcopy(model))):
        start(Net, out / "two.safetensors", wrapped, keep)
    ELSEWHERE.clear()


def tie(net: Any) -> None:
    net.b.weight = net.a.weight


@two.test_each((shard, wrap))
def test_a_tie_that_was_made_after_prepare(wrapped: Any, out: Path) -> None:
    error = same_error(lambda: start(Net, out / "two.safetensors", wrapped, tie))
    assert "two values" in error["message"]
    assert error["problems"] == ["rank 0: a.weight and b.weight"]
    for source, options in (("same", {}), ("one", {"missing": "init"})):
        model = start(Net, out / f"{source}.safetensors", wrapped, tie, **options).model
        assert model.a.weight is model.b.weight
        assert torch.equal(value(model.a.weight), WEIGHT)
    ctx = shardkit.prepare(Net, None)
    tie(ctx.model)
    shardkit.finalize(wrapped(ctx.model), ctx)


def fsdp1(build: Build, source: Path, between: Callable[[Any], object], **options: Any) -> Any:
    ctx = shardkit.prepare(build, source, **options)
    between(ctx.model)
    fill = shardkit.param_init_fn(ctx)
    model: Any = FullyShardedDataParallel(ctx.model, param_init_fn=fill, device_id=torch.device("cpu"))
    with FullyShardedDataParallel.summon_full_params(model):
        return {name: value.clone() for name, value in model.named_parameters()}, ctx.model.table, ctx.notes


@two.test
def test_fsdp1_does_the_same(out: Path) -> None:
    error = same_error(lambda: fsdp1(holding(REFUSED["list"][0]), out / "two.safetensors", lambda net: None))
    assert error["problems"] == ["ranks 0-1: teacher[0].weight: [4, 4]"]
    error = same_error(lambda: fsdp1(Net, out / "two.safetensors", tie))
    assert error["problems"] == ["rank 0: a.weight and b.weight"]
    for source, options in (("same", {}), ("one", {"missing": "init"})):
        values, _, _ = fsdp1(Net, out / f"{source}.safetensors", tie, **options)
        assert [list(each.flatten()) for each in values.values()] == [list(WEIGHT.flatten())]
    _, table, (note,) = fsdp1(Net, out / "two.safetensors", set_table)
    assert torch.equal(table, torch.arange(4.0))
    assert note.startswith("1 buffer had other values")


def by_data(net: Any) -> None:
    net.b.weight.data = net.a.weight.data


def overlapping(net: Any) -> None:
    memory = torch.zeros(28)
    net.a.weight = nn.Parameter(memory[:16].view(4, 4))
    net.b.weight = nn.Parameter(memory[12:].view(4, 4))


def side_by_side(net: Any) -> None:
    memory = torch.zeros(4, 8)
    net.a.weight, net.b.weight = nn.Parameter(memory[:, :4]), nn.Parameter(memory[:, 4:])


@two.test
def test_live_parameters_on_one_memory(out: Path) -> None:
    for hold in (by_data, overlapping):
        error = same_error(lambda: shardkit.load_into(holding(hold)(), out / "two.safetensors"))  # noqa: B023
        (problem,) = error["problems"]
        assert "a.weight, b.weight lie on one memory, and the source has other values" in problem
    net: Any = shardkit.load_into(holding(by_data)(), out / "same.safetensors")
    assert torch.equal(net.a.weight, WEIGHT)
    assert net.a.weight.data_ptr() == net.b.weight.data_ptr()
    net = shardkit.load_into(holding(side_by_side)(), out / "two.safetensors")
    assert torch.equal(net.a.weight, WEIGHT)
    assert torch.equal(net.b.weight, WEIGHT + 1)


class Scaled(nn.Linear):
    """Keeps a tensor of one dtype as extra state, as TransformerEngine keeps bytes."""

    dtype = torch.float32

    def __init__(self) -> None:
        super().__init__(4, 4, bias=False)
        self.scale = torch.ones(2, dtype=self.dtype)

    def get_extra_state(self) -> torch.Tensor:
        return self.scale

    def set_extra_state(self, state: torch.Tensor) -> None:
        assert self.dtype != torch.uint8, "it might unpickle what is in the file"
        self.scale = state


class Bytes(Scaled):
    dtype = torch.uint8


def save_scaled(out: Path, kind: type[Scaled]) -> Path:
    path = out / f"{kind.__name__}.safetensors"
    if dist.get_rank() == 0:
        scale = torch.arange(3, dtype=kind.dtype)
        save_file({"a.weight": WEIGHT, "b.weight": WEIGHT + 1, "b._extra_state": scale}, path)
    dist.barrier()
    return path


def keep_scale(net: Any, kind: type[Scaled] = Scaled) -> None:
    net.b = kind()


@two.test_each(("direct", "broadcast"))
def test_tensors_of_extra_state_are_read(strategy: Any, out: Path) -> None:
    source = save_scaled(out, Scaled)
    given: Any = source if strategy == "direct" or dist.get_rank() == 0 else out / "nowhere"
    ctx = shardkit.prepare(holding(keep_scale), given)
    model: Any = shardkit.finalize(shard(ctx.model), ctx, strategy=strategy)
    assert torch.equal(model.b.scale, torch.arange(3.0))
    assert ctx.notes == ()
    net: Any = shardkit.load_into(holding(keep_scale)(), source, strategy=strategy)
    assert torch.equal(net.b.scale, torch.arange(3.0))
    # What is saved with it comes back with it.
    shardkit.save(model, out / f"scaled-{strategy}")
    ctx = shardkit.prepare(holding(keep_scale), out / f"scaled-{strategy}")
    model = shardkit.finalize(shard(ctx.model), ctx)
    assert torch.equal(model.b.scale, torch.arange(3.0))


@two.test
def test_bytes_of_extra_state_are_left_out_with_a_note(out: Path) -> None:
    source = save_scaled(out, Bytes)
    ctx = shardkit.prepare(holding(partial(keep_scale, kind=Bytes)), source)
    model: Any = shardkit.finalize(shard(ctx.model), ctx)
    assert torch.equal(model.b.scale, torch.ones(2, dtype=torch.uint8))
    (note,) = ctx.notes
    assert note.startswith("1 extra state of the source not given to its set_extra_state")
    assert "b._extra_state" in note


@two.test
def test_fsdp1_reads_extra_state_too(out: Path) -> None:
    nets: list[Any] = []
    fsdp1(holding(keep_scale), save_scaled(out, Scaled), nets.append)
    assert torch.equal(nets[0].b.scale, torch.arange(3.0))


NEW = torch.full((4,), 7.0)


def set_table(net: Any) -> None:
    net.table = NEW.clone()


@two.test_each({"assigned": set_table, "in place": lambda net: net.table.fill_(7)})
def test_a_buffer_that_was_set_before_wrap_is_kept(change: Any, out: Path) -> None:
    ctx = start(Net, out / "two.safetensors", wrap, change)
    assert torch.equal(ctx.model.table, NEW)
    assert ctx.notes == ()
    ctx = start(Net, out / "two.safetensors", shard, change)
    assert torch.equal(ctx.model.table, torch.arange(4.0))
    (note,) = ctx.notes
    told = "1 buffer had other values than after prepare and was put back: table; set buffers before"
    assert note.startswith(told)
    assert note.endswith("model.table.copy_(values)")


@two.test
def test_buffers_that_are_rounded_or_emptied_by_a_wrapper_are_put_back_without_a_note(out: Path) -> None:
    def cast(net: Any) -> None:
        net.table = net.table.bfloat16()

    def to_empty(net: Any) -> None:
        net.to_empty(device="cpu").table.fill_(3)

    for between in (cast, to_empty):
        ctx = start(Net, out / "two.safetensors", between=between)
        assert torch.equal(ctx.model.table.float(), torch.arange(4.0))
        assert ctx.notes == ()
