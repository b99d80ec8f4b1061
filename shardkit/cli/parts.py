"""`shardkit commit`, `shardkit status` and `shardkit abort`, of jobs that have not ended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from shardkit.cli import options as opt
from shardkit.cli.output import Output, facts, limited, source_facts
from shardkit.core.text import count, escape, format_size

if TYPE_CHECKING:
    from shardkit.operations.commit import AbortResult, CommitResult, PartStatus, PlanStatus, StatusResult
    from shardkit.operations.leftovers import Leftover
    from shardkit.operations.uploading.status import StoredStatus


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
    help="Wait for parts that are not finished, or that a network file system does not show yet.",
)
@opt.overwrite("output, even if the parts did not have this option")
@opt.reporting
def commit_command(*, out: Output, output: str, wait: float, overwrite: bool) -> None:
    """Make OUTPUT from what all parts of a job have written, with one rename.

    It may run any number of times, and several may run at once. The last part to finish does the same by itself.
    """
    from shardkit.operations.commit import commit

    result = commit(output, wait=wait, overwrite=overwrite, progress=out.progress(), on_warning=out.warn)
    out.result(result, commit_lines)


def commit_lines(result: CommitResult) -> list[str]:
    """Return a result as lines for people."""
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
    """Show how far the runs and parts that write OUTPUT are, who is missing, and how to go on.

    Without OUTPUT, it shows all that is not committed in this directory. In a bucket, it shows the data that are no part
    of OUTPUT: of runs that have not ended, and of outputs that were replaced.
    """
    from shardkit.operations.commit import status

    out.result(status(output), status_lines)


def status_lines(result: StatusResult) -> list[str]:
    """Return a result as lines for people."""
    is_named = result.outputs is None
    plans = [line for plan in result.plans for line in facts(_plan_facts(plan, is_named))]
    runs = [line for run in result.runs for line in facts(_run_facts(run))]
    stored = [] if result.stored is None else facts(_stored_facts(result.stored))
    return [result.headline(), *stored, *plans, *runs]


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
    """Remove what was written for OUTPUT and not committed. An output that is there stays.

    Parts that are still at work end with an error. A run that is at work on this host is left alone; one of another host
    is named before it is removed. In a bucket, data of replaced outputs are removed too: wait until nobody reads them.
    """
    from shardkit.operations.commit import abort

    out.result(abort(output, on_warning=out.warn), abort_lines)


def abort_lines(result: AbortResult) -> list[str]:
    """Return a result as lines for people."""
    if result.stored is not None:
        return [result.headline(), *facts(_stored_facts(result.stored, end=" were removed"))]
    if result.aborted and not result.runs:
        return [f"{result.headline()}; what parts had written was removed"]
    return [result.headline(), *(line for run in result.runs for line in facts(_run_facts(run)))]


def _run_facts(run: Leftover) -> Iterator[tuple[str, str]]:
    from shardkit.operations.leftovers import describe

    yield "removed" if run.is_removed else "directory", escape(run.staging)
    yield from describe(run)


def _stored_facts(stored: StoredStatus, end: str = "") -> Iterator[tuple[str, str]]:
    yield "not committed", f"{count(stored.num_files, 'file')}, {format_size(stored.file_bytes)}{end}"
    for prefix in stored.prefixes:
        yield "prefix", escape(prefix)
    yield "on their way", f"{count(stored.num_uploads, 'file')}, {format_size(stored.sent_bytes)} sent"


def _plan_facts(plan: PlanStatus, is_named: bool) -> Iterator[tuple[str, str]]:
    if not is_named:
        yield "directory", escape(plan.staging)
    yield "plan", f"{escape(plan.verb)} {escape(plan.plan[:16])}, begun in {count(plan.num_parts, 'part')}"
    if plan.is_committed:
        yield "state", "committed; parts that come late will see it, and shardkit commit removes what is left"
        return
    yield (
        "finished",
        f"{plan.finished_files} of {count(plan.num_files, 'file')}, {format_size(plan.finished_bytes)} of "
        f"{format_size(plan.file_bytes)}",
    )
    yield from limited("part", [_part(part) for part in plan.parts])
    missing = [f"part {part}: {count(number, 'file')}; {typed}" for part, number, typed in plan.missing]
    yield from limited("missing", missing)
    if not missing:
        yield "next", "shardkit commit"


def _part(part: PartStatus) -> str:
    launcher = f", {escape(part.found)}" if part.found else ""
    return f"{part.part}: {'ended' if part.is_done else 'begun'} on {escape(part.host)}, process {part.pid}{launcher}"
