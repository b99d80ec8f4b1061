"""One bar of bytes on stderr, for people at a terminal."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING

from shardkit.core.threads import NoProgress, Progress

if TYPE_CHECKING:
    from tqdm import tqdm

_REDRAW_S = 0.1


def make_progress(*, enabled: bool) -> Progress:
    """Return a bar, or what shows nothing where it is not wanted or stderr is no terminal."""
    return ByteBar() if enabled and sys.stderr.isatty() else NoProgress()


class ByteBar:
    """A tqdm bar that counts bytes.

    The engine calls `advance` for every MiB from several threads: it only adds up, and draws ten times a
    second.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bar: tqdm | None = None
        self._pending_bytes, self._drawn_at = 0, 0.0

    def start(self, total_bytes: int, label: str) -> None:
        """Begin a bar of `total_bytes`."""
        from tqdm import tqdm

        tqdm.set_lock(threading.RLock())  # tqdm's own is one between processes: it costs a semaphore
        self._bar = tqdm(
            total=total_bytes,
            desc=label,
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            file=sys.stderr,
            dynamic_ncols=True,
            miniters=1,
            mininterval=0,
        )

    def advance(self, num_bytes: int) -> None:
        """Count bytes, and draw if it is time."""
        with self._lock:
            self._pending_bytes += num_bytes
            now = time.monotonic()
            if now - self._drawn_at >= _REDRAW_S:
                self._drawn_at = now
                self._draw()

    def finish(self) -> None:
        """Draw the last state and leave it on the screen."""
        with self._lock:
            self._draw()
            if self._bar is not None:
                self._bar.close()
                self._bar = None

    def _draw(self) -> None:
        if self._bar is not None:
            self._bar.update(self._pending_bytes)
            self._pending_bytes = 0
