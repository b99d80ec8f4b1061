"""Initialised tensors are the model's own kind, whole, and the same whoever else is initialised."""

from __future__ import annotations

import contextlib
import math
import resource
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardkit.errors import LayoutError
from shardkit.training.model.fit import ModelInitializationContext
from shardkit.training.model.initialise import initialise, new_rows
from shardkit.training.prepare import prepare
from tests.training import models
from tests.worlds.processes import return_freed_memory


def scratch(build: Any, **options: Any) -> ModelInitializationContext:
    return prepare(build, None, **options)


def all_of(ctx: ModelInitializationContext) -> dict[str, torch.Tensor]:
    return dict(initialise(ctx, ctx.initialised))


@pytest.mark.parametrize("name", ["llama-tied", "gpt2", "bert-lm", "qwen2-vl", "qwen3-moe"])
def test_tensors_are_as_transformers_makes_them(name: str, tmp_path: Path) -> None:
    import transformers

    config = models.config_of(name)
    config.save_pretrained(tmp_path)
    made = all_of(scratch(str(tmp_path)))
    torch.manual_seed(5)
    real = getattr(transformers, config.architectures[0])(config)
    state = real.state_dict()
    firsts = {fqn for fqn, _ in real.named_parameters()}
    assert made.keys() == firsts | {fqn for fqn, _ in real.named_buffers() if fqn in state}
    for fqn, value in made.items():
        theirs = state[fqn]
        assert (value.shape, value.dtype) == (theirs.shape, theirs.dtype)
        if theirs.unique().numel() == 1:
            assert torch.equal(value, theirs), fqn
        elif theirs.ndim > 1:
            # Of 12 x 12 and more random numbers each; GPT-2 scales those of its blocks' last layers.
            assert value.std().item() == pytest.approx(theirs.std().item(), rel=0.25), fqn
            assert not torch.equal(value, theirs)
    if name == "gpt2":
        scaled = made["transformer.h.1.mlp.c_proj.weight"].std().item()
        assert scaled == pytest.approx(0.02 / math.sqrt(6), rel=0.1)
    if name == "llama-tied":  # the padding token's row
        assert not made["model.embed_tokens.weight"][0].any()
        assert made["model.embed_tokens.weight"][1:].all()


def test_a_tensor_depends_on_the_seed_and_its_name_alone(tmp_path: Path) -> None:
    models.config_of("gpt2").save_pretrained(tmp_path)
    made = all_of(scratch(str(tmp_path), seed=3))
    torch.manual_seed(11)
    before = torch.random.get_rng_state()
    ctx = scratch(str(tmp_path), seed=3)
    some = sorted(fqn for fqn in made if "h.1." in fqn)
    for fqns in (some, some[::-1][:5], ["transformer.wte.weight"]):
        for fqn, value in initialise(ctx, fqns):
            assert torch.equal(value, made[fqn]), fqn
    assert torch.equal(torch.random.get_rng_state(), before)
    other = all_of(scratch(str(tmp_path), seed=4))
    blocks = [f"transformer.h.{at}.attn.c_attn.weight" for at in range(3)]
    drawn = [made[fqn] for fqn in blocks] + [other[fqn] for fqn in blocks]
    assert len({value.sum().item() for value in drawn}) == 6
    # All rows of a tensor differ too.
    assert made[blocks[0]].unique(dim=0).shape == made[blocks[0]].shape


def test_it_is_made_in_the_dtype_that_is_wanted(tmp_path: Path) -> None:
    models.config_of("llama").save_pretrained(tmp_path)
    made = all_of(scratch(str(tmp_path), dtype="bf16"))
    assert {value.dtype for value in made.values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Linear(30, 40),
        lambda: nn.MultiheadAttention(40, 2),
        lambda: nn.LSTM(30, 20),
        lambda: nn.Conv1d(30, 20, 3),
        lambda: nn.BatchNorm1d(30),
        lambda: nn.Bilinear(9, 8, 7),
        lambda: nn.TransformerEncoderLayer(40, 2, 60),
        lambda: nn.Transformer(40, 2, 1, 1, 60, batch_first=True),
    ],
)
def test_modules_of_torch_are_as_their_constructors_make_them(build: Callable[[], nn.Module]) -> None:
    made = all_of(scratch(build))
    state = build().state_dict()
    assert made.keys() == state.keys()
    for fqn, theirs in state.items():
        if theirs.numel() > 0 and theirs.unique().numel() == 1:
            assert torch.equal(made[fqn], theirs), fqn
        else:
            assert made[fqn].std().item() == pytest.approx(theirs.std().item(), rel=0.4), fqn


