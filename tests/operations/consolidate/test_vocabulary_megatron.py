"""Megatron's torch_dist: a padded vocabulary, and one that grew; by names, shapes and what `common.pt` says."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardkit
from shardkit.errors import LayoutError
from shardkit.operations.consolidate import consolidate
from tests.keys.trainers import SETS, VOCAB, config, layers_one_by_one, megatron, numbered, padded
from tests.operations.consolidate.checkpoints import hub, load, save, tokenizer
from tests.operations.test_keys import Tree

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning")

EMBED = "model.embed_tokens.weight"
ARGS = {"make_vocab_size_divisible_by": 7, "tensor_model_parallel_size": 2}
MODEL = numbered(SETS["megatron-llama"][1])
EXPERTS = numbered(SETS["megatron-qwen-moe"][1])


def trained(
    directory: Path,
    theirs: dict[str, np.ndarray],
    args: dict[str, object] | None = None,
    *,
    model: dict[str, np.ndarray] = MODEL,
) -> tuple[Path, Path]:
    """Write a checkpoint as Megatron-Core does, and the model that it was trained from."""
    stored = {name: torch.from_numpy(value.astype(np.float32)) for name, value in model.items()}
    base = hub(directory / "base", stored, config("qwen2" if model is MODEL else "qwen3_moe"))
    checkpoint = save(
        {name: torch.from_numpy(value.astype(np.float32)) for name, value in theirs.items()}, directory / "ck"
    )
    content = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
    (checkpoint / "metadata.json").write_text(json.dumps(content))
    if args is not None:
        torch.save({"args": argparse.Namespace(**args), "iteration": 10}, checkpoint / "common.pt")
    return checkpoint, base


def rows_of(made: Any) -> tuple[int, int]:
    count: int = json.loads((Path(made.output) / "config.json").read_text())["vocab_size"]
    return load(made.output)[EMBED].shape[0], count


@pytest.mark.parametrize(("one_by_one", "rows"), [(False, 128), (False, 256), (False, VOCAB), (True, 128)])
@pytest.mark.parametrize("model", [MODEL, EXPERTS], ids=["dense", "experts"])
def test_the_bases_values_come_back(
    model: dict[str, np.ndarray], one_by_one: bool, rows: int, tmp_path: Path
) -> None:
    """Rows are padded to 128 for each rank of tensor parallelism, or not; layers that are not alike are not stacked."""
    theirs = padded(megatron(model), rows)
    checkpoint, base = trained(tmp_path, layers_one_by_one(theirs) if one_by_one else theirs, model=model)
    made = consolidate(checkpoint, tmp_path / "out", base=base)
    read = load(made.output)
    assert read.keys() == model.keys()
    assert all(np.array_equal(read[name].numpy(), value) for name, value in model.items())
    assert rows_of(made) == (VOCAB, VOCAB)
    cut = [note for note in made.notes if "padding" in note]
    assert cut == (
        [f"{rows - VOCAB} rows of padding cut: {VOCAB} of {rows} are tokens"] if rows > VOCAB else []
    )


def test_padding_is_cut_as_the_arguments_say(tmp_path: Path) -> None:
    """42 rows are padded by no power of two, but by 7 rows for each of two ranks."""
    sizes = {"padded_vocab_size": 42, **ARGS}
    checkpoint, base = trained(tmp_path, padded(layers_one_by_one(megatron(MODEL)), 42), sizes)
    made = consolidate(checkpoint, tmp_path / "out", base=base)
    assert "2 rows of padding cut: 40 of 42 are tokens" in made.notes
    assert rows_of(made) == (VOCAB, VOCAB)
    found = load(made.output)
    assert all(np.array_equal(found[name].numpy(), value) for name, value in MODEL.items())


def test_training_cuts_the_same_padding(tmp_path: Path) -> None:
    sizes = {"padded_vocab_size": 42, **ARGS}
    checkpoint, base = trained(tmp_path, padded(layers_one_by_one(megatron(MODEL)), 42), sizes)
    shutil.copy(base / "config.json", checkpoint)
    expected = {name: torch.from_numpy(value.astype(np.float32)) for name, value in MODEL.items()}
    model = Tree(expected)
    shardkit.load_into(model, checkpoint, keys="megatron-llama")
    assert all(torch.equal(model.state_dict()[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    ("rows", "args"), [(44, None), (48, {"padded_vocab_size": 48, **ARGS}), (64, {"vocab_size": 50})]
)
def test_other_rows_are_a_grown_vocabulary(rows: int, args: dict[str, object] | None, tmp_path: Path) -> None:
    checkpoint, base = trained(tmp_path, padded(megatron(MODEL), rows), args)
    made = consolidate(checkpoint, tmp_path / "out", base=base)
    assert rows_of(made) == (rows, rows)
    assert f"has {rows} rows, in {base} 40" in "\n".join(made.warnings)


def test_a_tokenizer_counts_the_tokens_of_a_padded_vocabulary(tmp_path: Path) -> None:
    checkpoint, base = trained(tmp_path, padded(megatron(MODEL), 64))
    made = consolidate(checkpoint, tmp_path / "out", base=base, tokenizer=tokenizer(tmp_path / "more", 43))
    assert rows_of(made) == (43, 43)
    assert "21 rows of padding cut: 43 of 64 are tokens" in made.notes


def test_fewer_rows_need_the_arguments(tmp_path: Path) -> None:
    """A base may be padded itself, to more than Megatron's."""
    theirs = {
        name: value[:36] if name.endswith(("word_embeddings.weight", "output_layer.weight")) else value
        for name, value in megatron(MODEL).items()
    }
    checkpoint, base = trained(tmp_path, theirs)
    with pytest.raises(LayoutError, match="does not fit"):
        consolidate(checkpoint, tmp_path / "out", base=base)
    torch.save({"args": argparse.Namespace(padded_vocab_size=36, **ARGS)}, checkpoint / "common.pt")
    assert rows_of(consolidate(checkpoint, tmp_path / "out", base=base)) == (36, 36)


def test_a_set_that_nearly_fits_says_what_it_lacks(tmp_path: Path) -> None:
    odd = "decoder.layers.self_attention.linear_gate.weight"
    checkpoint, base = trained(tmp_path, {**padded(megatron(MODEL), 128), odd: np.ones((2, 3))})
    with pytest.raises(LayoutError) as caught:
        consolidate(checkpoint, tmp_path / "out", base=base)
    told = caught.value.to_json()
    assert told["problems"] == [f"Megatron, Llama and Qwen (megatron-llama): no rule is about {odd}"]
    made = consolidate(
        checkpoint, tmp_path / "out", base=base, keys="megatron-llama", exclude=["*linear_gate*"]
    )
    assert rows_of(made) == (VOCAB, VOCAB)
