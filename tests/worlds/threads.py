"""Threads that a run may not leave behind, and how one is interrupted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest


def threads_left() -> list[str]:
    """Return the names of shardkit's threads, but for those that a process which reads stores keeps for its requests."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("shardkit") and not name.startswith("shardkit-store")]


@contextmanager
def interrupted(heard: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Let SIGUSR1 interrupt what is done meanwhile, as Ctrl-C does, and see that it did; `heard` is called before."""

    def interrupt(*_: object) -> None:
        heard()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        signal.signal(signal.SIGUSR1, before)
