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
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

import shardkit
from tests.distributed.training import Model
from tests.worlds.processes import end_world, fork, wait

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


def let_fsdp_use_cpu() -> None:
    """Name the CPU to every FSDP: trainers name no device there, and FSDP then looks for an accelerator."""
    original = FullyShardedDataParallel.__init__

    def on_cpu(self: FullyShardedDataParallel, *args: Any, **options: Any) -> None:
        original(self, *args, **{**options, "device_id": torch.device("cpu")})

    FullyShardedDataParallel.__init__ = on_cpu


def _world(job: Job, trainer: Trainer) -> None:
    wait([fork(partial(_run_rank, number, job, trainer)) for number in range(job.size)])


def _run_rank(rank: int, job: Job, trainer: Trainer) -> None:
    """Train in the process group that is there, with what a launcher says of this rank."""
    torch.set_num_threads(1)
    size = str(job.size)
    os.environ.update(RANK=str(rank), WORLD_SIZE=size, LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=size)
    store = f"file://{job.folder}/{size}.store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=job.size)
    steps = trainer(job)
    if rank == 0:
        (job.folder / f"{size}.json").write_text(json.dumps(steps))
    end_world()
