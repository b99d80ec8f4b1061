"""Jobs in a few threads while the main thread keeps handling signals, and progress of long jobs."""

from __future__ import annotations

import _thread
import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Future, ThreadPoolExecutor, wait
from contextvars import Context, ContextVar, copy_context
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, Literal, Protocol, TypeVar, cast

from shardkit.errors import UsageError

_INTERRUPT: ContextVar[threading.Event | None] = ContextVar("interrupt", default=None)

T = TypeVar("T")
R = TypeVar("R")

_UNHEARD_S = 0.5
# One thread waits for the disk while another computes a checksum. More threads compete for the same memory and disk.
_FEWEST, _MOST = 2, 8
_NUM_WAITING = 16


def choose_jobs(jobs: int | None) -> int:
    """Return how many threads move bytes.

    Args:
        jobs: the user's choice; None for the number of cores that this process may use, but at least 2 and at most 8.

    Raises:
        UsageError: fewer than one.
    """
    if jobs is None:
        return min(max(len(os.sched_getaffinity(0)), _FEWEST), _MOST)
    if jobs < 1:
        raise UsageError(
            f"--jobs must be at least 1, not {jobs}",
            hint=f"leave --jobs out for one thread for each core, from {_FEWEST} to {_MOST}",
        )
    return jobs


def run_all(
    jobs: Sequence[Callable[[], None]], num_threads: int, stop: threading.Event, *, name: str
) -> None:
    """Run jobs in their order, several at a time. The first error, or Ctrl-C, stops the others.

    Args:
        jobs: each ends soon after `stop` is set, by CancelledError if necessary.
        num_threads: maximum number of concurrent jobs.
        stop: set when a job fails.
        name: name of the threads.

    Raises:
        BaseException: the first error of a job, or KeyboardInterrupt, after all jobs have ended.
    """
    if not jobs:
        return
    # A signal that arrives while threads are being started could leave a thread that nobody waits for. Another thread
    # therefore starts them: only the main thread handles signals, and it does not while it is inside `extend`.
    over, stopped, begun = Outcome[None](), Outcome[None](), list[int]()
    manage = partial(_manage, jobs, min(num_threads, len(jobs)), stop, name, copy_context())
    try:
        begun.extend(map(_thread.start_new_thread, (over.settle,), ((manage,),)))
        over.wait()
    except BaseException:  # Ctrl-C: threads stop at their next check
        if begun:
            _thread.start_new_thread(stopped.settle, (stop.set,))
            stopped.wait()
            over.wait()
        raise
    over.result()


def _manage(
    jobs: Sequence[Callable[[], None]], num_threads: int, stop: threading.Event, name: str, context: Context
) -> None:
    """Run jobs from a thread that receives no signals; arguments and errors as for `run_all`."""
    waiting, lock = iter(jobs), threading.Lock()

    def work() -> None:
        while not stop.is_set():
            with lock:
                job = next(waiting, None)
            if job is None:
                return
            job()

    with ThreadPoolExecutor(num_threads, thread_name_prefix=name) as pool:
        try:
            # Context variables, such as the permission to follow links, apply in the threads too.
            futures = [pool.submit(context.copy().run, work) for _ in range(num_threads)]
            wait(futures, return_when=FIRST_EXCEPTION)
        except BaseException:  # no thread can be started
            stop.set()
            raise
        if any(future.done() and future.exception() for future in futures):
            stop.set()
    errors = [error for future in futures if (error := future.exception())]
    for error in errors:
        if not isinstance(error, CancelledError):
            raise error


def heed(interrupt: threading.Event) -> None:
    """Make `check_interrupt` raise in this thread, and in threads of its `at_once`, once an event is set."""
    _INTERRUPT.set(interrupt)


def check_interrupt() -> None:
    """Raise CancelledError if Ctrl-C has interrupted the thread that waits for this one."""
    interrupt = _INTERRUPT.get()
    if interrupt is not None and interrupt.is_set():
        raise CancelledError


