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
from shardkit.errors import UsageError
from shardkit.operations.inspect import inspect
from shardkit.operations.preshard import preshard
from shardkit.operations.verify import verify

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


def model(*, stacked: bool = False, experts: int = 4) -> Shapes:
    """Return the shapes of a mixture of experts that CONFIG describes."""
    shapes: Shapes = {"model.embed_tokens.weight": (24, 4)}
    for at in range(6):
        block: Shapes = {"self_attn.q_proj.weight": (4, 4), "mlp.gate.weight": (4, 4)}
        if stacked:
            block |= {"mlp.experts.gate_up_proj": (experts, 6, 4), "mlp.experts.down_proj": (experts, 4, 3)}
        else:
            block |= {f"mlp.experts.{number}.up_proj.weight": (3, 4) for number in range(experts)}
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


def test_files_and_layers_that_are_missing_together_are_a_problem(tmp_path: Path) -> None:
    half = hub(tmp_path / "half", model(), CONFIG, in_files=True)
    result = verify(half)
    (problem,) = result.problems
    said = "\n".join(problem.details)
    assert "whole layers: model.layers.1, model.layers.2, model.layers.3, ..." in said
    assert "lm_head.weight, which is not tied" in said
    assert f"{FILE.format(2)}, {FILE.format(3)}" in said
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
        assert made.warnings == tuple(
            line.replace("the model", "the source") for line in inspect(half).warnings
        )
        assert any("whole layers: model.layers.1, " in line for line in made.warnings)
        assert any(FILE.format(2) in line for line in made.warnings)
        assert preshard(whole, tmp_path / f"whole{at}", world_size=2, **options).warnings == ()


def test_a_model_with_code_of_its_own_gets_warnings(tmp_path: Path) -> None:
    config = {**CONFIG, "auto_map": {"AutoModelForCausalLM": "own.Own"}}
    half = hub(tmp_path / "half", model(), config, in_files=True)
    assert not verify(half).problems
    assert any("whole layers" in line for line in verify(half).warnings)
    assert first_line(half) == (0, f"{half}: no byte is damaged, but it does not look whole")


def test_files_that_are_missing_without_an_index_are_named(tmp_path: Path) -> None:
    half = hub(tmp_path / "half", model(), CONFIG, in_files=True)
    (half / "model.safetensors.index.json").unlink()
    (problem,) = verify(half).problems
    assert problem.details == (f"missing: {FILE.format(2)}", f"missing: {FILE.format(3)}")


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        (without(model(), r"layers\.[345]\."), "model.layers.3 up to 5: the config counts 6 layers"),
        (without(model(), r"layers\.[01]\."), "whole layers: model.layers.0, model.layers.1"),
        (without(model(), r"lm_head"), "lm_head.weight, which is not tied"),
        (
            without(model(), r"experts\.[23]\."),
            "12 experts (the config counts 4 in each layer): model.layers.{0..5}.mlp.experts.{2,3}",
        ),
        (
            model(stacked=True, experts=2),
            "model.layers.{0..5}.mlp.experts.down_proj [2, 4, 3], "
            "model.layers.{0..5}.mlp.experts.gate_up_proj [2, 6, 4]: the config counts 4 experts",
        ),
        (
            {**model(), "model.layers.2.mlp.gate.weight": (2, 4)},
            "model.layers.2.mlp.gate.weight [2, 4]: the config counts 4 experts",
        ),
        ({**model(), "lm_head.weight": (27, 4)}, "lm_head.weight [27, 4]: the config counts 24 tokens"),
    ],
)
def test_what_config_and_names_tell_is_a_warning(shapes: Shapes, said: str, tmp_path: Path) -> None:
    part = hub(tmp_path / "part", shapes, CONFIG)
    result = verify(part)
    assert result.ok
    (line,) = result.warnings
    assert said in line
    assert result.doubts == result.warnings == inspect(part).warnings
    assert first_line(part) == (0, f"{part}: no byte is damaged, but it does not look whole")


def test_a_tower_of_text_that_is_cut_is_seen_beside_a_longer_one_of_images(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3_vl",
        "text_config": {"vocab_size": 24, "num_hidden_layers": 6},
        "vision_config": {"depth": 8},
    }
    shapes = {name.replace("model.", "model.language_model."): shape for name, shape in model().items()}
    shapes |= {f"model.visual.blocks.{at}.norm.weight": (4,) for at in range(8)}
    assert verify(hub(tmp_path / "whole", shapes, config)).warnings == ()
    (line,) = verify(hub(tmp_path / "cut", without(shapes, r"layers\.[45]\."), config)).warnings
    assert line.endswith("lacks: model.language_model.layers.4 up to 5: the config counts 6 layers")


WHOLE = (
    (model(), CONFIG),
    (model(stacked=True), CONFIG),
    (without(model(), "lm_head"), {**CONFIG, "tie_word_embeddings": True}),
    # A layer that foretells tokens follows those that are counted.
    ({**model(), "model.layers.6.eh_proj.weight": (4, 8)}, {**CONFIG, "num_nextn_predict_layers": 1}),
    # Layers that are gone through twice are counted twice, or not.
    (without(model(), r"layers\.[45]\."), {**CONFIG, "n_recurrent_loops": 2}),
    # LongCat routes to experts that have no weights.
    (
        {**model(), **{f"model.layers.{at}.mlp.gate.weight": (6, 4) for at in range(6)}},
        {**CONFIG, "model_type": "longcat_flash"},
    ),
    # A module that was not quantised has no scales.
    (
        {**model(), **{f"model.layers.{at}.self_attn.q_proj.weight_scale": (1,) for at in (0, 1, 3, 4, 5)}},
        CONFIG,
    ),
    # mllama has rows for more tokens than its config counts.
    ({"model.embed_tokens.weight": (32, 4)}, {"model_type": "mllama", "text_config": {"vocab_size": 24}}),
    # A model of diffusers.
    ({"conv.weight": (4, 4)}, {"_class_name": "UNet", "num_layers": 4}),
    ({"a": (1,)}, {"model_type": ["odd"], "architectures": 5, "vocab_size": True}),
)


@pytest.mark.parametrize("at", range(len(WHOLE)))
def test_nothing_is_said_of_what_is_whole(at: int, tmp_path: Path) -> None:
    result = verify(hub(tmp_path / "whole", *WHOLE[at]))
    assert (result.problems, result.warnings) == ((), ())


def test_nothing_is_said_of_a_part_that_a_person_named(tmp_path: Path) -> None:
    half = hub(tmp_path / "half", model(), CONFIG, in_files=True)
    assert verify(half / FILE.format(1)).doubts == ()
    write(half / "adapter_model.safetensors", {"base_model.model.a.lora_A.weight": (2, 4)})
    assert verify(half / "adapter_model.safetensors").doubts == ()


def test_the_class_is_asked_about_models_alone(tmp_path: Path) -> None:
    config = {**CONFIG, "architectures": None}
    result = verify(hub(tmp_path / "part", without(model(), r"layers\.5\."), config), ask_class=True)
    assert result.is_only_unreadable
    assert result.problems[0].message.endswith("config.json names no architecture")
    assert result.doubts
    (tmp_path / "adapter").mkdir()
    write(tmp_path / "adapter/adapter_model.safetensors", {"base_model.model.a.lora_A.weight": (2, 4)})
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"ask_class is about the files of a Hub model"):
        verify(tmp_path / "adapter", ask_class=True)
