"""A quantised checkpoint beside the plain weights that were made of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import shardkit
from tests.models.architecture import Architecture
from tests.models.quantised import GPT_OSS, QWEN3, QWEN3_MOE, quantise


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [(QWEN3_MOE, "fp32"), (GPT_OSS, "bf16")],
    ids=lambda each: each if isinstance(each, str) else each.name,
)
def test_plain_weights_are_compared(
    architecture: Architecture, dtype: str, tmp_path: Path, fast_trace: object
) -> None:
    source, out = quantise(architecture, tmp_path / "hub"), tmp_path / "out"
    shardkit.preshard(source, out, world_size=2, dequantize=True, dtype=dtype)
    found = shardkit.diff(source, out, as_dtype=dtype)  # norms and such, too, which the source has in bf16
    assert found.is_equal
    assert any(note.startswith("A: dequantised to ") for note in found.notes)
    assert not found.count("only_a", "only_b")

    shardkit.consolidate(out, tmp_path / "plain", base=source, dtype=dtype)
    weights = tmp_path / "plain" / "model.safetensors"
    state = load_file(weights)
    name = max(state, key=lambda name: state[name].numel())
    state[name].view(-1)[3] += 1
    save_file(state, weights, {"format": "pt"})
    changed = shardkit.diff(source, tmp_path / "plain", as_dtype=dtype)
    assert [tensor.name for tensor in changed.differences] == [name]
    turned = shardkit.diff(tmp_path / "plain", source)
    assert any(note.startswith("B: dequantised to ") for note in turned.notes)


def test_two_quantised_ones_are_compared_as_they_are_stored(tmp_path: Path) -> None:
    source = quantise(QWEN3, tmp_path / "hub")
    found = shardkit.diff(source, source)
    assert found.is_equal
    assert any(tensor.name.endswith("_scale_inv") for tensor in found.tensors)


def test_what_cannot_be_dequantised_is_said(tmp_path: Path) -> None:
    for name, tensors in (
        ("gptq", {"up.qweight": torch.ones(2, 4, dtype=torch.int32), "up.scales": torch.ones(2, 4)}),
        ("plain", {"up.weight": torch.ones(4, 8)}),
    ):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors", {"format": "pt"})
    config = {"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}
    (tmp_path / "gptq" / "config.json").write_text(json.dumps(config))
    found = shardkit.diff(tmp_path / "plain", tmp_path / "gptq")
    assert not found.is_equal
    assert any("B is quantised in a way that shardkit does not know" in note for note in found.notes)
