"""What stops a call before it is done: the system refuses something, or somebody interrupts."""

from __future__ import annotations

import os
from collections.abc import Callable

from shardkit.core.threads import NoProgress


def failing(code: int) -> Callable[..., None]:
    """Return a function to put in a place where the system refuses, with this `errno`."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def interrupt(*_: object, **__: object) -> None:
    """Stand in a place where somebody interrupts."""
    raise KeyboardInterrupt


class InterruptAfter(NoProgress):
    """A progress that interrupts the call, the so-and-so-manieth time that it is told of bytes."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def advance(self, num_bytes: int) -> None:
        self.left -= 1
        if self.left <= 0:
            raise KeyboardInterrupt
