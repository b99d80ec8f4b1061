"""A Lightning callback that says what wrapping did, and where memory peaks in the first batches.

Lightning is imported when a callback is made, not before.
"""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from typing import Any

from shardkit.core.units import MIB
from shardkit.errors import UsageError
from shardkit.training.diagnose import Diagnosis, diagnose
from shardkit.training.memory import PhaseMemory, PhaseUsage

# The same library under two names, whose classes are not each other's.
_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


class FSDPDiagnosticsCallback:
    """Logs `diagnose` of the wrapped model when fit starts, and memory in the first batches, on every rank.

    For FSDPStrategy (FSDP1) and ModelParallelStrategy (FSDP2); with any other one it says that nothing is cut.
    Of each batch: what is held at its start, after backward, before the optimizer's step and at its end, with the
    peak since the point before.

    Args:
        num_logged_batches: of each fit, the first so many are watched; 0 for none.

    Raises:
        UsageError: Lightning is not installed.
    """

    def __new__(cls, *args: object, **kwargs: object) -> FSDPDiagnosticsCallback:
        bases = _callback_classes()
        made: FSDPDiagnosticsCallback = object.__new__(
            type(cls.__name__, (cls, *bases), {"__module__": __name__})
        )
        return made

    def __init__(self, num_logged_batches: int = 3) -> None:
        self.num_logged_batches = num_logged_batches
        self.diagnosis: Diagnosis | None = None
        """Of this rank; None before fit."""
        self.phases: list[PhaseUsage] = []
        """What was logged of memory; names are "batch 0 after backward" and so on."""
        self._memory: PhaseMemory | None = None
        self._batch = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return FSDPDiagnosticsCallback, (self.num_logged_batches,)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Diagnose the model as the strategy wrapped it."""
        self.diagnosis = diagnose(trainer.strategy.model or pl_module)
        self.phases, self._batch = [], 0
        for line in str(self.diagnosis).splitlines():
            _logger().info("%s", line)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin to watch a batch."""
        if self._batch < self.num_logged_batches:
            self._memory = PhaseMemory().__enter__()
            self._mark(trainer, "start")

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Peak of forward and backward."""
        self._mark(trainer, "after backward")

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Peak of what lies between: clipping, logging."""
        self._mark(trainer, "before optimizer step")

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Peak of the optimizer's step."""
        self._mark(trainer, "end")
        self._close()
        self._batch += 1

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the watching of a batch that failed."""
        self._close()

    def _mark(self, trainer: Any, point: str) -> None:
        if self._memory is None:
            return
        usage = self._memory.mark(f"batch {self._batch} {point}")
        self.phases.append(usage)
        parts = [f"{name} {value / MIB:,.1f}" for name, value in _shown(usage) if value is not None]
        _logger().info("rank %d, %s, MiB: %s", trainer.global_rank, usage.name, ", ".join(parts))

    def _close(self) -> None:
        if self._memory is not None:
            self._memory.__exit__(None, None, None)
            self._memory = None


def _shown(usage: PhaseUsage) -> tuple[tuple[str, int | None], ...]:
    return (
        ("CPU", usage.cpu_after),
        ("peak", usage.cpu_peak),
        ("CUDA", usage.cuda_after),
        ("peak", usage.cuda_peak),
        ("reserved", usage.cuda_reserved),
    )


def _callback_classes() -> tuple[type, ...]:
    """Callback of every name that Lightning was imported under, else of the first that can be."""
    imported = [name for name in _PACKAGES if name in sys.modules]
    for name in imported or _PACKAGES:
        if not imported:
            try:
                import_module(name)
            except ModuleNotFoundError:
                continue
        return tuple(sys.modules[found].Callback for found in (imported or [name]))
    raise UsageError(
        "FSDPDiagnosticsCallback needs Lightning, which is not installed", hint="pip install lightning"
    )


def _logger() -> logging.Logger:
    """A child of Lightning's own logger: it is shown where Lightning's messages are."""
    name = next((name for name in _PACKAGES if name in sys.modules), "shardkit")
    return logging.getLogger(f"{name}.shardkit")
