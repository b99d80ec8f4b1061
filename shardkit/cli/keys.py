"""`shardkit keys`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from shardkit.cli import options as opt
from shardkit.cli.output import Output, facts, max_lines, shown
from shardkit.core.text import count, escape, format_name, listed

if TYPE_CHECKING:
    from shardkit.operations.keys import KeysResult


@click.group(
    name="keys",
    epilog="""\b
Examples:
  shardkit keys show last.ckpt
  shardkit keys check rules.toml last.ckpt --base Qwen/Qwen3-8B""",
)
def command() -> None:
    """Show what tensors become on the Hub or in a model, and check rules for that.

    `--keys RULES` on preshard and consolidate applies them; docs/keys.md describes the file.
    """


base = opt.option(
    "Input",
    "--base",
    first=True,
    type=opt.PATH,
    metavar="MODEL",
    help="The model whose config.json has the numbers that rules need.",
)


@command.command(
    cls=opt.Verb,
    name="check",
    short_help="Compare key rules with the names and shapes of SOURCE.",
    epilog="""\b
Examples:
  shardkit keys check rules.toml last.ckpt
  shardkit keys check torchtitan-llama3 last.ckpt --base my-base""",
)
@click.argument("rules", type=opt.PATH, shell_complete=opt.rule_sets())
@click.argument("source", type=opt.PATH)
@base
@opt.follow_links
@opt.answering
@click.pass_context
def check(ctx: click.Context, /, *, out: Output, rules: str, source: str, **options: Any) -> None:
    """Compare RULES with the names and shapes of SOURCE, there and back. No tensor is read.

    RULES is a TOML file or the name of a rule set that shardkit has. SOURCE is a Hub model, or a checkpoint with a
    trainer's own names. The exit code is 1 if the rules do not fit; every problem is listed.
    """
    from shardkit.operations.keys import check_keys

    result = check_keys(rules, source, **options)
    out.result(result, render)
    ctx.exit(0 if result.ok else 1)


@command.command(
    cls=opt.Verb,
    name="show",
    short_help="Show what the tensors of SOURCE are on the other side.",
    epilog="""\b
Examples:
  shardkit keys show Qwen/Qwen3-30B-A3B
  shardkit keys show last.ckpt --base meta-llama/Llama-3.1-8B --json""",
)
@click.argument("source", type=opt.PATH)
@base
@opt.follow_links
@opt.answering
def show(*, out: Output, source: str, **options: Any) -> None:
    """Show what the tensors of SOURCE are on the other side: of a Hub model in memory, of a checkpoint on the Hub."""
    from shardkit.operations.keys import show_keys

    out.result(show_keys(source, **options), render)


def render(result: KeysResult) -> list[str]:
    """Return a result as lines for people."""
    from shardkit.operations.keys import line

    lines = shown([line(tensor) for tensor in result.tensors], 4 * max_lines(), spreads=True)
    return [*facts(_facts(result)), *(f"  {text}" for text in (*lines, *result.problems))]


def _facts(result: KeysResult) -> Iterator[tuple[str, str]]:
    sides = {"hub": "the Hub's", "model": "the model's own"}
    yield (
        "source",
        f"{escape(result.source)} ({format_name(result.format)}); its names are taken as {sides[result.side]}",
    )
    yield "rules", escape(result.title) + (f" ({escape(result.rules)})" if result.rules else "")
    if not result.ok:
        yield "fit", f"no: {count(len(result.problems), 'problem')}"
        return
    moved = sum(tensor.is_reordered for tensor in result.tensors)
    yield (
        "tensors",
        f"{count(result.num_stored, 'tensor')} become {len(result.tensors)}; there and back, all fits",
    )
    yield "bytes", f"{len(result.tensors) - moved} move as they lie, {moved} are reordered in pieces"
    if result.dropped:
        yield (
            "left out",
            f"{count(len(result.dropped), 'tensor')}: {listed(result.dropped)}",
        )
