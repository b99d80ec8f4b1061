"""Plain values of quantised tensors, box by box: against transformers' own code, and against the formula where it has none."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from shardkit.core.catalog import Catalog
from shardkit.core.dtypes import BY_NAME
from shardkit.errors import LayoutError
from shardkit.formats.hub.directory import open_model
from shardkit.formats.quantised import can_dequantize, find_scaled, why_narrow, why_quantised
from shardkit.transfer.codecs.derive import derive
from tests.transfer.codecs.reading import read_in_ranges

FP8 = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}


def plain(
    folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None, dtype: str = "bfloat16"
) -> Catalog:
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors")
    catalog = open_model(str(folder)).catalog
    found = find_scaled(catalog.tensors, config, "it")
    made = {name: scaled.method.codec(scaled, BY_NAME[dtype]) for name, scaled in found.scaled.items()}
    return derive(catalog, made, found.gone)


def read(catalog: Catalog, name: str) -> torch.Tensor:
    """Read a tensor in ranges of random lengths."""
    entry = catalog.tensors[name]
    data = read_in_ranges(catalog, name, random.Random(0), (1, 31, 500, 10_000))
    return torch.frombuffer(data, dtype=getattr(torch, entry.dtype.name)).reshape(entry.shape)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor; its NaNs are all the same one."""
    one = torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor)
    return one.contiguous().view(torch.uint8)


def fp8(*shape: int, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8).view(torch.float8_e4m3fn)


