"""`--quantize base`: what is written is what the projects that made the base would write of the same weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import shardkit
from shardkit.errors import LayoutError, UsageError
from shardkit.files import storage
from tests.answers import answer_of
from tests.operations.consolidate.checkpoints import CONFIG, assert_bit_equal, load, save

Tensors = dict[str, torch.Tensor]
Q, UP, NORM = (
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.norm.weight",
)
FP8, LARGEST = torch.float8_e4m3fn, 448.0
SECTIONS: dict[str, dict[str, Any]] = {
    "blocks": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "blocks, ue8m0": {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
    "rows": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}}
        },
    },
}


def weights(seed: int = 0) -> Tensors:
    """Return weights with zeros in a block and outliers in another."""
    torch.manual_seed(seed)
    state = {Q: torch.randn(256, 384), UP: 3e-3 * torch.randn(384, 128), NORM: torch.randn(128)}
    state[Q][:128, 128:256] = 0.0
    state[Q][200, 300] = 3e4
    state[UP][7] = 0.0
    return state


def by_transformers(weight: torch.Tensor, section: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales of whole blocks."""
    finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
    config = SimpleNamespace(
        weight_block_size=section["weight_block_size"], scale_fmt=section.get("scale_fmt", "float")
    )
    found = finegrained.Fp8Quantize(SimpleNamespace(quantization_config=config))._quantize_one(
        "w.weight", weight
    )
    return found["w.weight"], found["w.weight_scale_inv"]


def by_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales as compressed-tensors computes them, written out."""
    most = weight.abs().amax(1, keepdim=True)
    scales = most / LARGEST
    scales = torch.where(scales == 0, torch.finfo(scales.dtype).eps, scales)
    return (weight / scales).clamp(-LARGEST, LARGEST).to(FP8), scales


def quantised(name: str, weight: torch.Tensor) -> tuple[str, torch.Tensor, torch.Tensor]:
    """Return the suffix of the scales, the codes and the scales of a weight."""
    if name == "rows":
        return "_scale", *by_rows(weight.bfloat16())
    return "_scale_inv", *by_transformers(weight, SECTIONS[name])


def expected_of(name: str, state: Tensors) -> Tensors:
    expected = {NORM: state[NORM].bfloat16()}
    for fqn in (Q, UP):
        suffix, codes, scales = quantised(name, state[fqn])
        expected |= {fqn: codes, fqn + suffix: scales}
    return expected


def make_base(directory: Path, name: str, **further: torch.Tensor) -> Path:
    """Write a quantised base of other values."""
    directory.mkdir()
    tensors = {**expected_of(name, weights(1)), **further}
    save_file(
        {fqn: value.contiguous() for fqn, value in tensors.items()},
        directory / "model.safetensors",
        {"format": "pt"},
    )
    (directory / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": SECTIONS[name]}))
    return directory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SECTIONS)
def test_bits_are_those_of_the_project_that_made_the_base(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    state = {fqn: value.to(dtype) for fqn, value in weights().items()}
    base = make_base(tmp_path / "base", name)
    result = shardkit.consolidate(
        save({"model": state}, tmp_path / "trained"), tmp_path / "out", base=base, quantize="base"
    )
    assert_bit_equal(load(tmp_path / "out"), expected_of(name, state))
    assert result.warnings == ()
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["quantization_config"] == SECTIONS[name]
    assert shardkit.verify(tmp_path / "out").ok


@pytest.mark.parametrize("name", ["blocks", "blocks, ue8m0"])
def test_scales_next_to_powers_of_two(name: str, tmp_path: Path) -> None:
    """A power of two is not rounded up, its neighbours are as transformers' logarithm in float32 has them."""
    steps = range(-4, 5)
    largest = torch.tensor([LARGEST * 2.0**exponent for exponent in range(-100, 101, 8)])[:, None]
    bits = largest.view(torch.int32) + torch.tensor(steps, dtype=torch.int32)
    weight = torch.zeros(bits.numel(), 128, 128)
    weight[:, 5, 7] = bits.view(torch.float32).reshape(-1)
    state = {**weights(), Q: weight.reshape(-1, 128)}
    codes, scales = by_transformers(state[Q], SECTIONS[name])
    further = {Q: codes, f"{Q}_scale_inv": scales}
    base = make_base(tmp_path / "base", name, **further)
    shardkit.consolidate(save(state, tmp_path / "trained"), tmp_path / "out", base=base, quantize="base")
    assert_bit_equal(load(tmp_path / "out"), {**expected_of(name, state), **further})


