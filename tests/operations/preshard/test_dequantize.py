"""preshard of quantised models, in the layouts of Hub repos: refused, or dequantised as transformers itself does."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import shardkit
from shardkit.errors import LayoutError, UsageError
from shardkit.files import manifest
from tests.answers import answer_of
from tests.bits import raw
from tests.contents import edit_json, json_of
from tests.models.architecture import Architecture
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
    to_fp8,
    to_nvfp4,
)
from tests.models.text import DECODER
from tests.models.zoo import ZOO, make_hub
from tests.operations.consolidate.checkpoints import assert_bit_equal, hub, load
from tests.operations.preshard.test_preshard import loaded


def assert_written(out: Path, expected: dict[str, torch.Tensor]) -> manifest.Presharded:
    """Compare what stock torch loads, bit for bit, and return what the manifest says."""
    assert_bit_equal(loaded(out, expected), expected)
    said = manifest.read(str(out))
    assert isinstance(said, manifest.Presharded)
    return said


def loaded_in_bf16(
    out: Path, quantised: dict[str, tuple[torch.Tensor, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    return loaded(out, {n: torch.empty(x.shape, dtype=torch.bfloat16) for n, (x, _) in quantised.items()})


@pytest.mark.parametrize("architecture", QUANTISED, ids=lambda each: each.name)
def test_what_stock_torch_loads_is_what_transformers_dequantises(
    architecture: Architecture, tmp_path: Path, fast_trace: object
) -> None:
    source = quantise(architecture, tmp_path / "hub")
    expected = by_transformers(source)
    with pytest.raises(LayoutError, match=r"^quantised: ") as caught:
        shardkit.preshard(source, tmp_path / "out", world_size=4)
    assert "--dequantize" in str(caught.value.hint)
    done = shardkit.preshard(source, tmp_path / "out", world_size=4, dequantize=True)
    assert done.layout == "traced"
    assert any("quantization_config" in note for note in done.notes)
    said = assert_written(tmp_path / "out", expected)
    assert said.dequantized == ("mxfp4" if architecture is GPT_OSS else "fp8")


def test_what_is_taken_from_a_quantised_base_is_right(tmp_path: Path, fast_trace: object) -> None:
    """The layer that foretells tokens was not trained: plain weights are made of the base's own bytes."""
    source, out, back = tmp_path / "hub", tmp_path / "out", tmp_path / "back"
    make_hub(ZOO["deepseek_v3+repo"], source)
    stored = load(source)
    expected = {
        name: (x.float() * stored[f"{name}_scale_inv"].float()).bfloat16()  # a block holds all of each
        if f"{name}_scale_inv" in stored
        else x
        for name, x in stored.items()
        if not name.endswith("_scale_inv")
    }
    shardkit.preshard(source, out, world_size=2, dequantize=True)
    done = shardkit.consolidate(out, back, base=source)
    assert any(note.startswith("copied unchanged from") for note in done.notes)
    assert_bit_equal(load(back), expected)


def test_ragged_blocks_are_read_by_the_config_and_not_by_the_grid(tmp_path: Path, fast_trace: object) -> None:
    """192 and 320 rows in blocks of 128: transformers takes blocks of 96 rows for the first, and refuses the second."""
    config = {**DECODER, "hidden_size": 192, "intermediate_size": 320}
    config |= {"num_attention_heads": 12, "head_dim": 16}
    source = tmp_path / "hub"
    make_hub(Architecture(name="qwen3", kind="text", model_class="Qwen3ForCausalLM", config=config), source)
    made = to_fp8(source)
    name = "model.layers.0.mlp.down_proj.weight"
    assert made[name][1].shape == (2, 3)
    shardkit.preshard(source, tmp_path / "out", world_size=3, dequantize=True)
    found = loaded_in_bf16(tmp_path / "out", made)
    for weight, (numbers, scales) in made.items():
        whole = scales.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
        expected = numbers.float() * whole[: numbers.shape[0], : numbers.shape[1]]
        assert raw(found[weight]) == raw(expected.bfloat16()), weight


