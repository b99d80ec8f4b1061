"""A part that stops when two of its files are finished, and waits to be lost: run by `tests.slurm` alone."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from shardkit.cli import main
from shardkit.files.shared import SharedStaging
from shardkit.operations import places


class Stopping(SharedStaging):
    """Stops this process after two notes."""

    num_notes = 0
    lock = threading.Lock()

    def write_note(
        self, work: str, directory: str, name: str, content: bytes, *, is_synced: bool = True
    ) -> None:
        """Write a note, then stop for good if it is the second of a file."""
        with self.lock:
            super().write_note(work, directory, name, content, is_synced=is_synced)
            Stopping.num_notes += directory == self.done.path
            if Stopping.num_notes == 2:
                (Path(self.destination).parent / "half-done").write_text(str(os.getpid()))
                signal.pause()


places.SharedStaging = Stopping  # type: ignore[misc]
main.main(args=[*sys.argv[1:], "--jobs", "1"], prog_name="shardkit")
