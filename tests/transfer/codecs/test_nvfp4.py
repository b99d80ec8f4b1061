"""Plain values of NVFP4 weights, box by box, against the formulas of the two projects that write them (`tests.models.quantised`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from shardkit import formats
from shardkit.core.catalog import Catalog
from shardkit.core.dtypes import BY_NAME
from shardkit.errors import LayoutError
from shardkit.formats.contract import PlainWeights
from tests.models.quantised import by_compressed_tensors, by_modelopt, random_nvfp4
from tests.transfer.codecs.test_dequantize import bits, read

MODELOPT, COMPRESSED = ("", "_scale_2"), ("_packed", "_global_scale")


def stored_as(
    ends: tuple[str, str], name: str, packed: torch.Tensor, scales: torch.Tensor, second: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return a weight as one of the projects names its parts."""
    return {f"{name}{ends[0]}": packed, f"{name}_scale": scales, f"{name}{ends[1]}": second}


def plain(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    dtype: str = "bfloat16",
    config: dict[str, Any] | None = None,
) -> Catalog:
    save_file({name: x.contiguous().clone() for name, x in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config or {}))
    found = formats.open(str(folder), plain=PlainWeights(dtype=BY_NAME[dtype], by_content=True))
    return found.catalog


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("shape", [(64, 96), (7, 48), (1, 16), (3, 5, 80)])
@pytest.mark.parametrize("ends", [MODELOPT, COMPRESSED], ids=["modelopt", "compressed-tensors"])
def test_values_are_those_of_the_project_that_wrote_them(
    ends: tuple[str, str], shape: tuple[int, ...], dtype: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    packed, scales = random_nvfp4(*shape)
    packed.view(-1)[:4] = torch.tensor([0x80, 0x08, 0xF7, 0x7F])  # zeros of both signs, the largest numbers
    if ends == MODELOPT:
        second = torch.tensor(0.00123)
        expected = by_modelopt(packed, scales, second)
    else:
        second = torch.tensor([1234.5])
        expected = by_compressed_tensors(packed, scales, second)
    stored = stored_as(ends, "a.weight", packed, scales, second)
    catalog = plain(tmp_path, {**stored, "a.bias": torch.ones(7)}, dtype)
    assert list(catalog.tensors) == ["a.bias", "a.weight"]
    found = read(catalog, "a.weight")
    assert found.shape == shape
    assert torch.equal(bits(found), bits(expected.to(getattr(torch, dtype))))


@pytest.mark.parametrize("value", [3.7e-4, 0.0, 1e38])
def test_every_number_with_every_scale(value: float, tmp_path: Path) -> None:
    """Scales that are negative, or no number, too."""
    packed = torch.arange(256, dtype=torch.uint8).reshape(1, 256).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8).reshape(256, 1).repeat(1, 32).view(torch.float8_e4m3fn)
    second = torch.tensor(value)
    tensors = stored_as(MODELOPT, "a.weight", packed, scales, second)
    catalog = plain(tmp_path, tensors | stored_as(COMPRESSED, "b.weight", packed, scales, second.reshape(1)))
    for name, expected in (
        ("a.weight", by_modelopt(packed, scales, second)),
        ("b.weight", by_compressed_tensors(packed, scales, second.reshape(1))),
    ):
        found = read(catalog, name)
        assert torch.equal(bits(found), bits(expected.bfloat16())), name
        row = found[0x38]  # of scale 1
        assert row[2 * 0x08].signbit() == row[2 * 0x80 + 1].signbit() == (name == "b.weight")


