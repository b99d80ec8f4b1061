"""A Lightning callback that logs the result of wrapping, and the memory peaks in the first batches.

Lightning is imported when a callback is created, not before.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from shardkit._torch import wrap_policy_classes
from shardkit.core.text import MIB, escape
from shardkit.keys.names import clean_name
from shardkit.training.extras.diagnose import Diagnosis, diagnose
from shardkit.training.extras.memory import PhaseMemory, PhaseUsage
from shardkit.training.extras.publish import LIGHTNING, callback_classes
from shardkit.training.ranks.local import local_tensor

_FIELDS = {
    "cpu_after": "CPU",
    "cpu_peak": "peak",
    "cuda_after": "CUDA",
    "cuda_peak": "peak",
    "cuda_reserved": "reserved",
}
"""Field of `PhaseUsage` that loggers get -> its label in lines of text."""


class FSDPDiagnosticsCallback:
    """Logs `diagnose` of the wrapped model when fit starts, and memory in the first batches, on every rank.

    It is for FSDPStrategy (FSDP1) and ModelParallelStrategy (FSDP2); with any other strategy it logs that
    nothing is cut. Rank 0 also logs the effective settings of the strategy: the mixed precision of the
    strategy, that of `Trainer(precision=...)`, the one that the wrapped model has, state_dict_type,
    offload and policies. For each batch it logs the used memory at its start, after backward, before the
    optimizer's step and at its end, with the peak since the previous point.

    Args:
        num_logged_batches: number of batches at the start of each fit whose memory is logged; 0 for none.
        log_module_tree_top_k: number of modules to log, of those with the most parameters; 0 for none.
        log_to_logger: also send the settings as hyperparameters, and rank 0's shares and memory as metrics in bytes
            (`shardkit/...`), to the trainer's loggers.

    Raises:
        UsageError: Lightning is not installed.
    """

    def __new__(cls, *args: object, **kwargs: object) -> FSDPDiagnosticsCallback:
        bases = callback_classes(cls.__name__, "Lightning", LIGHTNING, "Callback")
        callback: FSDPDiagnosticsCallback = object.__new__(
            type(cls.__name__, (cls, *bases), {"__module__": __name__})
        )
        return callback

    def __init__(
        self, num_logged_batches: int = 3, log_module_tree_top_k: int = 5, log_to_logger: bool = False
    ) -> None:
        self.num_logged_batches = num_logged_batches
        self.log_module_tree_top_k = log_module_tree_top_k
        self.log_to_logger = log_to_logger
        self.settings: dict[str, str] = {}
        """Name -> effective setting of the strategy; empty before fit."""
        self.diagnosis: Diagnosis | None = None
        """This rank's diagnosis; None before fit."""
        self.phases: list[PhaseUsage] = []
        """The memory that was logged; names are "batch 0 after backward" and so on."""
        self._memory: PhaseMemory | None = None
        self._batch = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return FSDPDiagnosticsCallback, (
            self.num_logged_batches,
            self.log_module_tree_top_k,
            self.log_to_logger,
        )

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Diagnose the model as the strategy wrapped it."""
        model = trainer.strategy.model or pl_module
        self.diagnosis = diagnose(model)
        self.settings = _settings(trainer, model, self.diagnosis)
        self.phases, self._batch = [], 0
        lines = str(self.diagnosis).splitlines()
        if trainer.global_rank == 0:
            lines += [f"{name}: {value}" for name, value in self.settings.items()]
        for line in (*lines, *_largest(model, self.log_module_tree_top_k)):
            _logger().info("%s", line)
        if self.log_to_logger:
            for logger in trainer.loggers:
                logger.log_hyperparams({f"shardkit/{name}": value for name, value in self.settings.items()})
            self._send(
                trainer,
                {
                    "units": len(self.diagnosis.units),
                    "checkpoint_wrappers": self.diagnosis.checkpoint_wrappers,
                    "local_parameters": self.diagnosis.local_parameters,
                    "local_bytes": self.diagnosis.local_bytes,
                    "expected_bytes": self.diagnosis.expected_bytes,
                },
            )

    def _send(self, trainer: Any, metrics: Mapping[str, int]) -> None:
        """Send numbers to the trainer's loggers, which log those of rank 0."""
        named = {f"shardkit/{name}": float(value) for name, value in metrics.items()}
        for logger in trainer.loggers:
            logger.log_metrics(named, step=trainer.global_step)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Start recording the memory of a batch."""
        if self._batch < self.num_logged_batches:
            self._memory = PhaseMemory().__enter__()
            self._mark(trainer, "start")

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Log the peak of forward and backward."""
        self._mark(trainer, "after backward")

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Log the peak between backward and step, such as of clipping."""
        self._mark(trainer, "before optimizer step")

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the peak of the optimizer's step."""
        self._mark(trainer, "end")
        self._close()
        self._batch += 1

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stop recording the memory of a batch that failed."""
        self._close()

    def _mark(self, trainer: Any, point: str) -> None:
        if self._memory is None:
            return
        usage = self._memory.mark(f"batch {self._batch} {point}")
        self.phases.append(usage)
        measured = {
            name: value for name, value in asdict(usage).items() if name in _FIELDS and value is not None
        }
        parts = [f"{_FIELDS[name]} {value / MIB:,.1f}" for name, value in measured.items()]
        _logger().info("rank %d, %s, MiB: %s", trainer.global_rank, usage.name, ", ".join(parts))
        if self.log_to_logger:
            prefix = point.replace(" ", "_")
            self._send(trainer, {f"{prefix}/{name}_bytes": value for name, value in measured.items()})

    def _close(self) -> None:
        if self._memory is not None:
            self._memory.__exit__(None, None, None)
            self._memory = None


def _settings(trainer: Any, model: nn.Module, diagnosis: Diagnosis) -> dict[str, str]:
    """Return name -> effective setting, from a strategy and from the model that it wrapped."""
    strategy = trainer.strategy
    settings = {"strategy": f"{type(strategy).__name__}, {trainer.world_size} processes"}
    strategy_policy = getattr(strategy, "mixed_precision", None)
    plugin = getattr(strategy, "precision_plugin", None)
    implied = getattr(plugin, "mixed_precision_config", None)
    settings["mixed precision of the strategy"] = _precision(strategy_policy)
    settings["mixed precision of the Trainer"] = f"precision={trainer.precision}" + (
        f": {_precision(implied)}" if implied is not None else ""
    )
    settings["mixed precision in effect"] = _in_effect(model, diagnosis, strategy_policy, implied)
    if hasattr(strategy, "_save_distributed_checkpoint"):  # ModelParallelStrategy
        settings["state_dict_type"] = "sharded" if strategy._save_distributed_checkpoint else "full"
        settings["mesh"] = str(getattr(strategy, "device_mesh", None))
    elif hasattr(strategy, "_state_dict_type"):  # FSDPStrategy
        settings["state_dict_type"] = strategy._state_dict_type
        settings["sharding"] = strategy.sharding_strategy.name
    offload = getattr(strategy, "cpu_offload", None)
    on = offload.offload_params if offload is not None else any(u.cpu_offload for u in diagnosis.units)
    settings["cpu offload"] = "parameters" if on else "none"
    arguments = dict(getattr(strategy, "kwargs", {}))
    if "auto_wrap_policy" in arguments or offload is not None:
        settings["wrap policy"] = _policy(arguments.pop("auto_wrap_policy", None))
        checkpointing = getattr(strategy, "_activation_checkpointing_kwargs", {}) or {}
        settings["activation checkpointing"] = _policy(
            checkpointing.get("auto_wrap_policy") or checkpointing.get("check_fn")
        )
    settings.update({name: _policy(value) for name, value in arguments.items()})
    return {name: escape(value) for name, value in settings.items()}


def _in_effect(model: nn.Module, diagnosis: Diagnosis, strategy_policy: object, implied: object) -> str:
    """Return the mixed precision of the outermost unit, and its origin, as text."""
    first = next((module for module in model.modules() if isinstance(module, FullyShardedDataParallel)), None)
    if first is None:
        kinds = dict.fromkeys(unit.mixed_precision or "none" for unit in diagnosis.units)
        return ("fully_shard's own: " + "; ".join(kinds)) if kinds else "none: nothing is cut"
    effective = first.mixed_precision
    origin = "set by hand"
    if effective == strategy_policy:
        origin = "the strategy's" + (
            ", which wins over the Trainer's" if implied not in (None, strategy_policy) else ""
        )
    elif effective == implied:
        origin = "the Trainer's"
    return f"{_precision(effective)} ({origin})"


def _precision(value: Any) -> str:
    """Return the dtypes of torch's MixedPrecision or MixedPrecisionPolicy as text."""
    if value is None:
        return "not set"
    kinds = ("param", "reduce", "buffer", "output")
    dtypes = {kind: getattr(value, f"{kind}_dtype", None) for kind in kinds}
    shown = [
        f"{kind} {str(dtype).removeprefix('torch.')}" for kind, dtype in dtypes.items() if dtype is not None
    ]
    return ", ".join(shown) or "dtypes as they are"


