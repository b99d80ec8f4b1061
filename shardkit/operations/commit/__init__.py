"""commit, status and abort: what becomes of a job that has not ended.

Internal: import from `shardkit`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from inspect import signature
from typing import Any

from shardkit._version import __version__
from shardkit.core.keywords import suggests_keywords
from shardkit.core.result import Result, wrote
from shardkit.core.text import escape, in_shell, listed
from shardkit.core.threads import ProgressOption
from shardkit.errors import SourceError, UsageError
from shardkit.files import storage
from shardkit.files.location import location_of
from shardkit.files.output.contract import JobEnded, JobRecord, JobStatus
from shardkit.files.output.local import outputs_in
from shardkit.formats.owned import OutputKind
from shardkit.formats.registry import recognise
from shardkit.operations.consolidate import consolidate
from shardkit.operations.options import OnWarning, WriteOptions
from shardkit.operations.parts.agreement import (
    PLAN,
    Agreement,
    Command,
    Committing,
    incomplete,
    missing_parts,
    part_command,
)
from shardkit.operations.parts.results import WriteResult
from shardkit.operations.places import Destination, destination_at
from shardkit.operations.preshard import preshard
from shardkit.operations.reshard import reshard
from shardkit.transfer.checks import Unchecked

_VERBS: Mapping[str, Callable[..., WriteResult]] = {
    "preshard": preshard,
    "consolidate": consolidate,
    "reshard": reshard,
}
_LOOK_AGAIN_S = 0.5
_MAY_RUN = ("wrap", "stages")
"""Options that may be "module:function"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitResult(Result):
    """What became of an output that parts have written."""

    output: str
    """The directory; absolute."""
    by_another: bool
    """It was there already, or another process was faster: nothing was left to do."""
    num_files: int = 0
    """Files with tensors in them; 0 where there was nothing to do."""
    written_bytes: int = 0
    """Size of all these files."""
    checked_bytes: int = 0
    """Bytes of the source that were compared with the CRC-32 recorded for them, by all parts."""
    unchecked: tuple[Unchecked, ...] = ()
    """What could not be compared, by reason."""
    source_manifests: tuple[str, ...] = ()
    """Manifests by shardkit that the source was compared with, beside what its files record."""
    replaced: tuple[str, ...] = ()
    """How the paths begin of data in a bucket that were replaced. They stay, as readers may need them."""
    elapsed_s: float
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    pushed_to: str | None = None
    """Address of the repo on the Hub, where the parts were told to upload."""

    def headline(self) -> str:
        """Return what was made, or that it is there."""
        return f"{escape(self.output)} is there" if self.by_another else wrote(self.output)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedJob:
    """A job that is not committed."""

    output: str
    """Its destination; absolute."""
    command: str
    """The command that began it, as the shell takes it; empty for a call from Python."""
    directory: str
    """In which the command was typed; empty where it is not known."""
    hash: str
    """Of everything that decides about the output's bytes."""
    num_parts: int
    """Of the process that began."""
    num_files: int
    file_bytes: int
    finished_files: int
    finished_bytes: int
    missing: tuple[tuple[str, int, str], ...]
    """(part, files that it lacks, what to type) of each part that lacks something."""
    is_committing: bool
    """Its output is being made, or a commit was interrupted: the same command, or `commit`, ends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusResult(Result):
    """The jobs of a destination that nobody has committed."""

    output: str
    """The directory; absolute."""
    is_there: bool
    """Something has its name."""
    jobs: tuple[UnfinishedJob, ...]
    """On a disk there is at most one for each output."""
    replaced: tuple[str, ...] = ()
    """How the paths begin of data in a bucket that no output names any more; on a disk, what could not be removed of jobs
    that are over."""
    outputs: tuple[str, ...] | None = None
    """Where no output was named, all in the directory that have such jobs."""
    notes: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    def headline(self) -> str:
        """Return whether the output is there, or which are not committed in a directory."""
        if self.outputs is not None:
            names = listed([os.path.basename(path) for path in self.outputs])
            return (
                f"{escape(self.output)}: {f'not committed: {names}' if names else 'no output is under way'}"
            )
        return _headline(self.output, self.is_there)


def _headline(output: str, is_there: bool) -> str:
    return f"{escape(output)} {'is' if is_there else 'is not'} there"


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortResult(Result):
    """What was removed of jobs that nobody has committed."""

    output: str
    """The directory; absolute."""
    is_there: bool
    """An output has its name, which stays."""
    aborted: bool
    """Something was removed."""
    jobs: tuple[UnfinishedJob, ...]
    """The jobs that were removed, as they were before."""
    notes: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    def headline(self) -> str:
        """Return whether an output is there."""
        return _headline(self.output, self.is_there)


@suggests_keywords
def commit(
    output: str | os.PathLike[str],
    *,
    wait: float = 0,
    overwrite: bool = False,
    progress: ProgressOption = None,
    on_warning: OnWarning | None = None,
) -> CommitResult:
    """Make the output of what all parts of a job have written. May run any number of times, and several at once.

    Args:
        output: the destination that the parts were given.
        wait: seconds to wait for parts that are not finished, or that a network file system does not show yet.
        overwrite: replace what is there, if it is of the same kind, even if the parts were not told to.
        progress: told of the bytes that are read to compare what parts read of the source; by default a bar, on a terminal and in a notebook. False: none.
        on_warning: told each warning.

    Raises:
        IncompleteError: parts lack something; says which, and what to type. Or another process has aborted the job.
        UsageError: no part was begun, something else is at the destination, or the plan is another one by now.
        IntegrityError: what the parts read is not what the source records.
        ResourceError: disk or permission.
    """
    begun, warnings = time.monotonic(), list[str]()
    place, until = _destination(output), begun + wait
    while not (jobs := place.jobs()) and not place.is_there and time.monotonic() < until:  # none has begun
        time.sleep(_LOOK_AGAIN_S)
    if not jobs:
        return _was_there(place, begun)
    try:
        _join(place, jobs[0].record, warnings, overwrite=overwrite)
        _wait_for_all(place, jobs[0].record, until)
        result = _repeat(place.path, jobs[0].record, overwrite, progress, on_warning)
    except JobEnded as error:
        if not error.is_committed:
            raise
        return _was_there(place, begun, warnings)
    if result.was_there:
        return _was_there(place, begun, result.warnings)
    facts: dict[str, Any] = {each.name: getattr(result, each.name, None) for each in fields(CommitResult)}
    facts |= {"output": place.path, "by_another": False, "elapsed_s": round(time.monotonic() - begun, 3)}
    return CommitResult(**facts)


def _destination(output: str | os.PathLike[str]) -> Destination:
    """Return where an output goes.

    Raises:
        UsageError: no output can be there.
    """
    path = os.fspath(output)
    if not location_of(path).is_writable:
        raise UsageError(f"{escape(path)}: this store is read only so far, so nothing is written there")
    return destination_at(path)


def _join(place: Destination, record: JobRecord, warnings: list[str], *, overwrite: bool) -> None:
    """Look whether this user may commit a job. What a person should know is added to `warnings`.

    Raises:
        JobEnded: its commit was interrupted, and this call has ended it.
        UsageError: as `JobOutput.join`.
    """
    is_save = PLAN not in record.draft
    command = Command(verb="", options={}) if is_save else Agreement.of(record, place.path).command
    options = WriteOptions(overwrite=overwrite or is_save or bool(command.options.get("overwrite")))
    kind = OutputKind.HUB if command.verb == "consolidate" else OutputKind.SHARDED
    with destination_at(place.path, options, kind).output(record.hash) as output:
        try:
            output.join()
        finally:
            warnings += output.warnings


def _repeat(
    output: str,
    record: JobRecord,
    overwrite: bool,
    progress: ProgressOption,
    on_warning: OnWarning | None,
) -> WriteResult:
    """Plan once more, as each part did, and let the verb describe what they wrote."""
    if not record.files:
        raise UsageError(
            f"the ranks of a training job save {escape(output)}: they make it themselves",
            hint=f"if they are dead, remove what they wrote: {_abort(output)}",
        )
    agreement = Agreement.of(record, output)
    command = agreement.command
    if agreement.version != __version__:
        raise UsageError(
            f"the parts were written by shardkit {escape(agreement.version)}, and this is {__version__}",
            hint=f"commit with the same version; or begin anew after {_abort(output)}",
        )
    if not command.verb:
        raise UsageError(
            f"the job for {escape(output)} was begun by a call in Python that no command can repeat",
            hint="make the same call again: it makes the output of what is finished",
        )
    verb = _VERBS.get(command.verb)
    if verb is None or not command.options.keys() <= signature(verb).parameters.keys():
        raise SourceError(
            f"the record of the job for {escape(output)} is damaged",
            hint=f"remove the job, and begin anew: {_abort(output)}",
        )
    if not location_of(output).has_owners:
        _check_harmless(command)
    share = Committing(record=record, overwrite=overwrite)
    return verb(output=output, part=share, progress=progress, on_warning=on_warning, **command.options)


def _check_harmless(command: Command) -> None:
    """Refuse what a record in a store may not ask for: whoever may write there may have written it.

    Raises:
        UsageError: it names code to run, or a file to write on this machine.
    """
    values = command.options
    flags = ["--trust-remote-code"] if values.get("trust_remote_code") else []
    flags += ["--manifest-file"] if values.get("manifest_file") else []
    flags += [
        f"--{name} {escape(str(values[name]))}" for name in _MAY_RUN if ":" in str(values.get(name, ""))
    ]
    UsageError.raise_for(
        flags,
        "the parts were told what no record in a store is believed, since others may write there",
        hint="run any of the parts again instead, with the options that it had: once nothing is missing it commits",
    )


def _abort(output: str) -> str:
    return f"`shardkit abort {in_shell(output)}`"


def _wait_for_all(place: Destination, record: JobRecord, until: float) -> None:
    """Return once every file is finished, or the job is over.

    Raises:
        IncompleteError: some are not when the time is over.
    """
    while jobs := [job for job in place.jobs() if job.record.hash == record.hash]:
        missing = [number for number in range(len(record.files)) if number not in jobs[0].finished]
        if not missing:
            return
        if time.monotonic() >= until:
            raise incomplete(place.path, record, missing)
        time.sleep(_LOOK_AGAIN_S)


def _was_there(place: Destination, begun: float, warnings: Iterable[str] = ()) -> CommitResult:
    warnings, path = (*warnings, *place.end_commits()), place.path
    if not place.is_there or recognise(path) is None:
        raise UsageError(
            f"no part was begun for {escape(path)}, and no output is there",
            hint="run the parts first: preshard, consolidate or reshard with `--part 1/16` and so on",
        )
    return CommitResult(
        output=path,
        by_another=True,
        elapsed_s=round(time.monotonic() - begun, 3),
        notes=(f"{escape(path)} is there, and no parts of it are under way: nothing is left to commit",),
        warnings=warnings,
    )


@suggests_keywords
def status(output: str | os.PathLike[str] | None = None) -> StatusResult:
    """Return the jobs of an output that nobody has committed: how far each is, which parts are missing, what to type.

    Args:
        output: the destination that they were given. None: all of those in the working directory.

    Raises:
        SourceError, ResourceError: the record of a job cannot be read.
    """
    if output is None:
        return _status_here()
    place = _destination(output)
    jobs, replaced = _unfinished(place), place.unnamed_data()
    return StatusResult(
        output=place.path,
        is_there=place.is_there,
        jobs=jobs,
        replaced=replaced,
        notes=() if jobs or replaced else (_nothing(place),),
    )


def _nothing(place: Destination) -> str:
    return f"no job is under way for {escape(place.path)}"


def _status_here() -> StatusResult:
    """Return what is under way in the working directory."""
    directory = storage.absolute(os.curdir)
    places = [_destination(path) for path in outputs_in(directory)]
    jobs = tuple(job for place in places for job in _unfinished(place))
    return StatusResult(
        output=directory,
        is_there=True,
        jobs=jobs,
        replaced=tuple(path for place in places for path in place.unnamed_data()),
        outputs=tuple(dict.fromkeys(job.output for job in jobs)),
        notes=(),
    )


def abort(output: str | os.PathLike[str]) -> AbortResult:
    """Remove what was written of an output and nobody has committed. Processes that are still at work end with an error.

    A commit that was interrupted after its output got its name is ended instead.

    Args:
        output: the destination that they were given. An output that is there stays.

    Raises:
        ResourceError: something cannot be removed.
    """
    place = _destination(output)
    try:
        jobs = _unfinished(place)
    except SourceError:  # a record is damaged, and is removed for that
        jobs = ()
    with place.output("") as files:
        has_leftovers = files.abort()
    return AbortResult(
        output=place.path,
        is_there=place.is_there,
        aborted=has_leftovers,
        jobs=jobs,
        notes=() if has_leftovers else (_nothing(place),),
        warnings=tuple(files.warnings),
    )


def _unfinished(place: Destination) -> tuple[UnfinishedJob, ...]:
    return tuple(_describe(place.path, job) for job in place.jobs())


def _describe(output: str, job: JobStatus) -> UnfinishedJob:
    record = job.record
    missing = [number for number in range(len(record.files)) if number not in job.finished]
    return UnfinishedJob(
        output=output,
        command=record.command,
        directory=record.directory,
        hash=record.hash,
        num_parts=record.num_parts,
        num_files=len(record.files),
        file_bytes=sum(file.size for file in record.files),
        finished_files=len(record.files) - len(missing),
        finished_bytes=sum(record.files[number].size for number in sorted(job.finished)),
        missing=tuple(
            (str(part), number, part_command(record, part, output))
            for part, number in missing_parts(record, missing)
        ),
        is_committing=job.is_committing,
    )
