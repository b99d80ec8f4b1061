"""What every trainer's script does: train in one world, reshard, resume in others.

Two ranks train, save after SAVED steps with the trainer's own code, and go on to STEPS: that is the reference. The
checkpoint is resharded, and each other world resumes from it with the trainer's own code. Every world writes
BASE/<case>/<its size>.json: step, loss of the global batch and learning rate of each of its steps.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import shardkit
from tests.distributed.train_world import BATCH, Model, world

SAVED = 3
STEPS = 6
RESUMED = (3, 1)
"""World sizes; 3 does not divide the tensors, and some have fewer rows."""


class Job(NamedTuple):
    """What a rank does: `Trainer` is a function of one."""

    folder: Path
    """Of the case."""
    size: int
    """World size."""
    resume: Path | None
    """The resharded checkpoint; without it, train from the start and save `checkpoint`."""

    @property
    def checkpoint(self) -> Path:
        return self.folder / f"checkpoint-{SAVED}"  # the name that transformers gives it


class Step(NamedTuple):
    number: int
    loss: float
    """Of the global batch."""
    lr: float
    """That the step's update was made with."""


Trainer = Callable[[Job], list[Step]]


def start_model(job: Job) -> Model:
    """Build the model. A resumed one begins with other weights, which must not pass for loaded ones."""
    torch.manual_seed(job.resume is not None)
    return Model()


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the global batch of a step: tokens and labels."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 37, (BATCH, 6), generator=generator)
    return tokens, torch.randint(0, 2, (BATCH,), generator=generator)


def local_loss(model: nn.Module, step: int) -> torch.Tensor:
    """Return the loss of this rank's share of a step's batch."""
    share = BATCH // dist.get_world_size()
    mine = slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)
    tokens, labels = batch_of(step)
    return nn.functional.cross_entropy(model(tokens[mine]), labels[mine])


def global_loss(loss: torch.Tensor) -> float:
    """Average a loss over the ranks."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def run(trainers: Mapping[str, Trainer]) -> None:
    """Run every trainer in worlds of its own, below the directory that the command line names."""
    warnings.simplefilter("ignore")  # of the trainers
    for case, trainer in trainers.items():
        folder = Path(sys.argv[1]) / case
        folder.mkdir()
        first = Job(folder, 2, None)
        _world(first, trainer)
        for size in RESUMED:
            resharded = folder / str(size) / first.checkpoint.name
            resharded.parent.mkdir()
            shardkit.reshard(first.checkpoint, str(resharded), world_size=size)
            _world(Job(folder, size, resharded), trainer)


def _world(job: Job, trainer: Trainer) -> None:
    def work() -> None:
        os.environ["LOCAL_WORLD_SIZE"] = str(job.size)
        steps = trainer(job)  # in the process group that is there
        if dist.get_rank() == 0:
            (job.folder / f"{job.size}.json").write_text(json.dumps(steps))

    world(job.folder, str(job.size), job.size, work)
