"""Python imports this before anything else: one process stops once it has finished two files of a part, to be killed then."""

from __future__ import annotations

import contextlib
import os
import time

MARKER = os.environ.get("SHARDKIT_TESTS_STOP", "")
"""Made by the process that stops, with its number in it. While it is there, no other process stops."""
NUM_FILES = 2


def _stop() -> None:
    own = f"{MARKER}.{os.getpid()}"
    with contextlib.suppress(FileExistsError):
        with open(own, "x") as file:
            file.write(str(os.getpid()))
        os.link(own, MARKER)  # whole, or not at all
    while os.path.exists(own) and os.path.samefile(own, MARKER):
        time.sleep(0.1)


if MARKER:
    from shardkit.files.output.contract import FileNote
    from shardkit.files.output.local import LocalOutput

    add, finished, stopped = LocalOutput.add, list[int](), list[int]()

    def stopping(self: LocalOutput, scratch: str, number: int, note: FileNote) -> None:
        add(self, scratch, number, note)
        finished.append(number)
        if len(finished) >= NUM_FILES and (stopped or not os.path.exists(MARKER)):
            stopped.append(number)  # no other thread goes further
            _stop()

    LocalOutput.add = stopping  # type: ignore[method-assign]
