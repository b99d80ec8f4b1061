"""`shardkit latest`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import click

from shardkit.cli import options as opt
from shardkit.cli.output import Output, printing, shown_lines, table, wrap_indented
from shardkit.core.text import escape, format_name, format_size
from shardkit.errors import SourceError
from shardkit.operations.latest import LatestResult, latest

_NONE = 1


@click.command(
    cls=opt.Verb,
    name="latest",
    epilog="""\b
Examples:
  shardkit latest runs/sft --all
  shardkit latest runs/sft

ckpt=$(shardkit latest runs/sft) && torchrun train.py "$ckpt" resumes from it.""",
)
@click.argument("run", type=opt.PATH)
@opt.option(
    "Output",
    "--all",
    "list_all",
    first=True,
    is_flag=True,
    help="List every checkpoint, newest first, and what is missing in those that are not whole.",
)
@opt.answering
def command(*, out: Output, run: str, list_all: bool) -> None:
    """Print the path of the newest checkpoint of RUN that opens whole.

    RUN is the directory that a trainer saves into. The path is all that stdout gets; stderr gets the reason, and every
    newer checkpoint that is passed over. A checkpoint opens if its metadata, headers and sizes agree; no tensor is
    read. Steps above the one that a tracker file names (latest_checkpointed_iteration.txt) do not count.
    Exit code 0: there is one; 1: there is none; 2: RUN holds several runs, which are listed; 3: no such path.
    """
    result = latest(run, list_all=list_all)
    for warning in result.warnings:
        out.warn(warning)
    if out.as_json or list_all:
        out.answer(result, render)
    else:
        _print_path(out, result)
    if result.path is None:
        click.get_current_context().exit(_NONE)


def _print_path(out: Output, result: LatestResult) -> None:
    """Print the path for a shell, exactly; everything else goes to stderr."""
    if result.path is None:
        out.say("none", result.reason)
        for line in shown_lines(result.problems, spreads=True):
            out.detail(line)
        return
    if not result.path.isprintable():
        raise SourceError(
            f"{escape(result.path)} has characters that cannot be printed", hint="--json prints it in quotes"
        )
    if not out.is_quiet:
        out.say("note", result.reason)
    with printing():
        click.echo(result.path)


def render(result: LatestResult) -> list[str]:
    """Return a result as lines of text."""
    return [result.headline(), *_lines(result)]


def _lines(result: LatestResult) -> Iterator[str]:
    if result.path is None or result.checkpoints is None:
        lines = [result.reason, *(result.problems if result.checkpoints is None else ())]
        for line in lines:
            yield from wrap_indented(line, sys.stdout, indent=2)
    rows = []
    for each in result.checkpoints or ():
        step = "" if each.step is None else str(each.step)
        name = escape(os.path.relpath(each.path, result.run)) if each.path != result.run else "."
        kind = format_name(each.format) if each.format else ""
        rows.append((step, format_size(each.size_bytes), kind, name, each.missing or "whole"))
    if rows:
        yield from table([("step", "size", "kind", "path", "state"), *rows], right=(0, 1))