def by_formula(weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return number * scale of its block, in float32, element by element as the definition says."""
    rows = torch.arange(weight.shape[-2]) // block[0]
    columns = torch.arange(weight.shape[-1]) // block[1]
    return weight.float() * scales.float()[..., rows, :][..., columns]


def by_transformers(weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
    found: torch.Tensor = finegrained.Fp8Dequantize(SimpleNamespace())._dequantize_one(weight, scales, dtype)
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16", "float8_e8m0fnu", "uint8"])
@pytest.mark.parametrize("shape", [(256, 384), (128, 128), (3, 256, 128)])
def test_fp8_blocks_are_transformers_own_values(
    shape: tuple[int, ...], scale_dtype: str, dtype: str, tmp_path: Path
) -> None:
    weight, grid = fp8(*shape), (*shape[:-2], shape[-2] // 128, shape[-1] // 128)
    if scale_dtype in ("uint8", "float8_e8m0fnu"):
        scales = torch.randint(110, 130, grid, dtype=torch.uint8)
        scales = scales if scale_dtype == "uint8" else scales.view(torch.float8_e8m0fnu)
    else:
        scales = (torch.rand(grid) * 1e-2).to(getattr(torch, scale_dtype))
    expected = by_transformers(weight, scales, getattr(torch, dtype))
    catalog = plain(tmp_path, {"a.weight": weight, "a.weight_scale_inv": scales}, FP8, dtype)
    assert list(catalog.tensors) == ["a.weight"]
    assert torch.equal(bits(read(catalog, "a.weight")), bits(expected))


@pytest.mark.parametrize("shape", [(192, 320), (320, 192), (1, 1), (129, 127), (128, 576)])
def test_a_ragged_last_block_has_its_own_scale(shape: tuple[int, int], tmp_path: Path) -> None:
    """transformers takes 96 rows for a block of 192 rows, and refuses 320."""
    weight, grid = fp8(*shape), (-(-shape[0] // 128), -(-shape[1] // 128))
    scales = torch.rand(grid) * 1e-2
    catalog = plain(tmp_path, {"a.weight": weight, "a.weight_scale_inv": scales}, FP8)
    expected = by_formula(weight, scales, (128, 128)).bfloat16()
    assert torch.equal(bits(read(catalog, "a.weight")), bits(expected))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("name", ["a.weight_scale", "a.weight_scale_inv", "a.scale"])
def test_one_scale_for_the_whole_tensor(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    weight, scale = fp8(100, 70), torch.full(shape, 0.0123)
    beside = {"a.input_scale": torch.tensor(2.0), "a.bias": torch.ones(100)}
    catalog = plain(
        tmp_path,
        {"a.weight": weight, name: scale, **beside},
        {"quantization_config": {"quant_method": "fp8"}},
    )
    assert set(catalog.tensors) == {"a.weight", "a.bias"}
    assert torch.equal(bits(read(catalog, "a.weight")), bits((weight.float() * 0.0123).bfloat16()))


def test_one_scale_for_each_row(tmp_path: Path) -> None:
    weight, scale = fp8(100, 70), torch.rand(100, 1)
    catalog = plain(tmp_path, {"a.weight": weight, "a.weight_scale": scale}, None)
    assert torch.equal(bits(read(catalog, "a.weight")), bits((weight.float() * scale).bfloat16()))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(2, 64, 3), (1, 200, 1), (3, 5, 90)])
def test_mxfp4_is_what_transformers_makes_of_it(
    shape: tuple[int, int, int], dtype: str, tmp_path: Path
) -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
    scales = torch.randint(0, 256, shape, dtype=torch.uint8)
    expected = mxfp4._convert_moe_packed_tensors(blocks, scales, dtype=getattr(torch, dtype))
    tensors = {
        "e.gate_up_proj_bias": torch.ones(4),
        "e.gate_up_proj_blocks": blocks,
        "e.gate_up_proj_scales": scales,
    }
    catalog = plain(tmp_path, tensors, MXFP4, dtype)
    assert set(catalog.tensors) == {"e.gate_up_proj", "e.gate_up_proj_bias"}
    assert catalog.tensors["e.gate_up_proj"].shape == (shape[0], shape[2] * 32, shape[1])
    assert torch.equal(bits(read(catalog, "e.gate_up_proj")), bits(expected))


def test_all_that_does_not_fit_is_named_at_once(tmp_path: Path) -> None:
    tensors = {
        "a.weight": fp8(256, 256),
        "a.weight_scale_inv": torch.ones(3, 2),
        "b.weight": fp8(4, 4),
        "c_blocks": torch.ones(2, 3, 4, 8, dtype=torch.uint8),
        "c_scales": torch.ones(2, 3, 4, dtype=torch.uint8),
        "fine.weight": fp8(4, 4),
        "fine.weight_scale": torch.ones(()),
    }
    with pytest.raises(LayoutError, match=r"quantised: it: .* of 3 tensors are") as caught:
        plain(tmp_path, tensors, FP8)
    assert caught.value.problems == (
        "a.weight: it is [256, 256], its scales a.weight_scale_inv are [3, 2], and blocks are [128, 128]",
        "b.weight: fp8 without scales",
        "c_blocks: it is [2, 3, 4, 8], and its scales c_scales are [2, 3, 4]",
    )


def test_blocks_are_of_128_where_the_config_does_not_say(tmp_path: Path) -> None:
    """192 rows with two scales are blocks of 128 and 64, as transformers has them, and not twice 96."""
    scales = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    tensors = {"a.weight": fp8(192, 320), "a.weight_scale_inv": torch.ones(2, 3), "b.weight": fp8(192, 192)}
    catalog = plain(tmp_path, tensors | {"b.weight_scale_inv": scales}, None)
    each = scales.repeat_interleave(128, 0)[:192].repeat_interleave(128, 1)[:, :192]
    expected = (tensors["b.weight"].float() * each).bfloat16()
    assert torch.equal(bits(read(catalog, "b.weight")), bits(expected))


def test_a_grid_that_fits_no_size_of_blocks_needs_the_config(tmp_path: Path) -> None:
    tensors = {"a.weight": fp8(322, 320), "a.weight_scale_inv": torch.ones(4, 4)}
    with pytest.raises(LayoutError) as caught:
        plain(tmp_path, tensors, None)
    assert "the config has no block size" in caught.value.problems[0]


ELSEWHERE: dict[str, dict[str, Any]] = {
    "compressed-tensors": {
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"]}},
    },
    "modelopt": {"quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
    "fbgemm_fp8": {"activation_scale_ub": 1200.0},
}
"""How other writers of fp8 describe it; compressed-tensors' own `decompress` was compared by hand, bit for bit."""


@pytest.mark.parametrize("method", ELSEWHERE)
@pytest.mark.parametrize("grid", [(1,), (100,), (100, 1), (100, 7), (1, 1)])
def test_fp8_of_other_writers_has_a_scale_for_each_row_group_or_weight(
    grid: tuple[int, ...], method: str, tmp_path: Path
) -> None:
    weight, scales = fp8(100, 70), (torch.rand(grid) * 1e-2).bfloat16()
    config = {"quantization_config": {"quant_method": method, **ELSEWHERE[method]}}
    catalog = plain(tmp_path, {"a.weight": weight, "a.weight_scale": scales}, config)
    each = scales.reshape(grid if len(grid) == 2 else (-1, 1))
    expected = (weight.bfloat16() * each.repeat_interleave(70 // each.shape[1], -1)).bfloat16()
    assert torch.equal(bits(read(catalog, "a.weight")), bits(expected))


MXFP4_PACKED = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
EXPONENTS = torch.arange(1, 252, dtype=torch.uint8).repeat(2)[:320].reshape(64, 5)


@pytest.mark.parametrize(
    "config",
    [
        None,
        {"quant_method": "fp8"},
        {"quant_method": "modelopt", "quant_algo": "MXFP8"},
        {"quant_method": "compressed-tensors", "format": "mxfp8-quantized"},
    ],
)
def test_fp8_with_a_power_of_two_for_each_32_numbers(config: dict[str, Any] | None, tmp_path: Path) -> None:
    """The writers' own code was compared by hand, bit for bit."""
    weight, said = fp8(64, 160), config and {"quantization_config": config}
    catalog = plain(tmp_path, {"a.weight": weight, "a.weight_scale": EXPONENTS}, said)
    assert torch.equal(
        bits(read(catalog, "a.weight")), bits(by_transformers(weight, EXPONENTS, torch.bfloat16))
    )


@pytest.mark.parametrize("shape", [(64, 160), (4, 16, 160)], ids=str)
@pytest.mark.parametrize(
    ("numbers", "scales", "is_signed", "config"),
    [
        ("a.weight", "a.weight_scale", False, None),
        ("a.weight", "a.weight_scale", False, {"quant_method": "modelopt", "quant_algo": "W4A8_MXFP4_FP8"}),
        ("a.weight_packed", "a.weight_scale", False, MXFP4_PACKED),
        # DeepSeek-V4
        ("a.weight", "a.scale", True, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
        ("a.weight", "a.weight_scale_inv", True, {"quant_method": "fp8"}),
    ],
)
def test_numbers_of_4_bits_with_a_power_of_two_for_each_32(
    numbers: str,
    scales: str,
    is_signed: bool,
    config: dict[str, Any] | None,
    shape: tuple[int, ...],
    tmp_path: Path,
) -> None:
    """The writers' own code was compared by hand, bit for bit."""
    torch.manual_seed(0)
    packed = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8)
    exponents = EXPONENTS.reshape(*shape[:-1], 5)
    stored = {numbers: packed.view(torch.int8) if is_signed else packed}
    stored[scales] = exponents.view(torch.float8_e8m0fnu) if is_signed else exponents
    catalog = plain(tmp_path, stored, config and {"quantization_config": config})
    expected = by_transformers(packed.view(torch.int8), exponents, torch.bfloat16)
    assert torch.equal(bits(read(catalog, "a.weight")), bits(expected))


@pytest.mark.parametrize(
    ("numbers", "fits"), [((4, 32), True), ((4, 48), False), ((3, 32), False), ((), False)]
)
def test_numbers_of_4_bits_have_a_scale_for_each_32(numbers: tuple[int, ...], fits: bool) -> None:
    tensors = held(a__weight=("int8", 2), a__weight_scale=("uint8", 2))
    tensors["a.weight"].shape, tensors["a.weight_scale"].shape = numbers, (4, 2)[: len(numbers)]
    if fits:
        assert find_scaled(tensors, FP8, "it").scaled["a.weight"].blocks.shape == (4, 64)
        return
    with pytest.raises(LayoutError, match="the values of 1 tensor are unknown"):
        find_scaled(tensors, FP8, "it")


@pytest.mark.parametrize("last", ["weight_zero_point", "pre_quant_scale", "weight_g_idx"])
def test_fp8_numbers_that_are_not_the_whole_weight_are_refused(last: str) -> None:
    weight = held(a__weight=("float8_e4m3fn", 2), a__weight_scale=("float32", 0))
    with pytest.raises(LayoutError) as caught:
        find_scaled({**weight, **held(**{f"a__{last}": ("float32", 1)})}, FP8, "it")
    assert caught.value.problems == (f"a.weight: its values depend on a.{last} too",)


@pytest.mark.parametrize(
    "said",
    [
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "kv_cache_scheme": {"type": "float"},
        },
        {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "kv_cache_quant_algo": "FP8"},
        {"quant_method": "compressed-tensors", "format": "float-quantized", "transform_config": {"R1": {}}},
    ],
)
def test_fp8_of_the_cache_alone_or_of_a_transformed_model_is_no_fp8(said: dict[str, Any]) -> None:
    assert not can_dequantize({"quantization_config": said})


@pytest.mark.parametrize("method", ["fp8", "compressed-tensors"])
def test_int8_beside_fp8_is_refused(method: str) -> None:
    tensors = held(a__weight=("float8_e4m3fn", 2), a__weight_scale=("float32", 0))
    tensors |= held(b__weight=("int8", 2), b__weight_scale=("float32", 2))
    config = {"quantization_config": {"quant_method": method, **ELSEWHERE.get(method, {})}}
    with pytest.raises(LayoutError, match=r"^quantised: it: config.json has"):
        find_scaled(tensors, config, "it")


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "torchao", "compressed-tensors"])
def test_other_methods_are_refused_by_name(method: str) -> None:
    with pytest.raises(
        LayoutError, match=rf"quantised: it: config.json has a quantization_config \({method}\)"
    ) as caught:
        find_scaled({}, {"quantization_config": {"quant_method": method}}, "it")
    assert "--dequantize" not in str(caught.value.hint)


