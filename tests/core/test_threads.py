"""Jobs in threads: what stops them, and who hears a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import CancelledError
from contextvars import ContextVar

import pytest

from shardkit.core import threads
from shardkit.core.threads import at_once, check_interrupt, choose_jobs, run_all
from shardkit.errors import UsageError
from tests.worlds.threads import interrupted

# What another thread is interrupted by does not wake the main thread; nor does what comes just before it begins to wait.
_UNHEARD = """
import os, signal, sys, threading, time
from shardkit.core.threads import run_all

signal.signal(signal.SIGINT, signal.default_int_handler)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
stop = threading.Event()

def place():
    frame = sys._current_frames()[threading.main_thread().ident]
    return frame.f_code.co_name, frame.f_lasti

def job():
    while len(places := {place() for _ in range(5) if not time.sleep(0.01)}) > 1 or min(places)[0] != "wait":
        pass
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    os.kill(os.getpid(), signal.SIGINT)
    stop.wait()

try:
    run_all([job, job], 1, stop, name="test")
except KeyboardInterrupt:
    print("heard")
"""

# A signal is heard when a call returns, so also when one has just taken a lock that nobody has promised to give back, or
# has just started a thread that nobody knows yet.
_ON_RETURN = """
import sys, threading, time
from shardkit.core.threads import run_all

def interrupt(at):
    left, is_inside, was_heard, stop, running = at, False, threading.Event(), threading.Event(), []

    def hear(event):
        nonlocal left
        left -= is_inside and event in ("return", "c_return")
        if left < 0 and not was_heard.is_set():
            was_heard.set()
            raise KeyboardInterrupt

    def profile(frame, event, _):
        nonlocal is_inside
        if event == "call" and frame.f_code.co_name == "run_all":
            is_inside = True
        if event != "c_return" or frame.f_code.co_filename == run_all.__code__.co_filename:
            hear(event)

    def place():
        frame = sys._current_frames()[threading.main_thread().ident]
        return frame.f_code.co_name, frame.f_lasti

    def job():
        running.append(job)
        while not was_heard.is_set() and len({place() for _ in range(5) if not time.sleep(0.01)}) > 1:
            pass
        if was_heard.is_set():
            stop.wait()
            time.sleep(0.02)  # one that is not waited for is still there then
        running.remove(job)

    sys.setprofile(profile)
    try:
        run_all([job, job], 2, stop, name="test")
    except KeyboardInterrupt:
        sys.setprofile(None)
        assert not running, at
    finally:
        sys.setprofile(None)
    return was_heard.is_set()

at = 0
while interrupt(at):
    at += 1
print("over" if at > 5 else f"never heard, or {at} times")
"""


def test_a_signal_at_any_return_from_a_call_stops_no_thread_for_good() -> None:
    done = subprocess.run([sys.executable, "-c", _ON_RETURN], capture_output=True, text=True, timeout=600)
    assert (done.stdout, done.returncode) == ("over\n", 0), done.stderr


def test_a_signal_that_does_not_wake_the_main_thread_is_heard() -> None:
    done = subprocess.run([sys.executable, "-c", _UNHEARD], capture_output=True, text=True, timeout=600)
    assert (done.stdout, done.returncode) == ("heard\n", 0), done.stderr


def test_all_run_once_and_in_their_order() -> None:
    found: list[int] = []
    run_all([lambda n=n: found.append(n) for n in range(100)], 1, threading.Event(), name="test")  # type: ignore[misc]
    assert found == list(range(100))
    run_all([], 3, threading.Event(), name="test")


def test_the_first_error_stops_the_others() -> None:
    stop, begun = threading.Event(), threading.Barrier(2)
    later: list[str] = []

    def fails() -> None:
        begun.wait()
        raise ValueError("this one")

    def goes_on() -> None:
        begun.wait()
        stop.wait()

    with pytest.raises(ValueError, match="this one"):
        run_all([fails, goes_on, lambda: later.append("not begun")], 2, stop, name="test")
    assert stop.is_set()
    assert later == []


@pytest.mark.parametrize(("cores", "threads"), [(1, 2), (2, 2), (5, 5), (128, 8)])
def test_by_default_as_many_threads_as_the_process_may_use_cores(
    cores: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert choose_jobs(None) == threads
    assert choose_jobs(3) == 3
    with pytest.raises(UsageError, match="jobs must be at least 1"):
        choose_jobs(0)


def test_only_phases_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([1.0, 3.0, 10.0, 10.5])
    monkeypatch.setattr(threads.time, "monotonic", lambda: next(now))
    timed = threads.TimedProgress(threads.NoProgress())
    timed.finish()
    for _ in range(2):
        timed.start(8, "copy")
        timed.advance(8)
        timed.finish()
        timed.finish()
    assert timed.phases_s == 2.5


def test_at_once_asks_for_several_and_keeps_their_order() -> None:
    all_ask, allowed = threading.Barrier(4, timeout=600), ContextVar("allowed", default=False)
    allowed.set(True)

    def ask(item: int) -> tuple[int, bool]:
        all_ask.wait()
        return item, allowed.get()

    assert at_once(ask, range(4), 8) == [(item, True) for item in range(4)]
    assert at_once(str, iter("ab"), 1) == ["a", "b"]
    assert at_once(str, (), 8) == []


def test_ctrl_c_ends_what_at_once_does() -> None:
    ended, both, one_ended = list[str](), threading.Barrier(2, timeout=600), threading.Semaphore(0)

    def send(name: str) -> None:
        if both.wait() == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
        try:
            while True:
                check_interrupt()
        except CancelledError:
            ended.append(name)
            one_ended.release()
            raise

    with interrupted():
        at_once(send, ["a", "b"])
    for _ in range(2):  # a thread that was being started when the signal came is not waited for
        assert one_ended.acquire(timeout=600)
    assert sorted(ended) == ["a", "b"]
    check_interrupt()  # not in this thread
