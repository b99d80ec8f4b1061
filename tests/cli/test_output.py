"""The bar of bytes."""

from __future__ import annotations

import io
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from shardkit.cli.output import ByteBar, Output, painted
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


def test_files_that_are_copied_have_one_form(run, tiny):
    """How many, and the first few, folded; -v has all. Consolidate has them after the base that they come from."""
    files = [f"rng_state_{rank}.pth" for rank in range(64)]
    made = run("preshard", "tiny", "ck", "--profile", "accelerate", "--world-size", "2", "--wrap", "none")
    assert made.exit_code == 0
    for name in files:
        (tiny.parent / "ck" / name).write_bytes(b"x")
    reshard = ("reshard", "ck", "out", "--world-size", "3", "-n")
    assert "  to copy    65 files: rng_state_{0..63}.pth, trainer_state.json\n" in run(*reshard).stdout
    assert f"65 files: {', '.join(sorted(files))}, trainer_state.json\n" in run(*reshard, "-v").stdout
    (tiny / "config.json").write_text('{"model_type": "llama"}')
    for letter in "abcdefgh":
        (tiny / f"tokenizer_{letter}.json").write_text("{}")
    names = "config.json, " + ", ".join(f"tokenizer_{letter}.json" for letter in "abcdefg")
    preshard = run("preshard", "tiny", "again", "--world-size", "2", "--wrap", "none")
    assert f"  copy       9 files: {names}, ...\n" in preshard.stdout
    consolidate = run("consolidate", "ck", "hub", "--base", "tiny", "-n")
    assert f"  base       tiny, 9 files: {names}, ...\n" in consolidate.stdout


def test_only_on_a_terminal(terminal, monkeypatch):
    terminal()
    assert isinstance(Output(shows_bars=True).progress(), ByteBar)
    assert isinstance(Output().progress(), NoProgress)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert isinstance(Output(shows_bars=True).progress(), NoProgress)


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