def test_packed_values_are_known_by_their_names(tmp_path: Path) -> None:
    tensors = {"a.qweight": torch.ones(4, 4, dtype=torch.int32), "a.scales": torch.ones(4)}
    save_file(tensors, tmp_path / "model.safetensors")
    found = open_model(str(tmp_path)).catalog.tensors
    assert why_quantised(found) == "1 tensor of scales or packed values: a.qweight"
    assert why_quantised({"a.weight": found["a.scales"], "a.weight_scale": found["a.scales"]}) is None


@pytest.mark.parametrize("first", ["a__weight", "b__weight"])
def test_scales_of_activations_and_of_the_cache_go_with_those_of_weights(first: str) -> None:
    """Whether the weight beside them is quantised or plain; a parameter of that name is none."""
    beside = {f"a__{last}": ("float32", 0) for last in ("k_scale", "kv_scale", "output_scale", "input_scale")}
    heads = SimpleNamespace(dtype=BY_NAME["bfloat16"], shape=(8, 1, 1))
    own = held(
        **{first: ("float8_e4m3fn", 2), f"{first}_scale": ("float32", 0), "c__k_scale": ("float32", 1)}
    )
    if first == "b__weight":
        del beside["a__input_scale"]
    found = find_scaled({**own, **held(**beside), "attn.v_scale": heads}, FP8, "it")
    name = first.replace("__", ".")
    assert list(found.scaled) == [name]
    assert found.gone == {f"{name}_scale", "attn.v_scale", *(key.replace("__", ".") for key in beside)}


