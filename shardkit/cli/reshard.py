"""`shardkit reshard`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from shardkit.cli.output import (
    Output,
    check_facts,
    check_source_option,
    count,
    facts,
    json_option,
    limited,
    links_option,
    size_runs,
    source_manifest_option,
)
from shardkit.cli.progress import make_progress
from shardkit.core.text import escape, format_size

if TYPE_CHECKING:
    from shardkit.operations.reshard import ReshardResult

_CASTS = click.Choice(["keep", "bf16", "fp16", "fp32"])


@click.command(
    name="reshard",
    epilog="""\b
Examples:
  shardkit reshard runs/last.ckpt last-64.ckpt --world-size 64
  shardkit reshard checkpoints out --mesh dp_replicate=2,dp_shard=16 --optimizer-dtype bf16 --dry-run""",
)
@click.argument("checkpoint")
@click.argument("output")
@click.option("--world-size", type=int, metavar="M", help="Number of ranks.")
@click.option(
    "--mesh", metavar="AXES", help="Device mesh, e.g. dp_replicate=2,dp_shard=16; default dp_shard=M."
)
@click.option(
    "--dtype",
    type=_CASTS,
    default="keep",
    show_default=True,
    help="Convert floating tensors outside the optimizer; scalars stay.",
)
@click.option(
    "--optimizer-dtype",
    type=_CASTS,
    default="keep",
    show_default=True,
    help="Convert the optimizer's floating tensors; scalars such as step stay.",
)
@click.option("--overwrite", is_flag=True, help="Replace an existing checkpoint, whole and in one step.")
@click.option("--strict", is_flag=True, help="Refuse a run whose newest checkpoint cannot be taken.")
@click.option(
    "--dry-run", "-n", is_flag=True, help="Check everything, say what would be done, write nothing."
)
@click.option(
    "--resume/--no-resume",
    default=True,
    show_default=True,
    help="Go on with an interrupted run of the same job.",
)
@click.option(
    "--resume-from",
    metavar="DIR",
    help="Go on with this .OUTPUT.shardkit-... directory, left by another host.",
)
@click.option(
    "--digest",
    type=click.Choice(["crc32", "none"]),
    default="crc32",
    show_default=True,
    help="Checksum of every tensor and file.",
)
@click.option("--sha256", is_flag=True, help="Take the sha256 of every file too.")
@check_source_option
@source_manifest_option
@click.option("--jobs", type=int, default=2, show_default=True, metavar="N", help="Threads.")
@click.option(
    "--max-memory",
    default="256MiB",
    show_default=True,
    metavar="SIZE",
    help="For all buffers, e.g. 512MiB, 1GB.",
)
@links_option
@json_option
@click.option("--no-progress", is_flag=True, help="Show no progress bar.")
def command(*, checkpoint: str, output: str, as_json: bool, no_progress: bool, **options: Any) -> None:
    """Write CHECKPOINT anew as OUTPUT, for another number of ranks: model, optimizer and everything else.

    CHECKPOINT is a sharded checkpoint of any trainer, or a run directory, whose newest complete checkpoint is
    taken. OUTPUT is of the same trainer's kind: what lies beside the shards is copied. No model code is needed.
    """
    from shardkit.operations.reshard import reshard

    out = Output(as_json=as_json)
    progress = make_progress(enabled=not (as_json or no_progress))
    result = reshard(checkpoint, output, progress=progress, on_warning=out.warn, **options)
    out.result(result, render)


def render(result: ReshardResult) -> list[str]:
    """Return a result as lines for people."""
    path = escape(result.output)
    head = f"dry run: nothing was written to {path}" if result.dry_run else f"wrote {path}"
    return [head, *facts(_facts(result))]


def _facts(result: ReshardResult) -> Iterator[tuple[str, str]]:
    would = "to " if result.dry_run else ""
    yield "checkpoint", f"{escape(result.checkpoint)} ({escape(result.writer)})"
    yield "mesh", f"{escape(result.mesh)}; world size {result.world_size}"
    parts = [
        count(result.num_tensors, "tensor"),
        f"{result.num_optimizer_tensors} of the optimizer" if result.num_optimizer_tensors else "",
        count(result.num_objects, "byte entry", "byte entries") if result.num_objects else "",
    ]
    yield "holds", ", ".join(part for part in parts if part)
    yield f"{would}read", format_size(result.read_bytes)
    yield f"{would}write", f"{count(result.num_files, 'shard file')}, {format_size(result.written_bytes)}"
    if result.dry_run:
        yield from limited(
            "per file", [f"file {numbers}: {size}" for numbers, size in size_runs(result.file_bytes)]
        )
    yield from limited("copied", [escape(name) for name in result.copied])
    if result.dry_run:
        yield "memory", f"at most {format_size(result.peak_memory_bytes)} of buffers"
        yield "free disk", format_size(result.free_bytes)
        return
    if result.resumed_files:
        yield "resumed", f"{count(result.resumed_files, 'file')} had been finished before"
    yield from check_facts(result)
    yield "time", f"{result.elapsed_s:.2f} s"
