"""Threads that a run may not leave behind."""

from __future__ import annotations

import threading


def threads_left() -> list[str]:
    """Return the names of shardkit's threads, but for those that a process which reads stores keeps for its requests."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("shardkit") and not name.startswith("shardkit-store")]
