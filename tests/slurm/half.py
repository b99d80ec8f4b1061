"""A part that stops when two of its files are finished, and waits to be lost: run by `tests.slurm` alone."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from shardkit.cli import main
from shardkit.files.output.contract import FileNote
from shardkit.files.output.local import LocalOutput
from shardkit.operations import places


class Stopping(LocalOutput):
    """Stops this process after two files."""

    num_notes = 0
    lock = threading.Lock()

    def add(self, scratch: str, number: int, note: FileNote) -> None:
        """Add a file, then stop for good if it is the second one."""
        with self.lock:
            super().add(scratch, number, note)
            Stopping.num_notes += 1
            if Stopping.num_notes == 2:
                (Path(self.path).parent / "half-done").write_text(str(os.getpid()))
                signal.pause()


places.LocalOutput = Stopping  # type: ignore[misc]
main.main(args=[*sys.argv[1:], "--jobs", "1"], prog_name="shardkit")
