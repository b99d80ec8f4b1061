"""A vocabulary that training made longer or shorter: its rows are written, and the config counts them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from shardkit.cli import main
from shardkit.errors import LayoutError, SourceError
from shardkit.operations.consolidate import ConsolidateResult, consolidate
from tests.contents import json_of
from tests.operations.consolidate.checkpoints import CONFIG as OF_LLAMA
from tests.operations.consolidate.checkpoints import (
    EMBED,
    HEAD,
    assert_bit_equal,
    hub,
    load,
    save,
    tokenizer,
    weights,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning")

# Without a class nobody is asked about what differs.
CONFIG = {key: value for key, value in OF_LLAMA.items() if key != "architectures"}
OLD = CONFIG["vocab_size"]


def resized(
    rows: int, *, names: tuple[str, ...] = (EMBED, HEAD), tied: bool = False
) -> dict[str, torch.Tensor]:
    """Return weights whose embeddings have other rows."""
    state = weights(tied=tied)
    more = torch.randn(rows, 16)
    return {name: more[:rows].clone() if name in names else value for name, value in state.items()}


@pytest.mark.parametrize("tied", [True, False])
def test_a_grown_vocabulary_is_json_of(tied: bool, tmp_path: Path) -> None:
    """Every row as trained, vocab_size with it, the base's files kept, and a warning about the tokenizer."""
    config = {**CONFIG, "tie_word_embeddings": tied}
    stored = {name: value for name, value in weights(tied=tied).items() if not tied or name != HEAD}
    base = hub(tmp_path / "base", stored, config, tokenizer__json="{}")
    state = resized(42, tied=tied)
    made = consolidate(save({"model": state}, tmp_path / "ck"), tmp_path / "out", base=base)
    assert json_of(made.output) == {**config, "vocab_size": 42}
    assert_bit_equal(load(made.output), {name: state[name] for name in stored})
    (warning,) = (line for line in made.warnings if "vocabulary" in line)
    assert f"42 rows, in {base} 37" in warning
    assert "--tokenizer DIR" in warning
    assert made.held_against == "base"


def test_the_text_part_of_a_vision_model_is_found_below_its_own_name(tmp_path: Path) -> None:
    """In memory it stands below `language_model`; names and shapes tell, although rows differ."""
    parts = {part: {"vocab_size": OLD} for part in ("text_config", "vision_config")}
    config = {**CONFIG, "model_type": "x_vl", **parts}
    base = hub(tmp_path / "base", weights(), config)
    state = resized(40)
    inner = {name.replace("model.", "model.language_model."): value for name, value in state.items()}
    made = consolidate(save({"model": inner}, tmp_path / "ck"), tmp_path / "out", base=base)
    assert_bit_equal(load(made.output), state)
    said = json_of(made.output)
    assert (said["vocab_size"], said["text_config"]["vocab_size"]) == (40, 40)
    assert said["vision_config"]["vocab_size"] == OLD


def test_all_parts_decide_alike(tmp_path: Path) -> None:
    base = hub(tmp_path / "base", weights(), CONFIG)
    state = resized(42)
    checkpoint = save({"model": state}, tmp_path / "ck")
    directory = tokenizer(tmp_path / "tokenizer", 42)
    options: dict[str, Any] = {"base": base, "tokenizer": directory, "max_shard_size": 3000}
    for part in ("1/2", "2/2"):
        made = consolidate(checkpoint, tmp_path / "out", part=part, **options)
    assert json_of(made.output)["vocab_size"] == 42
    assert (Path(made.output) / "tokenizer.json").read_bytes() == (directory / "tokenizer.json").read_bytes()
    assert_bit_equal(load(made.output), state)


def cut(tmp_path: Path, rows: int, **options: Any) -> ConsolidateResult:
    base = tmp_path / "base"
    if not base.exists():
        hub(base, weights(), CONFIG, tokenizer__json="{}")
    checkpoint = tmp_path / f"ck-{rows}"
    if not checkpoint.exists():
        save({"model": resized(rows)}, checkpoint)
    return consolidate(checkpoint, tmp_path / "out", base=base, overwrite=True, **options)


def test_a_cut_vocabulary_needs_a_word_for_it(tmp_path: Path) -> None:
    """A tokenizer of that size, the checkpoint's own config; else both counts and what to do."""
    with pytest.raises(LayoutError) as caught:
        cut(tmp_path, 30)
    told = caught.value.to_json()
    assert told["problems"] == [f"shape: {name}: [30, 16], in the base [37, 16]" for name in (HEAD, EMBED)]
    assert "--tokenizer DIR with a tokenizer of 30 tokens" in told["hint"]
    for tokens in (30, 27):  # the rows may be padded to a multiple of 8 or more, which 30 is not
        directory = tokenizer(tmp_path / f"tokens-{tokens}", tokens)
        if tokens == 30:
            made = cut(tmp_path, 30, tokenizer=directory)
            assert json_of(made.output)["vocab_size"] == 30
            assert load(made.output)[EMBED].shape == (30, 16)
            assert len(json_of(made.output, "tokenizer.json")["model"]["vocab"]) == 29
        else:
            with pytest.raises(LayoutError, match="does not fit"):
                cut(tmp_path, 30, tokenizer=directory)
    assert cut(tmp_path, 32, tokenizer=tmp_path / "tokens-27")
    (tmp_path / "ck-30" / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 30}))
    assert "vocabulary has 30 rows" in "\n".join(cut(tmp_path, 30).warnings)


