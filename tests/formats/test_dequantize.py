"""Quantised sources in every command: refused in one way, or made plain; what only describes them goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import shardkit
from shardkit.errors import LayoutError, UsageError
from shardkit.files import manifest
from tests.bits import raw
from tests.formats.dcp.samples import save
from tests.manifests import write_file_list
from tests.models.quantised import (
    COMPRESSED,
    EXPORTED,
    GPT_OSS,
    MODELOPT,
    QUANTISED,
    QWEN3,
    QWEN3_MOE,
    by_transformers,
    quantise,
    to_nvfp4,
)
from tests.models.zoo import make_hub

MOVES: dict[str, Callable[..., Any]] = {
    "preshard": lambda source, out, **options: shardkit.preshard(source, out, world_size=2, **options),
    "reshard": lambda source, out, **options: shardkit.reshard(source, out, world_size=2, **options),
    "consolidate": shardkit.consolidate,
}
METHODS = ["fp8", "mxfp4", "gptq", "awq", "bitsandbytes"]


def describe(directory: Path, said: dict[str, Any]) -> None:
    """Have a config say how the weights are quantised."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": said}))


def source_of(method: str, directory: Path) -> Path:
    """Make a Hub directory that is quantised so."""
    if method in ("fp8", "mxfp4"):
        return quantise(QWEN3 if method == "fp8" else GPT_OSS, directory)
    make_hub(QWEN3, directory)
    describe(directory, {"quant_method": method, "bits": 4})
    return directory


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("method", METHODS)
def test_without_the_option_it_is_refused(method: str, move: str, tmp_path: Path) -> None:
    source = source_of(method, tmp_path / "hub")
    with pytest.raises(
        LayoutError, match=r"^quantised: .*its values mean nothing without their scales"
    ) as caught:
        MOVES[move](source, tmp_path / "out")
    assert method in caught.value.message
    is_known, way = method in ("fp8", "mxfp4"), "make plain" if move == "reshard" else "--dequantize"
    assert (way in str(caught.value.hint)) == is_known
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("move", ["preshard", "consolidate"])
@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes"])
def test_what_cannot_be_made_plain_is_refused_all_the_same(method: str, move: str, tmp_path: Path) -> None:
    source = source_of(method, tmp_path / "hub")
    with pytest.raises(LayoutError, match=rf"^quantised: .*{method}"):
        MOVES[move](source, tmp_path / "out", dequantize=True)


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_what_only_describes_it_goes_on(method: str, tmp_path: Path) -> None:
    source = source_of(method, tmp_path / "hub")
    assert shardkit.inspect(source).tensors
    write_file_list(source)
    assert shardkit.verify(source).ok
    assert shardkit.diff(source, source).is_equal


@pytest.mark.parametrize("architecture", QUANTISED, ids=lambda each: each.name)
def test_consolidate_makes_a_plain_hub_model(architecture: Any, tmp_path: Path) -> None:
    source = quantise(architecture, tmp_path / "hub")
    done = shardkit.consolidate(source, tmp_path / "out", dequantize=True)
    assert any("quantization_config" in note for note in done.notes)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert "quantization_config" not in config
    plain = getattr(transformers, config["architectures"][0]).from_pretrained(tmp_path / "out", dtype="auto")
    for name, tensor in by_transformers(source).items():
        found = plain.state_dict()[name]
        assert found.dtype == tensor.dtype, name
        assert raw(found) == raw(tensor), name


@pytest.mark.parametrize("parts", [["llm_config"], ["thinker_config", "text_config"]])
def test_a_config_may_say_at_any_depth_how_weights_are_quantised(parts: list[str], tmp_path: Path) -> None:
    source = quantise(QWEN3, tmp_path / "hub")
    path = source / "config.json"
    config = json.loads(path.read_text())
    inner: dict[str, Any] = {"quantization_config": config.pop("quantization_config"), "hidden_size": 64}
    for name in reversed(parts):
        inner = {name: inner}
    path.write_text(json.dumps({**config, **inner}))
    assert any("quantization_config (fp8)" in note for note in shardkit.inspect(source).notes)
    done = shardkit.consolidate(source, tmp_path / "out", dequantize=True)
    assert any("quantization_config (fp8)" in note for note in done.notes)
    written = json.loads((tmp_path / "out/config.json").read_text())
    for name in parts:
        written = written[name]
    assert written == {"hidden_size": 64}


