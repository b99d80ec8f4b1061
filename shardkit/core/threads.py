"""Jobs in a few threads, while the main thread still hears signals; and how a long job reports progress."""

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
# One thread waits for the disk while another computes a checksum. More than a few wait for the same memory and disk.
_FEWEST, _MOST = 2, 8
_NUM_WAITING = 16


def choose_jobs(jobs: int | None) -> int:
    """Return how many threads move bytes.

    Args:
        jobs: what a person asked for; None for the cores that this process may use, but at least 2 and at most 8.

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
        jobs: each ends soon once `stop` is set, with CancelledError if need be.
        num_threads: most threads that run jobs at the same time.
        stop: set when a job fails.
        name: name of the threads.

    Raises:
        BaseException: what a job raised, or Ctrl-C, once no job runs any more.
    """
    if not jobs:
        return
    # A signal that comes while threads are started would leave one that nobody waits for. So that is done where no
    # signal is heard. Inside `extend` none is heard either: whoever manages the threads is known once it has begun.
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
    """Run jobs, in a thread that hears no signals; arguments and errors as for `run_all`."""
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
            # What the run allows, such as following links, it allows in its threads too.
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
    """Let `check_interrupt` raise in this thread, and in those of its `at_once`, once an event is set."""
    _INTERRUPT.set(interrupt)


def check_interrupt() -> None:
    """Raise CancelledError in a thread that somebody waits for who has heard Ctrl-C."""
    interrupt = _INTERRUPT.get()
    if interrupt is not None and interrupt.is_set():
        raise CancelledError


def at_once(call: Callable[[T], R], items: Iterable[T], num_threads: int = _NUM_WAITING) -> list[R]:
    """Return the result of a call for each item, in their order; several calls, which wait for a network, run at a time.

    What the run allows, such as following links, it allows in the threads too. With one thread this is a loop. Ctrl-C
    ends calls at their next `check_interrupt`.
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
    """Wait until all are done, or one has failed.

    A signal that arrives just before the main thread waits does not wake it: CPython looks for signals before
    and after the wait. So no wait is long.

    Nor does the main thread take the locks of futures: a signal may come when it has just taken one, which nobody
    gives back then, and a job that is done waits for it for ever. A thread takes them that hears no signals.
    """
    if futures:
        over = Outcome[object]()
        watch = partial(wait, futures, return_when=FIRST_EXCEPTION)
        _thread.start_new_thread(over.settle, (watch,))  # a Thread takes locks while it starts
        over.wait()


class Outcome(Generic[T]):
    """What a job in another thread comes to. The main thread may wait for it at any time; see `until_done`."""

    def __init__(self) -> None:
        self._over = SimpleQueue[None]()
        self._is_over = False
        self._value: T | None = None
        self._error: BaseException | None = None

    def settle(self, job: Callable[[], T]) -> T | None:
        """Do the job, in the other thread; return what it gives, or None if it fails."""
        try:
            self._value = job()
        except BaseException as error:
            self._error = error
        self._is_over = True
        self._over.put(None)
        return self._value

    def wait(self) -> None:
        """Wait until the job is over."""
        while not self._is_over:
            with contextlib.suppress(Empty):
                self._over.get(timeout=_UNHEARD_S)

    def result(self) -> T:
        """Wait, and return what the job gives or raise its error."""
        self.wait()
        if self._error is not None:
            raise self._error
        return cast(T, self._value)


class Progress(Protocol):
    """Shows how many bytes are done. Its methods may be called from any thread."""

    def start(self, total_bytes: int, label: str) -> None:
        """Begin a phase that moves `total_bytes`; 0 if it waits, such as for the disk."""

    def advance(self, num_bytes: int) -> None:
        """Count `num_bytes` more that are where they belong."""

    def finish(self) -> None:
        """End the phase; nothing happens if it has ended."""


class TimedProgress:
    """Hands on what it is told, and knows how long its phases took.

    Args:
        progress: is told the same.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress, self._begun = progress, -1.0
        self.phases_s = 0.0
        """Seconds of all phases that have ended."""

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
"""Is told what takes seconds and moves no bytes."""


def silent(text: str) -> None:
    """Tell nobody."""


class NoProgress:
    """Shows nothing."""

    def start(self, total_bytes: int, label: str) -> None:
        """Ignore it."""

    def advance(self, num_bytes: int) -> None:
        """Ignore it."""

    def finish(self) -> None:
        """Ignore it."""


ProgressOption = Progress | Literal[False] | None
"""What a caller wants: something that is told of bytes, nothing with False, or with None a bar where a person watches."""

bar: Callable[[], Progress] = NoProgress
"""Makes that bar. What draws it stands above this module, so `shardkit` itself puts it here."""


def progress_for(option: ProgressOption) -> Progress:
    """Return what is told of the bytes of a call."""
    if option is None:
        return bar()
    return NoProgress() if option is False else option