EXPORTED = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}


def held(**tensors: tuple[str, int]) -> dict[str, Any]:
    """Return tensors of a dtype with so many dims; two underscores stand for a dot."""
    return {
        name.replace("__", "."): SimpleNamespace(dtype=BY_NAME[dtype], shape=(4,) * num_dims)
        for name, (dtype, num_dims) in tensors.items()
    }


@pytest.mark.parametrize(
    "tensors",
    [
        held(a__weight=("uint8", 2), a__weight_scale=("float8_e4m3fn", 2), a__weight_scale_2=("float32", 0)),
        held(a__weight=("int8", 2), a__weight_scale=("bfloat16", 2)),
        held(a__weight=("int8", 2), a__weight_scales=("float16", 1)),  # EETQ
        held(a__weight=("float4_e2m1fn_x2", 2), a__weight_scale=("float8_e8m0fnu", 2)),
        held(a__weight=("uint32", 2), a__scales=("bfloat16", 2), a__biases=("bfloat16", 2)),  # MLX
        held(a__codes=("int8", 3), a__codebooks=("float16", 4), a__scales=("float16", 4)),  # AQLM
        held(a__weight___data=("int8", 2), a__weight___scale=("bfloat16", 2)),  # quanto
        held(a___weight_qdata=("int8", 2), a___weight_scale=("bfloat16", 2)),  # torchao
        held(a__W_q=("uint8", 2), a__scale=("float16", 2), a__zero=("float16", 2)),  # HQQ
        held(a__gate_up_proj=("uint8", 3), a__gate_up_proj_weight_scale=("float8_e4m3fn", 3)),
    ],
    ids=list,
)
def test_narrow_numbers_are_known_by_the_scales_beside_them(tensors: dict[str, Any]) -> None:
    name, first = next(iter(tensors.items()))
    kind = " (nvfp4)" if "a.weight_scale_2" in tensors else ""
    if first.dtype.name == "float4_e2m1fn_x2":
        kind = " (mxfp4)"
    assert why_narrow(tensors) == f"1 tensor of {first.dtype.name} with scales beside them{kind}: {name}"
    assert str(why_narrow(tensors, EXPORTED)).startswith("hf_quant_config.json says NVFP4, and ")


