"""A worker for factors without a process of its own."""

from __future__ import annotations

import contextlib
import json
import mmap
import threading
from typing import Any, ClassVar

from shardkit.osft.child import serve
from shardkit.osft.workers import FactorWorker, _memory


class WorkerHere(FactorWorker):
    """Answers requests as the child does, through the same memory and JSON."""

    def _start(self, opened: contextlib.ExitStack, nbytes: int) -> None:
        self._fd = _memory(opened, nbytes)
        self._memory = mmap.mmap(self._fd, nbytes)

    def ask(self, request: dict[str, Any], stop: threading.Event) -> dict[str, Any]:
        """Compute at once."""
        answer: dict[str, Any] = json.loads(json.dumps(serve(json.loads(json.dumps(request)), self._fd)))
        return answer


class Counting(WorkerHere):
    """Keeps what it was asked for. Empty `asked` before it is used."""

    asked: ClassVar[list[str]] = []

    def ask(self, request: dict[str, Any], stop: threading.Event) -> dict[str, Any]:
        """Compute at once, and keep the weight's path."""
        self.asked.append(request["path"])
        return super().ask(request, stop)
