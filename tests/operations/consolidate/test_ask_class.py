"""What consolidate says that `from_pretrained` would miss, held against what `from_pretrained` says itself."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import shardkit
from shardkit.cli import main
from shardkit.errors import LayoutError
from shardkit.layout import traced
from shardkit.operations.consolidate import consolidate
from shardkit.operations.verify import verify
from tests.cases import but_first
from tests.contents import edit_json, json_of
from tests.operations.consolidate.checkpoints import load, save
from tests.worlds.processes import ROOT

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning")

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "head_dim": 4,
    "vocab_size": 97,
}
# What a checkpoint lacks: the names of which one of these is found in.
DROPPED = {
    "nothing": r"(?!)",
    "final norm": r"(model\.norm|post_layernorm)\.weight$",
    "norm of every layer": "post_attention_layernorm",
    "head": r"lm_head\.weight$",
    "embedding": r"embed_tokens\.weight$",
    "an expert of every layer": r"\.experts\.1\.",
    "all experts": r"\.experts\.",
    "projector": "multi_modal_projector",
}


def qwen3(**changes: Any) -> Any:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL, **changes))


def moe() -> Any:
    config = transformers.Qwen3MoeConfig(
        **SMALL, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2
    )
    return transformers.Qwen3MoeForCausalLM(config)


def vision() -> Any:
    config = transformers.LlavaConfig(
        text_config={"model_type": "llama", **SMALL},
        vision_config={**SIZES, "model_type": "clip_vision_model", "num_hidden_layers": 3}
        | {"image_size": 8, "patch_size": 4, "projection_dim": 8},
        image_token_index=96,
        vision_feature_layer=-1,
    )
    return transformers.LlavaForConditionalGeneration(config)


def qwen3_5() -> Any:
    config = transformers.Qwen3_5Config(
        text_config={**SMALL, "layer_types": ["linear_attention", "full_attention", "full_attention"]}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
        | {"linear_value_head_dim": 8},
        vision_config={"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2}
        | {"out_hidden_size": 16, "num_position_embeddings": 16, "patch_size": 4},
    )
    return transformers.Qwen3_5ForConditionalGeneration(config)


def fused_experts() -> Any:
    """A model whose experts are one tensor on the Hub too."""
    config = transformers.GptOssConfig(
        **SMALL, num_local_experts=4, num_experts_per_tok=2, layer_types=["full_attention"] * 3
    )
    return transformers.GptOssForCausalLM(config)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write each model as transformers saves it."""
    made = {"qwen3": qwen3(), "tied": qwen3(tie_word_embeddings=True), "moe": moe(), "vision": vision()}
    home = tmp_path_factory.mktemp("models")
    for name, model in made.items():
        model.save_pretrained(home / name)
    return {name: home / name for name in made}


def checkpoint_of(model: Path, drop: str, directory: Path) -> Path:
    """Save a model without some of its tensors as a trainer does, with the config beside."""
    state = {
        name: x
        for name, x in load_file(model / "model.safetensors").items()
        if not re.search(DROPPED[drop], name)
    }
    save({"model": state}, directory)
    (directory / "config.json").write_bytes((model / "config.json").read_bytes())
    return directory


def trained(model: Any, base: Path) -> Path:
    """Write a model as transformers saves it, and its state, under its names in memory, as a trainer does."""
    model.save_pretrained(base)
    return save(model.state_dict(), base.parent / "run")