def test_one_scale_for_each_weight(tmp_path: Path, fast_trace: object) -> None:
    make_hub(QWEN3, tmp_path / "hub")
    made = to_fp8(tmp_path / "hub", static=True)
    shardkit.preshard(tmp_path / "hub", tmp_path / "out", world_size=2, dequantize=True)
    found = loaded_in_bf16(tmp_path / "out", made)
    for weight, (numbers, scale) in made.items():
        assert raw(found[weight]) == raw((numbers.float() * scale.float()).bfloat16()), weight


@pytest.mark.parametrize(
    ("dtype", "wanted"), [("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)]
)
def test_other_dtypes_are_rounded_once(
    dtype: str, wanted: torch.dtype, tmp_path: Path, fast_trace: object
) -> None:
    source = quantise(QWEN3_MOE, tmp_path / "hub")
    whole = by_transformers(source, wanted)
    expected = {name: x for name, x in whole.items() if name.endswith(("_proj", "_proj.weight"))}
    assert {x.dtype for x in expected.values()} == {wanted}
    shardkit.preshard(source, tmp_path / "out", world_size=2, dequantize=True, dtype=dtype)
    assert_written(tmp_path / "out", expected)


def test_rules_give_some_tensors_another_dtype(tmp_path: Path, fast_trace: object) -> None:
    source = quantise(QWEN3_MOE, tmp_path / "hub")
    half, full = by_transformers(source), by_transformers(source, torch.float32)
    rules = ["*.mlp.*=fp32", "*.mlp.gate.weight=fp16", "model.norm.weight=fp32", "*.mlp.gate.weight=keep"]
    shardkit.preshard(source, tmp_path / "out", world_size=2, dequantize=True, dtype_rules=rules)
    is_wide = [name for name in half if ".experts." in name or name == "model.norm.weight"]
    assert is_wide
    expected = half | {name: full[name] for name in is_wide}
    said = assert_written(tmp_path / "out", expected)
    assert said.dtype_rules == tuple(tuple(rule.split("=")) for rule in rules)


@pytest.mark.parametrize(
    ("rules", "problems"),
    [
        (
            ["*.nothing=fp32", "lm_head.weigth=bf16", "*=fp32"],
            ["*.nothing", "lm_head.weigth  (closest name: lm_head.weight)"],
        ),
        (["lm_head.weight", "=fp32", "a=int8", "*=fp32"], ["lm_head.weight", "=fp32", "a=int8"]),
    ],
)
def test_rules_that_cannot_be_meant_are_all_named(
    rules: list[str], problems: list[str], tmp_path: Path, fast_trace: object
) -> None:
    make_hub(QWEN3, tmp_path / "hub")
    with pytest.raises(UsageError) as caught:
        shardkit.preshard(tmp_path / "hub", tmp_path / "out", world_size=2, dtype_rules=rules)
    assert list(caught.value.problems)[: len(problems)] == problems
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "torchao", "compressed-tensors"])
@pytest.mark.parametrize("dequantize", [False, True])
def test_other_methods_are_refused_in_one_way(method: str, dequantize: bool, tmp_path: Path) -> None:
    make_hub(QWEN3, tmp_path / "hub")
    edit_json(tmp_path / "hub" / "config.json", quantization_config={"quant_method": method})
    with pytest.raises(LayoutError, match=rf"^quantised: .*\({method}\)") as caught:
        shardkit.preshard(tmp_path / "hub", tmp_path / "out", world_size=2, dequantize=dequantize)
    assert "--dequantize" not in str(caught.value.hint)
    assert not (tmp_path / "out").exists()


# The peak counts from when torch is there; a small run before leaves what any run needs.
PEAK = """
import sys
from functools import partial
from pathlib import Path
import torch, shardkit
def kib(field):
    return int(next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)))
def run(name):
    shardkit.preshard(f"{sys.argv[1]}/{name}", f"{sys.argv[1]}/{name}-out", world_size=2, wrap="none", dequantize=True,
        jobs=2, max_memory="16MiB")
run("small")
Path("/proc/self/clear_refs").write_text("5")
before = kib("VmRSS")
run("large")
print(kib("VmHWM") - before)
"""


