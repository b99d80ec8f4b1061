"""commit, status and abort: complete, show or remove uncommitted jobs.

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
from shardkit.errors import ResourceError, SourceError, UsageError
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
    incomplete_error,
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
"""Options whose value may be "module:function", which a verb imports and calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitResult(Result):
    """The result of `commit`."""

    output: str
    """The directory; absolute."""
    by_another: bool
    """The output existed already, or another process has committed it meanwhile."""
    num_files: int = 0
    """Number of files with tensors; 0 if there was nothing to do."""
    written_bytes: int = 0
    """Size of all these files."""
    checked_bytes: int = 0
    """Bytes of the source that all parts have compared with recorded CRC-32s."""
    unchecked: tuple[Unchecked, ...] = ()
    """Bytes that could not be compared, by reason."""
    source_manifests: tuple[str, ...] = ()
    """Paths of the shardkit manifests whose checksums were compared, besides those in the source's own files."""
    replaced: tuple[str, ...] = ()
    """Prefixes of replaced data in a bucket. The data stays, since readers may need it."""
    elapsed_s: float
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    pushed_to: str | None = None
    """Address of the repo on the Hub, if the parts had `--push-to-hub`."""

    def headline(self) -> str:
        """Return the first line of the text output."""
        return f"{escape(self.output)} is there" if self.by_another else wrote(self.output)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedJob:
    """An uncommitted job."""

    output: str
    """The destination; absolute."""
    command: str
    """The shell command that began the job; empty for a call from Python."""
    directory: str
    """The working directory of that command; empty if unknown."""
    hash: str
    """Hash of all inputs and options that affect the output's bytes."""
    num_parts: int
    """The N of `--part K/N` of the command that began the job; 1 without parts."""
    num_files: int
    file_bytes: int
    finished_files: int
    finished_bytes: int
    missing: tuple[tuple[str, int, str], ...]
    """(part, number of its unfinished files, command that runs it) for each part that has some."""
    is_committing: bool
    """A commit is in progress, or was interrupted. Then the same command, or `commit`, completes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusResult(Result):
    """The result of `status`."""

    output: str
    """The directory; absolute."""
    is_there: bool
    """The destination exists."""
    jobs: tuple[UnfinishedJob, ...]
    """The uncommitted jobs; on a disk at most one for each output."""
    replaced: tuple[str, ...] = ()
    """In a bucket, prefixes of data that belongs to no output and no job; on a disk, directories of ended jobs that could
    not be removed."""
    outputs: tuple[str, ...] | None = None
    """For a call without an output, all outputs of the directory that have such jobs; else None."""
    notes: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    def headline(self) -> str:
        """Return the first line of the text output."""
        if self.outputs is not None:
            names = listed([os.path.basename(path) for path in self.outputs])
            return (
                f"{escape(self.output)}: {f'not committed: {names}' if names else 'no output is under way'}"
            )
        return f"{escape(self.output)} {'is' if self.is_there else 'is not'} there"


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortResult(Result):
    """The result of `abort`."""

    output: str
    """The directory; absolute."""
    is_there: bool
    """The destination exists. It was not changed."""
    aborted: bool
    """Something was removed."""
    jobs: tuple[UnfinishedJob, ...]
    """The jobs that were removed, as they were before."""
    notes: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    def headline(self) -> str:
        """Return the first line of the text output."""
        return f"{escape(self.output)} {'is' if self.is_there else 'is not'} there"


@suggests_keywords
def commit(
    output: str | os.PathLike[str],
    *,
    wait: float = 0,
    overwrite: bool = False,
    progress: ProgressOption = None,
    on_warning: OnWarning | None = None,
) -> CommitResult:
    """Complete an output from the files of all parts of a job. May run repeatedly and concurrently.

    Args:
        output: the destination of the parts.
        wait: seconds to wait for unfinished parts, or for files that a network file system does not show yet.
        overwrite: replace an existing output of the same kind, even if the parts did not have this option.
        progress: receives the bytes of tensors that have to be read once more for their checksums; by default a bar, on a terminal and in a notebook. False: none.
        on_warning: called with each warning.

    Raises:
        IncompleteError: parts have unfinished files; lists the commands that write them. Or another process has aborted the job.
        UsageError: there is no job, something else is at the destination, or source, options or version have changed.
        IntegrityError: the parts read bytes that differ from the source's checksums.
        ResourceError: disk or permission.
    """
    begun, warnings = time.monotonic(), list[str]()
    place, until = _destination(output), begun + wait
    while not (jobs := place.jobs()) and not place.is_there and time.monotonic() < until:  # none has begun
        time.sleep(_LOOK_AGAIN_S)
    if not jobs:
        return _existing_result(place, begun)
    try:
        _join(place, jobs[0].record, warnings, overwrite=overwrite)
        _wait_for_all(place, jobs[0].record, until)
        result = _repeat(place.path, jobs[0].record, overwrite, progress, on_warning)
    except JobEnded as error:
        if not error.is_committed:
            raise
        return _existing_result(place, begun, warnings)
    if result.was_there:
        return _existing_result(place, begun, result.warnings)
    facts: dict[str, Any] = {each.name: getattr(result, each.name, None) for each in fields(CommitResult)}
    facts |= {"output": place.path, "by_another": False, "elapsed_s": round(time.monotonic() - begun, 3)}
    return CommitResult(**facts)


def _destination(output: str | os.PathLike[str]) -> Destination:
    """Return the destination of an output.

    Raises:
        UsageError: the store is read only.
    """
    path = os.fspath(output)
    if not location_of(path).is_writable:
        raise UsageError(f"{escape(path)}: this store is read only so far, so nothing is written there")
    return destination_at(path)


def _join(place: Destination, record: JobRecord, warnings: list[str], *, overwrite: bool) -> None:
    """Check that this user may commit a job; add warnings of the output to `warnings`.

    Raises:
        JobEnded: the commit had been interrupted, and this call has completed it.
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
    """Call the verb as each part did, but as `Committing`: it plans again, describes the parts' files, and commits."""
    if not record.files:
        raise UsageError(
            f"the ranks of a training job save {escape(output)}: they make it themselves",
            hint=f"if they are dead, remove what they wrote: {_abort_command(output)}",
        )
    agreement = Agreement.of(record, output)
    command = agreement.command
    if agreement.version != __version__:
        raise UsageError(
            f"the parts were written by shardkit {escape(agreement.version)}, and this is {__version__}",
            hint=f"commit with the same version; or begin anew after {_abort_command(output)}",
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
            hint=f"remove the job, and begin anew: {_abort_command(output)}",
        )
    if not location_of(output).has_owners:
        _check_harmless(command)
    share = Committing(record=record, overwrite=overwrite)
    return verb(output=output, part=share, progress=progress, on_warning=on_warning, **command.options)


