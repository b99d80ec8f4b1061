"""Real gloo worlds in which one rank alone holds a state dict, and the others get their shards of it.

    python from_rank_world.py OUT

Writes OUT/<world size>-<rank>.json: by check what went wrong, or the error that was raised.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Shard, distribute_tensor

import shardkit
from shardkit.errors import ShardkitError
from tests.training.finalize_world import hybrid, one_axis, plain, run_model, same, whole
from tests.training.models import reference, save
from tests.worlds.processes import fork, wait

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
BF16 = torch.bfloat16


def odd(state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The same values, as surgery may leave them: strides, views, parameters, other dtypes, and things beside."""
    found: dict[str, Any] = {}
    for number, (name, value) in enumerate(state.items()):
        kind = number % 4 if value.ndim > 1 else 3
        if kind == 0:
            found[name] = value.t().contiguous().t()
        elif kind == 1:
            wide = torch.full((value.shape[0] + 5, 2 * value.shape[1]), torch.nan, dtype=value.dtype)
            wide[2:-3, ::2] = value
            found[name] = wide[2:-3, ::2]
        elif kind == 2:
            found[name] = nn.Parameter(value.double() if value.is_floating_point() else value, False)
        else:
            found[name] = value
    return {**found, "_extra": {"step": 7}}


def start(
    name: str, state: Any, rank: int, wrap: Callable[[nn.Module], None], out: Path, **options: Any
) -> nn.Module:
    """The three phases."""
    here = dist.get_rank() if dist.is_initialized() else 0
    source = shardkit.from_rank(state() if here == rank else None, rank=rank)
    ctx = shardkit.prepare(str(out / name), source, **options)
    assert (ctx.unavailable is None) == (here == rank)
    wrap(ctx.model.eval())
    return shardkit.finalize(ctx.model, ctx)


def check(name: str, wrap: Callable[[nn.Module], None], rank: int, out: Path, form: str = "state") -> None:
    """Equal in every bit to the model that the rank holds."""
    expected = reference(name).eval()
    make = {
        "state": expected.state_dict,
        "model": lambda: expected,
        "odd": lambda: odd(expected.state_dict()),
        "compiled": lambda: {f"_orig_mod.{key}": value for key, value in expected.state_dict().items()},
    }[form]
    model = start(name, make, rank, wrap, out)
    same(whole(model), whole(expected), "values")
    names = [list(dict(each.named_parameters())) for each in (model, expected)]
    assert names[0] == names[1], "ties"
    logits = run_model(name, expected)
    wrap(expected)
    assert torch.equal(run_model(name, model), run_model(name, expected)), "logits"
    torch.testing.assert_close(run_model(name, model), logits, rtol=1e-4, atol=1e-4)
    if wrap is not plain:
        run_model(name, model).float().square().mean().backward()


def check_hub_names(out: Path) -> None:
    """What lies in a model's file has other names than the model; `save` gives those back, as with the file."""
    from safetensors.torch import load_file

    state = partial(load_file, out / "qwen2-vl" / "model.safetensors")
    model = start("qwen2-vl", state, 1, one_axis, out)
    same(whole(model), whole(reference("qwen2-vl")), "values")
    shardkit.save(model, out / "saved-vl")
    shardkit.save(start("qwen2-vl", reference("qwen2-vl").state_dict, 1, one_axis, out), out / "saved-own")


def check_missing(out: Path) -> None:
    """A new head, other dtypes and a longer vocabulary, all from the memory of one rank."""
    state = {k: v for k, v in reference("llama").state_dict().items() if k != "lm_head.weight"}
    options: dict[str, Any] = {"missing": ["lm_head.weight"], "tokenizer": 120, "dtype": "bf16"}
    model = start("llama", lambda: state, 2, one_axis, out, **options)
    values = whole(model)
    assert values["model.embed_tokens.weight"].shape[0] == 120
    for name, value in state.items():
        assert torch.equal(values[name][: len(value)], value.to(BF16)), name
    assert values["lm_head.weight"].abs().sum() > 0


def check_load_into(out: Path) -> None:
    """The core alone, of a model that somebody wrapped."""
    config = transformers.AutoConfig.from_pretrained(out / "qwen3")
    with torch.device("meta"):
        model = transformers.Qwen3ForCausalLM(config).eval()
    one_axis(model)
    state = reference("qwen3").state_dict() if dist.get_rank() == 2 else None
    shardkit.load_into(model, shardkit.from_rank(state, rank=2))
    same(whole(model), whole(reference("qwen3")), "values")


