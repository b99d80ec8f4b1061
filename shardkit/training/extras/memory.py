"""Record the memory of the phases of a program: the current use and the peak of this process.

On the CPU this is anonymous memory. Pages of mapped files, which reading a checkpoint fills, belong to the
system and do not count. A thread samples it, so a peak shorter than the interval may be missed. On CUDA it is
the memory that the allocator has given out, whose peaks are exact.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from shardkit.core.text import MIB
from shardkit.errors import UsageError

_STATUS = "/proc/self/status"
_FIELD = b"RssAnon:"  # man 5 proc: in KiB; since Linux 4.5
_INTERVAL_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseUsage:
    """The memory of one phase, in bytes; None if it is not known, or without CUDA."""

    name: str
    """Names of nested phases are joined with slashes."""
    cpu_before: int | None
    """Anonymous memory at the start."""
    cpu_after: int | None
    """Anonymous memory at the end."""
    cpu_peak: int | None
    """Largest sample of anonymous memory during the phase."""
    cuda_before: int | None = None
    """Memory allocated on this process's current device at the start."""
    cuda_after: int | None = None
    """Memory allocated at the end."""
    cuda_peak: int | None = None
    """Peak of allocated memory during the phase."""
    cuda_reserved: int | None = None
    """Memory reserved by the allocator at the end."""


@dataclass(slots=True)
class _OpenPhase:
    """A phase that has not ended."""

    name: str
    cpu_before: int | None
    cpu_peak: int | None
    cuda_before: int | None
    cuda_peak: int | None


class PhaseMemory:
    """Records memory by phase.

        with PhaseMemory() as memory:
            with memory.phase("load"):
                with memory.phase("read"):  # recorded as load/read
                    ...
            memory.mark("after forward")  # records the time since the last mark, without a block
        print(memory)

    On CUDA it resets the allocator's peak statistics whenever a phase begins or ends. The object can
    be entered again.

    Args:
        interval_s: interval between samples of the CPU's memory.
    """

    def __init__(self, *, interval_s: float = _INTERVAL_S) -> None:
        self.phases: list[PhaseUsage] = []
        """Finished phases and marks, in the order in which they ended."""
        self._interval_s = interval_s
        self._open: list[_OpenPhase] = []
        self._since: _OpenPhase | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> PhaseMemory:
        if self._thread is not None:
            raise UsageError("this PhaseMemory is recording already", hint="use phase() for what is inside")
        self._stop.clear()
        self._since = self._begin("")
        self._thread = threading.Thread(target=self._sample, name="shardkit-memory", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._thread is not None
        self._stop.set()
        self._thread.join()
        self._thread, self._since = None, None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the block as a phase, even if it ends with an exception.

        Raises:
            UsageError: outside `with`.
        """
        self._check()
        inside = self._open[-1].name + "/" if self._open else ""
        begun = self._begin(inside + name)
        with self._lock:
            self._open.append(begun)
        try:
            yield
        finally:
            self._look()
            with self._lock:
                self._open.remove(begun)
            self.phases.append(_usage(begun, begun.name))

    def mark(self, name: str) -> PhaseUsage:
        """Record the time since the last mark, or since the beginning, as a phase.

        Raises:
            UsageError: outside `with`.
        """
        self._check()
        self._look()
        assert self._since is not None
        usage = _usage(self._since, name)
        self.phases.append(usage)
        self._since = self._begin("")
        return usage

    def to_json(self) -> dict[str, Any]:
        """Return every phase as plain data."""
        return {"phases": [asdict(phase) for phase in self.phases]}

    def __str__(self) -> str:
        columns = ["cpu_before", "cpu_after", "cpu_peak"]
        if any(phase.cuda_after is not None for phase in self.phases):
            columns += ["cuda_before", "cuda_after", "cuda_peak", "cuda_reserved"]
        width = max((len(phase.name) for phase in self.phases), default=5)
        lines = [f"{'MiB':<{width}}" + "".join(f"{name.replace('_', ' '):>14}" for name in columns)]
        for phase in self.phases:
            values = (getattr(phase, name) for name in columns)
            lines.append(f"{phase.name:<{width}}" + "".join(f"{_mib(value):>14}" for value in values))
        return "\n".join(lines)

    def _check(self) -> None:
        if self._thread is None:
            raise UsageError(
                "PhaseMemory records only inside `with`", hint="with PhaseMemory() as memory: ..."
            )

    def _begin(self, name: str) -> _OpenPhase:
        self._look()
        cpu, cuda = anonymous_bytes(), _cuda_allocated()
        return _OpenPhase(name, cpu, cpu, cuda, cuda)

    def _sample(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._raise_cpu()

    def _raise_cpu(self) -> None:
        nbytes = anonymous_bytes()
        with self._lock:
            for phase in self._running():
                if nbytes is not None and (phase.cpu_peak is None or nbytes > phase.cpu_peak):
                    phase.cpu_peak = nbytes

    def _look(self) -> None:
        """Update the peaks of all running phases, and reset CUDA's peak."""
        self._raise_cpu()
        if _has_cuda():
            peak = torch.cuda.max_memory_allocated()
            for phase in self._running():
                phase.cuda_peak = max(phase.cuda_peak or 0, peak)
            torch.cuda.reset_peak_memory_stats()

    def _running(self) -> list[_OpenPhase]:
        return self._open if self._since is None else [*self._open, self._since]


def _usage(phase: _OpenPhase, name: str) -> PhaseUsage:
    begun = {**asdict(phase), "name": name}
    reserved = torch.cuda.memory_reserved() if _has_cuda() else None
    return PhaseUsage(
        **begun, cpu_after=anonymous_bytes(), cuda_after=_cuda_allocated(), cuda_reserved=reserved
    )


def anonymous_bytes() -> int | None:
    """Return this process's anonymous memory in bytes; None if the system does not report it (other than Linux)."""
    try:
        with open(_STATUS, "rb", buffering=0) as file:
            text = file.read()
    except OSError:
        return None
    offset = text.find(_FIELD)
    return int(text[offset + len(_FIELD) :].split(None, 1)[0]) * 1024 if offset >= 0 else None


def _has_cuda() -> bool:
    # This check must not create a context, which would use hundreds of megabytes.
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _cuda_allocated() -> int | None:
    return torch.cuda.memory_allocated() if _has_cuda() else None


def _mib(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / MIB:,.1f}"