class Own(nn.Module):
    """As in nanoGPT: a method of the model initialises every module."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(50, 50) for _ in range(2))
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, mean=3.0, std=0.5)
            nn.init.constant_(module.bias, 7.0)


def test_a_models_own_method_is_called() -> None:
    made = all_of(scratch(Own))
    assert made["blocks.1.weight"].mean().item() == pytest.approx(3.0, abs=0.1)
    assert torch.equal(made["blocks.0.bias"], torch.full((50,), 7.0))


class Partly(nn.Module):
    """Initialises some of what it has, and that in ways that look like all."""

    def __init__(self) -> None:
        super().__init__()
        self.good = nn.Parameter(torch.empty(4))
        self.partial = nn.Parameter(torch.empty(4, 2))
        self.scaled = nn.Parameter(torch.empty(4))
        self.never = nn.Parameter(torch.empty(0))
        self.forgotten = nn.Parameter(torch.randn(3))
        self.steps = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)
        self.yes = nn.Parameter(torch.ones(2, dtype=torch.bool), requires_grad=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.good)
        nn.init.normal_(self.partial[:3])
        self.scaled *= 2
        self.yes.fill_(True)


def test_what_nothing_initialises_is_listed() -> None:
    with pytest.raises(LayoutError, match="nothing initialises 4 parameters") as caught:
        all_of(scratch(lambda: nn.ModuleDict({"net": Partly()})))
    assert caught.value.problems == ("net.partial", "net.scaled", "net.forgotten", "net.steps")


def test_initialisation_that_needs_other_weights_is_refused() -> None:
    class Needs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(3, 3)
            self.scale = nn.Parameter(torch.empty(1))

        def reset_parameters(self) -> None:
            self.scale.fill_(self.base.weight.norm().item())

    with pytest.raises(LayoutError, match="cannot be initialised by itself"):
        list(initialise(scratch(Needs), ["scale"]))


def test_buffers_have_their_computed_values() -> None:
    made = dict(initialise(scratch(lambda: nn.BatchNorm1d(3)), ["running_var", "num_batches_tracked"]))
    assert torch.equal(made["running_var"], torch.ones(3))
    assert made["num_batches_tracked"].dtype == torch.int64


@contextlib.contextmanager
def at_most_more(nbytes: int) -> Iterator[None]:
    """Refuse memory beyond what this process has now and `nbytes` more.

    Resident memory is no measure here. A busy machine drops pages of libraries, and they count again once they are
    read again.
    """
    held = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmData" in line)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, ((int(held.split()[1]) << 10) + nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


@pytest.mark.prove
def test_one_module_is_in_memory_at_a_time() -> None:
    def build(number: int) -> nn.Module:
        return nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(number)))  # 64 MiB each

    one, ctx = scratch(lambda: build(1)), scratch(lambda: build(8))
    assert all_of(one)  # what the first one loads and starts is no part of it
    return_freed_memory()
    # The next one, while the last is still held, and a mask of 16 MiB.
    with at_most_more(160 << 20):
        assert sum(value.numel() for _, value in initialise(ctx, ctx.initialised)) == 8 << 24
    with at_most_more(140 << 20), pytest.raises((LayoutError, RuntimeError), match="can't allocate memory"):
        all_of(ctx)
    assert ctx.blueprint is not None
    assert all(parameter.is_meta for parameter in ctx.blueprint.parameters())


def test_new_rows_are_the_models_kind(tmp_path: Path) -> None:
    models.save("bert-lm", tmp_path)
    ctx = prepare(str(tmp_path), str(tmp_path), tokenizer=1000)
    word, bias = "bert.embeddings.word_embeddings.weight", "cls.predictions.bias"
    assert ctx.grown == {word: 101, bias: 101}
    assert not ctx.initialised
    rows = new_rows(ctx, word)
    assert rows.shape == (1000 - 101, 12)
    assert rows.std().item() == pytest.approx(0.02, rel=0.05)
    assert torch.equal(new_rows(ctx, bias), torch.zeros(1000 - 101))
    torch.manual_seed(9)
    again = prepare(str(tmp_path), str(tmp_path), tokenizer=1000)
    assert torch.equal(new_rows(again, word), rows)
    assert not torch.equal(
        new_rows(prepare(str(tmp_path), str(tmp_path), tokenizer=1000, seed=1), word), rows
    )
    assert any("101 rows in the source" in note for note in ctx.notes)


class Lora(nn.Module):
    """PEFT's layer, as far as it concerns initialisation."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, base.out_features, bias=False)})
        self.lora_embedding_A = nn.ParameterDict({"default": torch.empty(4, 5)})

    def reset_lora_parameters(self, name: str, mode: object) -> None:
        nn.init.constant_(self.lora_A[name].weight, 2.0 if mode is True else 3.0)  # type: ignore[arg-type]
        nn.init.zeros_(self.lora_B[name].weight)  # type: ignore[arg-type]
        nn.init.normal_(self.lora_embedding_A[name])