def same_weights(one: Path, other: Path) -> bool:
    return (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


def loaded(output: Path) -> tuple[set[str], set[str]]:
    """Return the names that `from_pretrained` finds missing, and those of other shapes."""
    name = json_of(output)["architectures"][0]
    _, said = getattr(transformers, name).from_pretrained(
        output, output_loading_info=True, ignore_mismatched_sizes=True
    )
    return set(said["missing_keys"]), {name for name, *_ in said["mismatched_keys"]}


def test_the_language_model_of_a_vision_model(tmp_path: Path, fast_trace: None) -> None:
    """The class has other prefixes for it, and no place for what foretells tokens: both are the base's affair."""
    base, model = tmp_path / "base", qwen3_5()
    model.save_pretrained(base)
    stored = load_file(base / "model.safetensors") | {"mtp.norm.weight": torch.ones(16)}
    save_file(stored, base / "model.safetensors", metadata={"format": "pt"})
    text = transformers.AutoModelForCausalLM.from_pretrained(base)
    save({"model": {name: 3 * value for name, value in text.state_dict().items()}}, tmp_path / "step-3")
    result = consolidate(tmp_path / "step-3", tmp_path / "out", base=base, fill_from_base=["model.visual.*"])
    found, ours = load_file(tmp_path / "out" / "model.safetensors"), set(stored) - set(result.from_base)
    assert set(result.from_base) == {name for name in stored if name.startswith(("mtp.", "model.visual."))}
    assert found.keys() == stored.keys()
    for name, value in found.items():
        assert torch.equal(value, stored[name] * (3 if name in ours else 1)), name


def test_names_that_a_class_has_in_memory_and_in_its_files_are_the_hubs(
    tmp_path: Path, fast_trace: None
) -> None:
    """A config and its class are enough: nothing "may not be the Hub's"."""
    for name, model in {"vision": qwen3_5(), "fused": fused_experts()}.items():
        base = tmp_path / name
        model.save_pretrained(base)
        checkpoint = checkpoint_of(base, "nothing", tmp_path / f"{name}-step")
        result = consolidate(checkpoint, tmp_path / f"{name}-hf")
        assert result.warnings == ()
        assert load(tmp_path / f"{name}-hf").keys() == load(base).keys()
        said = consolidate(checkpoint, tmp_path / f"{name}-as-it-is", ask_class=False).warnings
        assert any("may not be the Hub's" in warning for warning in said)


def test_names_that_the_class_finds_are_no_warning(tmp_path: Path, fast_trace: None) -> None:
    """Renamed prefixes alone are ambiguous: query, key and value have one shape."""
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = transformers.Dinov2WithRegistersConfig(**sizes, image_size=16, patch_size=4)
    model = transformers.Dinov2WithRegistersModel(config)
    run = trained(model, tmp_path / "base")
    assert load_file(tmp_path / "base/model.safetensors").keys() != model.state_dict().keys()
    result = shardkit.consolidate(run, tmp_path / "out", base=tmp_path / "base", strict=True)
    assert not result.warnings
    assert same_weights(tmp_path / "base", tmp_path / "out")


VIT = {**SIZES, "image_size": 28}


def tower_below_one_name() -> Any:
    """Return a model with all weights below a name that is not its `base_model_prefix`."""
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "mlp_dim": 24}
    config = transformers.SamVisionConfig(**sizes, image_size=16, patch_size=4, output_channels=8)
    return transformers.SamVisionModel(config)


def model_in_a_model() -> Any:
    text = {**SMALL, "model_type": "gemma3_text"}
    vision = {**VIT, "model_type": "siglip_vision_model", "patch_size": 14, "vision_use_head": False}
    config = transformers.ShieldGemma2Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return transformers.ShieldGemma2ForImageClassification(config)


@pytest.mark.parametrize("make", but_first([tower_below_one_name, model_in_a_model]))
def test_the_one_name_above_a_model_is_its_own_where_the_class_says_so(
    make: Callable[[], Any], tmp_path: Path, fast_trace: None
) -> None:
    """Without it `from_pretrained` would find nothing."""
    run = trained(make(), tmp_path / "hub")
    shutil.copy(tmp_path / "hub/config.json", run)
    shardkit.preshard(tmp_path / "hub", tmp_path / "pre", world_size=2)
    context = shardkit.prepare(tmp_path / "hub", tmp_path / "hub")
    shardkit.save(shardkit.finalize(context.model, context), tmp_path / "saved")
    for name in ("pre", "saved"):
        shardkit.reshard(tmp_path / name, tmp_path / f"{name}-three", world_size=3)
    for source in (run, *(tmp_path / name for name in ("pre", "pre-three", "saved", "saved-three"))):
        result = consolidate(source, tmp_path / f"{source.name}-out")
        assert (result.held_against, result.unloadable) == ("class", ())
        assert same_weights(tmp_path / "hub", tmp_path / f"{source.name}-out")


