"""How far a command is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import struct
import sys
import termios
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from shardkit.cli import output, progress
from shardkit.cli.output import Output, paint
from shardkit.cli.progress import Beat, ByteBar, ByteLines
from shardkit.core.threads import NoProgress
from shardkit.transfer.execute import Execution

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


@pytest.fixture
def clock(monkeypatch):
    """The seconds that the module sees, in a list of one; nothing is said but what a test asks for."""
    now = [100.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(progress, "Beat", lambda *_: SimpleNamespace(stop=lambda: None))
    return now


def test_steps_are_said_where_somebody_watches(terminal, monkeypatch, clock):
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
    assert f"  copy     9 files: {names}, ...\n" in preshard.stdout
    consolidate = run("consolidate", "ck", "hub", "--base", "tiny", "-n")
    assert f"  base       tiny, 9 files: {names}, ...\n" in consolidate.stdout


def test_only_on_a_terminal(terminal, monkeypatch):
    terminal()
    assert isinstance(Output(shows_bars=True).progress(), ByteBar)
    assert isinstance(Output().progress(), NoProgress)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert isinstance(Output(shows_bars=True).progress(), ByteLines)
    assert isinstance(Output().progress(), NoProgress)


def test_bytes_from_threads_add_up(terminal):
    screen, bar, begun = terminal(), ByteBar(), time.monotonic()
    bar.start(400 * MIB, "preshard")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(bar.advance, [MIB] * 400))
    bar.finish()
    elapsed_s = time.monotonic() - begun
    last = screen.getvalue().rstrip().rpartition("\r")[2]
    assert last.startswith("preshard: 100%")
    assert "400M/400M" in last
    assert screen.getvalue().count("\r") < 10 + 20 * elapsed_s  # drawn ten times a second, not for every MiB


def test_finish_without_start():
    ByteBar().finish()
    ByteLines(print).close()


def test_a_phase_without_bytes_shows_when_it_takes_long(terminal, clock):
    """That files go to the disk: nothing flashes up where it is over at once."""
    screen, bar = terminal(), ByteBar()
    bar.start(0, "syncing")
    bar.finish()
    assert screen.getvalue() == ""
    bar.start(0, "syncing")
    bar._redraw()
    assert screen.getvalue() == "\rsyncing... 00:00"
    bar.finish()
    assert screen.getvalue().endswith("\r")  # and is gone


@pytest.mark.parametrize("columns", [0, 60])
def test_a_terminal_that_does_not_know_its_width_has_a_bar_of_80_columns(monkeypatch, columns):
    """As of `script`, `kubectl exec` and `ssh -tt`."""
    monkeypatch.delenv("COLUMNS", raising=False)
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 0, columns, 0, 0))
    with os.fdopen(slave, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        bar = ByteBar()
        bar.start(400 * MIB, "preshard")
        bar.advance(100 * MIB)
        bar.finish()
    shown = b""
    with contextlib.suppress(OSError):  # how Linux ends what a closed terminal was sent
        while part := os.read(master, 10_000):
            shown += part
    os.close(master)
    drawn = shown.decode().strip().rpartition("\r")[2]
    assert drawn.startswith("preshard:  25%|")
    assert len(drawn) == (columns or 80) - 1


def test_what_has_no_bar_shows_a_clock_on_a_terminal(terminal, clock):
    screen = terminal()
    out = Output(shows_bars=True)
    out.watch()
    clock[0] += 2
    out._bar._redraw()
    assert screen.getvalue() == "\r  00:02"
    out.step("tracing A ...")
    clock[0] += 70
    out._bar._redraw()
    assert screen.getvalue().endswith("tracing A ...\n\r  01:10")
    bar = out.progress()
    bar.start(400 * MIB, "preshard")
    drawn = len(screen.getvalue())
    out.step("asking B ...")  # what is done beside the bytes ends no bar
    bar.advance(400 * MIB)
    bar.finish()
    assert "asking B ..." in screen.getvalue()[drawn:]
    assert "preshard: 100%" in screen.getvalue()[drawn:]
    out.watch()
    out._bar._redraw()
    out.lines(["the result"])
    assert screen.getvalue().endswith("\r")  # the clock is gone before


def test_no_clock_where_nobody_watches(terminal, monkeypatch, clock):
    screen = terminal()
    Output().watch()
    assert screen.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    out = Output(shows_bars=True)
    out.watch()
    assert "_bar" not in vars(out)


def test_lines_say_how_far_it_is(clock):
    lines = ByteLines(print)
    assert lines.line(100) == ""
    lines.start(0, "tracing A")
    assert lines.line(clock[0] + 0.2) == "tracing A"
    assert lines.line(clock[0] + 70) == "tracing A (70 s elapsed)"
    lines.start(10 * 1024 * MIB, "preshard")
    lines.advance(1024 * MIB)
    assert lines.line(110) == "preshard: 1.0 GiB of 10.0 GiB, 10%, 102.4 MiB/s, 90 s left"
    lines.advance(3 * 1024 * MIB)  # the rate is that of the time since the line before
    assert lines.line(170) == "preshard: 4.0 GiB of 10.0 GiB, 40%, 51.2 MiB/s, 2 min left"
    assert lines.line(230) == "preshard: 4.0 GiB of 10.0 GiB, 40%"  # nothing moves
    lines.finish()
    assert lines.line(290) == ""


def test_a_beat_goes_on_until_it_is_stopped_or_nobody_reads_it():
    calls, third = [], threading.Event()

    def call():
        calls.append(len(calls))
        if len(calls) == 3:
            third.set()
            raise BrokenPipeError

    beat = Beat(call, [0.0] * 9)
    assert third.wait(600)
    beat.stop()
    assert calls == [0, 1, 2]


def test_a_run_without_a_terminal_says_that_files_go_to_the_disk(run, tiny, monkeypatch):
    """It waits for the disk until the line is there. stdout has the result alone."""
    said, remark, finish = threading.Event(), output.remark, Execution._finish
    monkeypatch.setattr(progress, "_FIRST_LINE_S", 0.0)
    monkeypatch.setattr(progress, "_NEXT_LINE_S", 0.01)

    def listen(text):
        remark(text)
        if text.startswith("syncing"):
            said.set()

    def wait_and_finish(self, image, state):
        assert said.wait(600)
        finish(self, image, state)

    monkeypatch.setattr(output, "remark", listen)
    monkeypatch.setattr(Execution, "_finish", wait_and_finish)
    result = run("preshard", "tiny", "out", "--world-size", "2", "--wrap", "none")
    assert result.exit_code == 0
    assert "\nsyncing\n" in f"\n{result.stderr}"
    assert "syncing" not in result.stdout
    assert result.stdout.startswith("wrote ")


@pytest.mark.parametrize("option", ["--no-progress", "--json", "-q"])
def test_no_lines_where_nobody_wants_them(run, tiny, monkeypatch, option):
    monkeypatch.setattr(ByteLines, "start", None)
    assert run("preshard", "tiny", "out", "--world-size", "2", "--wrap", "none", option).exit_code == 0


def test_colours_only_where_wanted(terminal, monkeypatch):
    screen = terminal()
    assert paint("error", screen) != "error"
    assert paint("error", io.StringIO()) == "error"
    monkeypatch.setenv("NO_COLOR", "1")
    assert paint("error", screen) == "error"


def test_verbose_says_what_is_done(run, tiny):
    """What was opened, written and copied, as it happens; without -v nothing, before and after."""
    (tiny / "tokenizer.json").write_text("{}")
    preshard = ("preshard", "tiny", "--world-size", "2", "--wrap", "none")
    quiet = run(*preshard, "a").stderr
    loud = run(*preshard, "b", "-v")
    lines = loud.stderr.splitlines()
    assert lines[0] == "opened tiny: Hub model, 4 tensors"
    assert sum(line.startswith("wrote __") for line in lines) == 2
    assert "copied tiny/tokenizer.json" in lines
    assert [
        line for line in lines if not line.startswith(("opened", "wrote", "copied"))
    ] == quiet.splitlines()
    assert run(*preshard, "c").stderr == quiet
    assert run("consolidate", "a", "d", "--base", "tiny", "-v").stderr.startswith(
        "opened a: shardkit, 4 tensors\n"
    )


def test_a_line_stands_above_a_bar_that_is_on_its_way(terminal, clock):
    screen, bar = terminal(), ByteBar()
    bar.start(400 * MIB, "preshard")
    output.remark("opened tiny")
    shown = screen.getvalue().rpartition("opened tiny\n")
    assert shown[0].endswith("\r")  # the bar was cleared
    assert "preshard:   0%" in shown[2]  # and is drawn again
    bar.finish()


def test_quiet_json_is_the_document_alone(run, tiny):
    (tiny / "config.json").write_text("{}")
    args = ("preshard", "tiny", "a", "--world-size", "2", "--wrap", "none", "-n", "--json")
    both, alone = run(*args, "-q"), run(*args)
    assert (both.exit_code, both.stderr) == (0, "")
    assert json.loads(both.stdout).keys() == json.loads(alone.stdout).keys()
    page = run("inspect", "tiny", "--html", "page.html", "-q")
    assert (page.exit_code, page.output) == (0, "")
    assert (tiny.parent / "page.html").exists()


def test_what_is_good_news_each_time_is_said_with_v_alone(run, tiny):
    """That safetensors have no checksum; that names and shapes are the base's."""
    (tiny / "config.json").write_text('{"model_type": "llama"}')
    preshard = ("preshard", "tiny", "--world-size", "2", "--wrap", "none")
    assert "unchecked" not in run(*preshard, "a").output
    assert "  unchecked  4 tensors, 116 B: safetensors have no CRC-32\n" in run(*preshard, "b", "-v").stdout
    assert "unchecked" not in run("consolidate", "tiny", "hub", "--root", "", "--allow-empty").output
    for part in ("1/2", "2/2"):
        assert "unchecked" not in run(*preshard, "parts", "--part", part).output
    assert json.loads(run(*preshard, "c", "--json").stdout)["unchecked"]
    same = "names and shapes are the same as in tiny\n"
    assert same not in run("consolidate", "a", "d", "--base", "tiny").output
    assert same in run("consolidate", "a", "e", "--base", "tiny", "-v").stderr


