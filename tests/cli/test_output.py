"""The bar of bytes."""

from __future__ import annotations

import io
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from shardkit.cli.output import ByteBar, Output, make_progress, painted
from shardkit.core.threads import NoProgress

MIB = 1 << 20


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """Return a function that makes stderr a terminal; a fixture itself is too early for pytest's capturing."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)

    def use():
        monkeypatch.setattr(sys, "stderr", Terminal())
        return sys.stderr

    return use


def test_steps_are_said_where_somebody_watches(terminal, monkeypatch):
    stream = terminal()
    Output(shows_bars=True).step("tracing A\x1b ...")
    Output(shows_bars=False).step("tracing B ...")
    assert stream.getvalue() == "tracing A\\x1b ...\n"
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    Output(shows_bars=True).step("tracing C ...")
    assert sys.stderr.getvalue() == ""


def test_only_on_a_terminal(terminal, monkeypatch):
    terminal()
    assert isinstance(make_progress(enabled=True), ByteBar)
    assert isinstance(make_progress(enabled=False), NoProgress)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert isinstance(make_progress(enabled=True), NoProgress)


def test_bytes_from_threads_add_up(terminal):
    screen, bar = terminal(), ByteBar()
    bar.start(400 * MIB, "preshard")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(bar.advance, [MIB] * 400))
    bar.finish()
    last = screen.getvalue().rstrip().rpartition("\r")[2]
    assert last.startswith("preshard: 100%")
    assert "400M/400M" in last
    assert screen.getvalue().count("\r") < 50  # drawn now and then, not for every MiB


def test_finish_without_start():
    ByteBar().finish()


def test_colours_only_where_wanted(terminal, monkeypatch):
    screen = terminal()
    assert painted("error", screen) != "error"
    assert painted("error", io.StringIO()) == "error"
    monkeypatch.setenv("NO_COLOR", "1")
    assert painted("error", screen) == "error"
