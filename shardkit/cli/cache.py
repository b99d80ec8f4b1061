"""`shardkit cache`."""

from __future__ import annotations

import click

from shardkit.cli import options as opt
from shardkit.cli.output import Output, count, facts
from shardkit.core.text import escape, format_size
from shardkit.operations.cache import CacheResult, show_cache


@click.command(
    name="cache",
    epilog="""\b
Examples:
  shardkit cache
  shardkit cache --clear""",
)
@click.option("--clear", is_flag=True, help="Remove what is kept.")
@opt.as_json
def command(*, clear: bool, as_json: bool) -> None:
    """Show what is kept of transformers' answers about models, or remove it.

    The environment variable SHARDKIT_CACHE names another directory, or is "off".
    """
    out, found = Output(as_json=as_json), show_cache(clear=clear)
    if as_json:
        out.document(found.to_json())
    else:
        out.lines(render(found))


def render(found: CacheResult) -> list[str]:
    """Return a result as lines for people."""
    if found.directory is None:
        return ["nothing is cached: SHARDKIT_CACHE is off"]
    what = f"{count(found.num_entries, 'answer')}, {format_size(found.cache_bytes)}"
    return [escape(found.directory), *facts([("removed" if found.cleared else "kept", what)])]
