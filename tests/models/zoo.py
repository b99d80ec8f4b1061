"""All architectures of the zoo, and how they are made: every tensor random, no two alike."""

from __future__ import annotations

import itertools
import json
import warnings
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from tests.models.architecture import Architecture
from tests.models.experts import EXPERTS
from tests.models.multimodal import VISION_LANGUAGE
from tests.models.newer import NEWER
from tests.models.recurrent import RECURRENT
from tests.models.repos import REPOS, write
from tests.models.senses import SENSES
from tests.models.text import DECODERS, ENCODER_DECODERS, ENCODERS

_ALL = (
    *DECODERS,
    *EXPERTS,
    *RECURRENT,
    *ENCODERS,
    *ENCODER_DECODERS,
    *VISION_LANGUAGE,
    *SENSES,
)
_CONVERTED = (
    *("jamba", "nemotron_h", "kimi_linear", "ernie4_5_vl_moe"),
    *("olmo_hybrid", "nomic_bert", "gte", "dinov2+swiglu"),
)
"""Whose tensors are others in the Hub's file than in memory."""
_LIVE = (replace(each, name=f"{each.name}+live", names="live") for each in _ALL if each.name in _CONVERTED)
_REPOS = [architecture for architecture, _ in REPOS.values()]
ZOO: dict[str, Architecture] = {each.name: each for each in (*_ALL, *_LIVE, *_REPOS, *NEWER)}
"""Name -> architecture."""

IN_MAKE_PROVE = frozenset(
    (
        *("llama+tied", "qwen3", "gemma3_text", "olmo3", "gpt2", "gpt_neo", "bloom", "falcon", "mpt"),
        "modernbert-decoder",
        *("mixtral", "mixtral+fused", "qwen3_next+fused", "deepseek_v32+fused", "gpt_oss", "llama4_text"),
        "jetmoe",
        *("mamba2", "zamba2", "recurrent_gemma", "jamba", "olmo_hybrid"),
        *("xlm-roberta", "deberta", "albert", "electra", "nomic_bert", "distilbert"),
        *("t5", "marian", "m2m_100"),
        *("qwen2_vl", "llava+tied", "paligemma", "mllama", "clip"),
        *("dinov2", "resnet", "wav2vec2", "whisper"),
        *("deepseek_v4", "diffusion_gemma"),
        *(each.name for each in _REPOS),
    )
)
"""Of each way that names, ties, fp32 and buffers go, one. All others are close relatives: `make models` runs them."""

BROADCAST = frozenset(tuple(ZOO)[::3])
"""Of which one rank reads for both: that way knows nothing of names, and a third of the models is enough."""

# Shorter tensors may be alike by chance.
_DISTINCT_BYTES = 16


def make_hub(architecture: Architecture, directory: Path) -> None:
    """Save a model of bf16 as a Hub directory; what its class keeps in fp32 is fp32, with values that bf16 cannot hold."""
    if architecture.name in REPOS:
        write(REPOS[architecture.name][1], architecture, directory)
        check_distinct(directory)
        return
    model_class = getattr(transformers, architecture.model_class)
    config = transformers.AutoConfig.for_model(architecture.model_type, **architecture.config)
    model = model_class._from_config(config, dtype=torch.bfloat16)
    fill(model)
    save = partial(
        model_class.save_pretrained,
        save_directory=directory,
        save_original_format=architecture.names == "hub",
    )
    save(model)
    if getattr(model, "_keep_in_fp32_modules_strict", None):  # from_pretrained alone makes them fp32
        model = from_pretrained(architecture, directory)
        fill(model)
        save(model)
    check_distinct(directory)


def from_pretrained(architecture: Architecture, directory: Path, **options: Any) -> Any:
    """Return the model that transformers itself loads, in the dtype of its config; `options` are its own."""
    model_class = getattr(transformers, architecture.model_class)
    if is_quantised(architecture.name):
        method = json.loads((directory / "config.json").read_text())["quantization_config"]["quant_method"]
        how = {"fp8": transformers.FineGrainedFP8Config, "mxfp4": transformers.Mxfp4Config}[method]
        options["quantization_config"] = how(dequantize=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model_class.from_pretrained(directory, dtype="auto", **options).eval()


def is_quantised(name: str) -> bool:
    """True if the files of a model have quantised weights, which become plain on their way."""
    return name in REPOS and REPOS[name][1].quantisation is not None


def fill(model: torch.nn.Module) -> None:
    """Give every floating tensor of a model's state dict values that its name decides."""
    done: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in done or not tensor.is_floating_point():
            continue
        done.add(id(tensor))
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(tensor.shape, generator=generator) * 0.1
        tensor.data.copy_(values if tensor.ndim > 1 else 1 + values)


def check_distinct(directory: Path) -> None:
    """Refuse a file in which two tensors are equal, or one is constant: a mistake about them would show nowhere."""
    seen: dict[bytes, str] = {}
    for name, tensor in itertools.chain(
        *(load_file(path).items() for path in directory.glob("*.safetensors"))
    ):
        if not tensor.is_floating_point() or tensor.nbytes < _DISTINCT_BYTES:
            continue
        data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        twin = seen.setdefault(data, name)
        assert twin == name, f"{name} equals {twin}"
        assert tensor.float().unique().numel() > 1, f"{name} is constant"