@pytest.mark.prove
@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_a_weight_far_larger_than_the_limit_passes_in_pieces(method: str, tmp_path: Path) -> None:
    """256 MiB of bf16 with buffers of 16 MiB; beside them each thread holds a few MiB of products in float32."""
    for name, size in (("small", 256), ("large", 4096)):
        described: dict[str, object] = {"quant_method": method, "weight_block_size": [128, 128]}
        config = {"architectures": ["TinyForCausalLM"], "quantization_config": described}
        if method == "fp8":
            numbers = torch.zeros(2 * size, 4 * size, dtype=torch.uint8)[:, : 16 * 1024]
            numbers = numbers.view(torch.float8_e4m3fn)
            scales = torch.ones(-(-numbers.shape[0] // 128), -(-numbers.shape[1] // 128))
            tensors = {"a.weight": numbers, "a.weight_scale_inv": scales}
        else:
            blocks = torch.zeros(4, 2 * size, size // 32, 16, dtype=torch.uint8)
            tensors = {"a_blocks": blocks, "a_scales": torch.full(blocks.shape[:-1], 127, dtype=torch.uint8)}
        hub(tmp_path / name, tensors, config)
    assert answer_of(PEAK, tmp_path) < 64 << 10


def test_a_profile_says_in_its_config_that_weights_are_plain(tmp_path: Path, fast_trace: object) -> None:
    source = quantise(QWEN3, tmp_path / "hub")
    out = tmp_path / "transformers"
    shardkit.preshard(source, out, world_size=2, dequantize=True, profile="transformers")
    config = json_of(out)
    assert "quantization_config" not in config
    assert config["model_type"] == "qwen3"
    assert shardkit.verify(out, full=True).problems == ()


def with_own_code(directory: Path) -> None:
    auto_map = {"AutoModelForCausalLM": "own.Own"}
    edit_json(directory / "config.json", model_type="own", auto_map=auto_map)
    (directory / "own.py").write_text("")


def to_int8(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[f"{name}_scale"] = torch.ones(len(tensors[name]), 1)
        tensors[name] = tensors[name].to(torch.int8)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("is_own", [False, True])
def test_what_only_the_tensors_tell_is_never_divided(is_own: bool, tmp_path: Path) -> None:
    hub, out = tmp_path / "hub", tmp_path / "out"
    for writer, why in ((None, "14 tensors of int8"), (EXPORTED, "says NVFP4, and 14 tensors of uint8")):
        shutil.rmtree(hub, ignore_errors=True)
        make_hub(QWEN3, hub)
        to_int8(hub) if writer is None else to_nvfp4(hub, writer)
        if is_own:
            with_own_code(hub)
        for options in ({"layout": "declared"}, {"names": "hub"}, {}):
            with pytest.raises(LayoutError, match=rf"^quantised: .*{why}") as caught:
                shardkit.preshard(hub, out, world_size=2, **options)
            assert ("--dequantize" in str(caught.value.hint)) is (writer is not None)
        assert any(why in note for note in shardkit.inspect(hub).notes)
        if writer is None:
            for move in (partial(shardkit.preshard, world_size=2), shardkit.consolidate):
                with pytest.raises(LayoutError, match=r"^quantised: ") as caught:
                    move(hub, out, dequantize=True)
                assert "--dequantize" not in str(caught.value.hint)


@pytest.mark.parametrize("writer", [MODELOPT, EXPORTED, COMPRESSED])
def test_what_stock_torch_loads_of_nvfp4_is_what_its_writer_dequantises(
    writer: str, tmp_path: Path, fast_trace: object
) -> None:
    make_hub(QWEN3, tmp_path / "hub")
    expected = to_nvfp4(tmp_path / "hub", writer)
    done = shardkit.preshard(tmp_path / "hub", tmp_path / "out", world_size=3, dequantize=True)
    assert done.layout == "traced"
    said = assert_written(tmp_path / "out", expected)
    assert said.dequantized == "nvfp4"


def test_the_bytes_of_what_only_the_tensors_tell_are_moved_and_compared(tmp_path: Path) -> None:
    make_hub(QWEN3, tmp_path / "hub")
    to_nvfp4(tmp_path / "hub", EXPORTED)
    shardkit.consolidate(tmp_path / "hub", tmp_path / "copy")
    assert shardkit.diff(tmp_path / "hub", tmp_path / "copy").is_equal
    shardkit.reshard(tmp_path / "hub", tmp_path / "ranks", world_size=2)
    assert shardkit.diff(tmp_path / "hub", tmp_path / "ranks").is_equal
