"""How a long operation tells what it has done; whoever calls it decides what to show."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Counts bytes. Methods may be called from any thread."""

    def start(self, total_bytes: int, label: str) -> None:
        """A phase begins that moves `total_bytes`."""
        ...

    def advance(self, num_bytes: int) -> None:
        """`num_bytes` more are where they belong."""
        ...

    def finish(self) -> None:
        """The phase is over."""
        ...


class NoProgress:
    """Shows nothing."""

    def start(self, total_bytes: int, label: str) -> None:
        """Ignore it."""

    def advance(self, num_bytes: int) -> None:
        """Ignore it."""

    def finish(self) -> None:
        """Ignore it."""
