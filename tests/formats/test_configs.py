"""Two configs of one model: what differs in meaning, and what only in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from shardkit.formats.configs import config_differences, follow_weights, generation_differences, is_same_model

OLD = json.loads((Path(__file__).parents[1] / "data/transformers/configs_4.json").read_text())
IDS = [config["model_type"] for config in OLD]
CHANGES: dict[str, Any] = {
    "max_position_embeddings": 77,
    "n_positions": 77,
    "eos_token_id": 5,
    "initializer_range": 0.5,
}


def keys(config: dict[str, Any], base: dict[str, Any]) -> list[str]:
    return [each.key for each in config_differences("config.json", config, base)]


def saved(config: dict[str, Any], directory: Path, **changes: Any) -> dict[str, Any]:
    """Return a config as transformers 5 saves it after loading it."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    loaded = transformers.AutoConfig.from_pretrained(directory)
    for key, value in changes.items():
        setattr(loaded, key, value)
    loaded.dtype = "float32"
    loaded.save_pretrained(directory / "saved")
    content: dict[str, Any] = json.loads((directory / "saved/config.json").read_text())
    return content


@pytest.mark.parametrize("config", OLD, ids=IDS)
def test_a_newer_transformers_writes_other_words(config: dict[str, Any], tmp_path: Path) -> None:
    """`rope_theta` and `rope_scaling` become `rope_parameters`, `torch_dtype` `dtype`, and keys are added."""
    new = saved(config, tmp_path)
    assert is_same_model(new, config)
    assert keys(new, config) == keys(config, new) == []
    flat = {key: value for key, value in config.items() if key != "text_config"} | config.get(
        "text_config", {}
    )
    assert keys(new, {**flat, "model_type": config["model_type"]}) == []  # as Qwen2-VL is on the Hub
    changes = {key: value for key, value in CHANGES.items() if key in config}
    assert keys(saved(config, tmp_path, **changes), config) == sorted(changes)


def theta(config: dict[str, Any], value: float) -> dict[str, Any]:
    """Change the base of the rotary embedding, wherever a version writes it."""
    changed = json.loads(json.dumps(config))
    for part in (changed, changed.get("text_config", {})):
        for key in part.keys() & {"rope_theta", "global_rope_theta", "rotary_emb_base"}:
            part[key] = value
        for rope in (
            part.get("rope_parameters") or {},
            (part.get("rope_parameters") or {}).get("full_attention", {}),
        ):
            if "rope_theta" in rope:
                rope["rope_theta"] = value
    assert changed != config
    return changed


@pytest.mark.parametrize(
    "config", [each for each in OLD if each["model_type"] != "gpt2"], ids=lambda c: c["model_type"]
)
def test_another_rope_is_found_in_all_words(config: dict[str, Any], tmp_path: Path) -> None:
    new = saved(config, tmp_path)
    for one, two in ((theta(new, 7.0), config), (new, theta(config, 7.0)), (theta(config, 7.0), config)):
        (key,) = keys(one, two)
        assert key.endswith("rope_theta")


