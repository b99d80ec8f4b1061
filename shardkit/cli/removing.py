"""`shardkit cache` and `shardkit gc`: what is kept and no longer needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from shardkit.cli import options as opt
from shardkit.cli.output import Output, facts
from shardkit.core.text import count, escape, format_size

if TYPE_CHECKING:
    from shardkit.operations.gc import GcResult, Unused
    from shardkit.operations.gc.cache import CacheResult


@click.command(
    cls=opt.Verb,
    name="cache",
    epilog="""\b
Examples:
  shardkit cache
  shardkit cache --clear""",
)
@opt.option("Output", "--clear", first=True, is_flag=True, help="Remove what is kept.")
@opt.answering
def cache_command(*, out: Output, clear: bool) -> None:
    """Show what is cached of transformers' answers about models, or remove it.

    The environment variable SHARDKIT_CACHE names another directory, or is "off".
    """
    from shardkit.operations.gc.cache import show_cache

    out.answer(show_cache(clear=clear), cache_lines)


def cache_lines(result: CacheResult) -> list[str]:
    """Return a result as lines for people."""
    if result.directory is None:
        return [result.headline()]
    what = f"{count(result.num_entries, 'answer')}, {format_size(result.cache_bytes)}"
    return [result.headline(), *facts([("removed" if result.cleared else "kept", what)])]


@click.command(
    cls=opt.Verb,
    name="gc",
    epilog="""\b
Examples:
  shardkit gc s3://bucket/run/last --older-than 12h --dry-run
  shardkit gc Qwen3-8B-dp_shard32""",
)
@click.argument("path", type=opt.PATH)
@opt.option(
    "Output",
    "--older-than",
    first=True,
    metavar="AGE",
    default="1d",
    show_default=True,
    help="Remove what is at least this old: 30m, 12h, 1d.",
)
@opt.option("Output", "--uncommitted", is_flag=True, help="Remove it where nothing was committed, too.")
@opt.dry_run
@opt.answering
def gc_command(*, out: Output, path: str, older_than: str, uncommitted: bool, dry_run: bool) -> None:
    """Delete what is left in PATH of replaced saves and of runs that died; PATH is an output, in an object store or on a local disk.

    Beside a local output the directories .PATH.shardkit-... are removed, however old, if their run was on this host and is
    over.

    Removed are folders data-<16 hex digits> that .metadata does not name, weight files with a hash in their names that
    the index does not name, and folders .shardkit-parts-<16 hex digits>, in which parts work. Uploads of such files that
    nobody has completed are ended. A job that still reads them fails.
    """
    from shardkit.operations.gc import gc

    result = gc(path, older_than=older_than, uncommitted=uncommitted, dry_run=dry_run, on_warning=out.warn)
    out.answer(result, gc_lines)


def gc_lines(result: GcResult) -> list[str]:
    """Return a result as lines for people."""
    return [result.headline(), *facts(_gc_facts(result))]


def _gc_facts(result: GcResult) -> Iterator[tuple[str, str]]:
    from shardkit.operations.leftovers import describe

    where = result.marker or "nothing was committed"
    yield "in use", f"{', '.join(map(escape, result.kept)) or 'nothing'} ({where})"
    verb = "to remove" if result.dry_run else "removed"
    for entry in result.removed:
        yield verb, _describe(entry)
    if result.removed:
        yield f"{verb}, in all", f"{count(len(result.removed), 'name')}, {format_size(result.removed_bytes)}"
    elif not result.runs:
        yield verb, "nothing"
    if result.num_ended:
        yield "to end" if result.dry_run else "ended", count(result.num_ended, "unfinished upload")
    for entry in result.young:
        yield "left, young", _describe(entry)
    for run in result.runs:
        yield verb if run.is_removed else "left", f"{escape(run.staging)}: {format_size(run.disk_bytes)}"
        yield from describe(run)


def _describe(entry: Unused) -> str:
    files = count(entry.num_files, "file")
    return f"{escape(entry.name)}: {files}, {format_size(entry.file_bytes)}, {entry.age_s / 3600:.1f} h old"
