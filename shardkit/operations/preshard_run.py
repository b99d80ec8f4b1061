"""Carrying out a decided preshard: staging, moving, describing, one rename."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator, Mapping

from shardkit.core.text import escape
from shardkit.errors import Interrupted, ResourceError
from shardkit.operations.preshard_describe import Descriptions
from shardkit.operations.preshard_job import PreshardJob
from shardkit.transfer.execute import ExecuteOptions, Execution, FileDigest
from shardkit.transfer.journal import Journal, read_finished, read_plan_hash
from shardkit.transfer.progress import Progress
from shardkit.transfer.staging import Staging, abandoned, journal_of, remove_abandoned


def run_job(
    job: PreshardJob, path: str, options: ExecuteOptions, progress: Progress, *, overwrite: bool, resume: bool
) -> int:
    """Write a job's checkpoint to `path`; return how many files an interrupted run had finished.

    On Ctrl-C or SIGTERM the staging directory stays for the next run; on any error it is removed.

    Raises:
        Interrupted: after a signal.
        IntegrityError, ResourceError: as `Execution.run`.
    """
    plan_hash, staging, num_finished = job.plan_hash, None, 0
    try:
        staging = (_adopted(path, plan_hash) if resume else None) or Staging.create(path)
        remove_abandoned(path)  # of other plans, or to begin anew: their room may be needed
        progress.start(job.plan.hole_bytes, "preshard")
        finished = _finished(job, staging, progress)
        num_finished = len(finished)
        _write(job, staging, plan_hash, options, progress, finished)
        staging.commit(overwrite=overwrite)
    except KeyboardInterrupt as interrupt:
        if staging is not None and staging.is_committed:
            staging.discard()
        else:
            if staging is not None:
                staging.release()
            raise Interrupted(
                f"interrupted: {escape(path)} was not made; what was finished is kept beside it",
                signum=getattr(interrupt, "signum", signal.SIGINT),
                hint="run the same command again to resume",
            ) from interrupt
    except BaseException:
        if staging is not None:
            staging.discard()
        raise
    finally:
        progress.finish()
    return num_finished


def _adopted(path: str, plan_hash: str) -> Staging | None:
    """Take over a dead run's staging directory if it was carrying out this very plan."""
    for leftover in abandoned(path):
        if read_plan_hash(journal_of(leftover)) == plan_hash:
            staging = Staging.adopt(path, leftover)
            if staging is not None:
                return staging
    return None


def _finished(job: PreshardJob, staging: Staging, progress: Progress) -> dict[str, FileDigest]:
    """Return what an interrupted run had finished, and remove all else that lies there.

    Half-written files and descriptions are made again; and a run that was killed between exchanging
    directories and removing the old one left the whole old checkpoint.
    """
    finished = read_finished(staging.journal, staging.data, {image.name: image.size for image in job.output})
    for number, image in enumerate(job.output):
        if image.name in finished:
            progress.advance(job.output.data_nbytes[number])
    with _translated(staging.data), os.scandir(staging.data) as entries:
        for entry in entries:
            if entry.name not in finished:
                shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)
    return finished


def _write(
    job: PreshardJob,
    staging: Staging,
    plan_hash: str,
    options: ExecuteOptions,
    progress: Progress,
    finished: Mapping[str, FileDigest],
) -> None:
    """Move the bytes, and describe them beside."""
    with (
        _translated(staging.path),
        contextlib.closing(Journal(staging.journal, plan_hash)) as journal,
        Descriptions(job, staging.data) as descriptions,
    ):

        def on_finished(digest: FileDigest) -> None:
            journal.add(digest)
            descriptions.add_file(digest)

        execution = Execution(
            job.plan, staging.data, options, finished=finished, on_finished=on_finished, progress=progress
        )
        descriptions.finish(*execution.run())


@contextlib.contextmanager
def _translated(path: str) -> Iterator[None]:
    """Let what the system refuses in our own bookkeeping name the place."""
    try:
        yield
    except OSError as error:
        raise ResourceError(f"cannot write to {escape(path)}: {error.strerror}") from error
