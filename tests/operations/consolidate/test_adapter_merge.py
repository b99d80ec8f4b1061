"""What --merge-lora makes of LoRA on experts and of trained tokens has the bits that PEFT's own merge has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch import nn
from torch.distributed.fsdp import fully_shard

import shardkit
from shardkit.errors import SourceError
from tests.operations.consolidate.checkpoints import assert_bit_equal, load, save
from tests.worlds.ranks import Ranks

pytestmark = [
    pytest.mark.usefixtures("fast_trace"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # peft asks for it
    pytest.mark.filterwarnings(
        "ignore:The following (rank|alpha)_pattern keys"
    ),  # peft says so of parameters
    pytest.mark.filterwarnings("ignore:Could not find a config file"),
]
SIZES: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8},
    **{"num_key_value_heads": 2, "max_position_embeddings": 64, "num_experts_per_tok": 2},
}
QWEN = transformers.Qwen3MoeConfig(
    **SIZES, intermediate_size=48, moe_intermediate_size=16, num_experts=4, tie_word_embeddings=False
)
MIXTRAL = transformers.MixtralConfig(**SIZES, intermediate_size=24, num_local_experts=3)
# Its matrices are (in, out), and the second one is square, as in the models of OpenAI.
GPT_OSS = transformers.GptOssConfig(**SIZES, intermediate_size=32, num_local_experts=3)
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def lora(**options: Any) -> peft.LoraConfig:
    return peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj"]} | options)


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "experts": (QWEN, {"target_parameters": BOTH}),
    "one parameter of each": (QWEN, {"target_parameters": ["experts.down_proj"], "target_modules": []}),
    "by layer": (QWEN, {"target_parameters": [f"0.{BOTH[1]}", *BOTH], "use_rslora": True, "r": 3}),
    "patterns": (
        QWEN,
        {
            "target_parameters": BOTH,
            "rank_pattern": {"experts.down_proj": 2, "0.mlp.experts.gate_up_proj": 6},
            "alpha_pattern": {r".*\.gate_up_proj": 5},
        },
    ),
    "a router": (QWEN, {"target_parameters": ["mlp.gate.weight"], "rank_pattern": {"gate.weight": 2}}),
    "experts by their names on the Hub": (MIXTRAL, {"target_modules": ["w1", "w2", "w3", "v_proj"]}),
    "transposed": (GPT_OSS, {"target_parameters": BOTH}),
    "transposed and square": (GPT_OSS, {"target_parameters": BOTH[1:]}),
    "tokens": (QWEN, {"trainable_token_indices": [7, 3, 63]}),
    "tokens of two modules": (
        QWEN,
        {
            "trainable_token_indices": {"embed_tokens": [5, 1], "lm_head": [2, 9, 4]},
            "target_parameters": BOTH,
        },
    ),
}


def tuned(config: Any, options: dict[str, Any], directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Return a PEFT model after a step, so to say; its base and its adapter are saved."""
    torch.manual_seed(0)
    base = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    for parameter in base.parameters():
        nn.init.normal_(parameter)
    base.save_pretrained(directory / "base")
    model = peft.get_peft_model(base, lora(**options), autocast_adapter_dtype=False)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn_like(parameter)
    model.save_pretrained(directory / "adapter")
    save({"model": model.state_dict()}, directory / "c")
    return model


def merge(directory: Path, checkpoint: str = "c") -> dict[str, torch.Tensor]:
    result = shardkit.consolidate(
        directory / checkpoint,
        directory / "merged",
        base=directory / "base",
        adapter_config=str(directory / "adapter"),
        merge_lora=True,
    )
    assert (result.kind, result.warnings) == ("merged", ())
    return load(result.output)


def by_peft(model: Any, directory: Path) -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    model.merge_and_unload().save_pretrained(directory)
    return load(directory)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_merged_as_peft_merges_it(kind: str, tmp_path: Path) -> None:
    model = tuned(*KINDS[kind], tmp_path)
    assert_bit_equal(merge(tmp_path), by_peft(model, tmp_path / "truth"))