@pytest.mark.parametrize(
    ("own", "base", "expected"),
    [
        ({"id2label": {"0": "NO", "1": "YES"}}, {}, ["id2label"]),
        ({}, {"eos_token_id": 5}, []),
        (
            {"head_dim": 8, "limits": [0.0, {"__float__": "Infinity"}]},
            {"head_dim": None, "limits": [0.0, float("inf")]},
            [],
        ),
        ({"eos_token_id": None}, {"eos_token_id": 5}, ["eos_token_id"]),
        ({"sliding_window": 8}, {"sliding_window": None}, ["sliding_window"]),
        ({"vision_config": {"depth": 2}}, {"vision_config": {"depth": 1}}, ["vision_config.depth"]),
        ({"rope_parameters": {"rope_theta": 1e6}}, {}, ["rope_parameters.rope_theta"]),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, {}, ["rope_parameters.factor"]),
        (
            {"vocab_size": 9, "use_cache": False, "_name_or_path": "/a"},
            {"vocab_size": 8, "use_cache": True},
            [],
        ),
        ({"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}, {}, []),
        ({"hidden_act": "silu", "layer_types": ["a"]}, {}, []),
        (
            {"target_modules": ["v_proj", "q_proj"], "image_processor_type": "PFast"},
            {"target_modules": ["q_proj", "v_proj"], "image_processor_type": "P"},
            [],
        ),
        ({"peft_version": "0.21.2", "r": 8}, {"peft_version": "0.15.0", "r": 4}, ["r"]),
    ],
)
def test_what_differs_in_meaning(own: dict[str, Any], base: dict[str, Any], expected: list[str]) -> None:
    assert keys(own, base) == expected


@pytest.mark.parametrize(
    ("own", "base", "expected"),
    [
        ({"sliding_window": 4096}, {}, ["sliding_window"]),
        ({}, {"attention_bias": True}, ["attention_bias"]),
        ({"layer_types": ["sliding_attention", "full_attention"]}, {}, ["layer_types"]),
        ({"softcap": None}, {"softcap": 50.0}, ["softcap"]),
        ({"num_labels": 3, "pad_token_id": 0}, {}, ["num_labels", "pad_token_id"]),
        ({"text_config": {"softcap": 50.0}}, {"text_config": {}}, ["text_config.softcap"]),
        ({"attention_bias": False, "pretraining_tp": 1, "layer_types": ["full_attention"] * 2}, {}, []),
        ({"top_k": 50, "max_length": 20, "return_dict": True}, {}, []),  # to_json_file(use_diff=False)
    ],
)
def test_a_key_of_one_file_counts_where_one_version_wrote_both(
    own: dict[str, Any], base: dict[str, Any], expected: list[str]
) -> None:
    version = {"transformers_version": "5.24.0"}
    assert keys(version | own, version | base) == keys(version | base, version | own) == expected


def test_what_a_version_adds_or_fills_in_is_no_difference() -> None:
    """What a newer one has as null is: a person said so. Nobody can say which is newer if one has no version."""
    old, new = {"transformers_version": "4.9.2"}, {"transformers_version": "4.57.0"}
    assert (
        keys({**new, "softcap": 50.0}, old) == keys({**new, "softcap": 50.0}, {**old, "softcap": None}) == []
    )
    assert keys({**new, "softcap": None}, {**old, "softcap": 50.0}) == ["softcap"]
    assert keys({"softcap": 50.0}, old) == keys({"softcap": 50.0}, {"softcap": None}) == []
    assert keys({**new, "sliding_window": 8}, old) == ["sliding_window"]
    off = {"use_sliding_window": False}  # Qwen2: transformers 5 writes null
    assert keys({**new, **off, "sliding_window": None}, {**old, **off, "sliding_window": 8}) == []


def test_a_theta_that_the_class_fills_in_for_kinds_of_layers_is_no_difference() -> None:
    """Gemma 3 on the Hub has a factor alone."""
    ropes = {"full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0}}
    base = {"text_config": {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}}
    assert keys({"text_config": {"rope_parameters": ropes}}, base) == []
    assert keys(base, {"text_config": {"rope_parameters": ropes}}) == []


def test_defaults_of_generation_are_no_difference() -> None:
    spelled = {"do_sample": False, "temperature": 1.0, "top_k": 50, "eos_token_id": [2], "pad_token_id": None}
    assert generation_differences("f", spelled, {"eos_token_id": 2, "transformers_version": "4.30.0"}) == []
    (each,) = generation_differences("f", {"eos_token_id": [3, 2]}, {"eos_token_id": 2})
    assert (each.key, each.checkpoint, each.base) == ("eos_token_id", "[3, 2]", "2")
    assert generation_differences("f", {"eos_token_id": [3, 2]}, {"eos_token_id": [2, 3]}) == []
    assert len(generation_differences("f", {}, {"do_sample": True, "temperature": 0.6})) == 2


@pytest.mark.parametrize(
    ("own", "base", "expected"),
    [
        (["FSDPLlamaForCausalLM"], ["LlamaForCausalLM"], True),
        (["LlamaForCausalLM"], None, True),
        (None, ["LlamaForCausalLM"], False),
        (["LlamaForSequenceClassification"], ["LlamaForCausalLM"], False),
    ],
)
def test_one_model_is_one_type_and_class(own: object, base: object, expected: bool) -> None:
    configs = [{"model_type": "llama", "architectures": names} for names in (own, base)]
    assert is_same_model(*configs) is expected
    assert not is_same_model({**configs[0], "model_type": "mistral"}, configs[1])
    assert not is_same_model({"_class_name": "UNet2DModel"}, {"_class_name": "AutoencoderKL"})


def test_parts_follow_the_weights_too() -> None:
    """Their dtypes and rows; what is not there is not added, and what is not about the weights stays."""
    own = {
        "dtype": "float32",
        "tie_word_embeddings": True,
        "text_config": {"dtype": "float32", "vocab_size": 64, "hidden_act": "silu"},
        "vision_config": {"torch_dtype": "float32", "vocab_size": 5},
        "audio_config": {"depth": 1},
    }
    written = {
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "text_config": {"torch_dtype": "bfloat16", "vocab_size": 66},
        "vision_config": {"torch_dtype": "float16"},
    }
    assert follow_weights(own, written, dtype=None, tied=None) == {
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "text_config": {"dtype": "bfloat16", "vocab_size": 66, "hidden_act": "silu"},
        "vision_config": {"torch_dtype": "float16", "vocab_size": 5},
        "audio_config": {"depth": 1},
    }
    flat = {"vocab_size": 66, "dtype": "bfloat16"}
    followed = follow_weights(
        {"text_config": {"vocab_size": 64, "dtype": "float32"}}, flat, dtype=None, tied=None
    )
    assert followed == {"text_config": {"vocab_size": 66, "dtype": "bfloat16"}, "dtype": "bfloat16"}
