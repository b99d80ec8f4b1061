"""Train a Hub model with Lightning's ModelParallelStrategy (FSDP2), and save last.ckpt.

    torchrun --nproc-per-node 8 lightning_run.py my-model

Runs on CUDA, and on CPU with gloo.
"""

from __future__ import annotations

import os
import sys

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM


class Module(lightning.LightningModule):
    """A causal language model in the attribute `net`."""

    def __init__(self, model_directory: str) -> None:
        super().__init__()
        self.net = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)

    def configure_model(self) -> None:
        """Shard the model; Lightning calls this on every rank."""
        mesh = self.device_mesh["data_parallel"]
        for layer in self.net.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def training_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
        """Return the loss of a batch."""
        return self.net(input_ids=tokens, labels=tokens).loss


def main(model_directory: str) -> None:
    """Train two steps on made-up data, and save."""
    data = torch.randint(0, 60, (16, 16), generator=torch.Generator().manual_seed(0))
    trainer = lightning.Trainer(
        # Lightning's own default is 1 for each machine, which shards nothing: each process has the whole model.
        strategy=ModelParallelStrategy(
            data_parallel_size=int(os.environ["WORLD_SIZE"]), tensor_parallel_size=1
        ),
        accelerator="auto",
        devices="auto" if torch.cuda.is_available() else int(os.environ["WORLD_SIZE"]),
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(model_directory), DataLoader(data, batch_size=2))
    trainer.save_checkpoint("last.ckpt")


if __name__ == "__main__":
    main(sys.argv[1])
