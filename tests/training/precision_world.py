"""Two gloo ranks run real models in bf16 as `wrap` leaves them; `from_pretrained` in bf16 says what is right.

    python precision_world.py OUT

Every rank writes OUT/logits-<rank>.json: by model and dtype of the masters, what differs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardkit._torch import fsdp2_units
from shardkit.training.finalize import finalize
from shardkit.training.prepare import prepare
from shardkit.training.wrap import wrap
from tests.distributed.processes import fork, wait
from tests.training import models

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
_IMAGES = {"image_size": 8, "patch_size": 4}
_STATES = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": models.VOCABULARY, "state_size": 4}


def _config(name: str, *parts: dict[str, Any], **more: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, name)(
        **{key: value for part in (*parts, more) for key, value in part.items()}
    )


def _known(name: str) -> Callable[[], Any]:
    return lambda: models.config_of(name)


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
    "t5": Case(
        "T5ForConditionalGeneration",
        _config("T5Config", d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0),
        translated,
    ),
}


def save(out: Path, name: str) -> None:
    """Save a model in bf16, each value of it random."""
    case = CASES[name]
    config = case.config()
    config.architectures = [case.class_name]
    model = getattr(transformers, case.class_name)._from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator) * 0.05
            parameter.copy_(values + (1.0 if parameter.ndim == 1 else 0.0))
    model.save_pretrained(out / name)


def logits(model: nn.Module, inputs: Inputs) -> torch.Tensor:
    with torch.no_grad():
        found = model(**inputs)
    return found.logits


def compare(out: Path, mesh: DeviceMesh, name: str) -> Found:
    """Compare logits with those of one process, for masters in bf16 and in fp32."""
    case, inputs = CASES[name], CASES[name].inputs()
    plain = getattr(transformers, case.class_name).from_pretrained(out / name, dtype=torch.bfloat16).eval()
    # A model in bf16 takes no fp32 from outside; the root casts it.
    halved = {key: x.bfloat16() if x.is_floating_point() else x for key, x in inputs.items()}
    expected = logits(plain, halved)
    found: Found = {"spread": float(expected.float().std())}
    for dtype in ("bf16", "fp32"):
        context = prepare(out / name, out / name, dtype=dtype)
        model = finalize(wrap(context.model, mesh), context).eval()
        ours = logits(model, inputs)
        found[dtype] = float((ours.float() - expected.float()).abs().max())
        found[f"{dtype}-kind"] = str(ours.dtype)
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
    found["policies"] = policies(mesh)
    (out / f"logits-{number}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    out = Path(sys.argv[1])
    for name in CASES:
        save(out, name)
    wait([fork(partial(rank, out, number)) for number in range(SIZE)])


if __name__ == "__main__":
    main()
