"""`shardkit manifest`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from shardkit.cli.output import MAX_LINES, Output, count, facts, json_option, links_option
from shardkit.cli.progress import make_progress
from shardkit.core.text import escape, format_size

if TYPE_CHECKING:
    from shardkit.operations.manifest.manifest import ManifestResult


@click.command(
    name="manifest",
    epilog="""\b
Examples:
  shardkit manifest last.ckpt
  shardkit manifest my-model --sha256 --output my-model.json""",
)
@click.argument("path")
@click.option(
    "--output", "-o", metavar="FILE", help="The manifest to make; default PATH.shardkit.json, beside PATH."
)
@click.option("--inside", is_flag=True, help="Put it into PATH, as shardkit.json.")
@click.option("--sha256", is_flag=True, help="Take the sha256 of every file too, as the Hub does.")
@click.option("--overwrite", is_flag=True, help="Replace an existing manifest.")
@click.option(
    "--dry-run", "-n", is_flag=True, help="Check the structure, say what would be read, write nothing."
)
@click.option("--jobs", type=int, default=2, show_default=True, metavar="N", help="Threads.")
@links_option
@json_option
@click.option("--no-progress", is_flag=True, help="Show no progress bar.")
def command(*, path: str, output: str | None, as_json: bool, no_progress: bool, **options: Any) -> None:
    """Write down the size and the checksum of every file and tensor of PATH, for `shardkit verify`.

    PATH is any checkpoint, whoever made it: a Hub model, a trainer's sharded checkpoint, a pre-sharded directory.
    All of it is read, and held against the checksums in it: what is damaged already gets no manifest.
    """
    out = Output(as_json=as_json)
    from shardkit.operations.manifest.manifest import write_manifest

    progress = make_progress(enabled=not (as_json or no_progress))
    result = write_manifest(path, output, progress=progress, **options)
    out.result(result, render, max_warnings=MAX_LINES)


def render(result: ManifestResult) -> list[str]:
    """Return a result as lines for people."""
    path = escape(result.manifest)
    first = f"dry run: nothing was written to {path}" if result.dry_run else f"wrote {path}"
    return [first, *facts(_facts(result))]


def _facts(result: ManifestResult) -> Iterator[tuple[str, str]]:
    yield "checkpoint", f"{escape(result.writer)} ({escape(result.format)})"
    would = "to " if result.dry_run else ""
    yield f"{would}read", f"{count(result.num_files, 'file')}, {format_size(result.read_bytes)}"
    if result.dry_run:
        return
    kinds = "CRC-32 and sha256" if result.sha256 else "CRC-32"
    yield "digests", f"{kinds} of every file, CRC-32 of {_of_tensors(result)}"
    yield "time", f"{result.elapsed_s:.2f} s"


def _of_tensors(result: ManifestResult) -> str:
    if result.num_tensor_digests == result.num_tensors:
        return count(result.num_tensors, "tensor")
    return f"{result.num_tensor_digests} of {count(result.num_tensors, 'tensor')}"