def _policy(value: Any) -> str:
    """Return a policy or another argument as short text, with classes by their names."""
    if value is None:
        return "none"
    classes = value if isinstance(value, (set, frozenset, list, tuple)) else wrap_policy_classes(value)
    if classes and all(isinstance(cls, type) for cls in classes):
        return ", ".join(sorted(cls.__name__ for cls in classes))
    return getattr(value, "__name__", None) or str(value)


def _largest(model: nn.Module, number: int) -> list[str]:
    """Return a line for each of the modules inside the model with the most parameters on this rank."""
    rows: list[tuple[int, int, str, str]] = []
    for path, module in model.named_modules():
        children = [child for child in module.children() if any(True for _ in child.parameters())]
        parameters = list(module.parameters(recurse=False))
        if not path or (len(children) == 1 and not parameters):  # a wrapper around one module
            continue
        local = [local_tensor(parameter) for parameter in module.parameters()]
        numel, nbytes = sum(tensor.numel() for tensor in local), sum(tensor.nbytes for tensor in local)
        if numel:
            rows.append((numel, nbytes, clean_name(path), type(module).__name__))
    rows.sort(key=lambda row: -row[0])  # stable: the module that comes first
    return [
        f"module {escape(path)} ({kind}): {numel:,} parameters here, {nbytes / MIB:,.1f} MiB"
        for numel, nbytes, path, kind in rows[:number]
    ]


def _logger() -> logging.Logger:
    """Return a child of Lightning's own logger, so that messages appear where Lightning's do."""
    name = next((name for name in LIGHTNING if name in sys.modules), "shardkit")
    return logging.getLogger(f"{name}.shardkit")
