"""Notes of runs that write into a store, on their machine: CACHE/runs/.<of the output>.shardkit-run-<hash>/.

A run that was killed leaves them to the next one of the same plan on this machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator

from shardkit.files import cache, storage
from shardkit.files.shared import remove_runs
from shardkit.files.staging import nothing


@contextlib.contextmanager
def place_of_run(output: str) -> Iterator[str]:
    """Give the path beside which a run that writes to a store has its notes on this machine.

    Args:
        output: the destination.
    """
    with _made_directory() as directory:
        yield os.path.join(directory, _name(output))


def place_of_notes(output: str) -> str:
    """Return that path; it and its directory need not exist."""
    return os.path.join(_directory() or tempfile.gettempdir(), _name(output))


def remove_notes(output: str) -> None:
    """Remove the notes of dead runs on this machine for an output that they did not make."""
    directory = _directory()
    if directory is not None:
        remove_runs(os.path.join(directory, _name(output)), nothing, but="")


def _name(output: str) -> str:
    return hashlib.sha256(output.encode()).hexdigest()[:16]


def _directory() -> str | None:
    """Return where this machine has what belongs to runs of all outputs; None if nothing is kept between runs."""
    home = cache.home()
    return None if home is None else os.path.join(home, "runs")


@contextlib.contextmanager
def _made_directory() -> Iterator[str]:
    """Give the directory for all outputs, or one that lasts as long as this run."""
    directory = _directory()
    if directory is not None:
        try:
            storage.make_directories(os.path.dirname(directory))
            with contextlib.suppress(FileExistsError):
                storage.mkdir(directory, 0o700)
        except OSError:
            pass  # a later run writes all of it again
        else:
            yield directory
            return
    with tempfile.TemporaryDirectory(prefix="shardkit-") as temporary:
        yield temporary
