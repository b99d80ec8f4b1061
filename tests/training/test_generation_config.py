"""The generation config: a job generates as `from_pretrained` does, and `save` takes what the job changed of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

import shardkit
from tests.contents import edit_json
from tests.training import models
from tests.worlds.ranks import Ranks

pytestmark = pytest.mark.usefixtures("fast_trace")

SAMPLING = {"do_sample": True, "temperature": 0.3, "top_p": 0.7, "eos_token_id": [2, 5], "bos_token_id": 1}


def hub(directory: Path, generation: dict[str, Any] | None) -> Path:
    """A Hub model as its authors publish it, with a generation config or none."""
    models.save("llama", directory)
    path = directory / "generation_config.json"
    path.unlink() if generation is None else path.write_text(json.dumps(generation))
    return directory


def prepared(source: Path, how: str = "directory") -> Any:
    built = transformers.LlamaConfig.from_pretrained(source)
    what: Any = {"directory": source, "function": lambda: transformers.LlamaForCausalLM(built)}[how]
    context = shardkit.prepare(what, source)
    return shardkit.finalize(context.model, context)


def saved(model: Any, directory: Path) -> dict[str, Any] | None:
    """Return the generation config that `save` puts beside the shards."""
    shardkit.save(model, directory)
    path = directory / "huggingface/generation_config.json"
    content: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return content


def said(model: Any) -> dict[str, Any]:
    """Return what a generation config says; null, and a switch that is off, say nothing."""
    content = model.generation_config.to_dict()
    return {key: value for key, value in content.items() if value not in (None, False)}


DERIVED = {"_from_model_config": True, "eos_token_id": [2, 7], "bos_token_id": 1}


@pytest.mark.parametrize("how", ["directory", "function"])
@pytest.mark.parametrize("generation", [SAMPLING, DERIVED, None], ids=["own", "derived", "none"])
def test_a_job_generates_as_from_pretrained_does(
    how: str, generation: dict[str, Any] | None, tmp_path: Path
) -> None:
    source = hub(tmp_path / "hub", generation)
    stock = transformers.AutoModelForCausalLM.from_pretrained(source)
    model = prepared(source, how)
    assert said(model) == said(stock)
    prompt = torch.tensor([[1, 3, 4]])
    found = [torch.manual_seed(0) and each.generate(prompt, max_new_tokens=12) for each in (stock, model)]
    assert torch.equal(*found)


def test_what_config_json_says_of_generation_counts_without_a_file(tmp_path: Path) -> None:
    """transformers 5 takes it out of the config object."""
    source = hub(tmp_path / "hub", None)
    edit_json(source / "config.json", num_beams=3)
    assert prepared(source).generation_config.num_beams == 3


def change_eos(model: Any) -> None:
    model.config.eos_token_id = 3
    model.generation_config.eos_token_id = [3, 2]


def sample(model: Any) -> None:
    model.generation_config.do_sample, model.generation_config.temperature = True, 0.5


def replace(model: Any) -> None:
    made: Any = transformers.GenerationConfig
    model.generation_config = made(eos_token_id=9, max_new_tokens=7)


def update(model: Any) -> None:
    model.generation_config.update(pad_token_id=4)


@pytest.mark.parametrize("change", [change_eos, sample, replace, update])
@pytest.mark.parametrize("generation", [SAMPLING, DERIVED, None], ids=["own", "derived", "none"])
def test_save_takes_a_live_change(
    change: Callable[[Any], None], generation: dict[str, Any] | None, tmp_path: Path
) -> None:
    model = prepared(hub(tmp_path / "hub", generation))
    change(model)
    kept = saved(model, tmp_path / "saved")
    model.generation_config.save_pretrained(tmp_path)
    expected = json.loads((tmp_path / "generation_config.json").read_text())
    expected.pop("_from_model_config", None)  # it is no longer made of the config
    assert kept == expected
    shardkit.consolidate(tmp_path / "saved", tmp_path / "out", ask_class=False)
    found = said(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    assert found == {key: value for key, value in said(model).items() if key != "_from_model_config"}


@pytest.mark.parametrize("generation", [SAMPLING, DERIVED, None], ids=["own", "derived", "none"])
def test_what_nobody_changed_is_as_it_was(generation: dict[str, Any] | None, tmp_path: Path) -> None:
    kept = saved(prepared(hub(tmp_path / "hub", generation)), tmp_path / "saved")
    if generation is None:
        assert kept is None
        return
    assert kept is not None
    kept.pop("transformers_version", None)
    assert kept == generation


def test_what_the_code_around_a_model_has_set_stays(tmp_path: Path) -> None:
    source = hub(tmp_path / "hub", SAMPLING)

    def build() -> Any:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(source))
        model.generation_config.eos_token_id = 8
        return model

    model: Any = shardkit.prepare(build, source).model
    assert model.generation_config.eos_token_id == 8


def test_one_that_cannot_be_used_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = hub(tmp_path / "hub", {**SAMPLING, "cache_implementation": "nonsense"})
    model: Any = shardkit.prepare(source, source).model
    assert "generation_config.json of" in caplog.text
    assert model.generation_config.eos_token_id == 2


def make(out: Path) -> None:
    hub(out / "hub", SAMPLING)


two = Ranks(__name__, 2, first=make)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two.folder(tmp_path_factory)


@two.test
def test_ranks_that_do_not_see_the_source_have_it_too(out: Path) -> None:
    """`save` writes rank 0's; all of them generate."""
    config = transformers.LlamaConfig.from_pretrained(out / "hub")
    source = out / "hub" if dist.get_rank() == 1 else out / "nowhere"
    model: Any = shardkit.prepare(lambda: transformers.LlamaForCausalLM(config), source).model
    assert model.generation_config.temperature == 0.3
