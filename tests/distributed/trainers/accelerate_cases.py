"""accelerate, and transformers' Trainer on top of it, with FSDP2. Takes one argument, a directory."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from accelerate import Accelerator, DataLoaderConfiguration, DistributedType, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.trainers.resuming import SAVED, STEPS, Job, Step, run, start_model
from tests.distributed.training import BATCH, batch_of, global_loss


def allow_cpu() -> None:
    """Accelerate ignores FSDP for processes on CPUs: call them GPUs, after their device was chosen."""
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU


def examples() -> TensorDataset:
    """Return the batches of all steps, one after another."""
    return TensorDataset(*(torch.cat(column) for column in zip(*map(batch_of, range(STEPS)), strict=True)))


def train(job: Job) -> list[Step]:
    allow_cpu()
    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2,
            state_dict_type="SHARDED_STATE_DICT",
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Sequential"],
        ),
        dataloader_config=DataLoaderConfiguration(split_batches=True),
    )
    model = start_model(job)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    loader = DataLoader(examples(), batch_size=BATCH)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    first = 0
    if job.resume is not None:
        accelerator.load_state(job.resume)
        first, loader = SAVED, accelerator.skip_first_batches(loader, SAVED)
    steps = []
    for number, (tokens, labels) in enumerate(loader, first):
        loss = nn.functional.cross_entropy(model(tokens), labels)
        steps.append(Step(number, global_loss(loss), optimizer.param_groups[0]["lr"]))
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if job.resume is None and number + 1 == SAVED:
            accelerator.save_state(job.checkpoint)
    return steps


class WithLoss(nn.Module):
    """A model as the Trainer wants it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.model(tokens), labels)}


class Trainer(transformers.Trainer):
    """Remembers the steps."""

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **options: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **options)
        lr = self.optimizer.param_groups[0]["lr"]
        self.steps.append(Step(self.state.global_step, global_loss(loss), lr))
        return loss


def train_transformers(job: Job) -> list[Step]:
    allow_cpu()
    arguments = transformers.TrainingArguments(
        output_dir=str(job.folder),
        use_cpu=True,
        accelerator_config={"use_configured_state": True},  # what allow_cpu did
        fsdp=True,
        fsdp_config={
            "version": 2,
            "state_dict_type": "SHARDED_STATE_DICT",
            "transformer_layer_cls_to_wrap": ["Sequential"],
        },
        per_device_train_batch_size=BATCH // job.size,
        max_steps=STEPS,
        save_steps=SAVED,
        save_strategy="no" if job.resume else "steps",
        learning_rate=1e-2,
        report_to="none",
        disable_tqdm=True,
    )
    tokens, labels = examples().tensors
    rows = [{"tokens": tokens[row], "labels": labels[row]} for row in range(len(tokens))]
    trainer = Trainer(model=WithLoss(start_model(job)), args=arguments, train_dataset=rows)
    trainer.steps = []
    trainer.train(resume_from_checkpoint=str(job.resume) if job.resume else None)
    return trainer.steps


if __name__ == "__main__":
    run({"accelerate": train, "transformers": train_transformers})
