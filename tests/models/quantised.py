"""Hub directories with quantised weights, in the layouts of Qwen/Qwen3-8B-FP8, deepseek-ai/DeepSeek-V3 and openai/gpt-oss-20b.

The weights of a directory are replaced; nothing of shardkit is used. Qwen3's scales are bfloat16, DeepSeek's float32;
both are named `weight_scale_inv`, and embeddings, norms, routers and the head are not quantised.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

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


def _write(directory: Path, tensors: dict[str, torch.Tensor], described: dict[str, object]) -> None:
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": described}))