class Config:
    def __init__(self, mode: object) -> None:
        self.init_lora_weights = mode


def peft_like(mode: object) -> nn.Module:
    model = Own()
    model.blocks[0] = Lora(model.blocks[0])  # type: ignore[arg-type]
    model.peft_config = {"default": Config(mode)}  # type: ignore[assignment]
    return model


@pytest.mark.parametrize(("mode", "value"), [(True, 2.0), ("gaussian", 3.0)])
def test_adapters_are_initialised_by_peft_alone(mode: object, value: float) -> None:
    """Not by the model's `_init_weights`: then B would not be zero, and training would start from another model."""
    made = all_of(scratch(lambda: peft_like(mode)))
    assert not made["blocks.0.lora_B.default.weight"].any()
    assert (made["blocks.0.lora_A.default.weight"] == value).all()
    assert made["blocks.0.lora_embedding_A.default"].all()
    plain = all_of(scratch(Own))
    # What is drawn for the base does not depend on the wrapper.
    assert torch.equal(made["blocks.0.base_layer.weight"], plain["blocks.0.weight"])


def test_adapters_that_need_the_bases_weights_are_refused() -> None:
    with pytest.raises(LayoutError, match="init_lora_weights=pissa"):
        all_of(scratch(lambda: peft_like("pissa")))


def test_adapters_of_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    models.save("llama", tmp_path)
    warnings.simplefilter("ignore", FutureWarning)  # peft 0.21 asks transformers for a name that is going
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])

    def build() -> nn.Module:
        model = AutoModelForCausalLM.from_config(models.config_of("llama"))
        wrapped: nn.Module = peft.get_peft_model(model, config)
        return wrapped

    with pytest.raises(LayoutError, match=r"lora_A\.default\.weight"):
        prepare(build, str(tmp_path))
    ctx = prepare(build, str(tmp_path), missing=["*lora_*"])
    assert len(ctx.initialised) == 3 * 2 * 2
    made = all_of(ctx)
    assert all(("lora_B" in fqn) == (not value.any()) for fqn, value in made.items())
    root = "base_model.model.model.layers.0.self_attn"
    assert ctx.weights is not None
    assert ctx.weights.names[f"{root}.q_proj.base_layer.weight"] == "model.layers.0.self_attn.q_proj.weight"
    head = [fqn for fqn, stored in ctx.weights.names.items() if stored == "lm_head.weight"]
    assert sorted(head) == [
        "base_model.model.lm_head.modules_to_save.default.weight",
        "base_model.model.lm_head.original_module.weight",
    ]
    everything = all_of(scratch(build))
    plain = all_of(scratch(lambda: AutoModelForCausalLM.from_config(models.config_of("llama"))))
    for fqn in head:  # PEFT's copy begins as the original
        assert torch.equal(everything[fqn], plain["lm_head.weight"])
    assert torch.equal(
        everything[f"{root}.q_proj.base_layer.weight"], plain["model.layers.0.self_attn.q_proj.weight"]
    )
