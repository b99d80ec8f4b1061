"""Progress on stderr: a bar on a terminal, occasional lines elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

from shardkit.core.text import format_duration, format_size

if TYPE_CHECKING:
    from tqdm import tqdm

    from shardkit.core.threads import Progress

_REDRAW_S = 0.1
_BEAT_S = 1.0
"""Interval for redrawing an idle bar, so that its clock advances."""
_CLOCK_S = 2.0
"""Steps that take longer show a clock."""
_FIRST_LINE_S, _NEXT_LINE_S = 10.0, 60.0


class Beat:
    """Calls a function repeatedly, in a separate thread, until stopped.

    Args:
        call: the function.
        pauses: seconds before each call.
    """

    def __init__(self, call: Callable[[], None], pauses: Iterable[float]) -> None:
        self._call, self._pauses, self._over = call, pauses, threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardkit-progress", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for pause in self._pauses:
            if self._over.wait(pause):
                return
            try:
                self._call()
            except (OSError, ValueError):  # stderr is gone, which should not end the command
                return

    def stop(self) -> None:
        """Stop, and wait for a call in progress."""
        self._over.set()
        self._thread.join()


class ByteBar:
    """A tqdm bar that counts bytes; a phase without bytes is shown once it takes a second.

    The engine calls `advance` for every MiB, from several threads. Drawing is limited to ten times a second.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bar: tqdm | None = None
        self._beat: Beat | None = None
        self._label, self._total_bytes = "", 0
        self._pending_bytes, self._drawn_at, self._begun = 0, 0.0, 0.0

    def start(self, total_bytes: int, label: str) -> None:
        """Begin a bar of `total_bytes`, 0 for a phase without bytes; without a label such a phase is only a clock."""
        self.finish()
        self._label, self._total_bytes = label, total_bytes
        if total_bytes:
            self._bar = self._new()
        self._begun = time.monotonic()
        self._beat = Beat(self._redraw, chain([_BEAT_S if label else _CLOCK_S], repeat(_BEAT_S)))

    @property
    def counts_bytes(self) -> bool:
        """True during a phase with bytes."""
        return self._beat is not None and self._total_bytes > 0

    def _new(self) -> tqdm:
        from tqdm import tqdm

        tqdm.set_lock(threading.RLock())  # tqdm's own lock works across processes, and needs a semaphore
        return tqdm(
            total=self._total_bytes or None,
            desc=self._label,
            unit="iB",  # with divisor 1024: 327MiB, like the lines below the bar
            unit_scale=True,
            unit_divisor=1024,
            file=sys.stderr,
            **_size(),
            miniters=1,
            mininterval=0,
            leave=bool(self._total_bytes),
            delay=0 if self._total_bytes else 1e-9,  # otherwise it is drawn before its clock is set
            bar_format=None if self._total_bytes else "{desc}... {elapsed}" if self._label else "  {elapsed}",
        )

    def advance(self, num_bytes: int) -> None:
        """Count bytes, and redraw if due."""
        with self._lock:
            self._pending_bytes += num_bytes
            now = time.monotonic()
            if now - self._drawn_at >= _REDRAW_S:
                self._drawn_at = now
                self._draw()

    def finish(self) -> None:
        """Draw the last state and leave it on the screen."""
        if self._beat is not None:
            self._beat.stop()
            self._beat = None
        with self._lock:
            self._draw()
            if self._bar is not None:
                self._bar.close()
                self._bar = None

    def _redraw(self) -> None:
        with self._lock:
            if self._bar is None:
                self._bar = self._new()
                self._bar.start_t -= time.monotonic() - self._begun
            self._draw()
            self._bar.refresh()

    def _draw(self) -> None:
        if self._bar is not None:
            self._bar.update(self._pending_bytes)
            self._pending_bytes = 0


def _size() -> dict[str, Any]:
    """Return the bar's size for tqdm, which draws nothing on a terminal with 0 columns or lines.

    Terminals of `script`, `kubectl exec` and `ssh -tt` have such sizes.
    """
    with contextlib.suppress(OSError, ValueError):  # no terminal
        columns, lines = os.get_terminal_size(sys.stderr.fileno())
        if not (columns and lines):
            return {"ncols": (columns or 80) - 1, "nrows": 24}
    return {"dynamic_ncols": True}


class ByteLines:
    """Prints progress for logs (srun, CI, nohup): after 10 seconds, then every minute.

    Args:
        say: prints a line.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._lock = say, threading.Lock()
        self._beat: Beat | None = None
        self._label, self._total_bytes, self._done_bytes, self._begun = "", 0, 0, 0.0
        self._rate_start = 0, 0.0
        """Bytes and time at the previous line, to compute the rate."""

    def start(self, total_bytes: int, label: str) -> None:
        """Begin a phase of `total_bytes`, 0 if unknown."""
        with self._lock:
            self._label, self._total_bytes, self._done_bytes = label, total_bytes, 0
            self._begun = time.monotonic()
            self._rate_start = 0, self._begun
        if self._beat is None:
            self._beat = Beat(self._tell, chain([_FIRST_LINE_S], repeat(_NEXT_LINE_S)))

    def advance(self, num_bytes: int) -> None:
        """Count bytes."""
        with self._lock:
            self._done_bytes += num_bytes

    def finish(self) -> None:
        """End the phase; nothing is printed before the next one."""
        with self._lock:
            self._label = ""

    def close(self) -> None:
        """End the thread that prints."""
        if self._beat is not None:
            self._beat.stop()

    def _tell(self) -> None:
        if line := self.line(time.monotonic()):
            self._say(line)

    def line(self, now: float) -> str:
        """Return the line to print; empty between phases.

        Args:
            now: seconds, of the monotonic clock.
        """
        with self._lock:
            label, total_bytes, done_bytes = self._label, self._total_bytes, self._done_bytes
            moved_bytes, elapsed_s = done_bytes - self._rate_start[0], now - self._rate_start[1]
            self._rate_start = done_bytes, now
        if not label:
            return ""
        if not total_bytes:
            elapsed = round(now - self._begun)
            return f"{label} ({format_duration(elapsed)} elapsed)" if elapsed else label
        share = f"{format_size(done_bytes)} of {format_size(total_bytes)}, {done_bytes * 100 // total_bytes}%"
        rate = moved_bytes / elapsed_s if elapsed_s > 0 else 0.0
        if not rate:
            return f"{label}: {share}"
        rest = f", {format_duration(round((total_bytes - done_bytes) / rate))} left"
        return f"{label}: {share}, {format_size(round(rate))}/s{rest if done_bytes < total_bytes else ''}"


def bar_of_library_calls() -> Progress:
    """Return the progress bar for a function of the library that is called from Python, not from the command line.

    It shows something only on a terminal or in a notebook, and not if SHARDKIT_NO_PROGRESS is set.
    """
    from shardkit.core.threads import NoProgress

    forbids = os.environ.get("SHARDKIT_NO_PROGRESS", "0").lower() not in ("", "0", "false", "no", "off")
    return NoProgress() if forbids or not (sys.stderr.isatty() or _is_notebook()) else ByteBar()


def _is_notebook() -> bool:
    """True in a kernel of IPython, whose stderr is not a terminal."""
    ipython = sys.modules.get("IPython")  # a kernel has imported it
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None
