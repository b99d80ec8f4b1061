"""`shardkit manifest`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from shardkit.cli import options as opt
from shardkit.cli.output import Output, facts, max_lines
from shardkit.core.text import count, format_name, format_size

if TYPE_CHECKING:
    from shardkit.operations.manifest import ManifestResult


@click.command(
    cls=opt.Verb,
    name="manifest",
    epilog="""\b
Examples:
  shardkit manifest last.ckpt
  shardkit manifest my-model --sha256 --output my-model.json""",
)
@click.argument("path", type=opt.PATH)
@opt.option(
    "Output",
    "--output",
    "-o",
    first=True,
    type=opt.PATH,
    metavar="FILE",
    help="The manifest to make; default PATH.shardkit.json, beside PATH.",
)
@opt.option("Output", "--inside", is_flag=True, help="Put it into PATH, as shardkit.json.")
@opt.sha256
@opt.overwrite("manifest")
@opt.dry_run
@opt.jobs
@opt.follow_links
@opt.reporting
def command(*, out: Output, path: str, output: str | None, **options: Any) -> None:
    """Record the size and the checksum of every file and tensor of PATH, for `shardkit verify`.

    PATH is any checkpoint, whoever made it: a Hub model, a trainer's sharded checkpoint, a pre-sharded directory.
    All of it is read and compared with the checksums in it. A checkpoint that is already damaged gets no manifest.
    """
    from shardkit.operations.manifest import write_manifest

    result = write_manifest(path, output, progress=out.progress(), **options)
    out.result(result, render, max_warnings=max_lines())


def render(result: ManifestResult) -> list[str]:
    """Return a result as lines for people."""
    return [result.headline(), *facts(_facts(result))]


def _facts(result: ManifestResult) -> Iterator[tuple[str, str]]:
    yield "checkpoint", format_name(result.writer)
    would = "to " if result.dry_run else ""
    yield f"{would}read", f"{count(result.num_files, 'file')}, {format_size(result.read_bytes)}"
    if result.dry_run:
        return
    kinds = "CRC-32 and sha256" if result.sha256 else "CRC-32"
    share = f"{result.num_tensor_digests} of " if result.num_tensor_digests != result.num_tensors else ""
    yield "digests", f"{kinds} of every file, CRC-32 of {share}{count(result.num_tensors, 'tensor')}"
    yield "time", f"{result.elapsed_s:.2f} s"
