"""Real gloo worlds that start real models in three phases, by every strategy and from every kind of source.

    python finalize_world.py OUT

Writes OUT/<world size>-<rank>.json: by scenario what went wrong and what else is to be looked at.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
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
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardkit
from shardkit.training.finalize import finalize, load_into
from shardkit.training.prepare import prepare
from shardkit.training.ranks.local import local_shards
from shardkit.training.wrap import wrap
from tests.training.models import inputs, save
from tests.worlds.processes import fork, wait

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

BLOCKS = (".layers", "transformer.h", "encoder.layer", ".blocks")
BF16 = torch.bfloat16


def blocks_of(model: nn.Module) -> list[nn.Module]:
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return [block for each in lists for block in each if any(p.numel() for p in block.parameters())]


def shard(model: nn.Module, mesh: Any) -> None:
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def one_axis(model: nn.Module) -> None:
    shard(model, init_device_mesh("cpu", (dist.get_world_size(),)))


def hybrid(model: nn.Module) -> None:
    shard(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")))


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


def plain(model: nn.Module) -> None:
    """Nobody wraps it."""


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


HUB = "hub"
SCENARIOS: dict[int, list[Scenario]] = {
    1: [
        Scenario("llama", HUB, plain, "auto"),
        Scenario("llama", HUB, plain, "broadcast"),
        Scenario("qwen3", "pre2", plain, "direct", dtype=BF16),
    ],
    2: [
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
    ],
    3: [
        Scenario("llama", HUB, one_axis, "direct", trains=True),
        Scenario("llama-tied", HUB, one_axis, "broadcast"),
        Scenario("qwen3", "pre2", one_axis, "direct"),
        Scenario("qwen3", "pre2", one_axis, "broadcast"),
        Scenario("qwen2-vl", HUB, one_axis, "direct"),
        Scenario("trained", "trained", one_axis, "auto", trains=True),
    ],
    4: [
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
    ],
}


def source_of(scenario: Scenario, out: Path) -> Path:
    return out / (scenario.source if scenario.source == "trained" else f"{scenario.model}-{scenario.source}")


def classic(scenario: Scenario, out: Path) -> Any:
    """The model as transformers loads it, whole, on every rank."""
    directory = out / f"{scenario.model}-{HUB}"
    config = transformers.AutoConfig.from_pretrained(directory)
    cls = getattr(transformers, config.architectures[0])
    return cls.from_pretrained(directory, dtype=scenario.dtype or config.dtype or torch.float32).eval()


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return {
            name: value.full_tensor() if isinstance(value, DTensor) else value.clone()
            for name, value in model.state_dict().items()
        }


def run_model(name: str, model: nn.Module) -> torch.Tensor:
    made = model(**inputs("llama" if name == "trained" else name.removesuffix("-bf16")))
    return made.logits if hasattr(made, "logits") else made.last_hidden_state


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], what: str) -> None:
    assert list(a) == list(b), f"{what}: other names"
    wrong = [name for name in a if a[name].dtype != b[name].dtype or not torch.equal(a[name], b[name])]
    assert not wrong, f"{what}: {wrong}"


def train(model: nn.Module, name: str) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(5):
        run_model(name, model).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


def check(scenario: Scenario, out: Path) -> dict[str, Any]:
    """Start a model in three phases; hold everything against the one that was loaded the classic way."""
    expected = classic(scenario, out)
    state, logits = whole(expected), run_model(scenario.model, expected).detach()
    ctx = prepare(str(out / f"{scenario.model}-{HUB}"), str(source_of(scenario, out)), dtype=scenario.dtype)
    assert all(parameter.is_meta for parameter in ctx.model.parameters())
    model = ctx.model.eval()
    scenario.wrap(model)
    before = read_bytes()
    done = finalize(model, ctx, strategy=scenario.strategy, source_rank=scenario.source_rank)
    read = read_bytes() - before
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
    held = sum(each.tensor.nbytes for each in local_shards(model) if each.persistent)
    return {"read": read, "held": held}


def read_bytes() -> int:
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])


def check_load_into(out: Path, strategy: str) -> dict[str, Any]:
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
    return {}


def check_initialised(out: Path) -> dict[str, Any]:
    """What is not in the source is the same in any world: the digests are compared by the test."""
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
    return {"values": found}


def run(rank: int, size: int, out: Path) -> None:
    if size > 1:
        os.environ["GROUP_RANK"] = str(rank // 2)  # torchrun says so of two nodes
        dist.init_process_group("gloo", init_method=f"file://{out}/store{size}", rank=rank, world_size=size)
    checks: dict[str, Callable[[], dict[str, Any]]] = {
        scenario.name: partial(check, scenario, out) for scenario in SCENARIOS[size]
    }
    if size != 3:
        checks["initialised"] = partial(check_initialised, out)
    if size == 2:
        for strategy in ("direct", "broadcast"):
            checks[f"load_into-{strategy}"] = partial(check_load_into, out, strategy)
    found: dict[str, Any] = {}
    for name, work in checks.items():
        try:
            found[name] = {"wrong": "", **work()}
        except Exception:
            found[name] = {"wrong": traceback.format_exc()}
        if size > 1:
            dist.barrier()
    (out / f"{size}-{rank}.json").write_text(json.dumps(found))


def save_trained(rank: int, out: Path) -> None:
    """A checkpoint of three ranks that have trained a step, saved by torch alone; its weights whole beside."""
    dist.init_process_group("gloo", init_method=f"file://{out}/store-trained", rank=rank, world_size=3)
    model = classic(Scenario("llama", HUB, one_axis, "direct"), out)
    one_axis(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run_model("llama", model).square().mean().backward()
    optimizer.step()
    dcp.save({"model": get_model_state_dict(model), "step": 1}, checkpoint_id=out / "trained")
    state = whole(model)
    if rank == 0:
        os.makedirs(out / "trained-hub")
        (out / "trained-hub/config.json").write_text((out / "llama-hub/config.json").read_text())
        save_file(state, out / "trained-hub/model.safetensors", metadata={"format": "pt"})
    dist.barrier()


def make_sources(out: Path) -> None:
    """Made by the parent: what it has imported and compiled, its children need not."""
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


if __name__ == "__main__":
    out = Path(sys.argv[1])
    make_sources(out)
    wait([fork(partial(save_trained, rank, out)) for rank in range(3)])
    for size in SCENARIOS:
        wait([fork(partial(run, rank, size, out)) for rank in range(size)])
