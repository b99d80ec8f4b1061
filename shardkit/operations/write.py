"""Carrying out what has been decided: staging, moving, describing, one rename."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from shardkit.core.text import KIB, MIB, escape, parse_size
from shardkit.core.threads import Progress
from shardkit.errors import Interrupted, ResourceError, UsageError
from shardkit.files import storage
from shardkit.files.staging import Staging, abandoned, journal_of, named, remove_abandoned
from shardkit.operations.destination import Replaceable, check_replaceable, is_sharded_checkpoint
from shardkit.transfer.chains import Run
from shardkit.transfer.checks import OFF, CheckedSource, SourceCheck
from shardkit.transfer.execute import ExecuteOptions, Execution, FileDigest
from shardkit.transfer.images import ImageSet
from shardkit.transfer.journal import Journal, read_finished, read_plan_hash
from shardkit.transfer.plan import TransferPlan

_MIN_MEMORY, _MIN_MEMORY_PER_JOB = 2 * MIB, 512 * KIB


OnWarning = Callable[[str], object]
"""Is told a warning."""


def warn_all(on_warning: OnWarning | None, warnings: Iterable[str]) -> None:
    """Tell warnings as soon as they are known: a person may want to stop before anything is written."""
    if on_warning is not None:
        for warning in warnings:
            on_warning(warning)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What came of a run."""

    resumed_files: int
    """Files that an interrupted run had finished."""
    source: CheckedSource
    """How much of the source was compared with what it records."""


class Describer(Protocol):
    """Writes what lies beside the images."""

    def add_file(self, digest: FileDigest) -> None:
        """An image is finished; may be called from any thread."""
        ...

    def finish(self, digests: Mapping[str, FileDigest], scattered: Mapping[str, int]) -> None:
        """Every image is on disk: write the rest, last of all what makes the directory complete.

        Args:
            digests: of every file, those of an interrupted run included.
            scattered: CRC-32 of every scattered tensor, by its source name.
        """
        ...


class Images(ImageSet, Protocol):
    """Images that know how much of each is data."""

    @property
    def data_nbytes(self) -> Sequence[int]:
        """Bytes of all holes of each image."""
        ...


class Job(Protocol):
    """Something decided that is to be carried out."""

    @property
    def plan(self) -> TransferPlan:
        """What is to be moved."""
        ...

    @property
    def output(self) -> Images:
        """The plan's images."""
        ...

    @property
    def plan_hash(self) -> str:
        """Stands for inputs, options and version: an interrupted run resumes only under an equal one."""
        ...


Describe = Callable[[str], AbstractContextManager[Describer]]
"""Returns what writes the rest of the files into a directory."""


def execute_options(jobs: int, max_memory: str | int, *, digests: bool, check_source: bool) -> ExecuteOptions:
    """Return how to move bytes, from what a person asked for.

    Args:
        jobs: threads.
        max_memory: bytes for all buffers, as a number or as "512MiB".
        digests: take CRC-32s on the way.
        check_source: compare what is read with what the source records.

    Raises:
        UsageError: too few threads, or too little memory for them.
    """
    budget = parse_size(max_memory)
    if jobs < 1:
        raise UsageError(f"--jobs must be at least 1, not {jobs}")
    if budget < _MIN_MEMORY:
        raise UsageError(f"--max-memory must be at least 2MiB, not {max_memory}")
    if budget < jobs * _MIN_MEMORY_PER_JOB:
        raise UsageError(
            f"--max-memory {max_memory} is too little for --jobs {jobs}: each takes 512KiB at least",
            hint="a few threads are as fast as many: --jobs 2 is the default",
        )
    return ExecuteOptions(jobs=jobs, max_memory_bytes=budget, digests=digests, check_source=check_source)


def check_warnings(options: ExecuteOptions) -> tuple[str, ...]:
    """Return what a person is warned of where the source is not compared with what it records."""
    return () if options.check_source else (OFF,)


def run_job(
    job: Job,
    path: str,
    options: ExecuteOptions,
    progress: Progress,
    *,
    describe: Describe,
    label: str,
    overwrite: bool,
    resume: bool,
    resume_from: str | None = None,
    why_not: Replaceable = is_sharded_checkpoint,
) -> Ran:
    """Write a job's output to `path`.

    On Ctrl-C or SIGTERM the staging directory stays for the next run; on any error it is removed.

    Args:
        describe: what is to lie beside the images.
        label: how the progress is called.
        resume: go on with what a dead run of this very plan left.
        resume_from: go on with this staging directory, whose owner is not known to be alive (`check_resume_from`).
        why_not: tells an output that may be replaced from what somebody put there during the run.

    Raises:
        Interrupted: after a signal.
        IntegrityError, ResourceError: as `Execution.run`, and whatever `describe` raises.
        UsageError: something else is at `path` by now, or `resume_from` is not what can be resumed.
    """
    plan_hash, staging, num_finished = job.plan_hash, None, 0
    check = SourceCheck(job.plan.catalog) if options.check_source else None
    try:
        if resume_from is not None:
            staging = _taken_over(path, check_resume_from(resume_from, path, plan_hash))
        else:
            staging = (_adopted(path, plan_hash) if resume else None) or Staging.create(path)
        remove_abandoned(path)  # of other plans, or to begin anew: their room may be needed
        progress.start(job.plan.hole_bytes, label)
        finished = _finished(job, staging, progress, check)
        num_finished = len(finished)
        _write(job, staging, plan_hash, options, progress, finished, describe, check)
        if overwrite and os.path.lexists(path):
            check_replaceable(path, escape(path), overwrite=True, why_not=why_not)
        staging.commit(overwrite=overwrite)
    except KeyboardInterrupt as interrupt:
        if staging is not None and staging.is_committed:
            staging.complete()
        else:
            if staging is not None:
                staging.release()
            raise Interrupted(
                f"interrupted: {escape(path)} was not made; what was finished is kept beside it",
                signum=getattr(interrupt, "signum", signal.SIGINT),
                hint="run the same command again to resume",
            ) from interrupt
    except BaseException:
        if staging is not None and staging.is_committed:
            staging.release()  # what was replaced stays until it is known that the new one is on the disk
        elif staging is not None:
            staging.discard()
        raise
    finally:
        progress.finish()
    return Ran(resumed_files=num_finished, source=_summary(check, job.plan, options))


