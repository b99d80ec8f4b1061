"""What goes wrong on one rank while a model is started is told to all, and nobody waits for a rank that is gone."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardkit.errors import ResourceError
from shardkit.training.fill.reading import ReadWorker
from shardkit.training.finalize import finalize, load_into
from shardkit.training.prepare import prepare
from shardkit.training.ranks.local import local_shards
from tests.training.wrapping import logged
from tests.worlds.ranks import Ranks, on_all, same_error

LARGE = (9 << 20) // 4  # elements; several bands of a broadcast
NOT_COMPARED = "weights: not compared: 6 tensors or storages, 9.0 MiB: safetensors have no CRC-32"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.large = nn.Parameter(torch.empty(LARGE // 8, 8))
        self.head = nn.Linear(8, 30, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("angles", torch.arange(4.0), persistent=False)
        self.register_buffer("noise", torch.rand(4), persistent=False)  # of its own on every rank
        self.plain = torch.ones(2)


def make_source(out: Path) -> None:
    torch.manual_seed(0)
    state = {name: torch.randn(value.shape) for name, value in Model().state_dict().items()}
    del state["head.weight"]
    (out / "model").mkdir()
    save_file(state, out / "model/model.safetensors")
    (out / "model/config.json").write_text("{}")
    ctx = prepare(Model, str(out / "model"))
    finalize(ctx.model, ctx)  # imports what is imported late, once for all


three = Ranks(__name__, 3, first=make_source)


def wrap(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (3,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def start(source: Path, strategy: str, between: Callable[[nn.Module], None] | None = None) -> nn.Module:
    ctx = prepare(Model, str(source))
    wrap(ctx.model)
    if between is not None:
        between(ctx.model)
    return finalize(ctx.model, ctx, strategy=strategy)


def own_copy(out: Path, name: str) -> Path:
    """Every rank has the weights on its own disk."""
    copy = out / f"{name}-{dist.get_rank()}"
    shutil.copytree(out / "model", copy)
    return copy


def told(work: Callable[[], object]) -> dict[str, Any]:
    """Return the error that all ranks are told; none of them had waited for another in vain."""
    error = same_error(work)
    assert "imed out" not in json.dumps(error)
    return error


def hidden_from(rank: int, out: Path) -> Path:
    return out / ("nowhere" if dist.get_rank() == rank else "model")


def check_sent(source: Path, out: Path) -> None:
    model = start(source, "auto")
    expected = load_file(out / "model/model.safetensors")
    for each in local_shards(model):
        if each.kind == "parameter":
            window = tuple(slice(o, o + s) for o, s in zip(*each.parts[0].region, strict=True))
            assert torch.equal(each.tensor, expected[each.fqn][window]), each.fqn


@three.test_each({"a reader": 1, "the source": 0})
def test_a_rank_without_the_source_is_sent_its_part(rank: int, out: Path) -> None:
    first, *others = logged(lambda: check_sent(hidden_from(rank, out), out))
    assert others == [[], []]
    assert len(first) == 2
    assert first[0].startswith(f"weights: broadcast, not direct: rank {rank}: ")
    assert first[0].endswith("nowhere: no such file or directory")
    assert first[1] == NOT_COMPARED


@three.test
def test_direct_without_the_source_on_one_rank(out: Path) -> None:
    error = told(lambda: start(hidden_from(1, out), "direct"))
    assert error["error"] == "SourceError"
    assert error["message"] == "1 of 3 ranks cannot read the source by themselves"
    assert error["problems"][0].startswith("rank 1: ")
    assert "broadcast" in error["hint"]


class Cut(NamedTuple):
    strategy: str
    rank: int
    """Whose copy of the source is cut short."""


@three.test_each({"direct": Cut("direct", 1), "broadcast": Cut("broadcast", 0)})
def test_a_file_that_was_cut_short(case: Cut, out: Path) -> None:
    """Between prepare and finalize, as by a copy that is written again."""
    copy = own_copy(out, f"truncated-{case.strategy}")

    def cut(_: nn.Module) -> None:
        if dist.get_rank() == case.rank:
            os.truncate(copy / "model.safetensors", 5 << 20)

    error = told(lambda: start(copy, case.strategy, cut))
    assert error["error"] == "IntegrityError"
    assert error["problems"] == [f"rank {case.rank}: model.safetensors"]


@three.test
def test_a_source_that_fails_in_the_middle_keeps_nobody_waiting(out: Path) -> None:
    """In the middle of a large tensor: what was sent before is of no use."""
    copy, real, calls = own_copy(out, "unreadable"), ReadWorker.run, 0

    def fail(self: ReadWorker, groups: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(5, "Input/output error")
        real(self, groups)

    if dist.get_rank() == 0:
        ReadWorker.run = fail
    try:
        error = told(lambda: start(copy, "broadcast"))
    finally:
        ReadWorker.run = real
    assert error["error"] == "ResourceError"
    assert error["problems"] == ["rank 0: OSError: [Errno 5] Input/output error"]


def other_weights(out: Path, name: str) -> Path:
    """Rank 2's copy is of another fine-tune: same header, other bytes."""
    copy = own_copy(out, name)
    if dist.get_rank() == 2:
        state = {k: v + 1 for k, v in load_file(copy / "model.safetensors").items()}
        save_file(state, copy / "model.safetensors")
    return copy


@three.test
def test_ranks_that_see_other_weights_are_refused(out: Path) -> None:
    copy = other_weights(out, "other-direct")
    assert told(lambda: start(copy, "direct"))["problems"] == ["rank 2: other weights than rank 0"]


