"""Lightning trains models that ModelParallelStrategy and FSDPStrategy shard on two CPU ranks, with the diagnostics callback.

python lightning_world.py OUT

It is a script: Lightning may be missing, and it makes the process group itself.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import sys
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh

from shardkit.errors import ShardkitError
from shardkit.training.extras.diagnose import diagnose
from shardkit.training.extras.gradients import clip_grad_norm_, grad_norm
from shardkit.training.extras.lightning import FSDPDiagnosticsCallback
from shardkit.training.save import save
from shardkit.training.wrap import bf16_mixed_precision, wrap
from tests.distributed.trainers.lightning_cases import OnCpu, let_fsdp_use_cpu
from tests.worlds.processes import agent_store, fork, wait

torch.set_num_threads(1)
SIZE = 2


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Module(pl.LightningModule):
    device_mesh: DeviceMesh

    def __init__(self) -> None:
        super().__init__()
        self.net = Blocks()

    def configure_model(self) -> None:
        wrap(self.net, self.device_mesh["data_parallel"], mixed_precision=None)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch).pow(2).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Plain(Module):
    """What FSDPStrategy wraps itself: the root is around it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 2)
        self.seen: dict[str, Any] = {}

    def configure_model(self) -> None:
        pass

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.head(self.net(batch)).pow(2).mean()
        return loss

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        root = self.trainer.strategy.model
        norms = [float(grad_norm(each)) for each in (self, root)]
        units = [len(diagnose(each).units) for each in (self, root)]
        clipped = [float(clip_grad_norm_(self, norms[0] / 2)), float(grad_norm(self))]
        self.seen = {"norms": norms, "units": units, "clipped": clipped}

    def on_train_end(self) -> None:
        place = Path(self.trainer.default_root_dir, "saved")
        root = self.trainer.strategy.model
        try:
            save(self.head, place)
        except ShardkitError as error:
            self.seen["part"] = error.message
        save(self, place, overwrite=True)
        wanted = get_model_state_dict(root, options=StateDictOptions(full_state_dict=True))
        found = {name: torch.zeros(value.shape) for name, value in wanted.items()}
        dcp.load({"model": found}, checkpoint_id=place)
        self.seen["saved"] = [name for name, value in wanted.items() if torch.equal(found[name], value)]


def fit(module: Module, out: Path, callback: FSDPDiagnosticsCallback, **options: Any) -> None:
    """Train as Lightning does, and let it write nothing of its own."""
    options |= dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(
        accelerator="cpu", devices=SIZE, callbacks=[callback], default_root_dir=out, **options
    )
    trainer.fit(module, torch.utils.data.DataLoader(torch.ones(16, 8), batch_size=2))


def fsdp1(out: Path, lines: Lines) -> dict[str, Any]:
    """With both mixed precisions and a logger: then with the Trainer's alone."""
    let_fsdp_use_cpu()
    found: dict[str, Any] = {}
    for name, precision in (("both", bf16_mixed_precision("fsdp1")), ("trainer", None)):
        lines.lines.clear()
        callback = FSDPDiagnosticsCallback(1, log_module_tree_top_k=0, log_to_logger=name == "both")
        strategy = OnCpu(
            auto_wrap_policy={nn.Sequential},
            activation_checkpointing_policy={nn.Sequential},
            mixed_precision=precision,
            state_dict_type="sharded",
            cpu_offload=False,
        )
        module = Plain()
        logger = CSVLogger(out, name=name, version="0", flush_logs_every_n_steps=1)
        fit(module, out, callback, strategy=strategy, precision="bf16-mixed", max_steps=2, logger=logger)
        found[name] = {"settings": callback.settings, "lines": list(lines.lines), "seen": module.seen}
    return found


def rank(out: Path, number: int) -> None:
    os.environ.update(
        RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(SIZE), TORCHELASTIC_RUN_ID="test"
    )
    os.environ.update(LOCAL_WORLD_SIZE=str(SIZE), GROUP_RANK="0")
    lines = Lines()
    logging.getLogger("lightning.pytorch.shardkit").addHandler(lines)
    callback = FSDPDiagnosticsCallback(num_logged_batches=2, log_module_tree_top_k=2)
    strategy = ModelParallelStrategy(data_parallel_size=SIZE, tensor_parallel_size=1)
    fit(Module(), out, callback, strategy=strategy, max_steps=4, logger=False)
    own = list(lines.lines)
    first = fsdp1(out, lines)
    again = pickle.loads(pickle.dumps(callback))
    found: dict[str, Any] = {
        "diagnosis": callback.diagnosis.to_json() if callback.diagnosis else None,
        "phases": [phase.name for phase in callback.phases],
        "peaks": all(phase.cpu_peak for phase in callback.phases),
        "lines": own,
        "settings": callback.settings,
        "fsdp1": first,
        "is_callback": isinstance(callback, pl.Callback) and isinstance(callback, FSDPDiagnosticsCallback),
        "pickled": [
            *(type(again).__name__, again.num_logged_batches),
            *(again.log_module_tree_top_k, again.log_to_logger),
        ],
    }
    (out / f"{number}.json").write_text(json.dumps(found))


def main() -> None:
    with agent_store() as place:
        os.environ.update(place)
        wait([fork(partial(rank, Path(sys.argv[1]), number)) for number in range(SIZE)])


if __name__ == "__main__":
    main()
