"""Models that real ranks start in three phases are the ones that transformers loads, by every strategy, from every source."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardkit
from shardkit.training.finalize import finalize, load_into
from shardkit.training.prepare import prepare
from shardkit.training.ranks.local import local_shards
from shardkit.training.wrap import wrap
from tests.training.models import save
from tests.training.wrapping import hybrid, one_axis, plain, run_model, same, shard, whole
from tests.worlds.ranks import Ranks

BF16 = torch.bfloat16
HUB = "hub"


def make_sources(out: Path) -> None:
    """What this process has imported and compiled, its ranks need not."""
    for name in ("llama", "qwen3", "gpt2", "bert", "qwen2-vl"):
        run_model(name, save(name, out / f"{name}-hub"))
    save("llama-tied", out / "llama-tied-hub", max_shard_size="20KB")
    save("llama", out / "llama-bf16-hub", dtype=BF16)
    for name, size in (("qwen3", 2), ("qwen3", 4), ("llama", 2)):
        bare = out / f"{name}-{size}-bare"  # without a model's config nothing is traced, which takes seconds
        bare.mkdir()
        os.link(out / f"{name}-hub/model.safetensors", bare / "model.safetensors")
        (bare / "config.json").write_text("{}")
        shardkit.preshard(str(bare), str(out / f"{name}-pre{size}"), world_size=size, wrap="none")
    (out / "initialised.json").write_text(json.dumps(initialised(out)))


one = Ranks(__name__, 1, first=make_sources)
two = Ranks(__name__, 2)
three = Ranks(__name__, 3)
four = Ranks(__name__, 4)


def both(model: nn.Module) -> None:
    """Tensor parallel inside of FSDP: `_StridedShard` on the output projections' rows."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    up = dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ColwiseParallel())
    plan = {**up, "self_attn.o_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tp"], plan)
    shard(model, mesh["dp"])


def checkpointing(model: nn.Module) -> None:
    """Wrapped by shardkit, with checkpoint wrappers in the modules' paths."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wrap(model, mesh, activation_checkpointing=True, mixed_precision=None)


class Scenario(NamedTuple):
    model: str
    source: str
    """A directory in OUT, or a format of one with the model's name."""
    wrap: Callable[[nn.Module], None]
    strategy: str
    source_rank: str = "global"
    dtype: torch.dtype | None = None
    trains: bool = False

    @property
    def name(self) -> str:
        parts = [self.model, self.source, self.wrap.__name__, self.strategy, self.source_rank]
        return "-".join([*parts, *([str(self.dtype).removeprefix("torch.")] if self.dtype else [])])


def named(*scenarios: Scenario) -> Mapping[str, Scenario]:
    return {scenario.name: scenario for scenario in scenarios}


def source_of(scenario: Scenario, out: Path) -> Path:
    return out / (scenario.source if scenario.source == "trained" else f"{scenario.model}-{scenario.source}")


def classic(scenario: Scenario, out: Path) -> Any:
    """The model as transformers loads it, whole, on every rank."""
    directory = out / f"{scenario.model}-{HUB}"
    config = transformers.AutoConfig.from_pretrained(directory)
    cls = getattr(transformers, config.architectures[0])
    return cls.from_pretrained(directory, dtype=scenario.dtype or config.dtype or torch.float32).eval()


def train(model: nn.Module, name: str) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(5):
        run_model(name, model).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


def check_started(scenario: Scenario, out: Path) -> None:
    """Start a model in three phases; hold everything against the one that was loaded the classic way."""
    expected = classic(scenario, out)
    state, logits = whole(expected), run_model(scenario.model, expected).detach()
    ctx = prepare(str(out / f"{scenario.model}-{HUB}"), str(source_of(scenario, out)), dtype=scenario.dtype)
    assert all(parameter.is_meta for parameter in ctx.model.parameters())
    model = ctx.model.eval()
    scenario.wrap(model)
    done = finalize(model, ctx, strategy=scenario.strategy, source_rank=scenario.source_rank)
    assert done is model
    same(whole(model), state, "values")
    own = {name: buffer for name, buffer in expected.named_buffers() if name not in state}
    same({k: v for k, v in model.named_buffers() if k not in state}, own, "other buffers")
    names = [list(dict(each.named_parameters()).keys()) for each in (model, expected)]
    assert names[0] == names[1], "ties"
    scenario.wrap(expected)
    torch.testing.assert_close(run_model(scenario.model, model), logits, rtol=2e-2, atol=2e-2)
    assert torch.equal(run_model(scenario.model, model), run_model(scenario.model, expected)), "logits"
    if scenario.trains:
        same(train(model, scenario.model), train(expected, scenario.model), "after five steps")


@one.test_each(
    named(
        Scenario("llama", HUB, plain, "auto"),
        Scenario("llama", HUB, plain, "broadcast"),
        Scenario("qwen3", "pre2", plain, "direct", dtype=BF16),
    )
)
def test_a_model_that_is_started_alone_is_the_classic_one(scenario: Scenario, out: Path) -> None:
    check_started(scenario, out)