def test_weights_below_another_prefix_than_from_pretrained_adds_are_missing(tmp_path: Path) -> None:
    model = tower_below_one_name()
    model.save_pretrained(tmp_path / "hub")
    file = tmp_path / "hub/model.safetensors"
    stored = {name.removeprefix("vision_encoder."): value for name, value in load_file(file).items()}
    save_file(stored, file, metadata={"format": "pt"})
    assert loaded(tmp_path / "hub")[0] == model.state_dict().keys()
    assert not verify(tmp_path / "hub").ok


def of_cosmos() -> Any:
    """On the Hub, its tower and its language model stand side by side, without the names above them."""
    text = {**SMALL, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 0]}}
    vision = {"hidden_size": 16, "out_hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "depth": 4}
    config = transformers.Cosmos3OmniConfig(
        text_config=text, vision_config={**vision, "deepstack_visual_indexes": []}, tie_word_embeddings=True
    )
    return transformers.Cosmos3OmniForConditionalGeneration(config)


def of_video_llava() -> Any:
    """Its head, which looks like a copy of the embedding, is the one tensor outside `model`. Its towers are alike."""
    tower = {"model_type": "clip_vision_model", **VIT, "patch_size": 14, "projection_dim": 8}
    config = transformers.VideoLlavaConfig(
        text_config={"model_type": "llama", **SMALL},
        vision_config=tower,
        image_token_index=95,
        video_token_index=96,
    )
    return transformers.VideoLlavaForConditionalGeneration(config)


def of_tips() -> Any:
    """It has its tokens below `embeddings` in memory, and beside the blocks in its files."""
    return transformers.Tipsv2VisionModel(transformers.Tipsv2VisionConfig(**VIT, patch_size=14))


@pytest.mark.parametrize("make", [of_cosmos, of_video_llava, of_tips])
def test_what_alone_has_the_names_of_the_base_is_not_the_model(
    make: Callable[[], Any], tmp_path: Path, fast_trace: None
) -> None:
    """A part of it, or a few names."""
    run = trained(make(), tmp_path / "base")
    shardkit.consolidate(run, tmp_path / "out", base=tmp_path / "base")
    assert same_weights(tmp_path / "base", tmp_path / "out")


def test_a_language_model_beside_a_tower_is_a_part_of_the_model(tmp_path: Path, fast_trace: None) -> None:
    text = {**VIT, "vocab_size": 97, "encoder_hidden_size": 16}
    config = transformers.BlipConfig(text_config=text, vision_config={**VIT, "patch_size": 14})
    run = trained(transformers.BlipForConditionalGeneration(config), tmp_path / "hub")
    assert consolidate(run, tmp_path / "of-base", base=tmp_path / "hub").warnings == ()
    shutil.copy(tmp_path / "hub/config.json", run)
    assert consolidate(run, tmp_path / "of-class").warnings == ()


def of_cohere_asr() -> Any:
    sizes = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 4}
    encoder = {**sizes, "model_type": "parakeet_encoder", "conv_kernel_size": 3, "num_mel_bins": 16}
    config = transformers.CohereAsrConfig(
        **sizes, vocab_size=97, max_position_embeddings=32, head_dim=4, encoder_config=encoder, pad_token_id=0
    )
    return transformers.CohereAsrForConditionalGeneration(config)


def of_siglip() -> Any:
    return transformers.SiglipTextModel(transformers.SiglipTextConfig(**SIZES, vocab_size=97))


