"""A tie that broke before the model had weights is mended, or refused: never do two parameters train apart in silence."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from accelerate import init_empty_weights
from safetensors.torch import load_file, save_file

import shardkit
from shardkit.errors import LayoutError
from shardkit.layout.classes import broken_ties, mend_ties
from tests.training import models

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
HINT = "call model.tie_weights() before the model is wrapped"


def by_accelerate() -> Any:
    with init_empty_weights():
        return transformers.AutoModelForCausalLM.from_config(models.config_of("qwen3"))


def by_to_meta() -> Any:
    return transformers.AutoModelForCausalLM.from_config(models.config_of("qwen3")).to("meta")


def tied(model: Any) -> bool:
    return model.lm_head.weight is model.model.embed_tokens.weight


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("hub") / "qwen3"
    models.save("qwen3", directory)
    return str(directory)


@pytest.fixture(scope="module")
def presharded(hub: str) -> str:
    return shardkit.preshard(hub, f"{hub}-presharded", world_size=2).output


@pytest.fixture(scope="module")
def untied(hub: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A source whose two values differ, under a config that says they are one."""
    directory = tmp_path_factory.mktemp("untied")
    tensors = load_file(f"{hub}/model.safetensors")
    save_file({**tensors, HEAD: tensors[EMBEDDING] + 1}, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(Path(hub, "config.json").read_text())
    return str(directory)


@pytest.mark.parametrize("build", [by_accelerate, by_to_meta])
@pytest.mark.parametrize("missing", ["error", "init"])
@pytest.mark.parametrize("kind", ["hub", "presharded"])
def test_prepare_ties_as_the_class_does(
    build: Callable[[], Any], missing: Any, kind: str, hub: str, presharded: str
) -> None:
    given = build()
    assert not tied(given)
    context = shardkit.prepare(given, {"hub": hub, "presharded": presharded}[kind], missing=missing)
    assert f"tied, as the model's class has it: {HEAD} to {EMBEDDING}" in context.notes
    assert not context.initialised
    model = shardkit.finalize(context.model, context)
    assert tied(model)
    right = transformers.AutoModelForCausalLM.from_pretrained(hub)
    assert torch.equal(model(**models.inputs("qwen3")).logits, right(**models.inputs("qwen3")).logits)
    assert not any("as the model's class has it" in note for note in shardkit.prepare(hub, hub).notes)


def test_two_values_in_the_source_are_two_parameters(untied: str) -> None:
    context = shardkit.prepare(by_accelerate(), untied)
    filled = [shardkit.finalize(context.model, context)]
    assert not any("as the model's class has it" in note for note in context.notes)
    filled.append(shardkit.load_into(by_accelerate(), untied))
    filled.append(shardkit.load_into(transformers.AutoModelForCausalLM.from_pretrained(untied), untied))
    for model in filled:
        assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight + 1)


@pytest.mark.parametrize("build", [by_accelerate, by_to_meta])
@pytest.mark.parametrize("kind", ["hub", "presharded"])
def test_load_into_refuses_two_parameters_for_one(
    build: Callable[[], Any], kind: str, hub: str, presharded: str
) -> None:
    source = {"hub": hub, "presharded": presharded}[kind]
    with pytest.raises(LayoutError) as caught:
        shardkit.load_into(build(), source)
    assert caught.value.problems == (f"{HEAD} and {EMBEDDING}",)
    assert HINT in str(caught.value)
    assert "missing=" not in str(caught.value)
    model = build()
    model.tie_weights()  # as the hint says
    assert tied(shardkit.load_into(model, source))


def test_a_config_that_says_so_unties(hub: str, presharded: str) -> None:
    model = by_accelerate()
    model.config.tie_word_embeddings = False  # as the hint says
    assert broken_ties(model) == []
    shardkit.load_into(model, presharded)
    assert not tied(model)
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_a_head_of_somebodys_own_is_no_broken_tie(hub: str) -> None:
    """Another shape is another layer; another dtype, or memory of its own, is not tied over a person's head."""
    model = by_accelerate()
    model.lm_head = torch.nn.Linear(24, 1, bias=False, device="meta")
    assert mend_ties(model) == []
    assert shardkit.prepare(model, hub, missing=[HEAD]).initialised == {HEAD}
    model = by_accelerate()
    model.lm_head = torch.nn.Linear(24, models.VOCABULARY, bias=False, device="meta", dtype=torch.float64)
    assert mend_ties(model) == []
    with pytest.raises(LayoutError, match="would train apart"):
        shardkit.prepare(model, hub)
    with pytest.raises(LayoutError, match="would train apart"):
        shardkit.prepare(model, None)


@pytest.mark.parametrize("name", ["qwen3", "bert-lm", "qwen2-vl-tied", "llava-tied", "llama"])
def test_a_class_ties_what_its_own_method_ties(name: str) -> None:
    """Against `tie_weights`: embeddings, heads and biases of each kind of model, some inside of others."""
    with init_empty_weights():
        mine, theirs = (
            getattr(transformers, models.config_of(name).architectures[0])(models.config_of(name))
            for _ in range(2)
        )
    mend_ties(mine)
    theirs.tie_weights()

    def groups(model: Any) -> set[frozenset[str]]:
        names: dict[int, set[str]] = {}
        for fqn, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), set()).add(fqn)
        return {frozenset(group) for group in names.values()}

    assert groups(mine) == groups(theirs)
    assert mend_ties(mine) == []


def test_inside_of_other_modules_and_adapters() -> None:
    with init_empty_weights(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's, about heads that are tied
        adapter = peft.LoraConfig(target_modules=["lm_head", "q_proj"], r=2)
        model = peft.get_peft_model(
            transformers.AutoModelForCausalLM.from_config(models.config_of("qwen3")), adapter
        )
        wrapped = torch.nn.ModuleDict({"policy": model})
    before = "policy.base_model.model."
    assert broken_ties(wrapped) == [(f"{before}{EMBEDDING}", f"{before}lm_head.base_layer.weight")]
