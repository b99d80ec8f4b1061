"""Directories as they lie on the Hub: the names, shapes, dtypes and order of real repos, written down by hand.

`save_pretrained` writes what transformers' own reverse says, and many repos are older than that, or were never written
by it: experts one by one, buffers of masks, heads of another class, scales, prefixes that are gone since. Sizes are
those of a tiny config.
"""

from __future__ import annotations

import itertools
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from tests.models.architecture import Architecture
from tests.models.experts import EXPERTS
from tests.models.multimodal import VISION_LANGUAGE
from tests.models.senses import SENSES
from tests.models.text import DECODERS, ENCODER_DECODERS, ENCODERS

DTYPES = {
    **{"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "BOOL": torch.bool},
    **{"U8": torch.uint8, "F8": torch.float8_e4m3fn},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Repo:
    """The weight files of a repo."""

    rows: str
    """A tensor a line: its name, with `{0..3}` for each of a range; its shape, `-` for none; its dtype if it is another."""
    dtype: str = "BF16"
    """Of the tensors that name none."""
    num_files: int = 1
    is_sorted: bool = True
    """The index has the names in their alphabetical order, as `save_pretrained` writes it; else in that of the rows."""
    quantisation: dict[str, Any] | None = None
    """The `quantization_config` of config.json."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor, in the order of the rows, with values that its name decides."""
        found = {}
        for row in self.rows.split("\n"):
            if row:
                name, shape, *dtype = row.split()
                sizes = () if shape == "-" else tuple(map(int, shape.split("x")))
                for each in _expand(name):
                    found[each] = _values(each, sizes, dtype[0] if dtype else self.dtype)
        return found


def write(repo: Repo, architecture: Architecture, directory: Path) -> None:
    """Write the weight files, their index and config.json."""
    tensors = repo.tensors()
    names = sorted(tensors, key=_by_layer)
    config = transformers.AutoConfig.for_model(architecture.model_type, **architecture.config)
    config.architectures, config.dtype = [architecture.model_class], DTYPES[repo.dtype]
    config.save_pretrained(directory)
    if repo.quantisation is not None:
        path = directory / "config.json"
        path.write_text(
            json.dumps({**json.loads(path.read_text()), "quantization_config": repo.quantisation}, indent=2)
        )
    if repo.num_files == 1:
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        return
    weight_map = {}
    for at in range(repo.num_files):
        part = names[at * len(names) // repo.num_files : (at + 1) * len(names) // repo.num_files]
        file = f"model-{at + 1:05}-of-{repo.num_files:05}.safetensors"
        save_file({name: tensors[name] for name in part}, directory / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {name: weight_map[name] for name in (sorted(tensors) if repo.is_sorted else tensors)},
    }
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _expand(pattern: str) -> Iterator[str]:
    parts = re.split(r"\{(\d+)\.\.(\d+)\}", pattern)
    ranges = [range(int(first), int(last) + 1) for first, last in zip(parts[1::3], parts[2::3], strict=True)]
    for numbers in itertools.product(*ranges):
        yield "".join(
            f"{text}{number}" for text, number in itertools.zip_longest(parts[::3], numbers, fillvalue="")
        )


def _by_layer(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _values(name: str, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    if dtype == "U8":
        high = (124, 130) if name.endswith("_scales") else (0, 256)
        return torch.randint(*high, shape, generator=generator, dtype=torch.uint8)
    values = torch.randn(shape, generator=generator)
    if dtype == "BOOL":
        return values > 0
    if dtype == "F8":
        return (values * 100).to(DTYPES[dtype])
    if name.endswith("_scale_inv"):
        return (values.abs() / 1000 + 1e-4).to(DTYPES[dtype])
    return (values * 0.1 if len(shape) > 1 else 1 + values * 0.1).to(DTYPES[dtype])


_ATTENTION = """
model.layers.{0..1}.input_layernorm.weight 32
model.layers.{0..1}.post_attention_layernorm.weight 32
model.layers.{0..1}.self_attn.k_proj.weight 16x32
model.layers.{0..1}.self_attn.o_proj.weight 32x32
model.layers.{0..1}.self_attn.q_proj.weight 32x32
model.layers.{0..1}.self_attn.v_proj.weight 16x32
model.norm.weight 32
lm_head.weight 99x32
model.embed_tokens.weight 99x32
"""

MIXTRAL = Repo(
    num_files=3,
    rows=f"""
model.layers.{{0..1}}.block_sparse_moe.experts.{{0..3}}.w1.weight 48x32
model.layers.{{0..1}}.block_sparse_moe.experts.{{0..3}}.w2.weight 32x48
model.layers.{{0..1}}.block_sparse_moe.experts.{{0..3}}.w3.weight 48x32
model.layers.{{0..1}}.block_sparse_moe.gate.weight 4x32
{_ATTENTION}""",
)
"""mistralai/Mixtral-8x7B-v0.1"""

QWEN3_MOE = Repo(
    num_files=2,
    rows=f"""
model.layers.{{0..1}}.mlp.experts.{{0..3}}.down_proj.weight 32x16
model.layers.{{0..1}}.mlp.experts.{{0..3}}.gate_proj.weight 16x32
model.layers.{{0..1}}.mlp.experts.{{0..3}}.up_proj.weight 16x32
model.layers.{{0..1}}.mlp.gate.weight 4x32
model.layers.{{0..1}}.self_attn.k_norm.weight 8
model.layers.{{0..1}}.self_attn.q_norm.weight 8
{_ATTENTION}""",
)
"""Qwen/Qwen3-30B-A3B"""

_LATENT = """
model.layers.{layers}.self_attn.q_a_proj.weight 8x32 F8
model.layers.{layers}.self_attn.q_a_proj.weight_scale_inv 1x1 F32
model.layers.{layers}.self_attn.q_a_layernorm.weight 8
model.layers.{layers}.self_attn.q_b_proj.weight 40x8 F8
model.layers.{layers}.self_attn.q_b_proj.weight_scale_inv 1x1 F32
model.layers.{layers}.self_attn.kv_a_proj_with_mqa.weight 12x32 F8
model.layers.{layers}.self_attn.kv_a_proj_with_mqa.weight_scale_inv 1x1 F32
model.layers.{layers}.self_attn.kv_a_layernorm.weight 8
model.layers.{layers}.self_attn.kv_b_proj.weight 48x8 F8
model.layers.{layers}.self_attn.kv_b_proj.weight_scale_inv 1x1 F32
model.layers.{layers}.self_attn.o_proj.weight 32x24 F8
model.layers.{layers}.self_attn.o_proj.weight_scale_inv 1x1 F32
"""
_FEEDFORWARD = """
model.layers.{layers}.mlp.{part}gate_proj.weight {inner}x32 F8
model.layers.{layers}.mlp.{part}gate_proj.weight_scale_inv 1x1 F32
model.layers.{layers}.mlp.{part}up_proj.weight {inner}x32 F8
model.layers.{layers}.mlp.{part}up_proj.weight_scale_inv 1x1 F32
model.layers.{layers}.mlp.{part}down_proj.weight 32x{inner} F8
model.layers.{layers}.mlp.{part}down_proj.weight_scale_inv 1x1 F32
"""
_NORMS = """
model.layers.{layers}.input_layernorm.weight 32
model.layers.{layers}.post_attention_layernorm.weight 32
"""


def _deepseek_layer(layer: int, *, has_experts: bool) -> str:
    parts = {"experts.{0..3}.": 16, "shared_experts.": 16} if has_experts else {"": 48}
    router = f"model.layers.{layer}.mlp.gate.weight 4x32\nmodel.layers.{layer}.mlp.gate.e_score_correction_bias 4 F32\n"
    return "".join(
        [
            _LATENT.replace("{layers}", str(layer)),
            router if has_experts else "",
            *(
                _FEEDFORWARD.replace("{layers}", str(layer))
                .replace("{part}", part)
                .replace("{inner}", str(inner))
                for part, inner in parts.items()
            ),
            _NORMS.replace("{layers}", str(layer)),
        ]
    )


DEEPSEEK_V3 = Repo(
    num_files=3,
    is_sorted=False,
    quantisation={
        **{"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"},
        "weight_block_size": [128, 128],
    },
    rows=f"""
model.embed_tokens.weight 99x32
{_deepseek_layer(0, has_experts=False)}
{_deepseek_layer(1, has_experts=True)}
model.layers.61.embed_tokens.weight 99x32
model.layers.61.enorm.weight 32
model.layers.61.hnorm.weight 32
model.layers.61.eh_proj.weight 32x64
{_deepseek_layer(61, has_experts=True)}
model.layers.61.shared_head.norm.weight 32
model.layers.61.shared_head.head.weight 99x32
model.norm.weight 32
lm_head.weight 99x32
""",
)
"""deepseek-ai/DeepSeek-V3; layer 61 foretells tokens, and transformers leaves it out"""

_QWEN3_VISION = """
{root}blocks.{0..1}.attn.proj.bias 16
{root}blocks.{0..1}.attn.proj.weight 16x16
{root}blocks.{0..1}.attn.qkv.bias 48
{root}blocks.{0..1}.attn.qkv.weight 48x16
{root}blocks.{0..1}.mlp.linear_fc1.bias 28
{root}blocks.{0..1}.mlp.linear_fc1.weight 28x16
{root}blocks.{0..1}.mlp.linear_fc2.bias 16
{root}blocks.{0..1}.mlp.linear_fc2.weight 16x28
{root}blocks.{0..1}.norm1.bias 16
{root}blocks.{0..1}.norm1.weight 16
{root}blocks.{0..1}.norm2.bias 16
{root}blocks.{0..1}.norm2.weight 16
{root}deepstack_merger_list.0.linear_fc1.bias 64
{root}deepstack_merger_list.0.linear_fc1.weight 64x64
{root}deepstack_merger_list.0.linear_fc2.bias 32
{root}deepstack_merger_list.0.linear_fc2.weight 32x64
{root}deepstack_merger_list.0.norm.bias 64
{root}deepstack_merger_list.0.norm.weight 64
{root}merger.linear_fc1.bias 64
{root}merger.linear_fc1.weight 64x64
{root}merger.linear_fc2.bias 32
{root}merger.linear_fc2.weight 32x64
{root}merger.norm.bias 16
{root}merger.norm.weight 16
{root}patch_embed.proj.bias 16
{root}patch_embed.proj.weight 16x3x2x4x4
{root}pos_embed.weight 16x16
""".replace("{root}", "model.visual.")

QWEN3_VL_MOE = Repo(
    num_files=2,
    rows=f"""
model.language_model.layers.{{0..1}}.mlp.experts.down_proj 4x24x32
model.language_model.layers.{{0..1}}.mlp.experts.gate_up_proj 4x32x48
model.language_model.layers.{{0..1}}.mlp.gate.weight 4x32
model.language_model.layers.{{0..1}}.self_attn.k_norm.weight 8
model.language_model.layers.{{0..1}}.self_attn.q_norm.weight 8
{_ATTENTION.replace("model.", "model.language_model.")}
{_QWEN3_VISION}""",
)
"""Qwen/Qwen3-VL-30B-A3B-Instruct: experts are [E, in, out]"""

GPT_OSS = Repo(
    num_files=2,
    quantisation={
        "modules_to_not_convert": [
            *("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"),
        ],
        "quant_method": "mxfp4",
    },
    rows=f"""
model.layers.{{0..1}}.mlp.experts.down_proj_bias 4x32
model.layers.{{0..1}}.mlp.experts.down_proj_blocks 4x32x2x16 U8
model.layers.{{0..1}}.mlp.experts.down_proj_scales 4x32x2 U8
model.layers.{{0..1}}.mlp.experts.gate_up_proj_bias 4x128
model.layers.{{0..1}}.mlp.experts.gate_up_proj_blocks 4x128x1x16 U8
model.layers.{{0..1}}.mlp.experts.gate_up_proj_scales 4x128x1 U8
model.layers.{{0..1}}.mlp.router.bias 4
model.layers.{{0..1}}.mlp.router.weight 4x32
model.layers.{{0..1}}.self_attn.k_proj.bias 16
model.layers.{{0..1}}.self_attn.o_proj.bias 32
model.layers.{{0..1}}.self_attn.q_proj.bias 32
model.layers.{{0..1}}.self_attn.sinks 4
model.layers.{{0..1}}.self_attn.v_proj.bias 16
{_ATTENTION}""",
)
"""openai/gpt-oss-20b"""

QWEN3_FP8 = Repo(
    num_files=2,
    quantisation={
        **{"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"},
        "modules_to_not_convert": ["lm_head", "model.embed_tokens", "model.norm"],
        "weight_block_size": [128, 128],
    },
    rows="""
lm_head.weight 99x128
model.embed_tokens.weight 99x128
model.layers.{0..1}.input_layernorm.weight 128
model.layers.{0..1}.mlp.down_proj.weight 128x256 F8
model.layers.{0..1}.mlp.down_proj.weight_scale_inv 1x2
model.layers.{0..1}.mlp.gate_proj.weight 256x128 F8
model.layers.{0..1}.mlp.gate_proj.weight_scale_inv 2x1
model.layers.{0..1}.mlp.up_proj.weight 256x128 F8
model.layers.{0..1}.mlp.up_proj.weight_scale_inv 2x1
model.layers.{0..1}.post_attention_layernorm.weight 128
model.layers.{0..1}.self_attn.k_norm.weight 32
model.layers.{0..1}.self_attn.k_proj.weight 64x128 F8
model.layers.{0..1}.self_attn.k_proj.weight_scale_inv 1x1
model.layers.{0..1}.self_attn.o_proj.weight 128x128 F8
model.layers.{0..1}.self_attn.o_proj.weight_scale_inv 1x1
model.layers.{0..1}.self_attn.q_norm.weight 32
model.layers.{0..1}.self_attn.q_proj.weight 128x128 F8
model.layers.{0..1}.self_attn.q_proj.weight_scale_inv 1x1
model.layers.{0..1}.self_attn.v_proj.weight 64x128 F8
model.layers.{0..1}.self_attn.v_proj.weight_scale_inv 1x1
model.norm.weight 128
""",
)
"""Qwen/Qwen3-8B-FP8"""

GPT2 = Repo(
    dtype="F32",
    rows="""
h.{0..1}.attn.bias 1x1x64x64
h.{0..1}.attn.c_attn.bias 72
h.{0..1}.attn.c_attn.weight 24x72
h.{0..1}.attn.c_proj.bias 24
h.{0..1}.attn.c_proj.weight 24x24
h.{0..1}.ln_1.bias 24
h.{0..1}.ln_1.weight 24
h.{0..1}.ln_2.bias 24
h.{0..1}.ln_2.weight 24
h.{0..1}.mlp.c_fc.bias 96
h.{0..1}.mlp.c_fc.weight 24x96
h.{0..1}.mlp.c_proj.bias 24
h.{0..1}.mlp.c_proj.weight 96x24
ln_f.bias 24
ln_f.weight 24
wpe.weight 64x24
wte.weight 99x24
""",
)
"""openai-community/gpt2: no `transformer.`, and its masks"""

BERT = Repo(
    dtype="F32",
    rows="""
bert.embeddings.LayerNorm.beta 24
bert.embeddings.LayerNorm.gamma 24
bert.embeddings.position_embeddings.weight 64x24
bert.embeddings.token_type_embeddings.weight 2x24
bert.embeddings.word_embeddings.weight 99x24
bert.encoder.layer.{0..1}.attention.output.LayerNorm.beta 24
bert.encoder.layer.{0..1}.attention.output.LayerNorm.gamma 24
bert.encoder.layer.{0..1}.attention.output.dense.bias 24
bert.encoder.layer.{0..1}.attention.output.dense.weight 24x24
bert.encoder.layer.{0..1}.attention.self.key.bias 24
bert.encoder.layer.{0..1}.attention.self.key.weight 24x24
bert.encoder.layer.{0..1}.attention.self.query.bias 24
bert.encoder.layer.{0..1}.attention.self.query.weight 24x24
bert.encoder.layer.{0..1}.attention.self.value.bias 24
bert.encoder.layer.{0..1}.attention.self.value.weight 24x24
bert.encoder.layer.{0..1}.intermediate.dense.bias 40
bert.encoder.layer.{0..1}.intermediate.dense.weight 40x24
bert.encoder.layer.{0..1}.output.LayerNorm.beta 24
bert.encoder.layer.{0..1}.output.LayerNorm.gamma 24
bert.encoder.layer.{0..1}.output.dense.bias 24
bert.encoder.layer.{0..1}.output.dense.weight 24x40
bert.pooler.dense.bias 24
bert.pooler.dense.weight 24x24
cls.predictions.bias 99
cls.predictions.transform.LayerNorm.beta 24
cls.predictions.transform.LayerNorm.gamma 24
cls.predictions.transform.dense.bias 24
cls.predictions.transform.dense.weight 24x24
cls.seq_relationship.bias 2
cls.seq_relationship.weight 2x24
""",
)
"""google-bert/bert-base-uncased: gamma and beta, and the parts of BertForPreTraining"""

_LLAMA = """
lm_head.weight 99x24
model.embed_tokens.weight 99x24
model.layers.{0..1}.input_layernorm.weight 24
model.layers.{0..1}.mlp.down_proj.weight 24x40
model.layers.{0..1}.mlp.gate_proj.weight 40x24
model.layers.{0..1}.mlp.up_proj.weight 40x24
model.layers.{0..1}.post_attention_layernorm.weight 24
model.layers.{0..1}.self_attn.k_proj.weight 12x24
model.layers.{0..1}.self_attn.o_proj.weight 24x24
model.layers.{0..1}.self_attn.q_proj.weight 24x24
model.layers.{0..1}.self_attn.v_proj.weight 12x24
model.norm.weight 24
"""

LLAMA_2 = Repo(
    dtype="F16", num_files=2, rows=f"{_LLAMA}model.layers.{{0..1}}.self_attn.rotary_emb.inv_freq 3 F32\n"
)
"""meta-llama/Llama-2-7b-hf: with the frequencies of its rotary embedding"""

QWEN2_5_VL = Repo(
    num_files=2,
    rows=f"""
{_LLAMA}
model.layers.{{0..1}}.self_attn.k_proj.bias 12
model.layers.{{0..1}}.self_attn.q_proj.bias 24
model.layers.{{0..1}}.self_attn.v_proj.bias 12
visual.blocks.{{0..1}}.attn.proj.bias 16
visual.blocks.{{0..1}}.attn.proj.weight 16x16
visual.blocks.{{0..1}}.attn.qkv.bias 48
visual.blocks.{{0..1}}.attn.qkv.weight 48x16
visual.blocks.{{0..1}}.mlp.down_proj.bias 16
visual.blocks.{{0..1}}.mlp.down_proj.weight 16x28
visual.blocks.{{0..1}}.mlp.gate_proj.bias 28
visual.blocks.{{0..1}}.mlp.gate_proj.weight 28x16
visual.blocks.{{0..1}}.mlp.up_proj.bias 28
visual.blocks.{{0..1}}.mlp.up_proj.weight 28x16
visual.blocks.{{0..1}}.norm1.weight 16
visual.blocks.{{0..1}}.norm2.weight 16
visual.merger.ln_q.weight 16
visual.merger.mlp.0.bias 64
visual.merger.mlp.0.weight 64x64
visual.merger.mlp.2.bias 24
visual.merger.mlp.2.weight 24x64
visual.patch_embed.proj.weight 16x3x2x4x4
""",
)
"""Qwen/Qwen2.5-VL-7B-Instruct"""

_VISION = """
vision_tower.vision_model.encoder.layers.{0..1}.layer_norm1.bias 16
vision_tower.vision_model.encoder.layers.{0..1}.layer_norm1.weight 16
vision_tower.vision_model.encoder.layers.{0..1}.layer_norm2.bias 16
vision_tower.vision_model.encoder.layers.{0..1}.layer_norm2.weight 16
vision_tower.vision_model.encoder.layers.{0..1}.mlp.fc1.bias 28
vision_tower.vision_model.encoder.layers.{0..1}.mlp.fc1.weight 28x16
vision_tower.vision_model.encoder.layers.{0..1}.mlp.fc2.bias 16
vision_tower.vision_model.encoder.layers.{0..1}.mlp.fc2.weight 16x28
vision_tower.vision_model.encoder.layers.{0..1}.self_attn.k_proj.bias 16
vision_tower.vision_model.encoder.layers.{0..1}.self_attn.k_proj.weight 16x16
vision_tower.vision_model.encoder.layers.{0..1}.self_attn.out_proj.bias 16
vision_tower.vision_model.encoder.layers.{0..1}.self_attn.out_proj.weight 16x16
vision_tower.vision_model.encoder.layers.{0..1}.self_attn.q_proj.bias 16
vision_tower.vision_model.encoder.layers.{0..1}.self_attn.q_proj.weight 16x16
vision_tower.vision_model.encoder.layers.{0..1}.self_attn.v_proj.bias 16
vision_tower.vision_model.encoder.layers.{0..1}.self_attn.v_proj.weight 16x16
vision_tower.vision_model.post_layernorm.bias 16
vision_tower.vision_model.post_layernorm.weight 16
vision_tower.vision_model.embeddings.patch_embedding.weight 16x3x4x4
"""

GEMMA_3 = Repo(
    num_files=2,
    rows=f"""
language_model.model.layers.{{0..1}}.post_feedforward_layernorm.weight 24
language_model.model.layers.{{0..1}}.pre_feedforward_layernorm.weight 24
language_model.model.layers.{{0..1}}.self_attn.k_norm.weight 6
language_model.model.layers.{{0..1}}.self_attn.q_norm.weight 6
{_LLAMA.replace("lm_head.weight 99x24", "").replace("model.", "language_model.model.")}
multi_modal_projector.mm_input_projection_weight 16x24
multi_modal_projector.mm_soft_emb_norm.weight 16
vision_tower.vision_model.embeddings.patch_embedding.bias 16
vision_tower.vision_model.embeddings.position_embedding.weight 16x16
{_VISION}""",
)
"""google/gemma-3-4b-it"""

LLAVA = Repo(
    dtype="F16",
    num_files=3,
    rows=f"""
{_LLAMA.replace("model.", "language_model.model.").replace("lm_head", "language_model.lm_head")}
multi_modal_projector.linear_1.bias 24
multi_modal_projector.linear_1.weight 24x16
multi_modal_projector.linear_2.bias 24
multi_modal_projector.linear_2.weight 24x24
vision_tower.vision_model.embeddings.class_embedding 16
vision_tower.vision_model.embeddings.position_embedding.weight 5x16
vision_tower.vision_model.pre_layrnorm.bias 16
vision_tower.vision_model.pre_layrnorm.weight 16
{_VISION}""",
)
"""llava-hf/llava-1.5-7b-hf"""

PYTHIA = Repo(
    dtype="F16",
    rows="""
embed_out.weight 99x24
gpt_neox.embed_in.weight 99x24
gpt_neox.final_layer_norm.bias 24
gpt_neox.final_layer_norm.weight 24
gpt_neox.layers.{0..1}.attention.bias 1x1x64x64 BOOL
gpt_neox.layers.{0..1}.attention.dense.bias 24
gpt_neox.layers.{0..1}.attention.dense.weight 24x24
gpt_neox.layers.{0..1}.attention.masked_bias -
gpt_neox.layers.{0..1}.attention.query_key_value.bias 72
gpt_neox.layers.{0..1}.attention.query_key_value.weight 72x24
gpt_neox.layers.{0..1}.attention.rotary_emb.inv_freq 3
gpt_neox.layers.{0..1}.input_layernorm.bias 24
gpt_neox.layers.{0..1}.input_layernorm.weight 24
gpt_neox.layers.{0..1}.mlp.dense_4h_to_h.bias 24
gpt_neox.layers.{0..1}.mlp.dense_4h_to_h.weight 24x40
gpt_neox.layers.{0..1}.mlp.dense_h_to_4h.bias 40
gpt_neox.layers.{0..1}.mlp.dense_h_to_4h.weight 40x24
gpt_neox.layers.{0..1}.post_attention_layernorm.bias 24
gpt_neox.layers.{0..1}.post_attention_layernorm.weight 24
""",
)
"""EleutherAI/pythia-70m: masks, their value, frequencies"""

T5 = Repo(
    dtype="F32",
    rows="""
decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight 8x4
decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight 8x4
decoder.block.{0..1}.layer.0.SelfAttention.k.weight 24x24
decoder.block.{0..1}.layer.0.SelfAttention.o.weight 24x24
decoder.block.{0..1}.layer.0.SelfAttention.q.weight 24x24
decoder.block.{0..1}.layer.0.SelfAttention.v.weight 24x24
decoder.block.{0..1}.layer.0.layer_norm.weight 24
decoder.block.{0..1}.layer.1.EncDecAttention.k.weight 24x24
decoder.block.{0..1}.layer.1.EncDecAttention.o.weight 24x24
decoder.block.{0..1}.layer.1.EncDecAttention.q.weight 24x24
decoder.block.{0..1}.layer.1.EncDecAttention.v.weight 24x24
decoder.block.{0..1}.layer.1.layer_norm.weight 24
decoder.block.{0..1}.layer.2.DenseReluDense.wi.weight 40x24
decoder.block.{0..1}.layer.2.DenseReluDense.wo.weight 24x40
decoder.block.{0..1}.layer.2.layer_norm.weight 24
decoder.final_layer_norm.weight 24
encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight 8x4
encoder.block.{0..1}.layer.0.SelfAttention.k.weight 24x24
encoder.block.{0..1}.layer.0.SelfAttention.o.weight 24x24
encoder.block.{0..1}.layer.0.SelfAttention.q.weight 24x24
encoder.block.{0..1}.layer.0.SelfAttention.v.weight 24x24
encoder.block.{0..1}.layer.0.layer_norm.weight 24
encoder.block.{0..1}.layer.1.DenseReluDense.wi.weight 40x24
encoder.block.{0..1}.layer.1.DenseReluDense.wo.weight 24x40
encoder.block.{0..1}.layer.1.layer_norm.weight 24
encoder.final_layer_norm.weight 24
shared.weight 99x24
""",
)
"""google-t5/t5-small: a bias of positions that no class has since"""

VIT = Repo(
    dtype="F32",
    rows="""
classifier.bias 5
classifier.weight 5x16
vit.embeddings.cls_token 1x1x16
vit.embeddings.patch_embeddings.projection.bias 16
vit.embeddings.patch_embeddings.projection.weight 16x3x4x4
vit.embeddings.position_embeddings 1x17x16
vit.encoder.layer.{0..1}.attention.attention.key.bias 16
vit.encoder.layer.{0..1}.attention.attention.key.weight 16x16
vit.encoder.layer.{0..1}.attention.attention.query.bias 16
vit.encoder.layer.{0..1}.attention.attention.query.weight 16x16
vit.encoder.layer.{0..1}.attention.attention.value.bias 16
vit.encoder.layer.{0..1}.attention.attention.value.weight 16x16
vit.encoder.layer.{0..1}.attention.output.dense.bias 16
vit.encoder.layer.{0..1}.attention.output.dense.weight 16x16
vit.encoder.layer.{0..1}.intermediate.dense.bias 28
vit.encoder.layer.{0..1}.intermediate.dense.weight 28x16
vit.encoder.layer.{0..1}.layernorm_after.bias 16
vit.encoder.layer.{0..1}.layernorm_after.weight 16
vit.encoder.layer.{0..1}.layernorm_before.bias 16
vit.encoder.layer.{0..1}.layernorm_before.weight 16
vit.encoder.layer.{0..1}.output.dense.bias 16
vit.encoder.layer.{0..1}.output.dense.weight 16x28
vit.layernorm.bias 16
vit.layernorm.weight 16
""",
)
"""google/vit-base-patch16-224"""

_TINY = {
    each.name: each for each in (*DECODERS, *EXPERTS, *ENCODERS, *ENCODER_DECODERS, *VISION_LANGUAGE, *SENSES)
}


def _as_on_the_hub(name: str, **config: Any) -> Architecture:
    tiny = _TINY[name]
    return replace(
        tiny, name=f"{name}+repo", kind="as on the Hub", names="repo", config={**tiny.config, **config}
    )


_QWEN3_VL_MOE = _TINY["qwen3_vl_moe"].config["text_config"]
REPOS = {
    each.name: (each, repo)
    for each, repo in (
        (_as_on_the_hub("mixtral"), MIXTRAL),
        (_as_on_the_hub("qwen3_moe"), QWEN3_MOE),
        (_as_on_the_hub("deepseek_v3"), DEEPSEEK_V3),
        (
            _as_on_the_hub("qwen3_vl_moe", text_config={**_QWEN3_VL_MOE, "moe_intermediate_size": 24}),
            QWEN3_VL_MOE,
        ),
        (_as_on_the_hub("gpt_oss", intermediate_size=64), GPT_OSS),
        (
            _as_on_the_hub(
                "qwen3", hidden_size=128, intermediate_size=256, head_dim=32, tie_word_embeddings=False
            ),
            QWEN3_FP8,
        ),
        (_as_on_the_hub("gpt2"), GPT2),
        (_as_on_the_hub("bert"), BERT),
        (_as_on_the_hub("llama"), LLAMA_2),
        (_as_on_the_hub("qwen2_5_vl"), QWEN2_5_VL),
        (_as_on_the_hub("gemma3"), GEMMA_3),
        (_as_on_the_hub("llava"), LLAVA),
        (_as_on_the_hub("gpt_neox"), PYTHIA),
        (_as_on_the_hub("t5"), T5),
        (_as_on_the_hub("vit"), VIT),
    )
}
"""Name -> the tiny model, and its files."""
