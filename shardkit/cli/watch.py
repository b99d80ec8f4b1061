"""`shardkit watch`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from shardkit.cli import options as opt
from shardkit.cli.consolidate import CHOOSING
from shardkit.cli.output import Output, facts
from shardkit.core.text import escape

if TYPE_CHECKING:
    from shardkit.operations.watch import WatchResult

_COUNT = click.IntRange(min=1)
_SECONDS = click.IntRange(min=0)


@click.command(
    cls=opt.Verb,
    name="watch",
    epilog="""\b
Examples:
  shardkit watch runs/sft published --base Qwen/Qwen3-8B --dtype base
  shardkit watch runs/sft published --base Qwen/Qwen3-8B --push-to-hub me/sft --keep 1""",
)
@click.argument("run", type=opt.PATH)
@click.argument("output_directory", type=opt.PATH)
@CHOOSING
@opt.option(
    "Output", "--once", first=True, is_flag=True, help="Convert what is whole now, and end; for cron."
)
@opt.option(
    "Output",
    "--keep",
    type=_COUNT,
    metavar="N",
    first=True,
    help="Keep the newest N outputs; remove older ones once they are uploaded.",
)
@opt.option(
    "Input",
    "--settle",
    "settle_s",
    type=_SECONDS,
    default=60,
    show_default=True,
    metavar="SECONDS",
    help="How long a checkpoint stays unchanged before it counts as whole, if no file shows that its save has ended.",
)
@opt.option(
    "Publishing",
    "--push-to-hub",
    "repo",
    metavar="REPO",
    first=True,
    help="Upload each output to a branch of this repo, step-N, and the newest to its default branch.",
)
@opt.option(
    "Publishing",
    "--private",
    first=True,
    is_flag=True,
    help="Make the repo private if it does not exist yet.",
)
@opt.option("Publishing", "--branch-only", is_flag=True, help="Leave the default branch as it is.")
@opt.jobs
@opt.max_memory
@opt.follow_links
@opt.reporting
def command(
    *,
    out: Output,
    run: str,
    output_directory: str,
    once: bool,
    keep: int | None,
    settle_s: float,
    repo: str | None,
    private: bool,
    branch_only: bool,
    **options: Any,
) -> None:
    """Write each new checkpoint of RUN as a Hub model, OUTPUT_DIRECTORY/step-N, while the run goes on.

    RUN is the directory that a trainer saves into; it is only read. A checkpoint is converted by `shardkit consolidate`
    once it is whole: its trainer has written the file that it writes last, or nothing in it changes for --settle
    seconds. One that the trainer removes meanwhile is passed over, and named. After a kill, the same command goes on.
    """
    from shardkit.operations.watch import WatchOptions, watch

    opt.silence_hub()
    if private and repo is None:
        raise click.UsageError("--private belongs to --push-to-hub, which is not given")
    if repo is not None:
        from shardkit.formats.hub.repo import check_push

        check_push(repo)
    watched = WatchOptions(
        run=run,
        directory=output_directory,
        consolidate=options,
        repo=repo,
        private=private,
        branch_only=branch_only,
        keep=keep,
        settle_s=settle_s,
        once=once,
    )
    result = watch(
        watched,
        lambda line: out.say("watch", line),
        progress=out.progress(),
        on_warning=out.warn,
        on_step=out.step,
    )
    out.answer(result, render)


def render(result: WatchResult) -> list[str]:
    """Return a result as lines of text."""
    return [result.headline(), *facts(_facts(result))]


def _facts(result: WatchResult) -> Iterator[tuple[str, str]]:
    for label, names in (
        ("converted", result.converted),
        ("uploaded", result.uploaded),
        ("removed", result.removed),
        ("passed over", result.passed_over),
    ):
        if names:
            yield label, ", ".join(map(escape, names))
