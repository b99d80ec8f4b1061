"""Train torchtitan's small Llama 3 with torchtitan's own Trainer on made-up data, and save after the second step.

    torchrun --nproc-per-node 8 torchtitan_run.py
    torchrun --nproc-per-node 8 torchtitan_run.py --checkpoint.initial_load_path "$PWD/titan-start"

`my-model` is the Hub model of this architecture; its tokenizer is used. Takes all options of torchtitan.
Made for CUDA, and for a torch newer than 2.13.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.train import main
from torchtitan.trainer import Trainer


class MadeUpTokens(IterableDataset):
    """Random tokens without an end, other ones on each rank."""

    def __init__(self, rank: int, seq_len: int) -> None:
        self.rank, self.seq_len = rank, seq_len

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        generator = torch.Generator().manual_seed(self.rank)
        while True:
            tokens = torch.randint(0, 60, (self.seq_len + 1,), generator=generator)
            yield {"input": tokens[:-1], "positions": torch.arange(self.seq_len)}, tokens[1:]


class MadeUpData(ParallelAwareDataloader):
    """Your data go here; torchtitan keeps in the checkpoint how far it has read."""

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        """What `MadeUpData` can be told."""

    def __init__(
        self,
        config: Config,
        *,
        dp_rank: int,
        dp_world_size: int,
        seq_len: int,
        local_batch_size: int,
        **_: Any,
    ) -> None:
        tokens = MadeUpTokens(dp_rank, seq_len)
        super().__init__(tokens, dp_rank, dp_world_size, batch_size=local_batch_size)


def two_steps() -> Trainer.Config:
    """Return torchtitan's own config of the model, with another length, other data and checkpoints."""
    config = llama3_debugmodel()  # or llama3_8b(), and so on
    config.hf_assets_path = "my-model"
    config.dataloader = MadeUpData.Config()
    config.training.seq_len = 128
    config.training.steps = 2
    config.checkpoint.enable = True
    config.checkpoint.interval = 2
    return config


if __name__ == "__main__":
    sys.argv[1:1] = ["--module", Path(__file__).stem, "--config", two_steps.__name__]
    main()
