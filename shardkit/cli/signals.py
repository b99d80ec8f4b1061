"""Ctrl-C and SIGTERM: the first asks the run to stop in order, the second stops it at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from shardkit.errors import Terminated


@contextmanager
def signals_raised() -> Iterator[None]:
    """Raise KeyboardInterrupt for SIGINT and `Terminated` for SIGTERM; a second signal ends the process.

    Nothing is lost by ending at once: files in the journal are on disk, and nothing else counts.
    """
    if threading.current_thread() is not threading.main_thread():  # signal.signal refuses
        yield
        return
    # A signal that is ignored stays so: `nohup` and background jobs of a plain shell want that.
    chosen = [s for s in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(s) is not signal.SIG_IGN]
    handler = _Handler()
    before = {signum: signal.signal(signum, handler) for signum in chosen}
    try:
        yield
    finally:
        for signum, old in before.items():
            signal.signal(signum, old)


class _Handler:
    def __init__(self) -> None:
        self._was_called = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self._was_called:
            os._exit(128 + signum)
        self._was_called = True
        raise Terminated if signum == signal.SIGTERM else KeyboardInterrupt
