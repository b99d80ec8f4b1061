"""Several files at a time: each in a thread, each with a report of its own, put together in their order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from functools import partial

from shardkit.core.threads import Progress, run_all
from shardkit.errors import UsageError
from shardkit.operations.verify.result import Report

Task = Callable[[Report], None]


def check_jobs(jobs: int) -> None:
    """Refuse a number of threads that is none.

    Raises:
        UsageError: it is below 1.
    """
    if jobs < 1:
        raise UsageError(f"--jobs must be at least 1, not {jobs}")


class _Stoppable:
    """Passes progress on until everything has to stop: whoever reads bytes tells of them."""

    def __init__(self, progress: Progress, stop: threading.Event) -> None:
        self._progress, self._stop = progress, stop

    def start(self, total_bytes: int, label: str) -> None:
        self._progress.start(total_bytes, label)

    def advance(self, num_bytes: int) -> None:
        if self._stop.is_set():
            raise CancelledError
        self._progress.advance(num_bytes)

    def finish(self) -> None:
        self._progress.finish()


def in_threads(tasks: Sequence[Task], jobs: int, report: Report) -> None:
    """Carry out tasks, `jobs` at a time; what they report is the same for any number of threads.

    Args:
        tasks: each takes the report that it adds to, and tells it of every part that it reads.
        jobs: threads.
        report: gets all of it, in the order of the tasks.

    Raises:
        BaseException: the first that a task raises, or Ctrl-C, once no task runs any more.
    """
    stop = threading.Event()
    progress = _Stoppable(report.progress, stop)
    parts = [Report(progress=progress) for _ in tasks]
    run_all(
        [partial(task, part) for task, part in zip(tasks, parts, strict=True)],
        jobs,
        stop,
        name="shardkit-read",
    )
    for part in parts:
        report.add(part)
