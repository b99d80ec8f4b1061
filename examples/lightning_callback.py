"""Lightning with FSDP2: what the strategy did to the model, and where memory peaks in the first batches.

    pip install lightning
    python examples/lightning_callback.py 2

starts that many processes, on GPUs where there are any, else on the CPU.
"""

from __future__ import annotations

import logging
import sys

import lightning.pytorch as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn

import shardkit


class Network(nn.Module):
    """A few blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)
        )
        self.head = nn.Linear(64, 1)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Run them."""
        for block in self.blocks:
            batch = batch + block(batch)
        return self.head(batch)


class Model(L.LightningModule):
    """A network, wrapped in Lightning's hook for it. Lightning calls `training_step`, not this module's `forward`: so
    the network is wrapped and not this module."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Network()

    def configure_model(self) -> None:
        """Shard; Lightning calls it in every process."""
        shardkit.wrap(self.network, self.device_mesh["data_parallel"], policy="blocks", mixed_precision=None)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        """Learn nothing in particular."""
        return self.network(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over this rank's shards."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(num_processes: str = "2") -> None:
    """Fit for a few batches, with the callback."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    trainer = L.Trainer(
        accelerator="auto",
        devices=int(num_processes),
        strategy=ModelParallelStrategy(data_parallel_size=int(num_processes), tensor_parallel_size=1),
        callbacks=[shardkit.FSDPDiagnosticsCallback(num_logged_batches=2)],
        max_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    data = torch.utils.data.DataLoader(torch.randn(64, 64), batch_size=4)
    trainer.fit(Model(), data)


if __name__ == "__main__":
    main(*sys.argv[1:])