def test_experts_in_one_are_packed_along_their_inputs(tmp_path: Path) -> None:
    """ModelOpt, export/unified_export_hf.py: experts of Llama 4 and gpt_oss are transposed, quantised, and transposed back."""
    packed, scales = random_nvfp4(3, 20, 48)
    second = torch.tensor(0.25)
    stored = {"e.up_proj": packed.mT, "e.up_proj_weight_scale": scales.mT}
    stored |= {"e.up_proj_weight_scale_2": second, "e.up_proj_input_scale": second}
    catalog = plain(tmp_path, stored)
    assert list(catalog.tensors) == ["e.up_proj"]
    expected = by_modelopt(packed, scales, second).mT.bfloat16()
    assert torch.equal(bits(read(catalog, "e.up_proj")), bits(expected))


def test_fp8_beside_it_becomes_plain_too(tmp_path: Path) -> None:
    """MIXED_PRECISION of ModelOpt, mixed-precision of compressed-tensors."""
    packed, scales = random_nvfp4(4, 64)
    stored = {"a.weight": packed, "a.weight_scale": scales, "a.weight_scale_2": torch.tensor(0.5)}
    eight = torch.arange(120, dtype=torch.uint8).reshape(4, 30).view(torch.float8_e4m3fn)
    of_rows = torch.rand(4, 1).bfloat16()
    catalog = plain(tmp_path, stored | {"b.weight": eight, "b.weight_scale": of_rows})
    assert set(catalog.tensors) == {"a.weight", "b.weight"}
    assert torch.equal(bits(read(catalog, "b.weight")), bits((eight.float() * of_rows.float()).bfloat16()))
    expected = by_modelopt(packed, scales, stored["a.weight_scale_2"]).bfloat16()
    assert torch.equal(bits(read(catalog, "a.weight")), bits(expected))


def test_weights_of_a_transformed_model_are_refused(tmp_path: Path) -> None:
    """compressed-tensors: what goes into them is multiplied too, and the plain model would not do so."""
    packed, scales = random_nvfp4(4, 64)
    stored = {"a.weight_packed": packed, "a.weight_scale": scales, "a.weight_global_scale": torch.ones(1)}
    said = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    for transforms in ({}, {"config_groups": {"R1": {"type": "hadamard"}}}):
        config = {"quantization_config": {**said, "transform_config": transforms}}
        if not transforms:
            assert list(plain(tmp_path, stored, config=config).tensors) == ["a.weight"]
            continue
        with pytest.raises(LayoutError, match=r"^quantised: .*\(compressed-tensors\)") as caught:
            plain(tmp_path, stored, config=config)
        assert "tools of that method" in str(caught.value.hint)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    packed, scales = random_nvfp4(4, 64)
    tensors = stored_as(MODELOPT, "a.weight", packed, scales[:, :2], torch.ones(()))
    tensors |= stored_as(COMPRESSED, "b.weight", packed, scales, torch.ones(4))
    with pytest.raises(LayoutError) as caught:
        plain(tmp_path, tensors)
    assert caught.value.problems == (
        "a.weight: it is [4, 32], and its scales a.weight_scale are [4, 2]",
        "b.weight_packed: the scale of its scales, b.weight_global_scale, is [4]",
    )


@pytest.mark.parametrize(
    "beside",
    [
        {"a.pre_quant_scale": torch.ones(64)},  # AWQ: the weight was multiplied by it
        {"a.svdquant_lora_a": torch.ones(2, 64)},  # a part of the weight is in factors
        {"b.weight": torch.ones(4, 4, dtype=torch.int8), "b.weight_scale": torch.ones(4)},
        {"b.weight_packed": torch.ones(4, 4, dtype=torch.int32), "b.weight_scale": torch.ones(4)},
    ],
    ids=lambda each: ", ".join(each),
)
def test_what_is_no_nvfp4_alone_is_refused(beside: dict[str, torch.Tensor], tmp_path: Path) -> None:
    packed, scales = random_nvfp4(4, 64)
    stored = {"a.weight": packed, "a.weight_scale": scales, "a.weight_scale_2": torch.ones(())}
    with pytest.raises(LayoutError, match=r"^quantised: ") as caught:
        plain(tmp_path, stored | beside)
    assert "tools of that method" in str(caught.value.hint)
