"""Every trainer's way of laying out a checkpoint, from its run's directory to the model's own names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import shardkit
from tests.operations.consolidate.checkpoints import assert_bit_equal, load, save, training_state, weights

# What torch says when it saves in a single process, and of a ShardedTensor that it looks for.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:torch.distributed is disabled")


class Trainer(NamedTuple):
    """How a trainer saves: `MODEL` and `OPTIM` stand for the two state dicts."""

    writer: str
    step: str
    """Name of the directory of a step."""
    folders: Mapping[str, Any]
    """Each DCP directory in it: what is saved there."""
    files: tuple[str, ...] = ()
    """What lies beside."""


MODEL, OPTIM = "<model>", "<optim>"
TRAINERS = {
    "recipe": Trainer("torch's AppState recipe", "step_{}", {"": {"app": {"model": MODEL, "optim": OPTIM}}}),
    "torchtitan": Trainer(
        "torchtitan",
        "checkpoint/step-{}",
        {"": {MODEL: MODEL, "optimizer": OPTIM, "train_state": {"step": 4}, "lr_scheduler": {"last_epoch": 1}}},
    ),
    "prime-rl": Trainer(
        "prime-rl",
        "checkpoints/step_{}",
        {"trainer": {"app": {"model": MODEL, "optimizers": OPTIM, "progress": {"step": 4}}}},
    ),
    "mini_trainer": Trainer(
        "mini_trainer",
        "step_{}",
        {"distributed": {"model": MODEL}},
        ("optimizer_rank_0.pt", "rng_state_rank_0.pt", "training_state.pt"),
    ),
    "AReaL": Trainer("AReaL", "epoch0epochstep1globalstep{}", {"": {"dcp": {"model": MODEL, "optimizer": OPTIM}}}),
    "VeOmni": Trainer(
        "VeOmni",
        "checkpoints/global_step_{}",
        {"": {"model": MODEL, "optimizer": OPTIM}},
        ("extra_state/extra_state_rank_0.pt",),
    ),
    "Composer": Trainer("Composer", "ep0-ba{}", {"": {"state": {"model": MODEL, "optimizers": {"AdamW": OPTIM}}}}),
    "OLMo-core": Trainer(
        "OLMo-core",
        "step{}",
        {"model_and_optim": {"model": MODEL, "optim": OPTIM}},
        ("train/rank0.pt", ".metadata.json"),
    ),
    "fms-fsdp": Trainer(
        "fms-fsdp",
        "checkpoints/step_{}_ckp",
        {"": {"model_state": MODEL, "optimizer_state": OPTIM}},
        ("metadata.pth", "loader_state_0.pth"),
    ),
    "NeMo Automodel": Trainer(
        "NeMo Automodel",
        "checkpoints/epoch_0_step_{}",
        {"model": {MODEL: MODEL}, "optim": {"optim": OPTIM}},
        ("step_scheduler.pt",),
    ),
    "XTuner V1": Trainer(
        "XTuner V1",
        "checkpoints/ckpt-step-{}",
        {"weights": {"model": MODEL, "optimizer": OPTIM}},
        ("lr_scheduler", "trainer_config.json", "train_state.json"),
    ),
    "XTuner V1, two directories": Trainer(
        "XTuner V1",
        "checkpoints/ckpt-step-{}",
        {"model": {MODEL: MODEL}, "optimizer": {OPTIM: OPTIM}},
        ("lr_scheduler", "trainer_config.json", "train_state.json"),
    ),
    "accelerate": Trainer(
        "transformers Trainer (FSDP)",
        "checkpoint-{}",
        {"pytorch_model_fsdp_0": {"model": MODEL}, "optimizer_0": {"optimizer": OPTIM}},
        ("scheduler.pt", "trainer_state.json", "rng_state_0.pth"),
    ),
}  # fmt: skip


def filled(shape: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """Put the state dicts in their places; a key that stands for one gives its entries to the level it is on."""
    found: dict[str, Any] = {}
    for key, value in shape.items():
        inside = filled(value, state) if isinstance(value, dict) else state.get(value, value)
        found |= inside if key in state else {key: inside}
    return found


def write_run(run: Path, trainer: Trainer, models: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
    for step, model in models.items():
        home = run / trainer.step.format(step)
        state = {MODEL: model, OPTIM: training_state(model)["optim"]}
        for folder, shape in trainer.folders.items():
            save(filled(shape, state), home / folder)
        for name in trainer.files:
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_text("{}")


@pytest.mark.parametrize("name", TRAINERS)
def test_a_run_becomes_its_newest_model(name: str, tmp_path: Path) -> None:
    trainer, model = TRAINERS[name], weights(torch.bfloat16)
    write_run(tmp_path / "run", trainer, {4: model, 2: {key: value * 2 for key, value in model.items()}})
    result = shardkit.consolidate(tmp_path / "run", str(tmp_path / "out"))
    assert result.writer == trainer.writer
    assert result.resolved == str(tmp_path / "run" / trainer.step.format(4))
    assert result.step == 4
    assert_bit_equal(load(result.output), model)


@pytest.mark.parametrize("name", TRAINERS)
def test_resharded_it_is_still_that_trainers(name: str, tmp_path: Path) -> None:
    trainer, model = TRAINERS[name], weights()
    write_run(tmp_path / "run", trainer, {4: model})
    out = tmp_path / "other" / trainer.step.format(4)
    out.parent.mkdir(parents=True)
    resharded = shardkit.reshard(tmp_path / "run", str(out), world_size=3)
    assert set(trainer.files) <= set(resharded.copied)
    assert resharded.num_optimizer_tensors == (0 if name == "mini_trainer" else 3 * len(model))
    again = shardkit.consolidate(tmp_path / "other", str(tmp_path / "out"))
    assert_bit_equal(load(again.output), model)