@two.test_each(
    named(
        Scenario("gpt2", HUB, one_axis, "broadcast", trains=True),
        Scenario("qwen3", "pre2", one_axis, "direct", trains=True),
        Scenario("llama-tied", HUB, checkpointing, "direct", trains=True),
        Scenario("bert", HUB, one_axis, "direct"),
        Scenario("bert", HUB, one_axis, "broadcast"),
        Scenario("llama-bf16", HUB, one_axis, "direct", dtype=torch.float32),
        Scenario("llama-bf16", HUB, one_axis, "broadcast", dtype=torch.float32),
        Scenario("llama", HUB, one_axis, "direct", dtype=BF16),
        Scenario("llama", HUB, one_axis, "broadcast", dtype=BF16),
        Scenario("llama", HUB, plain, "direct"),
        Scenario("llama", HUB, plain, "broadcast"),
    )
)
def test_a_model_that_is_started_by_two_ranks_is_the_classic_one(scenario: Scenario, out: Path) -> None:
    check_started(scenario, out)


@three.test
def test_stock_torch_saves_what_three_ranks_have_trained(out: Path) -> None:
    """The source of other tests; its weights whole beside."""
    model = classic(Scenario("llama", HUB, one_axis, "direct"), out)
    one_axis(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run_model("llama", model).square().mean().backward()
    optimizer.step()
    dcp.save({"model": get_model_state_dict(model), "step": 1}, checkpoint_id=out / "trained")
    state = whole(model)
    if dist.get_rank() == 0:
        os.makedirs(out / "trained-hub")
        (out / "trained-hub/config.json").write_text((out / "llama-hub/config.json").read_text())
        save_file(state, out / "trained-hub/model.safetensors", metadata={"format": "pt"})


@three.test_each(
    named(
        Scenario("llama", HUB, one_axis, "direct", trains=True),
        Scenario("llama-tied", HUB, one_axis, "broadcast"),
        Scenario("qwen3", "pre2", one_axis, "direct"),
        Scenario("qwen3", "pre2", one_axis, "broadcast"),
        Scenario("qwen2-vl", HUB, one_axis, "direct"),
        Scenario("trained", "trained", one_axis, "auto", trains=True),
    )
)
def test_a_model_that_is_started_by_three_ranks_is_the_classic_one(scenario: Scenario, out: Path) -> None:
    check_started(scenario, out)


@four.test_each(
    named(
        Scenario("llama", HUB, one_axis, "direct"),
        Scenario("llama", HUB, hybrid, "direct", trains=True),
        Scenario("llama", HUB, hybrid, "broadcast", "replica"),
        Scenario("llama", HUB, both, "direct", trains=True),
        Scenario("llama", HUB, both, "broadcast"),
        Scenario("llama", "pre2", both, "direct"),
        Scenario("qwen3", "pre4", one_axis, "direct"),
        Scenario("qwen3", "pre2", hybrid, "direct"),
        Scenario("qwen3", HUB, one_axis, "broadcast", "node"),
        Scenario("qwen2-vl", HUB, one_axis, "broadcast", trains=True),
        Scenario("trained", "trained", one_axis, "direct"),
        Scenario("trained", "trained", both, "broadcast"),
    )
)
def test_a_model_that_is_started_by_four_ranks_is_the_classic_one(scenario: Scenario, out: Path) -> None:
    check_started(scenario, out)


def initialised(out: Path) -> dict[str, Any]:
    """What is drawn for what a source lacks: sizes and sums."""
    found = {}
    for name, options in {
        "head": {"source": str(out / "llama-hub"), "missing": ["score.*"]},
        "scratch": {"source": None},
        "grown": {"source": str(out / "llama-hub"), "missing": ["score.*"], "tokenizer": 130},
    }.items():
        config = transformers.AutoConfig.from_pretrained(out / "llama-hub")
        ctx = prepare(
            lambda config=config: transformers.LlamaForSequenceClassification(config), seed=3, **options
        )
        if dist.is_initialized():
            one_axis(ctx.model)
        model = finalize(ctx.model, ctx)
        found[name] = {key: [list(v.shape), float(v.double().abs().sum())] for key, v in whole(model).items()}
        run_model("llama", model.eval())
    return found


@one.test
def test_what_the_source_lacks_is_drawn(out: Path) -> None:
    found = json.loads((out / "initialised.json").read_text())
    assert found["grown"]["model.embed_tokens.weight"][0][0] > 101


def check_initialised(out: Path) -> None:
    assert initialised(out) == json.loads((out / "initialised.json").read_text())


@two.test
def test_what_the_source_lacks_is_the_same_on_two_ranks_as_on_one(out: Path) -> None:
    check_initialised(out)


@four.test
def test_what_the_source_lacks_is_the_same_on_four_ranks_as_on_one(out: Path) -> None:
    check_initialised(out)


@two.test_each(("direct", "broadcast"))
def test_load_into_fills_what_anybody_wrapped(strategy: Any, out: Path) -> None:
    """A model with values is overwritten in place, one on meta is given memory; wrapped by hand."""
    config = transformers.AutoConfig.from_pretrained(out / "qwen3-hub")
    expected = classic(Scenario("qwen3", HUB, one_axis, strategy), out)
    for on_meta in (False, True):
        with torch.device("meta" if on_meta else "cpu"):
            model = transformers.Qwen3ForCausalLM(config).eval()
        one_axis(model)
        places = {} if on_meta else {each.fqn: each.tensor.data_ptr() for each in local_shards(model)}
        assert load_into(model, out / "qwen3-pre2", strategy=strategy) is model
        same(whole(model), whole(expected), "values")
        for each in local_shards(model):
            assert each.tensor.data_ptr() == places.get(each.fqn, each.tensor.data_ptr()), each.fqn
        close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
        close(run_model("qwen3", model), run_model("qwen3", expected))