@pytest.mark.parametrize("writer", [MODELOPT, EXPORTED, COMPRESSED])
def test_consolidate_makes_a_plain_hub_model_of_nvfp4(writer: str, tmp_path: Path) -> None:
    source, out = tmp_path / "hub", tmp_path / "out"
    make_hub(QWEN3_MOE, source)
    expected = to_nvfp4(source, writer)
    shardkit.consolidate(source, out, dequantize=True, manifest=True)
    stored = load_file(out / "model.safetensors")
    assert stored.keys() == expected.keys()
    assert all(raw(tensor) == raw(expected[name]) for name, tensor in stored.items())
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    assert not (out / "hf_quant_config.json").exists()
    assert json.loads((out / manifest.NAME).read_text())["dequantized"] == "nvfp4"
    assert shardkit.diff(source, out).is_equal
    save({"model": expected}, tmp_path / "run")
    shardkit.consolidate(tmp_path / "run", tmp_path / "again", base=source)
    assert (tmp_path / "again/model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


@pytest.mark.parametrize("is_mixed", [False, True])
def test_int4_of_compressed_tensors_is_refused(is_mixed: bool, tmp_path: Path) -> None:
    source = tmp_path / "hub"
    make_hub(QWEN3, source)
    if is_mixed:
        to_nvfp4(source, COMPRESSED)
    tensors = load_file(source / "model.safetensors")
    layer = "model.layers.1.mlp.up_proj."
    for name in [name for name in tensors if name.startswith(layer)]:
        del tensors[name]
    tensors |= {
        f"{layer}weight_packed": torch.ones(96, 8, dtype=torch.int32),
        f"{layer}weight_scale": torch.ones(96, 1),
    }
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    groups = {"a": {"format": "pack-quantized"}}
    groups |= {"b": {"format": "nvfp4-pack-quantized"}} if is_mixed else {}
    describe(source, {"quant_method": "compressed-tensors", "config_groups": groups})
    for move in MOVES.values():
        with pytest.raises(LayoutError, match=r"^quantised: .*\(compressed-tensors"):
            move(source, tmp_path / "out")
    for name in ("preshard", "consolidate"):
        with pytest.raises(LayoutError, match=r"^quantised: .*\(compressed-tensors") as caught:
            MOVES[name](source, tmp_path / "out", dequantize=True)
        assert "--dequantize" not in str(caught.value.hint)
    assert not (tmp_path / "out").exists()


def test_what_was_trained_of_a_quantised_base_has_its_names_and_a_plain_config(tmp_path: Path) -> None:
    source = quantise(QWEN3, tmp_path / "hub")
    trained = {name: tensor + 1 for name, tensor in by_transformers(source).items()}
    save({"model": trained}, tmp_path / "run")
    done = shardkit.consolidate(tmp_path / "run", tmp_path / "out", base=source, dtype="base")
    assert not done.warnings
    stored = load_file(tmp_path / "out/model.safetensors")
    assert stored.keys() == {name for name in load_file(source / "model.safetensors") if "scale" not in name}
    assert all(torch.equal(tensor, trained[name]) for name, tensor in stored.items())
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())


@pytest.mark.parametrize("method", ["gptq", "awq", "bits\x1bandbytes"])
def test_a_base_that_is_quantised_in_another_way_is_refused(method: str, tmp_path: Path) -> None:
    """Its names and its config are not those of what was trained, whatever may be missing."""
    base, trained = tmp_path / "hub", tmp_path / "run"
    make_hub(QWEN3, base)
    save({"model": load_file(base / "model.safetensors")}, trained)
    describe(base, {"quant_method": method, "bits": 4})
    with pytest.raises(LayoutError, match=r"is quantised \((gptq|awq|bits.x1bandbytes)\)") as caught:
        shardkit.consolidate(trained, tmp_path / "out", base=base, allow_missing=True, allow_unexpected=True)
    assert "the model that it was quantised from" in str(caught.value.hint)
    assert not (tmp_path / "out").exists()


def test_rules_give_some_tensors_another_dtype(tmp_path: Path) -> None:
    """Each product is rounded once: those in fp32 are not rounded to bf16 before."""
    source = quantise(QWEN3, tmp_path / "hub")
    rules = ["*.q_proj.weight=fp32", "model.norm.weight=fp16"]
    shardkit.consolidate(source, tmp_path / "out", dequantize=True, dtype_rules=rules, manifest=True)
    stored, wide = load_file(tmp_path / "out/model.safetensors"), by_transformers(source, torch.float32)
    found = {name: tensor for name, tensor in stored.items() if tensor.dtype != torch.bfloat16}
    assert len(found) == 2 + 1
    assert found.pop("model.norm.weight").dtype == torch.float16
    assert all(raw(tensor) == raw(wide[name]) for name, tensor in found.items())
    said = manifest.read(str(tmp_path / "out"))
    assert isinstance(said, manifest.HubModel)
    assert (said.dequantized, said.dtype_rules) == (
        "fp8",
        (("*.q_proj.weight", "fp32"), ("model.norm.weight", "fp16")),
    )
    with pytest.raises(UsageError, match="1 glob of --dtype-rule matches no floating tensor"):
        shardkit.consolidate(source, tmp_path / "other", dequantize=True, dtype_rules=["lost*=fp32"])