def refusals(out: Path, here: int) -> dict[str, Callable[[], object]]:
    """Wrong uses, each of which every rank has to learn of."""
    good = reference("llama").state_dict()
    mesh = init_device_mesh("cpu", (3,))
    sharded = {**good, "model.norm.weight": distribute_tensor(good["model.norm.weight"], mesh, [Shard(0)])}
    fsdp1 = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))

    def given(state: Any, rank: Any = 1, **options: Any) -> Callable[[], object]:
        source = shardkit.from_rank(state if here == rank else None, rank=rank)
        return lambda: shardkit.prepare(str(out / "llama"), source, **options)

    def strategy(name: str, source_rank: Any = "global") -> Callable[[], object]:
        def run() -> None:
            ctx = shardkit.prepare(
                str(out / "llama"), shardkit.from_rank(good if here == 1 else None, rank=1)
            )
            one_axis(ctx.model)
            shardkit.finalize(ctx.model, ctx, strategy=name, source_rank=source_rank)

        return run

    def freed() -> None:
        state = {name: value.clone() for name, value in good.items()}
        ctx = shardkit.prepare(str(out / "llama"), shardkit.from_rank(state if here == 1 else None, rank=1))
        one_axis(ctx.model)
        state["model.norm.weight"].untyped_storage().resize_(0)
        shardkit.finalize(ctx.model, ctx)

    def sources(*each: Any) -> Callable[[], object]:
        return lambda: shardkit.prepare(str(out / "llama"), each[here])

    def load(state: Any) -> Callable[[], object]:
        def run() -> None:
            with torch.device("meta"):
                model = nn.Linear(4, 4)
            shardkit.load_into(model, shardkit.from_rank(state if here == 1 else None, rank=1))

        return run

    one = shardkit.from_rank
    return {
        "nobody has it": sources(*[one(None, rank=1)] * 3),
        "another has it": sources(one(None, 1), one(good, 1), one(good, 1)),
        "the wrong one has it": sources(one(good, 1), one(None, 1), one(None, 1)),
        "two are named": sources(one(good, 0), one(None, 1), one(None, 0)),
        "another kind": sources(str(out / "llama"), one(good, 1), None),
        "no such rank": sources(*[one(None, 3)] * 3),
        "no number": sources(*[one(None, "0")] * 3),
        "missing": given({name: value for name, value in good.items() if "norm" not in name}),
        "unexpected": given({**good, "model.layers.9.mlp.up_proj.weight": torch.ones(3)}),
        "shape": given({**good, "model.norm.weight": torch.ones(5)}),
        "dtype": given({**good, "model.norm.weight": torch.ones(24, dtype=torch.int64)}),
        "dtensor": given({**sharded, "lm_head.weight": good["lm_head.weight"].to("meta")}),
        "nested": given({"model": good, "step": 1}),
        "empty": given({}),
        "no names": given({0: torch.ones(2)}),
        "a list": given([1, 2]),
        "fsdp1": given(fsdp1),
        "revision": given(good, revision="main"),
        "direct": strategy("direct"),
        "node": strategy("broadcast", "node"),
        "freed": freed,
        "load_into": load({"weight": torch.ones(4, 4)}),
        "load_into nobody": load(None),
    }


def attempt(work: Callable[[], object]) -> dict[str, Any]:
    try:
        work()
    except ShardkitError as error:
        return error.to_json()
    return {"error": ""}


def run(rank: int, size: int, out: Path) -> None:
    if size > 1:
        os.environ["GROUP_RANK"] = str(rank // 2)  # torchrun says so of two nodes
        dist.init_process_group("gloo", init_method=f"file://{out}/store{size}", rank=rank, world_size=size)
    checks: dict[int, dict[str, Callable[[], None]]] = {
        1: {
            "plain": partial(check, "llama-tied", plain, 0, out),
            "odd": partial(check, "gpt2", plain, 0, out, "odd"),
        },
        3: {
            "odd": partial(check, "llama", one_axis, 1, out, "odd"),
            "tied model": partial(check, "llama-tied", one_axis, 2, out, "model"),
            "compiled": partial(check, "qwen3", one_axis, 0, out, "compiled"),
            "experts": partial(check, "qwen3-moe", one_axis, 2, out),
            "buffers": partial(check, "bert", one_axis, 1, out, "odd"),
            "replicated": partial(check, "llama", plain, 1, out, "odd"),
            "hub names": partial(check_hub_names, out),
            "missing": partial(check_missing, out),
            "load_into": partial(check_load_into, out),
        },
        4: {"hybrid": partial(check, "llama-tied", hybrid, 3, out, "odd")},
    }
    found: dict[str, Any] = {}
    for name, work in checks[size].items():
        try:
            work()
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
        if size > 1:
            dist.barrier()
    if size == 3:
        found["refused"] = {name: attempt(work) for name, work in refusals(out, rank).items()}
        dist.barrier()
    (out / f"{size}-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    out = Path(sys.argv[1])
    for name in ("llama", "llama-tied", "qwen3", "qwen3-moe", "qwen2-vl", "bert", "gpt2"):
        run_model(name, save(name, out / name)) if name != "qwen3-moe" else save(name, out / name)
    for size in (1, 3, 4):
        wait([fork(partial(run, rank, size, out)) for rank in range(size)])
