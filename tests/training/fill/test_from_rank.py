"""A state dict in the memory of one rank: every other rank gets its shards, or all get one error."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Shard, distribute_tensor

import shardkit
from shardkit.files import manifest
from tests.training.models import reference, save
from tests.training.wrapping import hybrid, one_axis, plain, run_model, same, whole
from tests.worlds.ranks import Ranks, same_error

BF16 = torch.bfloat16


def make_models(out: Path) -> None:
    for name in ("llama", "llama-tied", "qwen3", "qwen3-moe", "qwen2-vl", "bert", "gpt2"):
        model = save(name, out / name)
        if name != "qwen3-moe":
            run_model(name, model)  # what this process has imported, its ranks need not


one = Ranks(__name__, 1, first=make_models)
three = Ranks(__name__, 3)
four = Ranks(__name__, 4)


class Case(NamedTuple):
    model: str
    wrap: Callable[[nn.Module], None]
    rank: int
    """Holds the state dict."""
    form: str = "state"
    """What it holds."""


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


def check_filled(case: Case, out: Path) -> None:
    """Equal in every bit to the model that the rank holds."""
    name, wrap, rank, form = case
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


@one.test_each({"plain": Case("llama-tied", plain, 0), "odd": Case("gpt2", plain, 0, "odd")})
def test_one_process_has_all_of_it(case: Case, out: Path) -> None:
    check_filled(case, out)


@three.test_each(
    {
        "odd": Case("llama", one_axis, 1, "odd"),
        "tied model": Case("llama-tied", one_axis, 2, "model"),
        "compiled": Case("qwen3", one_axis, 0, "compiled"),
        "experts": Case("qwen3-moe", one_axis, 2),
        "buffers": Case("bert", one_axis, 1, "odd"),
        "replicated": Case("llama", plain, 1, "odd"),
    }
)
def test_every_rank_has_its_part(case: Case, out: Path) -> None:
    check_filled(case, out)


@four.test_each({"hybrid": Case("llama-tied", hybrid, 3, "odd")})
def test_every_replica_has_its_part(case: Case, out: Path) -> None:
    check_filled(case, out)


@three.test
def test_names_of_the_hub_are_kept_where_they_are_known(out: Path) -> None:
    """What lies in a model's file has other names than the model; a model's own names tell nothing of those."""
    state = partial(load_file, out / "qwen2-vl" / "model.safetensors")
    model = start("qwen2-vl", state, 1, one_axis, out)
    same(whole(model), whole(reference("qwen2-vl")), "values")
    shardkit.save(model, out / "saved-vl")
    shardkit.save(start("qwen2-vl", reference("qwen2-vl").state_dict, 1, one_axis, out), out / "saved-own")
    rules = [
        manifest.load(manifest.read_bytes(str(out / name)), manifest.NAME)
        for name in ("saved-vl", "saved-own")
    ]
    assert rules[0] is not None
    assert rules[0]["key_rules"]
    assert not (rules[1] or {}).get("key_rules")


@three.test
def test_a_new_head_other_dtypes_and_a_longer_vocabulary(out: Path) -> None:
    """All from the memory of one rank."""
    state = {k: v for k, v in reference("llama").state_dict().items() if k != "lm_head.weight"}
    options: dict[str, Any] = {"missing": ["lm_head.weight"], "tokenizer": 120, "dtype": "bf16"}
    model = start("llama", lambda: state, 2, one_axis, out, **options)
    values = whole(model)
    assert values["model.embed_tokens.weight"].shape[0] == 120
    for name, value in state.items():
        assert torch.equal(values[name][: len(value)], value.to(BF16)), name
    assert values["lm_head.weight"].abs().sum() > 0


@three.test
def test_load_into_fills_what_somebody_wrapped(out: Path) -> None:
    """The core alone."""
    config = transformers.AutoConfig.from_pretrained(out / "qwen3")
    with torch.device("meta"):
        model = transformers.Qwen3ForCausalLM(config).eval()
    one_axis(model)
    state = reference("qwen3").state_dict() if dist.get_rank() == 2 else None
    shardkit.load_into(model, shardkit.from_rank(state, rank=2))
    same(whole(model), whole(reference("qwen3")), "values")


class Refused(NamedTuple):
    make: Callable[[dict[str, Any]], Any]
    """From the state dict of a Llama: what each of three ranks names as source, or what one of them holds."""
    error: str
    text: str
    """In the message or a problem."""


def check_refused(work: Callable[[], object], error: str, text: str) -> None:
    found = same_error(work)
    assert found["error"] == error
    assert text in json.dumps(found, ensure_ascii=False)


held_by = shardkit.from_rank


@three.test_each(
    {
        "nobody has it": Refused(
            lambda good: [held_by(None, rank=1)] * 3,
            "UsageError",
            "rank 1: None, though it is the rank that is named",
        ),
        "another has it": Refused(
            lambda good: [held_by(None, 1), held_by(good, 1), held_by(good, 1)],
            "UsageError",
            "rank 2: a state dict; it would be ignored",
        ),
        "the wrong one has it": Refused(
            lambda good: [held_by(good, 1), held_by(None, 1), held_by(None, 1)],
            "UsageError",
            "rank 0: a state dict; it would be ignored",
        ),
        "two are named": Refused(
            lambda good: [held_by(good, 0), held_by(None, 1), held_by(None, 0)],
            "UsageError",
            "rank 1: from_rank(..., rank=1)",
        ),
        "another kind": Refused(
            lambda good: ["hub", held_by(good, 1), None], "UsageError", "rank 0: another kind of source"
        ),
        "no such rank": Refused(
            lambda good: [held_by(None, 3)] * 3, "UsageError", "rank=3 is none of the 3 ranks"
        ),
        "no number": Refused(
            lambda good: [held_by(None, "0")] * 3, "UsageError", "rank='0' is none of the 3 ranks"
        ),
    }
)
def test_sources_that_the_ranks_do_not_agree_about(case: Refused, out: Path) -> None:
    mine = case.make(reference("llama").state_dict())[dist.get_rank()]
    source = str(out / "llama") if mine == "hub" else mine
    check_refused(lambda: shardkit.prepare(str(out / "llama"), source), case.error, case.text)


def with_dtensors(good: dict[str, Any]) -> dict[str, Any]:
    norm = distribute_tensor(good["model.norm.weight"], init_device_mesh("cpu", (3,)), [Shard(0)])
    return {**good, "model.norm.weight": norm, "lm_head.weight": good["lm_head.weight"].to("meta")}


@three.test_each(
    {
        "missing": Refused(
            lambda good: {name: value for name, value in good.items() if "norm" not in name},
            "LayoutError",
            "missing: model.norm.weight [24]",
        ),
        "unexpected": Refused(
            lambda good: {**good, "model.layers.9.mlp.up_proj.weight": torch.ones(3)},
            "LayoutError",
            "unexpected: model.layers.9.mlp.up_proj.weight [3]",
        ),
        "shape": Refused(
            lambda good: {**good, "model.norm.weight": torch.ones(5)},
            "LayoutError",
            "shape: model.norm.weight: [24] in the model, [5] in the source",
        ),
        "dtype": Refused(
            lambda good: {**good, "model.norm.weight": torch.ones(24, dtype=torch.int64)},
            "LayoutError",
            "dtype: model.norm.weight: float32 in the model, int64 in the source",
        ),
        "dtensor": Refused(with_dtensors, "SourceError", "model.norm.weight: a DTensor"),
        "nested": Refused(lambda good: {"model": good, "step": 1}, "UsageError", "checkpoint['model']"),
        "empty": Refused(lambda good: {}, "UsageError", "none of 0 entries is a tensor"),
        "no names": Refused(lambda good: {0: torch.ones(2)}, "UsageError", "keys that are not text"),
        "a list": Refused(lambda good: [1, 2], "UsageError", "found list"),
        "fsdp1": Refused(
            lambda good: FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")),
            "UsageError",
            "wrapped by FSDP1",
        ),
    }
)
def test_a_state_that_is_none_of_the_model(case: Refused, out: Path) -> None:
    state = case.make(reference("llama").state_dict())
    source = held_by(state if dist.get_rank() == 1 else None, rank=1)
    check_refused(lambda: shardkit.prepare(str(out / "llama"), source), case.error, case.text)


def llama_of_rank_1() -> Any:
    return held_by(reference("llama").state_dict() if dist.get_rank() == 1 else None, rank=1)


@three.test
def test_a_state_dict_has_no_revision(out: Path) -> None:
    source = llama_of_rank_1()
    check_refused(
        lambda: shardkit.prepare(str(out / "llama"), source, revision="main"),
        "UsageError",
        "a state dict has none",
    )


class Way(NamedTuple):
    strategy: Any
    source_rank: Any
    rank: int
    """That would have to read by itself."""


@three.test_each({"direct": Way("direct", "global", 0), "node": Way("broadcast", "node", 2)})
def test_ways_that_need_a_source_on_other_ranks(way: Way, out: Path) -> None:
    def start() -> None:
        ctx = shardkit.prepare(str(out / "llama"), llama_of_rank_1())
        one_axis(ctx.model)
        shardkit.finalize(ctx.model, ctx, strategy=way.strategy, source_rank=way.source_rank)

    check_refused(start, "SourceError", f"rank {way.rank}: rank 1 alone holds the state dict")


@three.test
def test_a_state_dict_whose_memory_is_freed_meanwhile(out: Path) -> None:
    def start() -> None:
        state = reference("llama").state_dict()
        ctx = shardkit.prepare(str(out / "llama"), held_by(state if dist.get_rank() == 1 else None, rank=1))
        one_axis(ctx.model)
        state["model.norm.weight"].untyped_storage().resize_(0)
        shardkit.finalize(ctx.model, ctx)

    check_refused(start, "IntegrityError", "model.norm.weight of the state dict has no memory any more")


class Loaded(NamedTuple):
    state: Any
    error: str
    text: str


@three.test_each(
    {
        "incomplete": Loaded({"weight": torch.ones(4, 4)}, "LayoutError", "missing: bias [4]"),
        "nobody": Loaded(None, "UsageError", "rank 1: None, though it is the rank that is named"),
    }
)
def test_load_into_refuses_too(case: Loaded) -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    source = held_by(case.state if dist.get_rank() == 1 else None, rank=1)
    check_refused(lambda: shardkit.load_into(model, source), case.error, case.text)
