"""Jobs in threads: what stops them, and who hears a signal."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from shardkit.core.threads import run_all

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
