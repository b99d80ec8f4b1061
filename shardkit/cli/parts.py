"""`shardkit commit`, `shardkit status` and `shardkit abort`, for unfinished jobs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from shardkit.cli import options as opt
from shardkit.cli.output import Output, facts, list_facts, source_facts
from shardkit.core.text import count, escape, escape_command, format_size, in_shell

if TYPE_CHECKING:
    from shardkit.operations.commit import AbortResult, CommitResult, StatusResult, UnfinishedJob

_SAVING = "the ranks of a training job save; if they are dead, the next save removes what they wrote"
_COMMITTING = "its output is being committed, or that was interrupted: shardkit commit OUTPUT completes it"


@click.command(
    cls=opt.Verb,
    name="commit",
    epilog="""\b
Examples:
  shardkit commit Qwen3-8B-dp_shard1024
  shardkit commit Qwen3-8B-dp_shard1024 --wait 120""",
)
@click.argument("output", type=opt.PATH)
@opt.option(
    "Many machines",
    "--wait",
    first=True,
    type=click.FloatRange(min=0),
    default=0,
    metavar="SECONDS",
    help="Wait for unfinished parts, or for files that a network file system does not show yet.",
)
@opt.overwrite("output, even if the parts did not have this option")
@opt.reporting
def commit_command(*, out: Output, output: str, wait: float, overwrite: bool) -> None:
    """Complete OUTPUT from the files of all parts of a job, with one rename.

    It may run repeatedly and concurrently. The last part to finish does the same automatically.
    """
    from shardkit.operations.commit import commit

    result = commit(output, wait=wait, overwrite=overwrite, progress=out.progress(), on_warning=out.warn)
    out.result(result, commit_lines)


def commit_lines(result: CommitResult) -> list[str]:
    """Return a result as lines of text."""
    return [result.headline(), *facts(_pushed(result) if result.by_another else _commit_facts(result))]


def _commit_facts(result: CommitResult) -> Iterator[tuple[str, str]]:
    yield "parts", f"{count(result.num_files, 'file')}, {format_size(result.written_bytes)}"
    yield from source_facts(result)
    yield from _pushed(result)
    yield "time", f"{result.elapsed_s:.2f} s"


def _pushed(result: CommitResult) -> Iterator[tuple[str, str]]:
    if result.pushed_to is not None:
        yield "pushed", escape(result.pushed_to)


@click.command(
    cls=opt.Verb,
    name="status",
    epilog="""\b
Examples:
  shardkit status
  shardkit status Qwen3-8B-dp_shard1024""",
)
@click.argument("output", type=opt.PATH, required=False)
@opt.reporting
def status_command(*, out: Output, output: str | None) -> None:
    """Show the progress of jobs that write OUTPUT, missing parts, and how to resume them.

    Without OUTPUT, show all uncommitted jobs in this directory. Also show what is left of replaced outputs: in a bucket all
    their data, on a disk what could not be removed.
    """
    from shardkit.operations.commit import status

    out.result(status(output), status_lines)


def status_lines(result: StatusResult) -> list[str]:
    """Return a result as lines of text."""
    jobs = [line for job in result.jobs for line in facts(_job_facts(job, result))]
    replaced = facts(("replaced", escape(prefix)) for prefix in result.replaced)
    return [result.headline(), *jobs, *replaced]


@click.command(
    cls=opt.Verb,
    name="abort",
    epilog="""\b
Examples:
  shardkit abort Qwen3-8B-dp_shard1024
  shardkit abort s3://bucket/run/last""",
)
@click.argument("output", type=opt.PATH)
@opt.answering
def abort_command(*, out: Output, output: str) -> None:
    """Remove the uncommitted files of jobs that write OUTPUT. An existing output is kept.

    Processes that are still running end with an error.
    """
    from shardkit.operations.commit import abort

    out.result(abort(output), abort_lines)


def abort_lines(result: AbortResult) -> list[str]:
    """Return a result as lines of text."""
    removed = [
        ("removed", f"{_finished(job)} of {escape_command(job.command) or 'a call from Python'}")
        for job in result.jobs
    ]
    removed = removed or [("removed", "what was left of a job")] * result.aborted
    return [result.headline(), *facts(removed)]


def _job_facts(job: UnfinishedJob, result: StatusResult) -> Iterator[tuple[str, str]]:
    if result.outputs is not None:
        yield "output", escape(job.output)
    where = f", in {escape(job.directory)}" if job.directory else ""
    yield "begun by", f"{escape_command(job.command)}{where}" if job.command else "a call from Python"
    if job.is_committing or not job.num_files:
        yield "state", _COMMITTING if job.is_committing else _SAVING
        return
    yield "finished", _finished(job)
    missing = [
        f"part {part}: {count(number, 'file')}; {escape_command(typed)}"
        for part, number, typed in job.missing
    ]
    if job.num_parts > 1:
        yield from list_facts("missing", missing)
    if not missing:
        from shardkit.files import storage

        is_there = storage.lexists(job.output) if result.outputs is not None else result.is_there
        yield "next", f"shardkit commit {in_shell(job.output)}{' --overwrite' if is_there else ''}"


def _finished(job: UnfinishedJob) -> str:
    return (
        "all files"
        if not job.num_files
        else (
            f"{job.finished_files} of {count(job.num_files, 'file')}, {format_size(job.finished_bytes)} of "
            f"{format_size(job.file_bytes)}"
        )
    )