@pytest.mark.parametrize("kind", ["experts", "transposed", "tokens of two modules"])
def test_half_precision_is_rounded_once(kind: str, tmp_path: Path) -> None:
    model = tuned(*KINDS[kind], tmp_path, torch.bfloat16)
    found, truth = merge(tmp_path), by_peft(model.float(), tmp_path / "truth")
    assert_bit_equal(found, {name: value.bfloat16() for name, value in truth.items()})


two = Ranks(__name__, 2)


@two.test
def test_on_two_ranks(out: Path) -> None:
    """FSDP2 cuts experts, factors and trained rows, of which none can be divided by two."""
    config = transformers.Qwen3MoeConfig(
        **SIZES, intermediate_size=48, moe_intermediate_size=16, num_experts=5, tie_word_embeddings=False
    )
    options = {"target_parameters": BOTH, "trainable_token_indices": [1, 2, 60], "r": 3}
    directory = out / str(dist.get_rank())
    model = tuned(config, options, directory)
    fully_shard(model)
    dcp.save({"model": model.state_dict()}, checkpoint_id=out / "c")
    if dist.get_rank() == 0:
        (out / "c").rename(directory / "sharded")
        whole = tuned(config, options, out / "whole")
        found = merge(directory, "sharded")
        assert_bit_equal(found, by_peft(whole, out / "truth"))
    dist.barrier()


def test_tokens_of_tied_embeddings(tmp_path: Path) -> None:
    """The output has the same rows, and stays tied."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = tuned(config, {"trainable_token_indices": {"embed_tokens": [3, 8]}}, tmp_path)
    truth = by_peft(model, tmp_path / "truth")
    assert "lm_head.weight" not in truth
    assert_bit_equal(merge(tmp_path), truth)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 2)


def test_attention_whose_projections_are_one_parameter(tmp_path: Path) -> None:
    """It is left to PEFT, which adds what `out_proj` learned twice, in training too."""
    torch.manual_seed(0)
    model = peft.get_peft_model(
        Attention(), peft.LoraConfig(r=2, target_modules=["attn"], init_lora_weights=False)
    )
    model.save_pretrained(tmp_path / "adapter")
    save({"model": {name: value.clone() for name, value in model.state_dict().items()}}, tmp_path / "c")
    with pytest.raises(SourceError, match=r"attn: target_parameters does not show .* of PEFT merges it"):
        shardkit.consolidate(tmp_path / "c", adapter_config=str(tmp_path / "adapter"), merge_lora=True)


def test_square_experts_of_which_nothing_shows_the_order(tmp_path: Path) -> None:
    """PEFT has it of the class."""
    config = transformers.Qwen3MoeConfig(
        **SIZES, intermediate_size=48, moe_intermediate_size=32, num_experts=4
    )
    tuned(config, {"target_parameters": BOTH[1:]}, tmp_path)
    with pytest.raises(SourceError, match="2 modules cannot be merged") as caught:
        merge(tmp_path)
    assert "nothing shows if its square matrix is" in str(caught.value)
    assert "export it without" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (None, "no list of its trainable_token_indices"),
        ([1, 2], "and 2 trained tokens"),
        ([1, 1, 2], "not different rows of"),
        ([1, 2, 64], "not different rows of"),
        ([1, 2, True], "no list of"),
    ],
)
def test_settings_that_do_not_fit_the_tokens(numbers: object, message: str, tmp_path: Path) -> None:
    tuned(*KINDS["tokens"], tmp_path)
    settings = tmp_path / "adapter/adapter_config.json"
    content = json.loads(settings.read_text()) | {"trainable_token_indices": numbers}
    settings.write_text(json.dumps(content))
    with pytest.raises(SourceError, match=message):
        merge(tmp_path)
