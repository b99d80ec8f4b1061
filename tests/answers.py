"""What Python code answers in a process of its own: of memory, of modules that it imported."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

HIGH_WATER = """
def high_water():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))
"""
"""A function for such code: the most memory that its process has had, in bytes, without what its parent had."""


def answer_of(code: str, *arguments: object) -> Any:
    """Run code with arguments, and return the JSON that it prints."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)