@pytest.mark.parametrize("make", [of_cohere_asr, of_siglip])
def test_a_vocabulary_grows_whatever_the_files_call_it(
    make: Callable[[], Any], tmp_path: Path, fast_trace: None
) -> None:
    """Cohere's ASR has other names in memory, SigLIP a `token_embedding`."""
    model = make()
    model.save_pretrained(tmp_path / "base")
    model.resize_token_embeddings(101, mean_resizing=False)
    model.save_pretrained(tmp_path / "truth")
    run = save(model.state_dict(), tmp_path / "run")
    consolidate(run, tmp_path / "out", base=tmp_path / "base")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "truth" / name).read_bytes()


def test_what_preshard_left_out_is_named_again(tmp_path: Path, fast_trace: None) -> None:
    """And the names below `model.language_model.` are the Hub's: the manifest has them."""
    base = tmp_path / "base"
    qwen3_5().save_pretrained(base)
    stored = load_file(base / "model.safetensors") | {"mtp.norm.weight": torch.ones(16)}
    save_file(stored, base / "model.safetensors", metadata={"format": "pt"})
    assert dict(shardkit.preshard(base, tmp_path / "pre", world_size=2).omitted).keys() == {"mtp.norm.weight"}
    shardkit.reshard(tmp_path / "pre", tmp_path / "three", world_size=3)
    left = "not in the output, because preshard left 1 tensor of its source out: mtp.norm.weight; --base MODEL takes"
    for name in ("pre", "three"):
        result = consolidate(tmp_path / name, tmp_path / f"{name}-hf", ask_class=False)
        assert (result.num_tensors, result.warnings) == (len(stored) - 1, ())
        assert [note for note in result.notes if note.startswith(left)]
    result = consolidate(tmp_path / "pre", tmp_path / "whole", base=base)
    assert result.from_base == ("mtp.norm.weight",)
    assert not [note for note in result.notes if "preshard left" in note]


@pytest.mark.parametrize(
    ("model", "drop", "num_missing", "num_misfits"),
    but_first(
        [
            ("qwen3", "nothing", 0, 0),
            ("qwen3", "final norm", 1, 0),
            ("qwen3", "norm of every layer", 3, 0),
            ("qwen3", "head", 1, 0),
            ("qwen3", "embedding", 1, 0),
            ("tied", "nothing", 0, 0),  # it has no lm_head
            ("tied", "norm of every layer", 3, 0),
            ("tied", "embedding", 2, 0),
            ("moe", "nothing", 0, 0),
            ("moe", "final norm", 1, 0),
            ("moe", "norm of every layer", 3, 0),
            ("moe", "all experts", 6, 0),
            ("moe", "an expert of every layer", 0, 6),
            ("vision", "nothing", 0, 0),
            ("vision", "final norm", 2, 0),
            ("vision", "norm of every layer", 3, 0),
            ("vision", "projector", 4, 0),
            ("vision", "head", 1, 0),
        ]
    ),
)
def test_what_is_told_is_what_from_pretrained_misses(
    model: str,
    drop: str,
    num_missing: int,
    num_misfits: int,
    models: dict[str, Path],
    tmp_path: Path,
    fast_trace: object,
) -> None:
    checkpoint = checkpoint_of(models[model], drop, tmp_path / "step-3")
    told, steps = list[str](), list[str]()
    made = consolidate(checkpoint, tmp_path / "out", on_warning=told.append, on_step=steps.append)
    assert made.held_against == "class"
    # transformers is loaded here: without a child nobody waits. What names may differ in memory a child is asked.
    name = json_of(checkpoint)["architectures"][0]
    assert steps == ([f"asking {name} ..."] if model in ("moe", "vision") else [])
    missing, misfits = loaded(tmp_path / "out")
    assert (len(missing), len(misfits)) == (num_missing, num_misfits)
    assert set(made.missing) == missing
    assert {name for name, _ in made.misfits} == misfits
    assert bool(made.unloadable) == bool(missing or misfits)
    assert made.warnings[: len(made.unloadable)] == made.unloadable
    assert set(made.unloadable) <= set(told)


