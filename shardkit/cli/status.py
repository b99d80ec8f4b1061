"""`shardkit status`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from shardkit.cli import options as opt
from shardkit.cli.output import Output, count, facts, limited
from shardkit.core.text import escape, format_size

if TYPE_CHECKING:
    from shardkit.operations.commit import PartStatus, PlanStatus, StatusResult


@click.command(
    name="status",
    epilog="""\b
Examples:
  shardkit status Qwen3-8B-dp_shard1024
  shardkit status Qwen3-8B-dp_shard1024 --abort""",
)
@click.argument("output")
@click.option("--abort", is_flag=True, help="Remove what parts have written and nobody has committed.")
@opt.as_json
def command(*, output: str, abort: bool, as_json: bool) -> None:
    """Show how far the parts of a job are that write OUTPUT, and who is missing."""
    from shardkit.operations.commit import status

    Output(as_json=as_json).result(status(output, abort=abort), render)


def render(result: StatusResult) -> list[str]:
    """Return a result as lines for people."""
    is_there = f"{escape(result.output)} {'is' if result.is_there else 'is not'} there"
    if result.aborted:
        return [f"{is_there}; what parts had written was removed"]
    return [is_there, *(line for plan in result.plans for line in facts(_facts(plan)))]


def _facts(plan: PlanStatus) -> Iterator[tuple[str, str]]:
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
    found = f", {escape(part.found)}" if part.found else ""
    return f"{part.part}: {'ended' if part.is_done else 'begun'} on {escape(part.host)}, process {part.pid}{found}"