@pytest.mark.parametrize(
    ("rows", "share"), [(19, "half"), (18, "half"), (13, "a third"), (12, "a third"), (9, "a quarter")]
)
def test_a_share_of_the_rows_is_never_a_cut(rows: int, share: str, tmp_path: Path) -> None:
    directory = tokenizer(tmp_path / "tokenizer", rows)
    with pytest.raises(LayoutError) as caught:
        cut(tmp_path, rows, tokenizer=directory)
    hint = caught.value.to_json()["hint"]
    assert f"{rows} rows are {share} of the base's 37" in hint
    copy = hub(tmp_path / "copy", None, {**CONFIG, "vocab_size": rows})  # the way that the hint names
    made = consolidate(tmp_path / f"ck-{rows}", tmp_path / "out", base=copy, ask_class=False)
    assert load(made.output)[EMBED].shape == (rows, 16)
    assert made.unloadable == ()


def test_input_and_output_have_to_have_the_same_rows(tmp_path: Path) -> None:
    base = hub(tmp_path / "base", weights(), CONFIG)
    checkpoint = save({"model": resized(42, names=(EMBED,))}, tmp_path / "ck")
    with pytest.raises(LayoutError) as caught:
        consolidate(checkpoint, tmp_path / "out", base=base)
    told = caught.value.to_json()
    assert told["problems"] == [f"shape: {EMBED}: [42, 16], in the base [37, 16]"]
    assert f"{EMBED} has 42 rows" in told["hint"]
    assert f"{HEAD} has 37 rows" in told["hint"]


def test_another_width_is_another_model(tmp_path: Path) -> None:
    """The hint leads to the base, not to options that accept no shape."""
    state = weights() | {name: weights()[name][:, :8].clone() for name in (EMBED, HEAD)}
    base = hub(tmp_path / "base", weights(), CONFIG)
    checkpoint = save({"model": state}, tmp_path / "ck")
    result = CliRunner().invoke(main, ["consolidate", str(checkpoint), "--base", str(base)])
    assert result.exit_code == 3
    assert "hint: give as --base the model that it was trained from" in result.stderr
    assert "--allow-missing" not in result.stderr


def test_a_tokenizer_takes_the_place_of_the_bases(tmp_path: Path) -> None:
    """All of its files; it may have fewer tokens than there are rows, and never more."""
    files = {"vocab__json": "{}", "merges__txt": "", "special_tokens_map__json": "{}"}
    base = hub(tmp_path / "base", weights(), CONFIG, **files)
    checkpoint = save({"model": weights()}, tmp_path / "ck")
    made = consolidate(checkpoint, tmp_path / "out", base=base, tokenizer=tokenizer(tmp_path / "a", 30))
    assert made.assets == ("config.json", "tokenizer.json")
    assert made.warnings == ()
    with pytest.raises(LayoutError, match="needs 38 rows, and the vocabulary has 37"):
        consolidate(checkpoint, tmp_path / "b", base=base, tokenizer=tokenizer(tmp_path / "c", 38))
    with pytest.raises(SourceError, match="no files of a tokenizer"):
        consolidate(checkpoint, tmp_path / "b", base=base, tokenizer=tmp_path / "ck")


def test_the_checkpoints_own_tokenizer_is_named(tmp_path: Path) -> None:
    base = hub(tmp_path / "base", weights(), CONFIG, tokenizer__json="{}")
    checkpoint = save({"model": resized(42)}, tmp_path / "ck")
    (checkpoint / "tokenizer.json").write_text("{}")
    made = consolidate(checkpoint, tmp_path / "out", base=base, dry_run=True)
    assert f"--tokenizer {checkpoint}" in "\n".join(made.warnings)


def test_others_say_how_many_rows_there_are(tmp_path: Path) -> None:
    """Of what is whole, and has other rows than another model."""
    base = str(hub(tmp_path / "base", weights(), CONFIG))
    grown = str(hub(tmp_path / "grown", resized(42), CONFIG))
    result = CliRunner().invoke(main, ["diff", grown, base])
    assert result.exit_code == 1
    assert "42 rows and 37 rows" in result.output
    assert "damaged" not in result.output


@pytest.mark.parametrize("is_given", [True, False])
def test_a_config_without_weights_counts_the_rows_too(is_given: bool, tmp_path: Path) -> None:
    """Of a type that has exactly as many rows; fewer may be a part, and are left to the class."""
    for rows, count in ((42, 42), (30, OLD)):
        checkpoint = save({"model": resized(rows)}, tmp_path / f"ck-{rows}")
        base = hub(tmp_path / f"base-{rows}" if is_given else checkpoint / "hf", None, CONFIG)
        given = {"base": base} if is_given else {}
        made = consolidate(checkpoint, tmp_path / f"out-{rows}", ask_class=False, **given)
        assert json_of(made.output)["vocab_size"] == count
        told = "\n".join((*made.warnings, *made.notes))
        assert ("the vocabulary has 42 rows" in told) == (rows == 42)
