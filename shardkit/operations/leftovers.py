"""What runs that did not end have left beside a local output: how far each came, how it goes on, and its removal.

What lies in such a directory and no run of shardkit puts there is named, and never removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from shardkit.core.text import count, escape, format_size, in_directory, in_shell, listed
from shardkit.errors import ShardkitError, SourceError, UsageError
from shardkit.files import storage
from shardkit.files.shared import SharedStaging, runs_of, staging_at
from shardkit.files.staging import OWNER, owner_of
from shardkit.files.strict_json import parse_object, read_small
from shardkit.operations.parts.agreement import SAVE, Agreement, read_all, read_parts
from shardkit.operations.parts.foreign import files_in, foreign_in, stays

_MAX_OWNER = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """A directory in which a run works, or has worked until it was killed."""

    staging: str
    """Its path."""
    owner: Literal["dead", "alive", "unknown"]
    """Whether the run is over; of another host or container nobody can tell."""
    host: str
    """The machine that the run was on; empty if nothing says it."""
    pid: int
    last_written: str
    """When the run wrote there last, such as "2026-01-31T12:00:00Z", by the clock of the file system."""
    kind: Literal["run", "save", "ended"]
    """A run that may go on, one that begins anew (of `shardkit.save`, or without anything finished), or one that has made
    the output and left the rest."""
    verb: str = ""
    """What it was carrying out; empty if nothing says it."""
    num_files: int = 0
    """Files with tensors in them that it was to write; 0 if nothing says it."""
    file_bytes: int = 0
    """Size of all of them."""
    finished_files: int = 0
    finished_bytes: int = 0
    disk_bytes: int
    """What all of it takes on the disk."""
    command: str = ""
    """What goes on from there, as the shell takes it. Empty if nothing can, or if the run was not started by a command."""
    foreign: tuple[str, ...] = ()
    """Files in it that shardkit has not put there, relative to it. They are never removed."""
    is_removed: bool = False
    """All of it was removed but what is foreign."""


def leftovers(destination: str) -> tuple[Leftover, ...]:
    """Return the directories that runs have left beside a destination, or are writing there.

    Args:
        destination: absolute.
    """
    return tuple(_look(run) for run in runs_of(destination, foreign_in))


def leftover_at(path: str) -> Leftover | None:
    """Return the leftover at a path if it is the directory of a run that has not ended; else None."""
    run = _run_at(path)
    return None if run is None else _look(run)


def _run_at(path: str) -> SharedStaging | None:
    staging = staging_at(storage.absolute(path), foreign_in)
    return None if staging is None or staging.is_of_parts else staging


def output_of(path: str) -> str | None:
    """Return the output for which a run works in a directory, or has worked, by its absolute path; None if none has."""
    run = _run_at(path)
    return None if run is None else run.destination


def outputs_in(directory: str) -> list[str]:
    """Return the outputs in a directory that have directories of runs or parts beside them.

    Args:
        directory: absolute.
    """
    places = (staging_at(os.path.join(directory, name), foreign_in) for name in storage.listdir(directory))
    return sorted({staging.destination for staging in places if staging is not None})


def remove(destination: str, runs: Collection[Leftover]) -> tuple[Leftover, ...]:
    """Remove what runs left, but what is foreign; what they had moved aside goes back. Return what became of each.

    Args:
        destination: absolute.
        runs: of `leftovers`. A run that is alive is left alone.

    Raises:
        UsageError: some could not be removed; all others were.
    """
    done = [
        replace(run, is_removed=run.owner != "alive" and _remove(destination, run.staging)) for run in runs
    ]
    UsageError.raise_for(
        [
            escape(run.staging) + _with_old(destination, run.staging)
            for run in done
            if run.owner != "alive" and not run.is_removed and storage.lexists(run.staging)
        ],
        f"{escape(destination)}: what runs have left could not be removed",
        hint="keep what you want of it, and remove the rest yourself",
    )
    return tuple(done)


def _with_old(destination: str, path: str) -> str:
    run = SharedStaging(destination, path, foreign_in)
    return "".join(f", with what was there before in {os.path.relpath(old, path)}" for old in run.replaced())


def _remove(destination: str, path: str) -> bool:
    """Remove what a run left; False if more stays than what is foreign."""
    try:
        SharedStaging(destination, path, foreign_in).give_up()
    except ShardkitError:
        return False
    return set(files_in(path)) == set(foreign_in(path))


def warn_before(
    runs: Collection[Leftover], shared: Collection[str], on_warning: Callable[[str], object] | None
) -> tuple[str, ...]:
    """Say what has to be said before runs are removed: who is at work, whose nobody can tell, what stays.

    Args:
        runs: all of them.
        shared: directories that parts share.
        on_warning: told each warning.
    """
    of_parts = (stays(path, foreign) for path in shared if (foreign := foreign_in(path)))
    warnings = (*_before_removal(runs), *of_parts)
    if on_warning is not None:
        for warning in warnings:
            on_warning(warning)
    return warnings


def _before_removal(runs: Collection[Leftover]) -> Iterator[str]:
    for run in runs:
        if run.owner == "alive":
            yield f"{escape(run.staging)} stays: {_whose(run)} is at work; stop it first"
            continue
        if run.owner == "unknown":
            yield _unknown(run, "is removed")
        if run.foreign:
            yield stays(run.staging, run.foreign)


def _unknown(run: Leftover, what: str) -> str:
    return (
        f"{escape(run.staging)} {what}: of {_whose(run)}, which wrote there last at {run.last_written}; from here nobody "
        "can tell whether it is over"
    )


def name_unknown(destination: str, own: str) -> Iterator[str]:
    """Yield a warning for each run of another plan that another host or container has begun, and that may be at work.

    Args:
        destination: absolute.
        own: path of the directory of the plan that is carried out here.
    """
    for run in runs_of(destination, foreign_in):
        if run.path != own and run.is_unknown and owner_of(run.path) is None:
            yield (
                f"{_unknown(_look(run), 'is left alone')}; `shardkit abort {in_shell(destination)}` removes it"
            )


def _look(run: SharedStaging) -> Leftover:
    """Describe the directory of a run as its record, its notes and those who worked in it say."""
    disk_bytes, newest = _sizes(run.path)
    told = next((content for _, content in read_parts(run)), _read_owner(run.path))
    owners, pid = run.owners(), told.get("pid")
    alive = [owner.pid for owner in owners if owner.is_provably_alive()]
    if alive and pid not in alive:  # who said it last may be over
        pid = alive[0]
    state: Literal["dead", "alive", "unknown"] = "dead" if run.is_over else "unknown"
    state = "alive" if run.is_attended else state
    agreement: Agreement | None = None
    if is_plan := owner_of(run.path) is None:
        with contextlib.suppress(ShardkitError):
            agreement = Agreement.of(run)
    files, verb = ([], "") if agreement is None else (agreement.files, agreement.command.verb)
    missing = {*run.done.missing(len(files))}
    finished = [size for number, (_, size) in enumerate(files) if number not in missing]
    return Leftover(
        staging=run.path,
        owner=state,
        host=str(told.get("host", "")),
        pid=pid if isinstance(pid, int) else next((owner.pid for owner in owners), 0),
        last_written=newest,
        kind="save" if not is_plan or verb == SAVE else "ended" if run.is_committed else "run",
        verb=verb,
        num_files=len(files),
        file_bytes=sum(size for _, size in files),
        finished_files=len(finished),
        finished_bytes=sum(finished),
        disk_bytes=disk_bytes,
        command=""
        if state == "alive" or agreement is None
        else in_directory(agreement.cwd, agreement.typed, here=storage.current_directory()),
        foreign=tuple(foreign_in(run.path)),
    )


def _sizes(path: str) -> tuple[int, str]:
    """Return the bytes that a directory takes on the disk, and when anything in it was written last."""
    states = [_status(os.path.join(path, name)) for name in files_in(path)]
    newest = max([written_s for _, written_s in states], default=_status(path)[1])
    written = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(newest))
    return sum(nbytes for nbytes, _ in states), written


def finished_in(path: str) -> dict[str, int]:
    """Return the size of each file that runs have finished in a directory, by name."""
    run = _run_at(path)
    if run is None or owner_of(run.path) is not None:  # nobody goes on there
        return {}
    files = [file for _, agreement in read_all([run]) for file in agreement.files]
    missing = {*run.done.missing(len(files))}
    return {name: size for number, (name, size) in enumerate(files) if number not in missing}


def _status(path: str) -> tuple[int, float]:
    """Return the bytes that a file takes on the disk, and when it was written."""
    try:
        status = storage.lstat(path)
    except OSError:
        return 0, 0.0
    return status.st_blocks * 512, status.st_mtime


def _read_owner(path: str) -> dict[str, object]:
    try:
        return parse_object(read_small(os.path.join(path, OWNER), OWNER, _MAX_OWNER, follow=False), OWNER)
    except (OSError, ShardkitError, json.JSONDecodeError):
        return {}


def describe(run: Leftover) -> list[tuple[str, str]]:
    """Describe a leftover as pairs of a label and a text that is safe to print."""
    whose = _whose(run)
    states = {
        "dead": f"{whose}, which is over",
        "alive": f"{whose}, which is at work",
        "unknown": f"{whose}; from here nobody can tell whether it is at work",
    }
    facts = [("run", f"{escape(run.verb) or 'of an unknown command'}, {states[run.owner]}")]
    facts.append(("last wrote", run.last_written))
    if run.kind == "ended":
        facts.append(("state", "it has made the output; only the rest was not removed"))
    elif run.kind == "run":
        facts += list(_so_far(run))
    else:
        facts.append(("finished", "nothing that another run could take over"))
    facts.append(("on the disk", format_size(run.disk_bytes)))
    if run.foreign:
        facts.append(("not shardkit's", f"{listed([*map(escape, run.foreign)])}; this stays"))
    return facts


def _whose(run: Leftover) -> str:
    return f"process {run.pid}" + (f" on {escape(run.host)}" if run.host else "")


def _so_far(run: Leftover) -> Iterator[tuple[str, str]]:
    if run.num_files:
        yield (
            "finished",
            f"{run.finished_files} of {count(run.num_files, 'file')}, {format_size(run.finished_bytes)} of "
            f"{format_size(run.file_bytes)}",
        )
    else:
        yield "finished", f"{count(run.finished_files, 'file')}, {format_size(run.finished_bytes)}"
    if run.owner != "alive" and not run.is_removed:
        # A file says it, and it has to be whole.
        command = run.command if run.command.isprintable() else ""
        yield "goes on with", command or "the call that began it"


def refuse(path: str) -> None:
    """Refuse the directory of a run that has not ended, where a model or a checkpoint is expected.

    Raises:
        SourceError: it is one.
    """
    staging = staging_at(storage.absolute(path), foreign_in)
    if staging is None:
        return
    if staging.is_of_parts:
        raise SourceError(
            f"{escape(path)} is no checkpoint: the parts of a job write there, or have written",
            hint=f"`shardkit status {in_shell(staging.destination)}` says how far they are",
        )
    leftover = _look(staging)
    raise SourceError(
        f"{escape(path)} is no checkpoint: a run works there"
        if leftover.owner == "alive"
        else f"{escape(path)} is no checkpoint: it is what a run left that did not end",
        problems=[f"{label}: {text}" for label, text in describe(leftover)],
        hint=f"`shardkit status {in_shell(staging.destination)}` shows all of them, and "
        f"`shardkit abort {in_shell(staging.destination)}` removes them",
    )