def at_once(call: Callable[[T], R], items: Iterable[T], num_threads: int = _NUM_WAITING) -> list[R]:
    """Call a function for each item, concurrently, and return the results in order; for calls that wait for a network.

    Context variables, such as the permission to follow links, apply in the threads too. With one thread this is a plain
    loop. Ctrl-C ends calls at their next `check_interrupt`.
    """
    items = list(items)
    num_threads = min(num_threads, len(items))
    if num_threads <= 1:
        return [call(item) for item in items]
    interrupt = _INTERRUPT.get() or threading.Event()

    def heedful(item: T) -> R:
        heed(interrupt)
        return call(item)

    with ThreadPoolExecutor(num_threads, thread_name_prefix="shardkit-requests") as pool:
        try:
            futures = [pool.submit(copy_context().run, heedful, item) for item in items]
            until_done(futures)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                interrupt.set()
            pool.shutdown(cancel_futures=True)
            raise
        return [one.result() for one in futures]


def until_done(futures: Collection[Future[Any]]) -> None:
    """Wait until all futures are done, or one has failed.

    CPython handles signals before and after a blocking wait, so one that arrives just before it does not end it. All
    waits are therefore short.

    The main thread must not acquire locks of futures either: a signal just after acquiring one would leave it locked,
    and a finished job would wait for it forever. Another thread, which receives no signals, waits for the futures.
    """
    if futures:
        over = Outcome[object]()
        watch = partial(wait, futures, return_when=FIRST_EXCEPTION)
        _thread.start_new_thread(over.settle, (watch,))  # threading.Thread acquires locks while starting
        over.wait()


class Outcome(Generic[T]):
    """The result or error of a job in another thread. The main thread can wait for it safely; see `until_done`."""

    def __init__(self) -> None:
        self._over = SimpleQueue[None]()
        self._is_over = False
        self._value: T | None = None
        self._error: BaseException | None = None

    def settle(self, job: Callable[[], T]) -> T | None:
        """Run the job in the calling thread; return its result, or None if it fails."""
        try:
            self._value = job()
        except BaseException as error:
            self._error = error
        self._is_over = True
        self._over.put(None)
        return self._value

    def wait(self) -> None:
        """Wait until the job has ended."""
        while not self._is_over:
            with contextlib.suppress(Empty):
                self._over.get(timeout=_UNHEARD_S)

    def result(self) -> T:
        """Wait for the job; return its result, or raise its error."""
        self.wait()
        if self._error is not None:
            raise self._error
        return cast(T, self._value)


class Progress(Protocol):
    """Shows the progress of moving bytes. All methods may be called from any thread."""

    def start(self, total_bytes: int, label: str) -> None:
        """Begin a phase that moves `total_bytes`; 0 for a phase that only waits, such as for the disk."""

    def advance(self, num_bytes: int) -> None:
        """Report that `num_bytes` more have been moved."""

    def finish(self) -> None:
        """End the phase; no effect if it has already ended."""


class TimedProgress:
    """Forwards to another progress, and measures the duration of phases.

    Args:
        progress: receives all calls.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress, self._begun = progress, -1.0
        self.phases_s = 0.0
        """Total seconds of all finished phases."""

    def start(self, total_bytes: int, label: str) -> None:
        """Begin a phase."""
        self._begun = time.monotonic()
        self._progress.start(total_bytes, label)

    def advance(self, num_bytes: int) -> None:
        """Count bytes."""
        self._progress.advance(num_bytes)

    def finish(self) -> None:
        """End the phase, if it has not ended."""
        if self._begun >= 0:
            self.phases_s += time.monotonic() - self._begun
            self._begun = -1.0
        self._progress.finish()


OnStep = Callable[[str], None]
"""Called with a description of each step that takes seconds but moves no bytes."""


def silent(text: str) -> None:
    """An `OnStep` that does nothing."""


class NoProgress:
    """Shows nothing."""

    def start(self, total_bytes: int, label: str) -> None:
        """Ignore it."""

    def advance(self, num_bytes: int) -> None:
        """Ignore it."""

    def finish(self) -> None:
        """Ignore it."""


ProgressOption = Progress | Literal[False] | None
"""A progress to report to; False for none; None for a bar if the output is a terminal."""

bar: Callable[[], Progress] = NoProgress
"""Creates that bar. `shardkit/__init__` sets it, as this module may not import `cli`."""


def progress_for(option: ProgressOption) -> Progress:
    """Return the progress for a call, from its option."""
    if option is None:
        return bar()
    return NoProgress() if option is False else option
