"""What writing into a store needs on this machine: notes of runs, and factors that are records until they are sent.

    CACHE/factors/.<of the output>.shardkit-run-<hash>/        of a run: its notes, and a record and a note of each weight
    CACHE/factors/.<of the output>.shardkit-<owner>/data/      records of a part

What is sent is written front to back, and a weight has parts in all files: so factors need a place where they wait. A run
that was killed leaves all of it to the next one of the same plan on this machine. A part sends each record to where all
parts have theirs, and keeps it here for as long as it writes files.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator

from shardkit.core.text import escape
from shardkit.errors import ResourceError
from shardkit.files import cache, storage
from shardkit.files.shared import remove_runs
from shardkit.files.staging import Staging, nothing

_FOLDER = "factors"  # as earlier versions called it: what they left goes by the same rules
ELSEWHERE = (
    f"factors wait on the local disk until they are sent; {cache.VARIABLE}=DIRECTORY has them elsewhere"
)
"""What to do where they cannot be written."""
ANOTHER_PLACE = f"set {cache.VARIABLE}=DIRECTORY"
"""How records come to lie on another disk."""


@contextlib.contextmanager
def place_of_run(output: str, *, is_needed: bool) -> Iterator[str]:
    """Give the path beside which a run that writes to a store has its notes and records on this machine.

    Args:
        output: the destination.
        is_needed: it has records. Else a directory that goes afterwards does for the notes.
    """
    with _made_directory(is_needed=is_needed) as directory:
        yield os.path.join(directory, _name(output))


@contextlib.contextmanager
def room_for_records(output: str) -> Iterator[str]:
    """Give a directory for the records of a part until the store has them; it goes afterwards, with those of dead runs."""
    with _made_directory(is_needed=True) as directory:
        beside = os.path.join(directory, _name(output))
        remove_runs(beside, nothing, but="")
        staging = Staging.create(beside)
        try:
            yield staging.scratch()
        finally:
            staging.discard()


def place_of_records(output: str) -> str:
    """Return the path beside which this machine has the records for an output; it and its directory need not exist."""
    return os.path.join(_directory() or tempfile.gettempdir(), _name(output))


def remove_records(output: str) -> None:
    """Remove what dead runs on this machine have computed for an output that they did not make."""
    directory = _directory()
    if directory is not None:
        remove_runs(os.path.join(directory, _name(output)), nothing, but="")


def _name(output: str) -> str:
    return hashlib.sha256(output.encode()).hexdigest()[:16]


def _directory() -> str | None:
    """Return where this machine has what belongs to runs of all outputs; None if nothing is kept between runs."""
    home = cache.home()
    return None if home is None else os.path.join(home, _FOLDER)


@contextlib.contextmanager
def _made_directory(*, is_needed: bool) -> Iterator[str]:
    """Give the directory for all outputs, or one that lasts as long as this run."""
    directory = _directory()
    if directory is not None:
        try:
            storage.make_directories(os.path.dirname(directory))
            with contextlib.suppress(FileExistsError):
                storage.mkdir(directory, 0o700)
        except OSError as error:
            if is_needed:
                raise ResourceError(
                    f"cannot write {escape(directory)}: {error.strerror}", hint=ELSEWHERE
                ) from error
        else:
            yield directory
            return
    with tempfile.TemporaryDirectory(prefix="shardkit-") as temporary:
        yield temporary
