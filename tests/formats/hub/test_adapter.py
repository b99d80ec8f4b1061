"""PEFT adapters: what the command that merges one does, and what their directory is called."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import shardkit
from shardkit.formats.hub.adapter import base_of_adapter, merge_command
from tests.operations.consolidate.checkpoints import CONFIG

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


def test_the_command_merges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it writes is a Hub model in the dtype of the base."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**CONFIG)).to(torch.bfloat16).save_pretrained("my model")
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(LlamaForCausalLM.from_pretrained("my model"), settings).save_pretrained("lora")
    python, flag, code, *arguments = shlex.split(
        merge_command("lora", base_of_adapter("lora"), "out").strip("`")
    )
    assert (python, flag, arguments) == ("python", "-c", ["my model", "lora", "out"])
    monkeypatch.setattr(sys, "argv", ["-c", *arguments])
    exec(code, {})
    before, after = load_file("my model/model.safetensors"), load_file("out/model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert before.keys() == after.keys()
    assert changed == {f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(2)}
    assert shardkit.inspect("out").dtypes == shardkit.inspect("my model").dtypes


def test_an_adapter_is_called_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is made of it has the name of its directory."""
    monkeypatch.chdir(tmp_path)
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(LlamaForCausalLM(LlamaConfig(**CONFIG)), settings).save_pretrained("lora")
    assert shardkit.verify("lora").writer == "PEFT adapter"
    done = shardkit.reshard("lora", world_size=2)
    assert (done.writer, Path(done.output).name) == ("PEFT adapter", "lora-dp_shard2")
