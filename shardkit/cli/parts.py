"""`shardkit commit` and `shardkit status`, of jobs that are divided into parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from shardkit.cli import options as opt
from shardkit.cli.output import Output, check_facts, facts, limited
from shardkit.core.text import count, escape, format_size

if TYPE_CHECKING:
    from shardkit.operations.commit import CommitResult, PartStatus, PlanStatus, StatusResult
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
    yield from check_facts(result)
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
  shardkit status Qwen3-8B-dp_shard1024
  shardkit status Qwen3-8B-dp_shard1024 --abort""",
)
@click.argument("output", type=opt.PATH)
@opt.option(
    "Many machines",
    "--abort",
    first=True,
    is_flag=True,
    help="Remove what was written and not committed.",
)
@opt.reporting
def status_command(*, out: Output, output: str, abort: bool) -> None:
    """Show how far the runs and parts that write OUTPUT are, who is missing, and how to go on.

    In s3://, it shows what is not committed. --abort leaves a run that is at work on this host, and names one of another
    host before it removes it.
    """
    from shardkit.operations.commit import status

    out.result(status(output, abort=abort, on_warning=out.warn), status_lines)


def status_lines(result: StatusResult) -> list[str]:
    """Return a result as lines for people."""
    is_there = result.headline()
    plans = [] if result.aborted else [line for plan in result.plans for line in facts(_plan_facts(plan))]
    runs = [line for run in result.runs for line in facts(_run_facts(run))]
    if result.stored is not None:
        return [is_there, *facts(_stored_facts(result.stored, aborted=result.aborted)), *plans]
    if result.aborted and not runs:
        return [f"{is_there}; what parts had written was removed"]
    return [is_there, *plans, *runs]


def _run_facts(run: Leftover) -> Iterator[tuple[str, str]]:
    from shardkit.operations.leftovers import describe

    yield "removed" if run.is_removed else "directory", escape(run.staging)
    yield from describe(run)


def _stored_facts(stored: StoredStatus, *, aborted: bool) -> Iterator[tuple[str, str]]:
    end = " were removed" if aborted else ""
    yield "not committed", f"{count(stored.num_files, 'file')}, {format_size(stored.file_bytes)}{end}"
    yield "on their way", f"{count(stored.num_uploads, 'file')}, {format_size(stored.sent_bytes)} sent"


def _plan_facts(plan: PlanStatus) -> Iterator[tuple[str, str]]:
    yield "plan", f"{escape(plan.verb)} {escape(plan.plan[:16])}, begun in {count(plan.num_parts, 'part')}"
    if plan.is_committed:
        yield "state", "committed; parts that come late will see it, and shardkit commit removes what is left"
        return
    yield (
        "finished",
        f"{plan.finished_files} of {count(plan.num_files, 'file')}, {format_size(plan.finished_bytes)} of "
        f"{format_size(plan.file_bytes)}",
    )
    if plan.num_weights:
        yield (
            "factors",
            f"of {plan.finished_weights} of {count(plan.num_weights, 'weight')}; files come after all",
        )
    yield from limited("part", [_part(part) for part in plan.parts])
    unit = "weight" if plan.finished_weights < plan.num_weights else "file"
    missing = [f"part {part}: {count(number, unit)}; {typed}" for part, number, typed in plan.missing]
    yield from limited("missing", missing)
    if not missing or (plan.num_weights and unit == "file"):
        yield "next", "shardkit commit" + (", which writes what is missing" if missing else "")


def _part(part: PartStatus) -> str:
    launcher = f", {escape(part.found)}" if part.found else ""
    return f"{part.part}: {'ended' if part.is_done else 'begun'} on {escape(part.host)}, process {part.pid}{launcher}"
