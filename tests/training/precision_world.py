"""Two gloo ranks run real models in bf16 as `wrap` leaves them; `from_pretrained` in bf16 says what is right.

    python precision_world.py OUT

Every rank writes OUT/logits-<rank>.json: by model and dtype of the masters, what differs.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import shardkit
from shardkit._torch import fsdp2_units
from shardkit.keys.names import clean_name
from shardkit.layout import traced
from shardkit.training.diagnostics.diagnose import diagnose
from shardkit.training.finalize import finalize
from shardkit.training.prepare import prepare
from shardkit.training.wrap import wrap
from tests.training import models
from tests.training.wrapping import full
from tests.worlds.processes import end_world, fork, forked_trace, wait

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

SIZE = 2
Found = dict[str, Any]
Inputs = dict[str, torch.Tensor]


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def text() -> Inputs:
    return models.inputs("")


def masked() -> Inputs:
    """A mask of floats, as it is added to scores: nobody sees the last two tokens."""
    mask = torch.zeros(2, 1, 7, 7)
    mask[..., 5:] = -1e4
    return {**text(), "attention_mask": mask + torch.full((7, 7), -1e4).triu(1)}


def translated(**inputs: torch.Tensor) -> Inputs:
    return {**(inputs or text()), "decoder_input_ids": text()["input_ids"]}


def with_image() -> Inputs:
    """One picture of 2 x 2 patches of Qwen-VL's, merged into one token, in each text."""
    found = text()
    found["input_ids"][:, 2:4] = torch.tensor([models.VOCABULARY + 3, models.VOCABULARY + 1])
    types = (found["input_ids"] == models.VOCABULARY + 1).long()
    grid = torch.tensor([[1, 2, 2]] * 2)
    return {**found, "pixel_values": noise(8, 96), "image_grid_thw": grid, "mm_token_type_ids": types}


class Case(NamedTuple):
    class_name: str
    config: Callable[[], Any]
    inputs: Callable[[], Inputs] = text
    half: str = "bf16"
    masters: tuple[str, ...] = ("bf16", "fp32")
    fp32: tuple[str, ...] = ()
    """Patterns of parameters that the class has in fp32."""


_SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_SPEECH = {
    **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": models.VOCABULARY},
    **{
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
    },
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
}
_WAVES = {
    **{"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2},
    **{"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "vocab_size": 32},
}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_EXPERTS = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}
_IMAGES = {"image_size": 8, "patch_size": 4}
_STATES = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": models.VOCABULARY, "state_size": 4}


def _config(name: str, *parts: dict[str, Any], **more: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, name)(
        **{key: value for part in (*parts, more) for key, value in part.items()}
    )


def _known(name: str) -> Callable[[], Any]:
    return lambda: models.config_of(name)


def _blip2() -> Any:
    return transformers.Blip2Config(
        vision_config={**_SMALL, **_IMAGES},
        qformer_config={**_SMALL, **_NO_DROPOUT, "vocab_size": 8, "encoder_hidden_size": 32},
        text_config={
            **{"model_type": "opt", "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "dropout": 0.0},
            **{"num_attention_heads": 4, "vocab_size": models.VOCABULARY + 10, "max_position_embeddings": 64},
            **{"word_embed_proj_dim": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        },
        num_query_tokens=4,
        image_token_index=models.VOCABULARY + 1,
    )


def pictured() -> Inputs:
    found = text()
    found["input_ids"][:, :4] = models.VOCABULARY + 1
    return {**found, "pixel_values": noise(2, 3, 8, 8).half()}


CASES: dict[str, Case] = {
    "llama": Case("LlamaForCausalLM", _known("llama")),
    "llama-mask": Case("LlamaForCausalLM", _known("llama"), masked),
    # These hand on in fp32: rotary tables, biases of attention, the residual.
    "olmo2": Case("Olmo2ForCausalLM", _config("Olmo2Config", models.decoder())),
    "ernie4_5": Case("Ernie4_5ForCausalLM", _config("Ernie4_5Config", models.decoder(head_dim=6))),
    "mpt": Case(
        "MptForCausalLM",
        _config("MptConfig", d_model=32, n_heads=4, n_layers=2, vocab_size=models.VOCABULARY),
    ),
    "mamba": Case("MambaForCausalLM", _config("MambaConfig", _STATES, time_step_rank=4)),
    "qwen2.5-vl": Case("Qwen2_5_VLForConditionalGeneration", _known("qwen2.5-vl"), with_image),
    # These get floats from outside.
    "whisper": Case(
        "WhisperForConditionalGeneration",
        _config("WhisperConfig", _SPEECH, num_mel_bins=8, max_source_positions=16, max_target_positions=32),
        lambda: translated(input_features=noise(2, 8, 32)),
    ),
    "wav2vec2": Case(
        "Wav2Vec2ForCTC",
        _config("Wav2Vec2Config", _SMALL, _WAVES),
        lambda: {"input_values": noise(2, 800)},
    ),
    # The embeddings are a unit, and get pixels in the dtype of their weights.
    "vit": Case(
        "ViTForImageClassification",
        _config("ViTConfig", _SMALL, _IMAGES),
        lambda: {"pixel_values": noise(2, 3, 8, 8)},
    ),
    "bert": Case(
        "BertForMaskedLM", _known("bert-lm"), lambda: {**text(), "attention_mask": torch.ones(2, 7).tril(5)}
    ),
    "bart": Case("BartForConditionalGeneration", _config("BartConfig", _SPEECH), translated),
    # Buffers that are in no file: positions, factors of a whole layer.
    "m2m": Case(
        "M2M100ForConditionalGeneration",
        _config("M2M100Config", _SPEECH, max_position_embeddings=64),
        translated,
    ),
    "falcon-h1": Case(
        "FalconH1ForCausalLM",
        _config(
            "FalconH1Config",
            models.decoder(hidden_size=32, head_dim=8, num_hidden_layers=2),
            {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
        ),
    ),
    "t5": Case(
        "T5ForConditionalGeneration",
        _config("T5Config", d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0),
        translated,
    ),
}


# Parameters in fp32 beside half precision: routers, outputs of feed-forward layers, biases, a whole Q-Former.
KEPT: dict[str, Case] = {
    "ernie4_5-moe": Case(
        "Ernie4_5_MoeForCausalLM",
        _config(
            "Ernie4_5_MoeConfig",
            models.decoder(head_dim=6, num_hidden_layers=2),
            _EXPERTS,
            moe_layer_start_index=1,
        ),
        fp32=(r"mlp\.gate\.",),
    ),
    "hunyuan-moe": Case(
        "HunYuanMoEV1ForCausalLM",
        _config(
            "HunYuanMoEV1Config",
            models.decoder(num_hidden_layers=2, intermediate_size=32),
            num_experts=4,
            moe_topk=2,
        ),
        fp32=(r"mlp\.gate\.wg\.",),
    ),
    "deberta": Case(
        "DebertaForMaskedLM",
        _config("DebertaConfig", _SMALL, _NO_DROPOUT, vocab_size=models.VOCABULARY, relative_attention=True),
        fp32=("q_bias", "v_bias"),
    ),
    "t5": Case(*CASES["t5"][:3], "fp16", ("fp16",), (r"\.wo\.",)),
    "blip2": Case(
        "Blip2ForConditionalGeneration", _blip2, pictured, "fp16", ("fp16",), ("query_tokens", "qformer")
    ),
}

PRESHARDED = ("hunyuan-moe", "deberta")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def save(out: Path, case: Case) -> None:
    """Save a model in half precision, each value of it random; experts as the model has them, in one tensor."""
    config = case.config()
    config.architectures, config.dtype = [case.class_name], _DTYPES[case.half]
    model = getattr(transformers, case.class_name)._from_config(config, dtype=_DTYPES[case.half])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator) * 0.05
            parameter.copy_(values + (1.0 if parameter.ndim == 1 else 0.0))
    model.save_pretrained(out)
    if "moe" in case.class_name.lower():
        save_file(model.state_dict(), out / "model.safetensors", metadata={"format": "pt"})


def logits(model: nn.Module, inputs: Inputs) -> torch.Tensor:
    return model(**inputs).logits


def halved(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """A model in half precision takes no fp32 from outside; the root casts it."""
    return {key: x.to(dtype) if x.is_floating_point() else x for key, x in inputs.items()}


def in_one_process(path: Path, case: Case) -> nn.Module:
    dtype = _DTYPES[case.half]
    model = getattr(transformers, case.class_name).from_pretrained(path, dtype=dtype).eval()
    if case.class_name == "DebertaForMaskedLM":  # its forward fails in half precision but with these rounded
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(dtype) if name.endswith(case.fp32) else parameter.data
    return model


def compare(out: Path, mesh: DeviceMesh, name: str) -> Found:
    """Compare logits with those of one process, for masters in bf16 and in fp32."""
    case, inputs = CASES[name], CASES[name].inputs()
    with torch.no_grad():
        expected = logits(in_one_process(out / name, case), halved(inputs, torch.bfloat16))
        found: Found = {"spread": float(expected.float().std())}
        for dtype in case.masters:
            context = prepare(out / name, out / name, dtype=dtype)
            model = finalize(wrap(context.model, mesh), context).eval()
            found[dtype] = float((logits(model, inputs).float() - expected.float()).abs().max())
    return found


def train(out: Path, mesh: DeviceMesh, name: str) -> Found:
    """Compare logits and gradients of a model with parameters in fp32; each rank has a batch of its own."""
    case = KEPT[name]
    batches = [case.inputs(), case.inputs()]
    if name != "blip2":
        batches[1] = {key: x.flip(-1) for key, x in batches[1].items()}
    plain = in_one_process(out / f"kept-{name}", case)
    expected, mean = [], dict[str, torch.Tensor]()
    for batch in batches:
        plain.zero_grad()
        expected.append(logits(plain, halved(batch, _DTYPES[case.half])))
        expected[-1].float().pow(2).sum().backward()
        for fqn, parameter in plain.named_parameters():
            if parameter.grad is not None:
                mean[fqn] = mean.get(fqn, 0) + parameter.grad.float() / len(batches)
    found: Found = {}
    sources = [(dtype, again, out / f"kept-{name}") for dtype in case.masters for again in (False, True)]
    if (out / f"presharded-{name}").exists():
        sources.append((case.half, False, out / f"presharded-{name}"))
    for dtype, again, source in sources:
        context = prepare(out / f"kept-{name}", source, dtype=dtype)
        options = {
            "mixed_precision": "bf16" if case.half == "bf16" else None,
            "activation_checkpointing": again,
        }
        model = wrap(context.model, mesh, **options)
        units = [unit.path for unit in diagnose(model).units]
        ours = logits(finalize(model, context).train(again), batches[mesh.get_rank()])
        ours.float().pow(2).sum().backward()
        held = {clean_name(fqn): parameter for fqn, parameter in model.named_parameters()}
        errors = {
            fqn: float((full(held[fqn].grad).float() - gradient).abs().max())
            for fqn, gradient in mean.items()
        }
        found[f"{dtype}{'-again' if again else ''}{'-presharded' if 'presharded' in source.name else ''}"] = {
            "logits": float((ours.float() - expected[mesh.get_rank()].float()).abs().max()),
            # Rounded twice at most: per rank, and as a mean. What is 0 but for rounding is held against the largest.
            "gradients": max(error / float(mean[fqn].abs().max() + 1e-3) for fqn, error in errors.items()),
            # A bias of keys changes no softmax: its gradient is nothing but rounding.
            "kept": max(
                error / float(mean[fqn].abs().max())
                for fqn, error in errors.items()
                if re.search("|".join(case.fp32), fqn) and not fqn.endswith("key.bias")
            ),
            "wide": sorted(fqn for fqn, parameter in held.items() if parameter.dtype == torch.float32),
            "outside": sorted(fqn for fqn, parameter in held.items() if not isinstance(parameter, DTensor)),
            "units": units,
        }
    right = getattr(transformers, case.class_name).from_pretrained(
        out / f"kept-{name}", dtype=_DTYPES[case.half]
    )
    found["right"] = sorted(fqn for fqn, p in right.named_parameters() if p.dtype == torch.float32)
    return found


def policies(mesh: DeviceMesh) -> Found:
    """Which units cast what they are given: by default, and where somebody says it."""

    def casts(name: str, dtype: torch.dtype, **options: Any) -> Found:
        model = wrap(models.reference(name, dtype=dtype), mesh, **options)
        return {
            path: next(fsdp2_units(module, is_root=not path)).mixed_precision.cast_forward_inputs
            for path, module in model.named_modules()
            if hasattr(module, "_get_fsdp_state")
        }

    own = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    return {
        "bf16": casts("bert", torch.bfloat16),
        "fp32": casts("bert", torch.float32),
        "own": casts("bert", torch.float32, mixed_precision=own),
    }


def rank(out: Path, number: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=number, world_size=SIZE)
    mesh = init_device_mesh("cpu", (SIZE,))
    found: Found = {name: compare(out, mesh, name) for name in CASES}
    found["kept"] = {name: train(out, mesh, name) for name in KEPT}
    found["policies"] = policies(mesh)
    (out / f"logits-{number}.json").write_text(json.dumps(found))
    end_world()


def main() -> None:
    out = Path(sys.argv[1])
    for name, case in CASES.items():
        save(out / name, case)
    for name, case in KEPT.items():
        save(out / f"kept-{name}", case)
    with mock.patch.object(traced, "_spawn", forked_trace):
        for name in PRESHARDED:
            kept, presharded = out / f"kept-{name}", out / f"presharded-{name}"
            shardkit.preshard(str(kept), str(presharded), world_size=SIZE, dtype="bf16")
    wait([fork(partial(rank, out, number)) for number in range(SIZE)])


if __name__ == "__main__":
    main()
