"""A model that is built with another config or tokenizer than its checkpoint's: said once, by one rank."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import transformers

import shardkit
from tests.contents import edit_json
from tests.training import models
from tests.worlds.ranks import Ranks

pytestmark = pytest.mark.usefixtures("fast_trace")

THETA = {"rope_theta": 1000000.0, "rope_type": "default"}


def edited(directory: Path, **changes: Any) -> Path:
    edit_json(directory / "config.json", **changes)
    return directory


def make(out: Path) -> None:
    """A base, and a checkpoint that was trained with another rope, end and template."""
    models.save("llama", out / "hub")
    for name, added in (("hub", []), ("long", [{"id": 37, "content": "<new>"}])):
        content = {"model": {"vocab": {"a": 0}}, "added_tokens": added}
        (out / name).mkdir(exist_ok=True)
        (out / name / "tokenizer.json").write_text(json.dumps(content))
    models.save("llama", out / "long")
    trained = edited(out / "long", rope_parameters=THETA, eos_token_id=5)
    context = shardkit.prepare(trained, out / "hub")
    context.model.generation_config = transformers.GenerationConfig(eos_token_id=5)  # type: ignore[assignment,no-untyped-call]
    shardkit.save(shardkit.finalize(context.model, context), out / "last")
    shardkit.save(models.reference("llama"), out / "plain")


two = Ranks(__name__, 2, first=make)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two.folder(tmp_path_factory)


def warnings_of(model: Any, source: Path) -> tuple[Any, list[str]]:
    """Return the prepared model, and the warnings on this rank."""
    seen = list[str]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardkit").addHandler(handler)
    try:
        context = shardkit.prepare(model, source)
    finally:
        logging.getLogger("shardkit").removeHandler(handler)
    assert set(seen) <= {f"prepare: {note}" for note in context.notes}
    return context.model, seen


@two.test
def test_what_was_passed_counts_and_one_rank_says_so(out: Path) -> None:
    config = transformers.LlamaConfig.from_pretrained(out / "hub")
    for model in (out / "hub", lambda: transformers.LlamaForCausalLM(config)):
        built, seen = warnings_of(model, out / "last")
        assert built.config.rope_parameters["rope_theta"] == 10000.0
        assert len(seen) == (1 if dist.get_rank() == 0 else 0)
        for line in seen:
            assert "rope_parameters.rope_theta 10000.0, there 1000000.0" in line
            assert "eos_token_id 2, there 5" in line
            has_tokenizers = isinstance(model, Path)
            assert ('tokens [], there ["<new>"]' in line) == has_tokenizers
            assert f"prepare({str(out / 'last/huggingface')!r}, ...)" in line


@two.test
def test_the_same_config_is_no_warning(out: Path) -> None:
    for model, source in (("hub", "hub"), ("hub", "plain"), ("last/huggingface", "last"), ("last", "last")):
        home = out / model
        if (home / "config.json").exists():
            assert warnings_of(home, out / source)[1] == []


@two.test
def test_a_run_above_is_not_the_checkpoints(out: Path) -> None:
    if dist.get_rank() == 0:
        models.save("llama", out / "run")
        edited(out / "run", eos_token_id=9)
        (out / "run/model.safetensors").unlink()
        (out / "plain").rename(out / "run/last")
        (out / "run/last/huggingface/config.json").unlink()
    dist.barrier()
    assert warnings_of(out / "hub", out / "run/last")[1] == []