def test_a_scale_of_a_norm_is_its_own() -> None:
    """Flux in fp8: all tensors are, scales of norms too."""
    norm = held(norm__scale=("float8_e4m3fn", 1), norm__bias=("float8_e4m3fn", 1))
    assert why_quantised(norm) is None
    assert why_quantised(held(a__bias=("float8_e4m3fn", 1), a__scale=("float32", 1))) is None
    assert why_quantised(held(a__weight=("float8_e4m3fn", 2), a__scale=("float32", 2))) is not None


def test_indices_of_a_table_are_packed_values() -> None:
    """VPTQ's; Gemma 4's masked embedding has centroids alone."""
    centroids = held(a__centroids__weight=("float16", 2))
    assert why_quantised(centroids) is None
    assert why_quantised({**centroids, **held(b__indices=("int32", 3))}) is None
    why = why_quantised({**centroids, **held(a__indices=("int32", 3))})
    assert why == "1 tensor of scales or packed values: a.indices"


@pytest.mark.parametrize(
    "tensors",
    [
        held(attn__bias=("uint8", 4), attn__scale=("float32", 1)),  # a mask
        held(table__weight=("int64", 2), table__scale=("float32", 1)),
        held(a__weight=("bfloat16", 2), a__k_scale=("float32", 0)),  # only the cache is quantised
        held(a__flags=("uint8", 2)),
    ],
    ids=list,
)
def test_plain_tensors_are_not_taken_for_quantised_ones(tensors: dict[str, Any]) -> None:
    assert why_narrow(tensors) is None
    assert why_narrow(tensors, {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}) is None


def test_an_export_config_left_beside_plain_or_mxfp4_weights_says_nothing() -> None:
    assert why_narrow(held(a__weight=("bfloat16", 2)), EXPORTED) is None
    assert why_narrow(held(a__up_blocks=("uint8", 4), a__up_scales=("uint8", 3)), EXPORTED) is None
