"""Python imports this before anything else: one process stops once it has finished two files of a part, to be killed then."""

from __future__ import annotations

import contextlib
import os
import signal

MARKER = os.environ.get("SHARDKIT_TESTS_STOP", "")
"""Made by the process that stops, with its number in it. While it is there, no other process stops."""
NUM_FILES = 2


def _stop() -> None:
    own = f"{MARKER}.{os.getpid()}"
    with open(own, "w") as file:
        file.write(str(os.getpid()))
    with contextlib.suppress(FileExistsError):
        os.link(own, MARKER)  # whole, or not at all
        while True:
            signal.pause()


if MARKER:
    from shardkit.files.shared import SharedStaging

    write_note, finished = SharedStaging.write_note, list[str]()

    def stopping(
        self: SharedStaging, work: str, directory: str, name: str, content: bytes, **options: bool
    ) -> None:
        write_note(self, work, directory, name, content, **options)
        finished.extend([name] if directory == self.done.path else [])
        if len(finished) == NUM_FILES and not os.path.exists(MARKER):
            _stop()

    SharedStaging.write_note = stopping  # type: ignore[method-assign]
