"""The checkpoints of a run: the newest that opens whole, and a list of all.

Internal: import from `shardkit`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from shardkit.core.keywords import suggests_keywords
from shardkit.core.result import Result
from shardkit.core.text import count, escape
from shardkit.errors import SourceError, UsageError
from shardkit.files import storage, stores
from shardkit.files.listing import list_files
from shardkit.formats.contract import missing_path
from shardkit.operations.resolve import ChosenCheckpoint, choose_checkpoint, every_checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCheckpoint:
    """A checkpoint of a run."""

    path: str
    step: int | None
    """The training step, if the name has it."""
    format: str
    """As `shardkit.inspect` names it; empty if the files are not those of any format."""
    size_bytes: int
    """Of all its files, the optimizer's included."""
    missing: str | None
    """Why it does not count as whole; None if it opens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatestResult(Result):
    """The result of `latest`."""

    run: str
    """The path that was searched."""
    path: str | None
    """The newest checkpoint that opens whole; None if there is none, or none that stands for several runs."""
    step: int | None
    """The training step of it, if its name or a tracker file has it."""
    reason: str
    """Why it was chosen, or why none was."""
    problems: tuple[str, ...]
    """Why no checkpoint was chosen: a line for each that is not whole."""
    checkpoints: tuple[RunCheckpoint, ...] | None
    """All checkpoints of the run, newest first; None if no list was asked for."""
    warnings: tuple[str, ...]
    """A line for each newer checkpoint that is not whole, and one if `consolidate` would choose otherwise."""

    def headline(self) -> str:
        """Return the path of the newest checkpoint, and how many there are."""
        where = f"none in {escape(self.run)}" if self.path is None else escape(self.path)
        if self.checkpoints is None:
            return where
        num_whole = sum(each.missing is None for each in self.checkpoints)
        return f"{where}: {count(len(self.checkpoints), 'checkpoint')}, {num_whole} whole"


@suggests_keywords
def latest(run: str | os.PathLike[str], *, list_all: bool = False) -> LatestResult:
    """Return the newest checkpoint of a run that opens whole; no tensor is read.

    It is the checkpoint that `consolidate` uses, with one exception: where a tracker file names a checkpoint that is not
    whole, consolidate refuses the run, and this function takes the newest one before it, with a warning.

    Args:
        run: a run directory, a checkpoint, or a directory of runs; also an address of a store.
        list_all: also list every checkpoint, whole or not, of all runs below.

    Raises:
        UsageError: there are several runs, or several checkpoints without an order; lists them. Not with `list_all`.
        SourceError: the path does not exist.
        ResourceError: a file or directory cannot be read.
    """
    place = stores.as_path(run)
    if not storage.lexists(place):
        raise missing_path(place)
    checkpoints = tuple(_list(place)) if list_all else None
    chosen, reason, problems = None, "", tuple[str, ...]()
    try:
        chosen = choose_checkpoint(place, before_tracker=True)
        chosen.models()  # a checkpoint that is given directly is not opened before
        reason = chosen.resolved.reason
    except SourceError as error:
        names_it = escape(place) in error.message
        reason = error.message if names_it else f"{escape(place)}: {error.message}"
        chosen, problems = None, error.problems
    except UsageError as error:
        if not list_all:
            raise
        reason, problems = error.message, error.problems
    return _result(place, chosen, reason, problems, checkpoints)


def _result(
    run: str,
    chosen: ChosenCheckpoint | None,
    reason: str,
    problems: tuple[str, ...],
    checkpoints: tuple[RunCheckpoint, ...] | None,
) -> LatestResult:
    resolved = None if chosen is None else chosen.resolved
    return LatestResult(
        run=run,
        path=None if resolved is None else resolved.path,
        step=None if resolved is None else resolved.step,
        reason=reason,
        problems=problems,
        checkpoints=checkpoints,
        warnings=() if resolved is None else resolved.warnings,
    )


def _list(place: str) -> list[RunCheckpoint]:
    """Return every checkpoint below a path, newest first."""
    return [
        RunCheckpoint(
            path=each.path,
            step=each.step,
            format=each.format,
            size_bytes=_nbytes(each.path),
            missing=missing,
        )
        for each, missing, _ in every_checkpoint(place)
    ]


def _nbytes(path: str) -> int:
    if not storage.isdir(path):
        return storage.getsize(path) if storage.isfile(path) else 0
    return sum(list_files(path, follow=True).files.values())