def test_ragged_blocks_are_padded_with_zeros(tmp_path: Path) -> None:
    """transformers leaves such weights alone; the formula is its own."""
    shape, block = (200, 300), 128
    torch.manual_seed(0)
    weight = torch.randn(shape)
    padded = torch.zeros(256, 384)
    padded[:200, :300] = weight
    codes, scales = by_transformers(padded, SECTIONS["blocks"])
    base = make_base(tmp_path / "base", "blocks", **{UP: codes[:200, :300], f"{UP}_scale_inv": scales})
    state = {**weights(), UP: weight}
    shardkit.consolidate(save(state, tmp_path / "trained"), tmp_path / "out", base=base, quantize="base")
    found = load(tmp_path / "out")
    assert_bit_equal(
        {name: found[name] for name in (UP, f"{UP}_scale_inv")},
        {UP: codes[:200, :300], f"{UP}_scale_inv": scales},
    )
    assert found[f"{UP}_scale_inv"].shape == (-(-200 // block), -(-300 // block))


@pytest.mark.parametrize("name", SECTIONS)
def test_cut_over_ranks_and_divided_over_parts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result is that of whole weights. Each weight is read at most twice, and every byte is compared."""
    state = weights()
    hub, base = tmp_path / "hub", make_base(tmp_path / "base", name)
    hub.mkdir()
    save_file(state, hub / "model.safetensors", {"format": "pt"})
    shardkit.preshard(hub, tmp_path / "ranks", mesh="dp_shard=3", wrap="none", layout="declared")
    (tmp_path / "ranks" / "shardkit.json").unlink()
    options: dict[str, Any] = {"base": base, "quantize": "base", "max_shard_size": 70_000}
    read, preadv = list[int](), storage.preadv

    def counted(fd: int, buffers: Sequence[Any], start: int) -> int:
        read.append(preadv(fd, buffers, start))
        return read[-1]

    with monkeypatch.context() as patch:
        patch.setattr(storage, "preadv", counted)
        alone = shardkit.consolidate(tmp_path / "ranks", tmp_path / "alone", **options)
    for part in ("1/2", "2/2"):
        result = shardkit.consolidate(tmp_path / "ranks", tmp_path / "out", part=part, **options)
    expected = expected_of(name, state)
    for made in ("alone", "out"):
        assert_bit_equal(load(tmp_path / made), expected)
    nbytes = sum(value.nbytes for value in state.values())
    assert nbytes < sum(read) <= 2 * nbytes + (64 << 10)  # headers
    for each in (alone, result):
        assert (each.checked_bytes, each.unchecked) == (nbytes, ())


def test_experts_in_one_tensor(tmp_path: Path) -> None:
    torch.manual_seed(0)
    name, experts = "model.layers.0.mlp.experts.gate_up_proj", torch.randn(3, 256, 128)
    codes, scales = by_transformers(experts, SECTIONS["blocks"])
    further = {name: codes, f"{name}_scale_inv": scales}
    base = make_base(tmp_path / "base", "blocks", **further)
    state = {**weights(), name: experts}
    shardkit.consolidate(save(state, tmp_path / "trained"), tmp_path / "out", base=base, quantize="base")
    assert_bit_equal(load(tmp_path / "out"), {**expected_of("blocks", state), **further})


def test_scales_in_bf16_are_rounded_before_weights_are_divided_by_them(tmp_path: Path) -> None:
    base, state = make_base(tmp_path / "base", "blocks"), weights()
    stored = load(base)
    rounded = {name: x.bfloat16() if name.endswith("_inv") else x for name, x in stored.items()}
    save_file(rounded, base / "model.safetensors", {"format": "pt"})
    shardkit.consolidate(save(state, tmp_path / "trained"), tmp_path / "out", base=base, quantize="base")
    found = load(tmp_path / "out")
    for fqn in (Q, UP):
        _, scales = by_transformers(state[fqn], SECTIONS["blocks"])
        assert torch.equal(found[f"{fqn}_scale_inv"], scales.bfloat16())
        spread = scales.bfloat16().float().repeat_interleave(128, 0).repeat_interleave(128, 1)
        codes = (state[fqn] * (1 / spread)).clamp(-LARGEST, LARGEST).to(FP8)
        assert torch.equal(found[fqn].view(torch.uint8), codes.view(torch.uint8))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["blocks", "rows"])
def test_values_that_are_not_finite_are_refused_by_name(name: str, value: float, tmp_path: Path) -> None:
    base, state = make_base(tmp_path / "base", name), weights()
    state[UP][300, 5] = value
    with pytest.raises(
        LayoutError, match=r"up_proj\.weight has values that are infinite, not a number, or too large"
    ):
        shardkit.consolidate(save(state, tmp_path / "trained"), tmp_path / "out", base=base, quantize="base")
    assert not (tmp_path / "out").exists()


def test_static_scales_are_refused_unless_they_are_to_be_copied(tmp_path: Path) -> None:
    further = {
        "model.layers.0.self_attn.q_proj.input_scale": torch.tensor(0.5),
        "model.layers.0.self_attn.k_scale": torch.tensor(0.25),
    }
    base, source = make_base(tmp_path / "base", "blocks", **further), save(weights(), tmp_path / "trained")
    with pytest.raises(LayoutError) as refused:
        shardkit.consolidate(source, tmp_path / "out", base=base, quantize="base")
    assert all(name in str(refused.value.problems) for name in further)
    globs = ["*.input_scale", "*.k_scale"]
    assert all(f"--fill-from-base '{glob}'" in str(refused.value.hint) for glob in globs)
    result = shardkit.consolidate(source, tmp_path / "out", base=base, quantize="base", fill_from_base=globs)
    assert_bit_equal(load(tmp_path / "out"), {**expected_of("blocks", weights()), **further})
    assert not any("matches no tensor" in note for note in result.notes)


ONLY_READ: dict[str, tuple[dict[str, Any], Tensors, str]] = {
    "MXFP4": (
        {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
        {
            f"{UP}_packed": torch.zeros(384, 64, dtype=torch.uint8),
            f"{UP}_scale": torch.full((384, 4), 127, dtype=torch.uint8),
        },
        "it is mxfp4",
    ),
    "one scale": (
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
        {UP: torch.zeros(384, 128).to(FP8), f"{UP}_scale": torch.ones(1)},
        "neither weight_scale_inv of blocks",
    ),
    "one scale of blocks": (
        {"quant_method": "fp8"},
        {UP: torch.zeros(384, 128).to(FP8), f"{UP}_scale_inv": torch.ones(())},
        "neither weight_scale_inv of blocks",
    ),
    "e5m2": (
        SECTIONS["blocks"],
        {UP: torch.zeros(384, 128).to(torch.float8_e5m2), f"{UP}_scale_inv": torch.ones(3, 1)},
        "its numbers are float8_e5m2",
    ),
    "small blocks": (
        {"quant_method": "fp8", "weight_block_size": [1, 32]},
        {UP: torch.zeros(384, 128).to(FP8), f"{UP}_scale_inv": torch.ones(384, 4)},
        "fewer than 1024 numbers",
    ),
    "scales in fp16": (
        SECTIONS["blocks"],
        {UP: torch.zeros(384, 128).to(FP8), f"{UP}_scale_inv": torch.ones(3, 1).half()},
        "its scales are float16",
    ),
}


@pytest.mark.parametrize(("section", "stored", "reason"), ONLY_READ.values(), ids=ONLY_READ)
def test_a_form_that_is_only_read_is_refused(
    section: dict[str, Any], stored: Tensors, reason: str, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    save_file({**stored, NORM: torch.ones(128)}, base / "model.safetensors", {"format": "pt"})
    (base / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": section}))
    state = {name: value for name, value in weights().items() if name != Q}
    with pytest.raises(LayoutError, match="not what") as refused:
        shardkit.consolidate(save(state, tmp_path / "trained"), tmp_path / "out", base=base, quantize="base")
    assert UP in str(refused.value.problems)
    assert reason in str(refused.value.problems)


def test_what_the_checkpoint_has_under_the_names_of_scales(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "blocks")
    source = save({**weights(), f"{UP}_scale_inv": torch.ones(3, 1)}, tmp_path / "trained")
    options: dict[str, Any] = {"base": base, "quantize": "base", "allow_unexpected": True}
    with pytest.raises(LayoutError, match="names of the scales") as refused:
        shardkit.consolidate(source, tmp_path / "out", **options)
    assert f"{UP}_scale_inv" in str(refused.value.problems)
    shardkit.consolidate(source, tmp_path / "out", exclude=["*_scale_inv"], **options)
    assert_bit_equal(load(tmp_path / "out"), expected_of("blocks", weights()))


def test_own_measured_scales_are_written(tmp_path: Path) -> None:
    name = UP.replace("weight", "input_scale")
    base = make_base(tmp_path / "base", "blocks", **{name: torch.tensor(0.5)})
    source = save({**weights(), name: torch.tensor(0.75)}, tmp_path / "trained")
    shardkit.consolidate(source, tmp_path / "out", base=base, quantize="base", allow_unexpected=True)
    assert_bit_equal(load(tmp_path / "out"), {**expected_of("blocks", weights()), name: torch.tensor(0.75)})


def test_measured_scales_of_what_is_left_out_do_not_count(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "blocks", **{UP.replace("weight", "input_scale"): torch.tensor(0.5)})
    source = save(weights(), tmp_path / "trained")
    shardkit.consolidate(
        source, tmp_path / "out", base=base, quantize="base", include=[Q], allow_missing=True
    )
    expected = expected_of("blocks", weights())
    assert_bit_equal(load(tmp_path / "out"), {name: expected[name] for name in (Q, f"{Q}_scale_inv")})


def test_a_block_that_is_nearly_zero_has_codes_of_zero(tmp_path: Path) -> None:
    """448 over its largest value is infinite in float32; transformers makes NaN of its zeros."""
    state, base = weights(), make_base(tmp_path / "base", "blocks")
    state[UP][:128] = 0.0
    state[UP][0, 0] = 1e-37
    shardkit.consolidate(save(state, tmp_path / "trained"), tmp_path / "out", base=base, quantize="base")
    state[UP][0, 0] = 0.0
    assert_bit_equal(load(tmp_path / "out"), expected_of("blocks", state))


def test_a_row_of_subnormal_numbers(tmp_path: Path) -> None:
    """Its scale is rounded by up to a third, so that quotients are beyond the range of fp8."""
    state, base = weights(), make_base(tmp_path / "base", "rows")
    state[UP] = torch.linspace(0, 2e-37, 384)[:, None].expand(384, 128).contiguous()
    shardkit.consolidate(save(state, tmp_path / "trained"), tmp_path / "out", base=base, quantize="base")
    expected = expected_of("rows", state)
    assert expected[UP].float().abs().max() == LARGEST
    assert_bit_equal(load(tmp_path / "out"), expected)


def test_what_comes_from_the_base_stays_as_it_is(tmp_path: Path) -> None:
    part = "visual.0.proj.weight"
    codes, scales = by_transformers(torch.randn(128, 256), SECTIONS["blocks"])
    scales *= 1.01  # another tool computed them
    further = {part: codes, f"{part}_scale_inv": scales}
    base = make_base(tmp_path / "base", "blocks", **further)
    source = save(weights(), tmp_path / "trained")
    shardkit.consolidate(source, tmp_path / "out", base=base, quantize="base", fill_from_base=["visual.*"])
    assert_bit_equal(load(tmp_path / "out"), {**expected_of("blocks", weights()), **further})


def test_scales_before_all_codes_of_a_file_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """safetensors puts float32 before float8. With the base's files, the output has that order, too."""
    torch.manual_seed(0)
    state = {f"layers.{number}.proj.weight": torch.randn(128, 128) for number in range(80)}
    base = tmp_path / "base"
    base.mkdir()
    expected: Tensors = {}
    for name, weight in state.items():
        expected[name], expected[f"{name}_scale_inv"] = by_transformers(weight, SECTIONS["blocks"])
    save_file(expected, base / "model.safetensors", {"format": "pt"})
    (base / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": SECTIONS["blocks"]}))
    read, preadv = list[int](), storage.preadv

    def counted(fd: int, buffers: Sequence[Any], start: int) -> int:
        read.append(preadv(fd, buffers, start))
        return read[-1]

    source = save(state, tmp_path / "trained")
    with monkeypatch.context() as patch:
        patch.setattr(storage, "preadv", counted)
        shardkit.consolidate(source, tmp_path / "out", base=base, quantize="base")
    assert (tmp_path / "out/model.safetensors").read_bytes() == (base / "model.safetensors").read_bytes()
    assert sum(read) <= 2 * sum(value.nbytes for value in state.values()) + (128 << 10)


def test_integers_are_not_quantised(tmp_path: Path) -> None:
    base, state = (
        make_base(tmp_path / "base", "blocks"),
        {**weights(), UP: torch.ones(384, 128, dtype=torch.int8)},
    )
    with pytest.raises(LayoutError) as refused:
        shardkit.consolidate(save(state, tmp_path / "trained"), tmp_path / "out", base=base, quantize="base")
    assert "its values in the checkpoint are int8" in str(refused.value.problems)


def test_options_that_contradict_it(tmp_path: Path) -> None:
    source, base = save(weights(), tmp_path / "trained"), tmp_path / "plain"
    base.mkdir()
    save_file(weights(1), base / "model.safetensors", {"format": "pt"})
    (base / "config.json").write_text(json.dumps(CONFIG))
    config_alone = tmp_path / "config"
    config_alone.mkdir()
    section = {"quantization_config": SECTIONS["blocks"]}
    (config_alone / "config.json").write_text(json.dumps({**CONFIG, **section}))
    for options, message in (
        ({}, "needs a base: name it"),
        ({"base": config_alone}, "needs a base that is quantised"),
        ({"base": base}, "needs a base that is quantised"),
        ({"base": base, "dtype": "bf16"}, "takes all dtypes from the base"),
        ({"base": base, "dtype_rules": ["*=fp32"]}, "takes all dtypes from the base"),
    ):
        with pytest.raises(UsageError, match=message):
            shardkit.consolidate(source, tmp_path / "out", quantize="base", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", SECTIONS)
def test_a_dequantised_base_comes_back(name: str, dtype: Any, tmp_path: Path) -> None:
    """All codes do. A scale in float32 differs in its last bits: it is made of a block's largest value, which was rounded."""
    base = make_base(tmp_path / "base", name)
    shardkit.consolidate(base, tmp_path / "plain", dequantize=True, dtype=dtype)
    shardkit.consolidate(tmp_path / "plain", tmp_path / "again", base=base, quantize="base")
    before, after = load(base), load(tmp_path / "again")
    if name == "blocks":
        lossy = 2.0**-8 if dtype == "bf16" else 2.0**-22
        for each in (f"{Q}_scale_inv", f"{UP}_scale_inv"):
            torch.testing.assert_close(after.pop(each), before.pop(each), rtol=lossy, atol=0)
    assert_bit_equal(after, before)


PEAK = """
import sys
from pathlib import Path
import shardkit
def kib(field):
    return int(next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)))
def run(name):
    home = f"{sys.argv[1]}/{name}"
    shardkit.consolidate(f"{home}/trained", f"{home}/out", base=f"{home}/base", quantize="base", jobs=2, max_memory="16MiB")
run("small")
assert "torch" not in sys.modules
Path("/proc/self/clear_refs").write_text("5")
before = kib("VmRSS")
run("large")
print(kib("VmHWM") - before)
"""


def test_memory_is_bounded(tmp_path: Path) -> None:
    """The weight has 64 MiB, and as many in float32."""
    for name, size in (("small", 256), ("large", 4096)):
        home, grid = tmp_path / name, size // 128
        (home / "base").mkdir(parents=True)
        codes = torch.zeros(size, size, dtype=torch.uint8).view(FP8)
        save_file({UP: codes, f"{UP}_scale_inv": torch.ones(grid, grid)}, home / "base/model.safetensors")
        config = {**CONFIG, "quantization_config": SECTIONS["blocks"]}
        (home / "base/config.json").write_text(json.dumps(config))
        save({UP: torch.ones(size, size)}, home / "trained")
    assert answer_of(PEAK, tmp_path) < 40 << 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_those_of_the_package(dtype: torch.dtype) -> None:
    """What `by_rows` writes out is what compressed-tensors does, where it is installed."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    settings = quantization.QuantizationArgs(num_bits=8, type="float", strategy="channel", symmetric=True)
    for weight in weights().values():
        rows = torch.atleast_2d(weight).to(dtype)
        least, most = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
        scales, zeros = helpers.calculate_qparams(least, most, settings)
        codes = forward.quantize(rows, scales, zeros, settings, dtype=FP8)
        assert_bit_equal(dict(zip("cs", by_rows(rows), strict=True)), {"c": codes, "s": scales})
