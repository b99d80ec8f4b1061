"""`shardkit commit`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from shardkit.cli import options as opt
from shardkit.cli.output import Output, check_facts, count, facts, headline, make_progress
from shardkit.core.text import escape, format_size

if TYPE_CHECKING:
    from shardkit.operations.commit import CommitResult


@click.command(
    name="commit",
    epilog="""\b
Examples:
  shardkit commit Qwen3-8B-dp_shard1024
  shardkit commit Qwen3-8B-dp_shard1024 --wait 120""",
)
@click.argument("output")
@click.option(
    "--wait",
    type=click.FloatRange(min=0),
    default=0,
    metavar="SECONDS",
    help="Wait for parts that are not finished, or that a network file system does not show yet.",
)
@opt.overwrite("output, even if the parts were not told to")
@opt.reporting
def command(*, out: Output, output: str, wait: float, overwrite: bool) -> None:
    """Make OUTPUT of what all parts of a job have written, with one rename.

    It may run any number of times, and several may run at once. The last part to finish does the same by itself.
    """
    from shardkit.operations.commit import commit

    progress = make_progress(enabled=out.shows_bars)
    out.result(commit(output, wait=wait, overwrite=overwrite, progress=progress, on_warning=out.warn), render)


def render(result: CommitResult) -> list[str]:
    """Return a result as lines for people."""
    if result.by_another:
        return [f"{escape(result.output)} is there"]
    return [headline(result.output, dry_run=False), *facts(_facts(result))]


def _facts(result: CommitResult) -> Iterator[tuple[str, str]]:
    yield "parts", f"{count(result.num_files, 'file')}, {format_size(result.written_bytes)}"
    yield from check_facts(result)
    yield "time", f"{result.elapsed_s:.2f} s"