@three.test
def test_ranks_that_see_other_weights_are_sent_those_of_rank_0(out: Path) -> None:
    copy = other_weights(out, "other-auto")
    assert logged(lambda: start(copy, "auto")) == [
        ["weights: broadcast, not direct: rank 2: other weights than rank 0", NOT_COMPARED],
        [],
        [],
    ]


@three.test
def test_a_buffer_that_a_wrapper_made_persistent(out: Path) -> None:
    def replace(model: nn.Module) -> None:
        """A wrapper that exchanges a module after prepare."""
        model.angles = torch.arange(4.0)
        model.register_buffer("angles", torch.arange(4.0), persistent=True)

    error = told(lambda: start(out / "model", "direct", replace))
    assert error["problems"] == ["ranks 0-2: angles: not in the source"]


@three.test
def test_a_tie_that_a_wrapper_broke_is_mended(out: Path) -> None:
    def untie(model: nn.Module) -> None:
        model.head.weight = nn.Parameter(torch.empty_like(model.embed.weight))

    model = start(out / "model", "direct", untie)
    assert model.embed.weight is model.head.weight


@three.test
def test_a_tie_across_units_is_refused_before_anything_is_read(out: Path) -> None:
    """Torch would tell at the first forward."""

    def start_apart() -> None:
        ctx = prepare(Model, str(out / "model"))
        mesh = init_device_mesh("cpu", (3,))
        fully_shard(ctx.model.embed, mesh=mesh)
        fully_shard(ctx.model.head, mesh=mesh)
        wrap(ctx.model)
        finalize(ctx.model, ctx)

    error = told(start_apart)
    assert error["error"] == "LayoutError"
    assert error["problems"] == ["ranks 0-2: head.weight and embed.weight"]


@three.test
def test_an_attribute_on_meta_on_one_rank_is_refused_on_all(out: Path) -> None:
    def add(model: nn.Module) -> None:
        if dist.get_rank() == 1:
            model.blocks[0].extra = torch.empty(2, device="meta")

    error = told(lambda: start(out / "model", "direct", add))
    assert error["error"] == "IntegrityError"
    assert error["problems"] == ["rank 1: blocks.0.extra: tensor attribute still on meta"]


@three.test
def test_a_model_that_does_not_fit_is_told_every_difference(out: Path) -> None:
    """One wrong shape, one missing and one unexpected tensor; an integer where a float is wanted."""
    with torch.device("meta"):
        model = Model()
        model.blocks[0] = nn.Linear(8, 9)
        model.blocks[1].gain = nn.Parameter(torch.empty(3))
        model.register_parameter("large", nn.Parameter(torch.empty(LARGE // 8, 8, dtype=torch.int32), False))
        del model.embed, model.head
    model.angles, model.noise, model.plain = torch.ones(4), torch.ones(4), torch.ones(2)
    error = told(lambda: load_into(model, out / "model"))
    assert error["error"] == "LayoutError"
    lines = "\n".join(error["problems"])
    for line in (
        "missing: blocks.1.gain [3]",
        "unexpected: embed.weight [30, 8]",
        "dtype: large: int32 in the model, float32 in the source",
        "shape: blocks.0.weight: [9, 8] in the model, [8, 8] in the source",
    ):
        assert f"ranks 0-2: {line}" in lines


@three.test
def test_load_into_refuses_buffers_that_nobody_computes(out: Path) -> None:
    with torch.device("meta"):
        model = Model()
    wrap(model)
    lines = "\n".join(told(lambda: load_into(model, out / "model"))["problems"])
    assert "angles: a buffer that is in no checkpoint" in lines
    assert "plain: a tensor attribute" in lines


@three.test
def test_buffers_that_differ_between_ranks_become_those_of_rank_0(out: Path) -> None:
    torch.manual_seed(dist.get_rank())
    model = start(out / "model", "direct")
    assert model.embed.weight is model.head.weight
    assert len(set(on_all(float(model.noise.sum())))) == 1


@three.test
def test_the_strategy_is_logged_once(out: Path) -> None:
    assert logged(lambda: start(out / "model", "direct")) == [
        ["weights: direct: all 3 ranks see the same weights", NOT_COMPARED],
        [],
        [],
    ]


@three.test
def test_an_unknown_strategy(out: Path) -> None:
    assert told(lambda: start(out / "model", "fastest"))["error"] == "UsageError"


class Kill(NamedTuple):
    strategy: str
    victim: int
    reads: int | None
    """At which it is killed; None for a rank that receives, at its first message."""


@three.test_each_killing(
    {
        "a reader": Kill("direct", 1, 1),
        "the source": Kill("broadcast", 0, 2),
        "a receiver": Kill("broadcast", 2, None),
    }
)
def test_a_killed_rank_ends_the_others(kill: Kill, out: Path) -> None:
    ctx = prepare(Model, str(out / "model"))
    wrap(ctx.model)
    real, done = ReadWorker.run, 0

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def die_reading(self: ReadWorker, groups: Any) -> None:
        nonlocal done
        done += 1
        if done == kill.reads:
            die()
        real(self, groups)

    if dist.get_rank() == kill.victim:
        ReadWorker.run = die_reading
        if kill.reads is None:
            dist.recv = die
    with pytest.raises(ResourceError) as caught:
        finalize(ctx.model, ctx, strategy=kill.strategy)
    assert caught.value.exit_code == 5
    assert caught.value.message.startswith("another rank was lost during ")
    assert "imed out" not in json.dumps(caught.value.to_json())  # it heard of it when the connection ended