TEXT = "a long note names `shardkit verify last.ckpt` at its end"


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (80, [f"note: {TEXT}"]),
        (44, ["note: a long note names", "  `shardkit verify last.ckpt` at its end"]),
        (20, ["note: a long note", "  names", "  `shardkit verify last.ckpt`", "  at its end"]),
    ],
)
def test_a_note_is_broken_between_words_and_not_in_a_command(terminal, monkeypatch, width, lines):
    screen = terminal()
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    Output().say("note", TEXT)
    assert screen.getvalue().splitlines() == lines
    Output().say("resume", TEXT)  # a command, to be copied
    assert screen.getvalue().splitlines()[len(lines) :] == [f"resume: {TEXT}"]
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    Output().say("note", TEXT)  # a log, in which each note is one line
    assert sys.stderr.getvalue() == f"note: {TEXT}\n"


def test_prose_is_broken_between_words_and_tables_and_code_are_not(terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setattr(sys, "stdout", Terminal())
    code = "  shardkit.load_into(model, 'out')  # parameters and buffers"
    Output().lines(["load it on every rank, into a model on meta:", code, "=  a.weight  [1000, 1000]  equal"])
    assert sys.stdout.getvalue().splitlines() == [
        "load it on every rank, into a",
        "  model on meta:",
        code,
        "=  a.weight  [1000, 1000]  equal",
    ]
    screen = terminal()
    Output().detail("x.distcp: no such file (a.weight lies there)")
    Output().detail("python -c 'import torch; torch.save(1)'", is_code=True)
    assert screen.getvalue().splitlines() == [
        "  x.distcp: no such file",
        "    (a.weight lies there)",
        "  python -c 'import torch; torch.save(1)'",
    ]


def test_a_fact_is_broken_below_itself(monkeypatch):
    pairs = [("copy", "3 files: config.json, tokenizer.json"), ("time", "1 s"), ("time", "2 s")]
    assert output.facts(pairs)[0] == "  copy  3 files: config.json, tokenizer.json"
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setattr(sys, "stdout", Terminal())
    found = output.facts(pairs)
    assert found[:2] == ["  copy  3 files: config.json,", "        tokenizer.json"]
    assert found[2:] == ["  time  1 s", "        2 s"]
