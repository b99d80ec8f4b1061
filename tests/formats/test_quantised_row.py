"""A way to quantise costs a codec and its row: LLM.int8 of bitsandbytes, which shardkit only recognises, with both given here.

Its weights are int8 codes with the largest magnitude of each row beside them, X.SCB: value = code * SCB / 127.
Source: bitsandbytes 0.48, functional.py (int8_vectorwise_dequant).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import shardkit
from shardkit.core.catalog import StoredParts
from shardkit.errors import LayoutError
from shardkit.formats import quantised
from shardkit.transfer.codecs.dequantize import Blocks, Held, Method, Product, ScaledNames
from tests.operations.consolidate.checkpoints import assert_bit_equal, load


class Rows(Product):
    __slots__ = ()

    def _with_second(self, parts: StoredParts, scales: np.ndarray) -> np.ndarray:
        return scales / np.float32(127)


def claim(name: str, tensors: Mapping[str, Held]) -> ScaledNames | None:
    layer, _, last = name.rpartition(".")
    if last != "weight" or tensors[name].dtype.name != "int8" or f"{layer}.SCB" not in tensors:
        return None
    return ScaledNames(name, name, f"{layer}.SCB", dropped=(f"{name}_format",))


def fit(names: ScaledNames, tensors: Mapping[str, Held], said: Mapping[str, Any]) -> Blocks:
    rows, columns = tensors[names.numbers].shape
    return Blocks((rows, columns), (1,))


ROW = Method(
    "bitsandbytes", Rows, claim, fit, lambda method, said: bool(said) and said.get("load_in_8bit", False)
)


def test_a_row_is_all_that_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    codes, largest = torch.randint(-127, 128, (5, 7), dtype=torch.int8), torch.rand(5) + 0.5
    source, norm = tmp_path / "hub", torch.ones(3)
    source.mkdir()
    stored = {"a.weight": codes, "a.SCB": largest, "a.weight_format": torch.tensor(0, dtype=torch.uint8)}
    save_file({**stored, "norm.weight": norm}, source / "model.safetensors", {"format": "pt"})
    config = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(LayoutError, match="bitsandbytes"):
        shardkit.consolidate(source, tmp_path / "out", dequantize=True)

    monkeypatch.setattr(quantised, "METHODS", (*quantised.METHODS, ROW))
    with pytest.raises(LayoutError, match="bitsandbytes") as refused:
        shardkit.consolidate(source, tmp_path / "out")
    assert "makes plain weights" in str(refused.value.hint)
    shardkit.consolidate(source, tmp_path / "out", dequantize=True)
    plain = (codes.float() * (largest[:, None] / 127)).bfloat16()
    assert_bit_equal(load(tmp_path / "out"), {"a.weight": plain, "norm.weight": norm})
    shardkit.preshard(source, tmp_path / "sharded", world_size=2, wrap="none", dequantize=True)
    assert shardkit.diff(tmp_path / "sharded", tmp_path / "out").is_equal
