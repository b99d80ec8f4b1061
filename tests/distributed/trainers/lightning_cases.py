"""Lightning's Trainer and Fabric, with FSDP and FSDP2. Takes one argument, a directory."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning
import torch
from lightning.fabric.plugins import FSDPPrecision as FabricFSDPPrecision
from lightning.fabric.strategies import FSDPStrategy as FabricFSDPStrategy
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallelStrategy
from lightning.pytorch.plugins import FSDPPrecision
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecision, fully_shard
from torch.utils.data import DataLoader

from tests.distributed.trainers.resuming import SAVED, STEPS, Job, Step, let_fsdp_use_cpu, run, start_model
from tests.distributed.training import global_loss, local_loss


class OnCpu(FSDPStrategy):
    """Lightning refuses FSDP without a GPU, but only the class itself."""


class FabricOnCpu(FabricFSDPStrategy):
    """The same for Fabric."""


class Double:
    """Lightning's FSDP knows no precision above float32, and converts to it."""

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module.double()

    def convert_output(self, data: Any) -> Any:
        return data


class DoublePrecision(Double, FSDPPrecision):
    pass


class FabricDoublePrecision(Double, FabricFSDPPrecision):
    pass


def wrap(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def optimizers(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)


class Module(lightning.LightningModule):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.net, self.job = start_model(job), job
        self.steps: list[Step] = []

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            wrap(self.net, self.device_mesh)

    def configure_optimizers(self) -> Any:
        optimizer, schedule = optimizers(self)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = local_loss(self.net, self.global_step)
        lr = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.steps.append(Step(self.global_step, global_loss(loss), lr))
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        if self.job.resume is None and self.global_step == SAVED:
            self.trainer.save_checkpoint(self.job.checkpoint)


def train(strategy: Any, job: Job) -> list[Step]:
    module = Module(job)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=job.size,
        strategy=strategy(job),
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=job.folder,
    )
    trainer.fit(module, DataLoader(torch.arange(100)), ckpt_path=job.resume)
    return module.steps


def train_fabric(strategy: Any, job: Job) -> list[Step]:
    fabric = lightning.Fabric(accelerator="cpu", devices=job.size, strategy=strategy(job))
    fabric.launch()
    model = fabric.setup_module(start_model(job))
    optimizer, schedule = optimizers(model)
    optimizer = fabric.setup_optimizers(optimizer)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "step": 0}
    if job.resume is not None:
        fabric.load(job.resume, state)
        schedule.load_state_dict(state["schedule"])
    steps = []
    for number in range(state["step"], STEPS):
        loss = local_loss(model, number)
        steps.append(Step(number, global_loss(loss), optimizer.param_groups[0]["lr"]))
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        state["step"] = number + 1
        if job.resume is None and state["step"] == SAVED:
            fabric.save(job.checkpoint, state)
    return steps


FSDP = {
    "state_dict_type": "sharded",
    "auto_wrap_policy": {nn.Sequential},
    "mixed_precision": MixedPrecision(torch.float64, torch.float64, torch.float64),
}

if __name__ == "__main__":
    let_fsdp_use_cpu()
    run(
        {
            "trainer-fsdp2": partial(train, lambda job: ModelParallelStrategy(job.size, 1)),
            "trainer-fsdp": partial(
                train, lambda job: OnCpu(precision_plugin=DoublePrecision("32-true"), **FSDP)
            ),
            "fabric-fsdp2": partial(train_fabric, lambda job: FabricModelParallelStrategy(wrap, job.size, 1)),
            "fabric-fsdp": partial(
                train_fabric, lambda job: FabricOnCpu(precision=FabricDoublePrecision("32-true"), **FSDP)
            ),
        }
    )
