"""Hub directories with quantised weights, in the layouts of Qwen/Qwen3-8B-FP8, deepseek-ai/DeepSeek-V3 and openai/gpt-oss-20b.

The weights of a directory are replaced; nothing of shardkit is used. Qwen3's scales are bfloat16, DeepSeek's float32;
both are named `weight_scale_inv`, and embeddings, norms, routers and the head are not quantised.

NVFP4 as nvidia-modelopt 0.47.0 (`export_hf_checkpoint`) and compressed-tensors 0.20.0 (`compress_model`) write it. Neither
is installed where tests run: the formulas here are theirs, and were compared with their functions by hand, bit for bit,
over files that they had written and over all bytes and scales.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.models.architecture import Architecture
from tests.models.experts import LATENT, MOE
from tests.models.text import DECODER
from tests.models.zoo import make_hub

WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
QWEN3 = Architecture(name="qwen3", kind="text", model_class="Qwen3ForCausalLM", config={**DECODER, **WIDE})
QWEN3_MOE = Architecture(name="qwen3_moe", kind="experts", model_class="Qwen3MoeForCausalLM", config=MOE)
DEEPSEEK = Architecture(
    name="deepseek_v3", kind="experts", model_class="DeepseekV3ForCausalLM", config={**MOE, **LATENT}
)
GPT_OSS = Architecture(
    name="gpt_oss",
    kind="experts",
    model_class="GptOssForCausalLM",
    config={**MOE, "hidden_size": 64, "intermediate_size": 32, "sliding_window": 4},
)


QUANTISED = (QWEN3, QWEN3_MOE, DEEPSEEK, GPT_OSS)


def quantise(architecture: Architecture, directory: Path) -> Path:
    """Make the Hub directory of a tiny model whose weights are quantised as those of its kind."""
    make_hub(architecture, directory)
    if architecture is GPT_OSS:
        to_mxfp4(directory)
    else:
        # Blocks of 16: transformers takes the block from the grid of scales, so all dims must divide.
        wide = architecture is DEEPSEEK
        to_fp8(directory, block=2 if wide else 16, scale_dtype=torch.float32 if wide else torch.bfloat16)
    return directory


def by_transformers(directory: Path, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Return the state of the model that transformers dequantises, in its own names."""
    config = json.loads((directory / "config.json").read_text())
    method = config["quantization_config"]["quant_method"]
    how = {"fp8": transformers.FineGrainedFP8Config, "mxfp4": transformers.Mxfp4Config}[method](
        dequantize=True
    )
    model_class: Any = getattr(transformers, config["architectures"][0])
    model = model_class.from_pretrained(directory, dtype=dtype, quantization_config=how)
    state: dict[str, torch.Tensor] = model.state_dict()
    return state


