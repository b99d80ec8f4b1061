"""What tests of the command line share: tiny models, and running it in this process or another."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from unittest.mock import patch

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

import shardkit
from shardkit.cli import main


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A model of two layers in `tiny/`; the working directory is the one around it."""
    tensors = {f"layers.{n}.up.weight": torch.full((4, 3), n, dtype=torch.bfloat16) for n in range(2)}
    tensors |= {"embed.weight": torch.arange(15.0).view(5, 3), "steps": torch.tensor(7)}
    (tmp_path / "tiny").mkdir()
    save_file(tensors, str(tmp_path / "tiny" / "model.safetensors"), metadata={"format": "pt"})
    monkeypatch.chdir(tmp_path)
    return tmp_path / "tiny"


@pytest.fixture
def run():
    """Run a command in this process; environment variables that it sets end with the test."""
    with patch.dict(os.environ):
        yield lambda *args: CliRunner().invoke(main, args, prog_name="shardkit")


@pytest.fixture
def sharded(run, tiny):
    """`tiny`, pre-sharded for two ranks in `out/`."""
    assert run("preshard", "tiny", "out", "--world-size", "2", "--wrap", "none").exit_code == 0
    return tiny.parent / "out"


@pytest.fixture
def start(tmp_path):
    """Start Python in a process of its own, with this shardkit on its path."""
    root = os.path.dirname(os.path.dirname(shardkit.__file__))

    def begin(*args, **options):
        # After ten seconds a command shows how far it is: on a busy machine that would be one line more.
        quiet = {} if "stderr" in options else {"SHARDKIT_NO_PROGRESS": "1"}
        env = {**os.environ, **quiet, "PYTHONPATH": root, **options.pop("env", {})}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen([sys.executable, *args], cwd=tmp_path, env=env, **{**pipes, **options})

    # A background job of a plain shell starts with Ctrl-C ignored, and what it starts inherits that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield begin
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def ended(start):
    """Run Python to its end, as `start` begins it: its exit code, and what it printed on stdout and on stderr."""

    def end(*args, **options):
        process = start(*args, **options)
        out, err = process.communicate(timeout=600)
        return process.returncode, out, err

    return end


def assert_as_planned(planned, written):
    """Compare the JSON of a dry run with that of the run: what only happens while bytes move may differ."""
    moving = {"dry_run", "names", "elapsed_s", "moving_s", "free_bytes", "checked_bytes", "unchecked"}
    assert planned.keys() == written.keys()
    assert {key for key in written if planned[key] != written[key]} <= moving