def test_the_first_line_and_the_document_name_what_is_missing(
    models: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint = checkpoint_of(models["qwen3"], "norm of every layer", tmp_path / "step-3")
    result = CliRunner().invoke(main, ["consolidate", str(checkpoint), str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    said = (
        "Qwen3ForCausalLM.from_pretrained would initialise 3 tensors at random, which the output lacks: "
        "model.layers.{0..2}.post_attention_layernorm.weight"
    )
    assert result.stdout.splitlines()[0] == (
        f"wrote {tmp_path}/out, which from_pretrained would not load whole: {said}"
    )
    assert "from_pretrained(" not in result.stdout
    result = CliRunner().invoke(main, ["consolidate", str(checkpoint), str(tmp_path / "dry"), "-n", "--json"])
    document = json.loads(result.stdout)
    assert document["unloadable"] == [said]
    assert document["warnings"][0] == said
    assert document["held_against"] == "class"
    assert document["missing"] == [f"model.layers.{at}.post_attention_layernorm.weight" for at in range(3)]
    assert document["misfits"] == []


def test_a_whole_model_is_said_to_be_whole(models: dict[str, Path], tmp_path: Path) -> None:
    checkpoint = checkpoint_of(models["qwen3"], "nothing", tmp_path / "step-3")
    result = CliRunner().invoke(main, ["consolidate", str(checkpoint), str(tmp_path / "out")])
    assert "Qwen3ForCausalLM finds all of its weights" in result.stdout
    assert f"transformers.Qwen3ForCausalLM.from_pretrained('{tmp_path}/out')" in result.stdout


@pytest.mark.parametrize("ask_class", [True, False])
def test_what_a_base_that_was_found_has_and_the_output_lacks_comes_first(
    ask_class: bool, models: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint = checkpoint_of(models["qwen3"], "final norm", tmp_path / "step-3")
    (checkpoint / "config.json").unlink()
    shutil.copytree(models["qwen3"], checkpoint / "hf")
    made = consolidate(checkpoint, tmp_path / "out", ask_class=ask_class)
    assert len(made.unloadable) == 1
    assert "model.norm.weight" in made.unloadable[0]
    assert made.warnings == made.unloadable
    assert made.held_against == ("class" if ask_class else None)


def test_what_a_base_that_was_found_has_and_its_class_does_not_want_is_a_warning_alone(
    models: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint = checkpoint_of(models["qwen3"], "nothing", tmp_path / "step-3")
    state = load_file(models["qwen3"] / "model.safetensors")
    spare = {"score.weight": state["model.norm.weight"].clone()}
    (checkpoint / "config.json").unlink()
    shutil.copytree(models["qwen3"], checkpoint / "hf")
    save_file({**state, **spare}, checkpoint / "hf/model.safetensors", metadata={"format": "pt"})
    made = consolidate(checkpoint, tmp_path / "out")
    assert made.unloadable == ()
    assert any("score.weight" in warning for warning in made.warnings)


@pytest.mark.parametrize(
    ("changes", "said"),
    but_first(
        [
            ({"architectures": ["NoSuchForCausalLM"]}, "has no NoSuchForCausalLM"),
            ({"architectures": None}, "names no architecture"),
            (
                {
                    "architectures": ["MyModel"],
                    "model_type": "mine",
                    "auto_map": {"AutoModel": "evil.MyModel"},
                },
                "code of its own",
            ),
            ({"num_attention_heads": 0}, ""),
            ({"max_window_layers": 10**9}, "more layers than can be built"),
        ]
    ),
)
def test_a_class_that_cannot_be_asked_is_no_error_and_no_alarm(
    changes: dict[str, Any], said: str, models: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint = checkpoint_of(models["qwen3"], "nothing", tmp_path / "step-3")
    edit_json(checkpoint / "config.json", **changes)
    (checkpoint / "evil.py").write_text("raise SystemExit('code of a checkpoint was run')")
    made = consolidate(checkpoint, tmp_path / "out")
    assert made.unloadable == ()
    assert made.held_against is None
    assert any("was not asked whether from_pretrained" in note and said in note for note in made.notes)


def test_a_config_that_calls_plain_weights_quantised_is_put_right_and_the_class_is_asked(
    models: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint = checkpoint_of(models["qwen3"], "nothing", tmp_path / "step-3")
    edit_json(checkpoint / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    made = consolidate(checkpoint, tmp_path / "out")
    assert (made.unloadable, made.held_against) == ((), "class")
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    assert any("quantization_config" in note for note in made.notes)


def question(models: dict[str, Path], drop: str) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    state = load_file(models["qwen3"] / "model.safetensors")
    return json_of(models["qwen3"]), {
        name: tuple(x.shape) for name, x in state.items() if not re.search(DROPPED[drop], name)
    }


def child_of(asked: traced.ClassQuestion) -> subprocess.Popen[bytes]:
    assert asked._process.child is not None
    return asked._process.child


@pytest.mark.prove
def test_another_thread_has_a_process_asked_and_closing_ends_it(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Building sets torch's default dtype for a moment: not beside a training loop."""
    found, ended = list[traced.ClassAnswer](), list[int | None]()

    def ask() -> None:
        with traced.ClassQuestion(*question(models, "final norm")) as asked:
            found.append(asked.answer())
        with traced.ClassQuestion(*question(models, "head")) as asked:
            child = child_of(asked)
        ended.append(child.returncode)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert found == [traced.ClassAnswer(model_class="Qwen3ForCausalLM", missing=("model.norm.weight",))]
    assert ended == [-signal.SIGKILL]


def test_a_child_that_is_killed_was_not_asked(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traced, "_may_ask_here", lambda: False)
    with traced.ClassQuestion(*question(models, "head")) as asked:
        child_of(asked).send_signal(signal.SIGKILL)
        assert asked.answer().failure == "the process that traces the model ended by signal 9"


def test_without_room_for_scratch_files_the_class_is_not_asked(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traced.tempfile, "tempdir", str(tmp_path / "nowhere"))
    with traced.ClassQuestion(*question(models, "head")) as asked:
        assert "no process that asks it can be started" in str(asked.answer().failure)


def test_a_checkpoint_of_nothing_but_what_the_class_computes_has_no_tensors_left(tmp_path: Path) -> None:
    """The sinusoidal positions of Marian, which `save_pretrained` does not write."""
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 31, "pad_token_id": 30}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = transformers.MarianConfig(**sizes, **heads, architectures=["MarianMTModel"])
    state = transformers.MarianMTModel(config).state_dict()
    positions = {name: tensor for name, tensor in state.items() if "embed_positions" in name}
    checkpoint = save({"model": positions}, tmp_path / "checkpoint")
    config.save_pretrained(checkpoint)
    made = consolidate(checkpoint, tmp_path / "out")
    assert load_file(tmp_path / "out/model.safetensors") == {}
    assert any(note.startswith("not written, the model computes them: ") for note in made.notes), made.notes


@pytest.mark.prove
def test_the_command_asks_without_importing_torch_itself(models: dict[str, Path], tmp_path: Path) -> None:
    checkpoint = checkpoint_of(models["qwen3"], "final norm", tmp_path / "step-3")
    code = (
        "import sys; from shardkit.operations.consolidate import consolidate; "
        f"made = consolidate({str(checkpoint)!r}, {str(tmp_path / 'out')!r}, on_step=print); "
        "assert not {'torch', 'transformers'} & sys.modules.keys(); print(made.held_against, *made.missing)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == "asking Qwen3ForCausalLM ...\nclass model.norm.weight\n", done.stderr


COUNTED = """
import sys
started = []
sys.addaudithook(lambda event, given: started.append(given[0]) if event in ("subprocess.Popen", "os.fork", "os.posix_spawn") else None)
from shardkit import consolidate, diff, verify
asks, checkpoint, out, base = sys.argv[1:]
if asks == "names and what is missing":
    made = consolidate(checkpoint, out, base=base, allow_missing=True)
    assert (made.held_against, made.missing) == ("class", ("model.norm.weight",)), made
elif asks == "the form on the Hub and dtypes":
    made = consolidate(checkpoint, out, base=base, dtype="bf16")
    assert any("names on the Hub are not known" in warning for warning in made.warnings), made.warnings
elif asks == "names and ties":
    assert diff(checkpoint, base).is_equal
else:
    assert verify(base).ok
print(len(started), *{"torch", "transformers"} & sys.modules.keys())
"""


@pytest.mark.prove
@pytest.mark.parametrize(
    "asks", ["names and what is missing", "the form on the Hub and dtypes", "names and ties", "all weights"]
)
def test_one_process_answers_all_that_a_command_asks(
    asks: str, models: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint, base = checkpoint_of(models["moe"], "final norm", tmp_path / "step-3"), models["moe"]
    if asks != "names and what is missing":  # names in memory
        model = transformers.Qwen3MoeForCausalLM.from_pretrained(base)
        save({"model": model.state_dict()}, checkpoint := tmp_path / "step-4")
    if "Hub" in asks:
        base = tmp_path / "base"
        base.mkdir()
        (base / "config.json").write_bytes((models["moe"] / "config.json").read_bytes())
    done = subprocess.run(
        [sys.executable, "-c", COUNTED, asks, str(checkpoint), str(tmp_path / "out"), str(base)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "SHARDKIT_CACHE": "off"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_verify_asks_the_class_of_a_model(tmp_path: Path) -> None:
    qwen3(tie_word_embeddings=False).save_pretrained(tmp_path / "hub")
    told = "Qwen3ForCausalLM.from_pretrained finds all weights"
    assert verify(tmp_path / "hub").notes[-1] == told
    file = tmp_path / "hub/model.safetensors"
    cut = {name: x for name, x in load_file(file).items() if name != "model.norm.weight"}
    cut["model.layers.1.mlp.up_proj.weight"] = cut["model.layers.1.mlp.up_proj.weight"][:12].contiguous()
    save_file(cut, file, metadata={"format": "pt"})
    missing, misfit = (problem.message for problem in verify(tmp_path / "hub").problems)
    assert missing.endswith("at random, which the model lacks: model.norm.weight")
    assert misfit.endswith("model.layers.1.mlp.up_proj.weight: [12, 16], in the model [24, 16])")
    edit_json(tmp_path / "hub/config.json", auto_map={"AutoModelForCausalLM": "own.Qwen3ForCausalLM"})
    result = verify(tmp_path / "hub")
    assert result.ok
    assert len(result.doubts) == 2


def test_experts_of_some_ranks_are_named_with_their_shapes(tmp_path: Path, fast_trace: None) -> None:
    model = moe()
    model.save_pretrained(tmp_path / "hub")
    half = {name: x[:2] if ".experts." in name else x for name, x in model.state_dict().items()}
    for ask_class in (True, False):
        with pytest.raises(LayoutError) as caught:
            consolidate(
                save({"model": half}, tmp_path / f"step-{ask_class}"),
                tmp_path / "out",
                base=tmp_path / "hub",
                ask_class=ask_class,
            )
        assert len(caught.value.problems) == 6
        name = "model.layers.0.mlp.experts.gate_up_proj"
        assert f"shape: {name}: [2, 16, 16], 2 experts; the base has 4" in caught.value.problems
        assert "transformers installed" not in str(caught.value.hint)