def _summary(check: SourceCheck | None, plan: TransferPlan, options: ExecuteOptions) -> CheckedSource:
    if check is None:
        return CheckedSource()
    names = dict.fromkeys(holes.source for holes in plan.images.tensors())
    return check.summary(names, looks_for_unread=options.share_extents and not options.digests)


def check_resume_from(resume_from: str, path: str, plan_hash: str, *, resume: bool = True) -> str:
    """Return the absolute path of a staging directory that a person chose to resume from.

    Args:
        resume_from: as given.
        path: the destination, absolute.
        plan_hash: of what is to be done now.
        resume: False where one asked to begin anew.

    Raises:
        UsageError: it is none of `path`, its run is under way, or was another job's.
    """
    if not resume:
        raise UsageError("--resume-from and --no-resume exclude each other")
    found = named(path, resume_from)
    if read_plan_hash(journal_of(found)) != plan_hash:
        raise UsageError(
            f"{escape(resume_from)} was left by another job: its source, options or version of shardkit differ",
            hint="give what was given then, or begin anew without --resume-from",
        )
    return found


def _taken_over(path: str, leftover: str) -> Staging:
    staging = Staging.adopt(path, leftover)
    if staging is None:
        raise ResourceError(
            f"cannot take over {escape(leftover)}", hint="another run may have, or you may not write to it"
        )
    return staging


def _adopted(path: str, plan_hash: str) -> Staging | None:
    """Take over a dead run's staging directory if it was carrying out this very plan."""
    for leftover in abandoned(path):
        if read_plan_hash(journal_of(leftover)) == plan_hash:
            staging = Staging.adopt(path, leftover)
            if staging is not None:
                return staging
    return None


def _finished(
    job: Job, staging: Staging, progress: Progress, check: SourceCheck | None
) -> dict[str, FileDigest]:
    """Return what an interrupted run had finished, and remove all else that lies there.

    Half-written files and descriptions are made again; and a run that was killed between exchanging
    directories and removing the old one left the whole old output.
    """
    sizes = {image.name: image.size for image in job.output}
    finished = read_finished(staging.journal, staging.data, sizes, check)
    for number, image in enumerate(job.output):
        if image.name in finished:
            progress.advance(job.output.data_nbytes[number])
    with translated(staging.data):
        _remove_others(staging.data, finished)
        # A file is made anew under the same name and vouched for in the journal: after a power loss the name must
        # not stand for the half-written one of before.
        storage.sync_directories(staging.data)
    return finished


def _remove_others(directory: str, finished: Collection[str]) -> None:
    """Remove all files but the finished ones, and the folders that are left empty."""
    for here, folders, names in os.walk(directory, topdown=False):
        for name in names:
            path = os.path.join(here, name)
            if os.path.relpath(path, directory) not in finished:
                storage.unlink(path)
        for name in folders:
            path = os.path.join(here, name)
            if os.path.islink(path):
                storage.unlink(path)
            elif not os.listdir(path):
                storage.rmdir(path)


def _write(
    job: Job,
    staging: Staging,
    plan_hash: str,
    options: ExecuteOptions,
    progress: Progress,
    finished: Mapping[str, FileDigest],
    describe: Describe,
    check: SourceCheck | None,
) -> None:
    """Move the bytes, and describe them beside."""
    with (
        translated(staging.path),
        contextlib.closing(Journal(staging.journal, plan_hash, staging.data)) as journal,
        describe(staging.data) as descriptions,
    ):

        def on_finished(digest: FileDigest, runs: Sequence[Run]) -> None:
            journal.add(digest, None if check is None else check.dump(runs))
            descriptions.add_file(digest)

        execution = Execution(
            job.plan,
            staging.data,
            options,
            finished=finished,
            on_finished=on_finished,
            progress=progress,
            check=check,
        )
        descriptions.finish(*execution.run())


@contextlib.contextmanager
def translated(path: str) -> Iterator[None]:
    """Let what the system refuses in our own bookkeeping name the place."""
    try:
        yield
    except OSError as error:
        raise ResourceError(f"cannot write to {escape(path)}: {error.strerror}") from error
