"""`LocalOutput` on a real file system: killed, or refused by the system, at each of its calls."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.files.outputs.local_sweep import MODES

ROOT = Path(__file__).parents[3]


@pytest.mark.prove
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fault", ["kill", "EIO", "ENOSPC", "EACCES"])
def test_after_a_fault_at_any_call_the_same_command_ends_well(fault: str, mode: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.files.outputs.local_sweep", str(tmp_path / "here"), fault, mode]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