def _check_harmless(command: Command) -> None:
    """Refuse a call from a record in a store, which any user of the store may have written, if it could do harm.

    Raises:
        UsageError: the call would run code, or write a file on this machine.
    """
    values = command.options
    flags = ["--trust-remote-code"] if values.get("trust_remote_code") else []
    flags += ["--manifest-file"] if values.get("manifest_file") else []
    flags += [
        f"--{name} {escape(str(values[name]))}" for name in _MAY_RUN if ":" in str(values.get(name, ""))
    ]
    UsageError.raise_for(
        flags,
        "the parts had options that `commit` does not take from a record in a store, since others may write there",
        hint="run any of the parts again instead, with the options that it had: once nothing is missing it commits",
    )


def _abort_command(output: str) -> str:
    return f"`shardkit abort {in_shell(output)}`"


def _wait_for_all(place: Destination, record: JobRecord, until: float) -> None:
    """Wait until all files are finished, or the job has ended.

    Raises:
        IncompleteError: files are unfinished at the time `until`.
    """
    while jobs := [job for job in place.jobs() if job.record.hash == record.hash]:
        missing = [number for number in range(len(record.files)) if number not in jobs[0].finished]
        if not missing:
            return
        if time.monotonic() >= until:
            raise incomplete_error(place.path, record, missing)
        time.sleep(_LOOK_AGAIN_S)


def _existing_result(place: Destination, begun: float, warnings: Iterable[str] = ()) -> CommitResult:
    """Return the result for a destination without a job: the output exists already.

    First completes interrupted commits and removes the rest of ended jobs; their warnings are added to `warnings`.

    Raises:
        UsageError: no output of a known format is there.
    """
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
    """Return the uncommitted jobs of an output: their progress, missing parts, and the commands that resume them.

    Args:
        output: the destination. None for all outputs in the working directory.

    Raises:
        SourceError, ResourceError: the job of `output` cannot be read.
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
    """Return the note for a destination without a job."""
    return f"no job is under way for {escape(place.path)}"


def _status_here() -> StatusResult:
    """Return the jobs of all outputs in the working directory; a warning names each output whose job cannot be read."""
    directory = storage.absolute(os.curdir)
    jobs, unreadable = list[UnfinishedJob](), dict[str, str]()
    places = [_destination(path) for path in outputs_in(directory)]
    for place in places:
        try:
            jobs += _unfinished(place)
        except (SourceError, ResourceError) as error:
            unreadable[place.path] = "; ".join(filter(None, (error.message, error.hint)))
    return StatusResult(
        output=directory,
        is_there=True,
        jobs=tuple(jobs),
        replaced=tuple(path for place in places for path in place.unnamed_data()),
        outputs=tuple(dict.fromkeys((*(job.output for job in jobs), *unreadable))),
        notes=(),
        warnings=tuple(unreadable.values()),
    )


def abort(output: str | os.PathLike[str]) -> AbortResult:
    """Remove the uncommitted files of an output. Processes that still write them end with an error.

    If a commit was interrupted after the output got its name, the commit is completed instead.

    Args:
        output: the destination. An existing output stays.

    Raises:
        ResourceError: something cannot be removed.
    """
    place = _destination(output)
    try:
        jobs = _unfinished(place)
    except SourceError:  # a job with a damaged record cannot be described, but is removed
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
