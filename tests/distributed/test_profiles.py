"""Trainers start, with their own loading code, from what preshard writes in their form."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor

import shardkit
from tests.bits import raw
from tests.distributed.models import LLAMA, build
from tests.worlds.ranks import Ranks

CONFIG = {**LLAMA, "head_dim": 4, "num_hidden_layers": 3}
WORLD = 2
PROFILES = ("accelerate",)


def needs(package: str) -> Callable[[Any], Any]:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


def preshard_all(out: Path) -> None:
    torch.manual_seed(0)
    build(CONFIG).save_pretrained(out / "hub")
    for profile in PROFILES:
        shardkit.preshard(out / "hub", out / profile, world_size=WORLD, profile=profile)


two = Ranks(__name__, WORLD, first=preshard_all)


def start_model() -> Any:
    """Build a model whose weights, other than the checkpoint's, must not pass for loaded ones."""
    torch.manual_seed(7)
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    return build(CONFIG)


def check(model: nn.Module, out: Path, prefix: str = "") -> None:
    """Compare every tensor of the model, bit for bit, with the Hub's."""
    expected = load_file(out / "hub" / "model.safetensors")
    found = {
        name.removeprefix(prefix): tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in model.state_dict().items()
    }
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert raw(found[name]) == raw(tensor), name


def make_accelerator(version: int = 2) -> Any:
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    from tests.distributed.trainers.accelerate_cases import allow_cpu

    allow_cpu()
    return Accelerator(
        cpu=True,
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=version,
            state_dict_type="SHARDED_STATE_DICT",
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        ),
    )


@needs("accelerate")
@two.test_apart
def test_accelerate_loads_the_state_of_a_model(out: Path) -> None:
    """With FSDP1: with FSDP2, accelerate prepares no model without an optimizer, whose state it would load too."""
    from accelerate.utils import save_fsdp_model

    from tests.distributed.trainers.resuming import let_fsdp_use_cpu

    let_fsdp_use_cpu()
    model = start_model()
    accelerator = make_accelerator(1)
    model = accelerator.prepare(model)
    accelerator.load_state(str(out / "accelerate"))
    again = out / "again"
    save_fsdp_model(accelerator.state.fsdp_plugin, accelerator, model, str(again))
    if dist.get_rank() == 0:
        assert shardkit.diff(again, out / "hub").is_equal


@needs("accelerate")
@two.test_apart
def test_accelerate_loads_the_model_beside_an_optimizer(out: Path) -> None:
    from accelerate.utils import load_fsdp_model

    model = start_model()
    accelerator = make_accelerator()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    load_fsdp_model(accelerator.state.fsdp_plugin, accelerator, model, str(out / "accelerate"))
    check(model, out)
    model(input_ids=torch.arange(9)[None], labels=torch.arange(9)[None]).loss.backward()
    optimizer.step()


class Stop(transformers.TrainerCallback):
    """Looks at the model when training begins, and stops after a step."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.seen: list[int] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        check(given["model"], self.out)
        self.seen.append(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.seen.append(state.global_step)


@needs("accelerate")
@two.test_apart
def test_a_trainer_of_transformers_starts_from_it(out: Path) -> None:
    from tests.distributed.trainers.accelerate_cases import allow_cpu

    model, rows = start_model(), [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 8
    allow_cpu()
    arguments = transformers.TrainingArguments(
        output_dir=str(out / f"trainer-{dist.get_rank()}"),
        use_cpu=True,
        accelerator_config={"use_configured_state": True},
        fsdp=True,
        fsdp_config={
            "version": 2,
            "state_dict_type": "SHARDED_STATE_DICT",
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        },
        per_device_train_batch_size=2,
        max_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    watch = Stop(out)
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[watch])
    trainer.train(resume_from_checkpoint=str(out / "accelerate"))
    assert watch.seen == [0, 1]


TITAN: dict[str, Any] = {
    **LLAMA,
    **{"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 16},
    **{"num_key_value_heads": 16, "head_dim": 16, "vocab_size": 2048, "rms_norm_eps": 1e-5},
    "rope_parameters": {
        **{"rope_type": "llama3", "rope_theta": 500000.0, "original_max_position_embeddings": 8192},
        **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    },
    "max_position_embeddings": 131072,
}
"""What torchtitan's debug model of Llama 3 is on the Hub."""


def titan_manager(model: nn.Module, folder: Path, **options: Any) -> Any:
    """Return torchtitan's own manager of checkpoints for a model without an optimizer."""
    from torchtitan.components.checkpoint import CheckpointManager

    config = CheckpointManager.Config(enable=True, folder=str(folder), **options)
    return CheckpointManager(
        config,
        dataloader=None,
        model_parts=[model],
        optimizers=None,  # type: ignore[arg-type]
        lr_schedulers=None,  # type: ignore[arg-type]
        states={},
        sd_adapter=None,
    )


@needs("torchtitan")
@two.test_apart
def test_torchtitan_starts_from_it_and_its_checkpoint_comes_back(out: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torchtitan.models.llama3 import Llama3StateDictAdapter, llama3_configs

    if dist.get_rank() == 0:
        torch.manual_seed(0)
        build(TITAN).save_pretrained(out / "titan-hub")
        shardkit.preshard(out / "titan-hub", out / "titan", world_size=WORLD, profile="torchtitan")
    dist.barrier()
    config = llama3_configs["debugmodel"]("flex")
    torch.manual_seed(7)
    model = config.build()
    model.init_states()
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",))
    for layer in (*model.layers.values(), model):
        fully_shard(layer, mesh=mesh)
    titan_manager(model, out / "none", initial_load_path=str(out / "titan")).load()

    expected = Llama3StateDictAdapter(config, None).from_hf(
        load_file(out / "titan-hub" / "model.safetensors")
    )
    found = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert raw(found[name]) == raw(tensor.contiguous()), name

    tokens, positions = torch.arange(32)[None], torch.arange(32)[None]
    hub = transformers.AutoModelForCausalLM.from_pretrained(out / "titan-hub", dtype=torch.float32)
    with torch.no_grad():
        logits = model(tokens, positions, model.get_attention_masks(positions))
        assert torch.allclose(logits, hub(tokens).logits, rtol=0, atol=1e-5)

    titan_manager(model, out / "saved", interval=1, last_save_model_only=True).save(1, last_step=True)
    if dist.get_rank() == 0:
        shardkit.consolidate(out / "saved" / "step-1", out / "titan-back", base=out / "titan-hub")
        found, expected = (load_file(out / at / "model.safetensors") for at in ("titan-back", "titan-hub"))
        assert found.keys() == expected.keys()
        assert all(raw(found[name]) == raw(tensor) for name, tensor in expected.items())
