"""How many calls lie between a command and the bytes that it writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

COUNT = """
import os, sys, threading, traceback
from pathlib import Path
import shardkit
from shardkit.cli import main
from shardkit.files import storage

package = os.path.dirname(shardkit.__file__)

def frames(stack):
    return [f"{frame.filename} {frame.name}" for frame in stack if frame.filename.startswith(package)]

def write(fd, data, start):
    storage.pwrite = os.pwrite
    main_thread = sys._current_frames()[threading.main_thread().ident]
    for stack in (traceback.extract_stack(main_thread), traceback.extract_stack()):
        print(len(frames(stack)), *frames(stack), sep="\\n  ", file=sys.stderr)
    return os.pwrite(fd, data, start)

storage.pwrite = write
main(sys.argv[1:])
"""
MAIN, WORKER = 12, 7


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hub model whose tensors are longer than one read."""
    home = tmp_path_factory.mktemp("model")
    tensors = {f"layers.{number}.weight": torch.rand(256, 64) for number in range(4)}
    save_file(tensors, home / "model.safetensors", metadata={"format": "pt"})
    return home


def frames_of(*command: str) -> list[int]:
    """Return how many frames of shardkit the main thread and the one that writes have at the first write."""
    done = subprocess.run([sys.executable, "-c", COUNT, *command], capture_output=True, text=True, check=True)
    return [int(line) for line in done.stderr.splitlines() if line.isdecimal()]


def test_few_calls_lead_from_a_command_to_the_first_write(model: Path, tmp_path: Path) -> None:
    sharded, again, back = (str(tmp_path / name) for name in ("sharded", "again", "back"))
    for command in (
        ("preshard", str(model), sharded, "--world-size", "2", "--layout", "declared", "--wrap", "none"),
        ("reshard", sharded, again, "--world-size", "3"),
        ("consolidate", again, back),
    ):
        main, worker = frames_of(*command)
        assert main <= MAIN, command
        assert worker <= WORKER, command
