"""verify and inspect of what is only a part of its model, though no byte of it is damaged. Only headers are needed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shardkit.cli import main
from shardkit.operations.inspect import inspect
from shardkit.operations.preshard import preshard
from shardkit.operations.verify import verify

pytestmark = pytest.mark.usefixtures("_no_class")
Shapes = dict[str, tuple[int, ...]]
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 24,
    "hidden_size": 4,
    "num_hidden_layers": 6,
    "num_experts": 4,
    "tie_word_embeddings": False,
}
FILE = "model-{:05d}-of-00004.safetensors"


@pytest.fixture
def _no_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no class be asked, as where transformers is not installed."""
    monkeypatch.setattr("shardkit.operations.verify.gaps.why_no_class", lambda config: "not installed")


def model() -> Shapes:
    """Return the shapes of a mixture of experts that CONFIG describes."""
    shapes: Shapes = {"model.embed_tokens.weight": (24, 4)}
    for at in range(6):
        block: Shapes = {"self_attn.q_proj.weight": (4, 4), "mlp.gate.weight": (4, 4)}
        block |= {f"mlp.experts.{number}.up_proj.weight": (3, 4) for number in range(4)}
        shapes |= {f"model.layers.{at}.{name}": shape for name, shape in block.items()}
    return {**shapes, "model.norm.weight": (4,), "lm_head.weight": (24, 4)}


def write(path: Path, shapes: Mapping[str, Sequence[int]]) -> None:
    """Write a safetensors file of zeros."""
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2
        for each in shape:
            size *= each
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def hub(directory: Path, shapes: Shapes, config: dict[str, Any], *, in_files: bool = False) -> Path:
    """Make a Hub directory; in files, the layers 0 and 5 lie in the first and the last of four, others in none."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    if not in_files:
        write(directory / "model.safetensors", shapes)
        return directory
    last = {
        name: shape for name, shape in shapes.items() if "layers.5." in name or name == "model.norm.weight"
    }
    first = {name: shape for name, shape in shapes.items() if "layers.0." in name or "embed" in name}
    files = {FILE.format(1): first, FILE.format(4): last}
    for name, held in files.items():
        write(directory / name, held)
    index = {name: file for file, held in files.items() for name in held}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return directory


def without(shapes: Shapes, pattern: str) -> Shapes:
    return {name: shape for name, shape in shapes.items() if not re.search(pattern, name)}


def first_line(path: Path) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["verify", str(path)])
    return result.exit_code, result.stdout.splitlines()[0]


def test_files_that_are_missing_from_a_numbered_set_are_a_problem(tmp_path: Path) -> None:
    half = hub(tmp_path / "half", model(), CONFIG, in_files=True)
    result = verify(half)
    (problem,) = result.problems
    assert problem.details == (
        f"2 weight files of a numbered set, neither here nor in the index: {FILE.format(2)}, {FILE.format(3)}",
    )
    assert first_line(half) == (1, f"{half}: 1 problem found")
    assert inspect(half).warnings == problem.details


def test_preshard_of_half_a_model_that_asks_no_class_warns(tmp_path: Path) -> None:
    half, whole = (
        hub(tmp_path / "half", model(), CONFIG, in_files=True),
        hub(tmp_path / "whole", model(), CONFIG),
    )
    for at, options in enumerate(({"layout": "declared"}, {"names": "hub"})):
        made = preshard(half, tmp_path / f"out{at}", world_size=2, **options)
        assert made.layout == "declared"
        assert made.warnings == inspect(half).warnings
        assert any(FILE.format(2) in line for line in made.warnings)
        assert preshard(whole, tmp_path / f"whole{at}", world_size=2, **options).warnings == ()


def test_files_that_are_missing_without_an_index_are_named(tmp_path: Path) -> None:
    half = hub(tmp_path / "half", model(), CONFIG, in_files=True)
    (half / "model.safetensors.index.json").unlink()
    (problem,) = verify(half).problems
    assert problem.details == (f"missing: {FILE.format(2)}", f"missing: {FILE.format(3)}")


def test_without_a_class_one_note_says_so(tmp_path: Path) -> None:
    part = hub(tmp_path / "part", without(model(), r"layers\.[345]\."), CONFIG)
    result = verify(part)
    assert (result.problems, result.warnings) == ((), ())
    assert result.notes[-1].endswith("was not asked whether from_pretrained finds all weights: not installed")
    (part / "config.json").unlink()
    assert not any("was not asked" in note for note in verify(part).notes)


@pytest.mark.parametrize("finds_all", [True, False])
def test_the_class_says_whether_missing_files_matter(
    finds_all: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardkit.operations.verify.gaps._finds_all", lambda *_: finds_all)
    half = hub(tmp_path / "half", model(), CONFIG, in_files=True)
    result = verify(half)
    assert result.ok == finds_all
    assert len(result.doubts) == finds_all
    assert len(result.problems) == (not finds_all)


def test_nothing_is_said_of_a_part_that_a_person_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The class, which could be asked, would miss the other weights."""

    def refuse(*_args: object, **_options: object) -> bool:
        raise AssertionError

    monkeypatch.setattr("shardkit.operations.verify.gaps._finds_all", refuse)
    half = hub(tmp_path / "half", model(), CONFIG, in_files=True)
    assert verify(half / FILE.format(1)).doubts == ()
    write(half / "adapter_model.safetensors", {"base_model.model.a.lora_A.weight": (2, 4)})
    assert verify(half / "adapter_model.safetensors").doubts == ()
