"""Train 40 steps with one trainer, save every 5 and keep the last 2; a copy of each save stays for the comparison.

    torchrun --nproc-per-node 2 publishing_run.py TRAINER MODEL HOME [OPTION ...]

HOME gets `run`, `copies`, `published`, and `steps.json` with the seconds of each step. The options are those of
`shardkit watch`; without them nothing is published from the job.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import shardkit

NUM_STEPS, EVERY, KEPT = 40, 5, 2
SECONDS = list[float]()


def data() -> torch.Tensor:
    return torch.randint(0, 60, (4 * NUM_STEPS, 16), generator=torch.Generator().manual_seed(0))


def is_first() -> bool:
    return os.environ["RANK"] == "0"


def copy(home: Path, name: str, step: int) -> None:
    """Keep a copy of a save, made by rank 0."""
    if is_first():
        shutil.copytree(home / "run" / name, home / f"copies/step-{step}")


def sharded(model_directory: str) -> tuple[Any, torch.optim.Optimizer]:
    """Return a model under FSDP2, and its optimizer."""
    dist.init_process_group("gloo")
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer


def train_step(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    begun = time.monotonic()
    tokens = data()[2 * step : 2 * step + 2]
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    SECONDS.append(time.monotonic() - begun)


def plain(model_directory: str, home: Path, options: list[str]) -> None:
    """A loop of one's own with FSDP2 and stock `dcp.save`."""
    model, optimizer = sharded(model_directory)
    publisher = shardkit.Publisher(home / "run", home / "published", *options)
    for step in range(1, NUM_STEPS + 1):
        train_step(model, optimizer, step)
        if step % EVERY == 0:
            weights, state = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": state}, checkpoint_id=home / f"run/step-{step}")
            copy(home, f"step-{step}", step)
            if options:
                publisher.saved()
            if is_first() and step > KEPT * EVERY:
                shutil.rmtree(home / f"run/step-{step - KEPT * EVERY}")
            dist.barrier()
    if options:
        assert publisher.finish() is None
    dist.barrier()
    dist.destroy_process_group()


def trainer(model_directory: str, home: Path, options: list[str]) -> None:
    """transformers' Trainer with FSDP2, which accelerate sets up and saves."""
    from accelerate import DistributedType, PartialState
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Copy(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            SECONDS.append(time.monotonic())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            SECONDS[-1] = time.monotonic() - SECONDS[-1]

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            copy(home, f"checkpoint-{state.global_step}", state.global_step)

    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU  # it shards on CPUs too, then
    arguments = TrainingArguments(
        output_dir=str(home / "run"),
        fsdp=True,
        fsdp_config={"version": 2, "state_dict_type": "SHARDED_STATE_DICT"},
        max_steps=NUM_STEPS,
        save_steps=EVERY,
        save_total_limit=KEPT,
        per_device_train_batch_size=2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        accelerator_config={"use_configured_state": True},
    )
    published = [shardkit.TrainerPublisher(home / "run", home / "published", *options)] if options else []
    Trainer(
        model=AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32),
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in data()],
        callbacks=[Copy(), *published],
    ).train()


def lightning(model_directory: str, home: Path, options: list[str]) -> None:
    """Lightning's ModelParallelStrategy, FSDP2."""
    import lightning as package
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.utils.data import DataLoader

    class Module(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)

        def configure_model(self) -> None:
            for layer in self.net.model.layers:
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

        def training_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
            return self.net(input_ids=tokens, labels=tokens).loss

    class Copy(package.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            copy_new()
            SECONDS.append(time.monotonic())

        def on_train_batch_end(self, *_: Any) -> None:
            SECONDS[-1] = time.monotonic() - SECONDS[-1]

        def on_fit_end(self, *_: Any) -> None:
            copy_new()

    def copy_new() -> None:
        for path in (home / "run").glob("step=*.ckpt") if is_first() else ():
            step = int(path.stem.removeprefix("step="))
            if not (home / f"copies/step-{step}").exists():
                copy(home, path.name, step)

    size = int(os.environ["WORLD_SIZE"])
    saving = ModelCheckpoint(
        home / "run", "{step}", every_n_train_steps=EVERY, save_top_k=KEPT, monitor="step", mode="max"
    )
    published = [shardkit.LightningPublisher(home / "run", home / "published", *options)] if options else []
    package.Trainer(
        strategy=ModelParallelStrategy(data_parallel_size=size, tensor_parallel_size=1),
        accelerator="cpu",
        devices=size,
        max_steps=NUM_STEPS,
        logger=False,
        callbacks=[Copy(), saving, *published],
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), DataLoader(data(), batch_size=2))


def accelerate(model_directory: str, home: Path, options: list[str]) -> None:
    """A loop with accelerate, whose `save_state` writes what FSDP2 shards."""
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState

    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    publisher = shardkit.Publisher(home / "run", home / "published", *options)
    for step in range(1, NUM_STEPS + 1):
        begun = time.monotonic()
        tokens = data()[2 * step : 2 * step + 2]
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        optimizer.zero_grad()
        SECONDS.append(time.monotonic() - begun)
        if step % EVERY == 0:
            accelerator.save_state(str(home / f"run/checkpoint-{step}"))
            copy(home, f"checkpoint-{step}", step)
            if options:
                publisher.saved()
            if is_first() and step > KEPT * EVERY:
                shutil.rmtree(home / f"run/checkpoint-{step - KEPT * EVERY}")
            accelerator.wait_for_everyone()
    if options:
        assert publisher.finish() is None
    accelerator.wait_for_everyone()
    accelerator.end_training()


def torch_checkpointing(model_directory: str, home: Path, options: list[str]) -> None:
    """torch_checkpointing, whose saves are asynchronous: the future of each one calls the publisher."""
    from torch_checkpointing import CheckpointManager, ItemSpec
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.metadata_manager import DefaultMetadataManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    def gather(_: Any, mine: Any, group: Any = None) -> dict[int, Any]:
        all_ranks = [None] * dist.get_world_size(group)
        dist.all_gather_object(all_ranks, mine, group)
        return dict(enumerate(all_ranks))

    DefaultMetadataManager._all_gather_pickled_data = gather  # its own one needs a GPU
    model, optimizer = sharded(model_directory)
    publisher = shardkit.Publisher(home / "run", home / "published", *options, "--settle", "1")
    manager = CheckpointManager.Config(
        items={"model": ItemSpec(resharder=DefaultResharder())},
        storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
    ).build()
    (home / "run").mkdir(parents=True, exist_ok=True)
    dist.barrier()
    for step in range(1, NUM_STEPS + 1):
        train_step(model, optimizer, step)
        if step % EVERY == 0:
            weights, _ = get_state_dict(model, optimizer)
            future = manager.save(str(home / f"run/step-{step}"), {"model": weights})
            if options:
                future.add_done_callback(publisher.saved)
            future.result()
            dist.barrier()
            copy(home, f"step-{step}", step)
            if is_first() and step > KEPT * EVERY:
                shutil.rmtree(home / f"run/step-{step - KEPT * EVERY}")
            dist.barrier()
    manager.close()
    if options:
        assert publisher.finish() is None
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    name, directory, place, *more = sys.argv[1:]
    trainers = (plain, trainer, lightning, accelerate, torch_checkpointing)
    {function.__name__: function for function in trainers}[name](directory, Path(place), more)
    if is_first():
        Path(place, "steps.json").write_text(json.dumps(SECONDS))