MODELOPT, EXPORTED, COMPRESSED = "modelopt", "exported", "compressed-tensors"
"""Who wrote NVFP4; `EXPORTED` is an older ModelOpt, which said so in hf_quant_config.json alone."""
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def by_modelopt(packed: torch.Tensor, scales: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return what NVFP4QTensor.dequantize makes before it rounds; its table has 0 in the place of -0."""
    table = torch.where(_E2M1 == 0, 0.0, _E2M1)
    values = table[torch.stack((packed & 0x0F, packed >> 4), -1).flatten(-2).long()]
    return (values.unflatten(-1, (-1, 16)) * (scales.float() * second).unsqueeze(-1)).flatten(-2)


def by_compressed_tensors(packed: torch.Tensor, scales: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return what NVFP4PackedCompressor.decompress makes before it rounds."""
    values = _E2M1[torch.stack((packed & 0x0F, packed >> 4), -1).flatten(-2).long()].bfloat16()
    scales = scales.bfloat16() / second
    return (values.unflatten(-1, (-1, 16)).to(scales.dtype) * scales.unsqueeze(-1)).flatten(-2)


def random_nvfp4(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return packed numbers and scales of a weight: all bytes, scales from 0 to the largest."""
    packed = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8)
    scales = torch.randint(0, 0x7F, (*shape[:-1], shape[-1] // 16), dtype=torch.uint8)
    return packed, scales.view(torch.float8_e4m3fn)


def to_nvfp4(directory: Path, writer: str) -> dict[str, torch.Tensor]:
    """Put random NVFP4 in the place of a Hub directory's linear weights; return the plain values of all, in bfloat16."""
    tensors, plain = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, tensor in load_file(directory / "model.safetensors").items():
        if not _LINEAR.search(name):
            tensors[name] = plain[name] = tensor
            continue
        packed, scales = random_nvfp4(*tensor.shape)
        tensors |= {f"{name}_scale": scales}
        layer = name.removesuffix("weight")
        if writer == COMPRESSED:
            second = tensors[f"{name}_global_scale"] = torch.rand(1) * 1e4 + 1
            tensors |= {f"{name}_packed": packed, f"{layer}input_global_scale": torch.rand(1)}
            plain[name] = by_compressed_tensors(packed, scales, second).bfloat16()
        else:
            second = tensors[f"{name}_scale_2"] = torch.rand(()) * 1e-3
            tensors |= {name: packed, f"{layer}input_scale": torch.rand(())}
            plain[name] = by_modelopt(packed, scales, second).bfloat16()
    owner = "" if writer == COMPRESSED else "k_proj."
    tensors[f"model.layers.0.self_attn.{owner}k_scale"] = torch.tensor(0.5)  # of the cache
    said = {"quant_algo": "NVFP4", "group_size": 16}
    if writer != COMPRESSED:
        (directory / "hf_quant_config.json").write_text(json.dumps({"quantization": said}))
    described = {"format": "nvfp4-pack-quantized"} if writer == COMPRESSED else said
    _write(directory, tensors, None if writer == EXPORTED else {"quant_method": writer, **described})
    return plain


_LINEAR = re.compile(r"\.(?:\w+_proj|kv_a_proj_with_mqa)\.weight$")


def to_fp8(
    directory: Path, *, block: int = 128, scale_dtype: torch.dtype = torch.bfloat16, static: bool = False
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Quantise the linear weights of a Hub directory; return the numbers and scales of each.

    Args:
        directory: with one safetensors file.
        block: rows and columns that share a scale.
        scale_dtype: of the scales.
        static: one scale for each weight instead, and one for what goes into its layer.
    """
    tensors, made = dict[str, torch.Tensor](), dict[str, tuple[torch.Tensor, torch.Tensor]]()
    for name, tensor in load_file(directory / "model.safetensors").items():
        if not _LINEAR.search(name):
            tensors[name] = tensor
            continue
        numbers, scales = _fp8(tensor.float(), None if static else block, scale_dtype)
        made[name] = tensors[name], _ = numbers, scales
        tensors[f"{name}_scale" if static else f"{name}_scale_inv"] = scales
        if static:
            tensors[name.removesuffix("weight") + "input_scale"] = torch.tensor(0.5)
    assert made
    described = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "static" if static else "dynamic"}
    _write(directory, tensors, {**described, "weight_block_size": None if static else [block, block]})
    return made


def _fp8(values: torch.Tensor, block: int | None, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    most = torch.finfo(torch.float8_e4m3fn).max
    if block is None:
        scale = (values.abs().max() / most).to(dtype)
        return (values / scale.float()).to(torch.float8_e4m3fn), scale
    rows, columns = values.shape
    scales = torch.empty(-(-rows // block), -(-columns // block), dtype=dtype)
    numbers = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            place = slice(row * block, (row + 1) * block), slice(column * block, (column + 1) * block)
            scales[row, column] = values[place].abs().max() / most
            numbers[place] = (values[place] / scales[row, column].float()).to(torch.float8_e4m3fn)
    return numbers, scales


def to_mxfp4(directory: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Put blocks and scales of random numbers in the place of a gpt_oss's experts; return those of each."""
    tensors, made = dict[str, torch.Tensor](), dict[str, tuple[torch.Tensor, torch.Tensor]]()
    for name, tensor in load_file(directory / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = tensor
            continue
        experts, columns, rows = tensor.shape
        assert columns % 32 == 0
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 124, (experts, rows, columns // 32), dtype=torch.uint8)
        made[name] = tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
    assert made
    _write(directory, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]})
    return made


def _write(directory: Path, tensors: dict[str, torch.Tensor], described: dict[str, Any] | None) -> None:
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    said = {} if described is None else {"quantization_config": described}
    (directory / "config.json").write_text(json.dumps({**config, **said}))
