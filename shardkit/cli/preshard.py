"""`shardkit preshard`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from shardkit._version import torch_note
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
    from shardkit.operations.preshard import PreshardResult


@click.command(
    name="preshard",
    epilog="""\b
Examples:
  shardkit preshard Qwen/Qwen3-8B --world-size 32
  shardkit preshard ./my-model out --mesh dp_replicate=2,dp_shard=16 --dtype bf16 --dry-run""",
)
@click.argument("source")
@click.argument("output", required=False)
@click.option("--world-size", type=int, metavar="N", help="Number of ranks.")
@click.option(
    "--mesh", metavar="AXES", help="Device mesh, e.g. dp_replicate=2,dp_shard=16; default dp_shard=N."
)
@click.option(
    "--wrap",
    default="auto",
    show_default=True,
    metavar="POLICY",
    help="What fully_shard wraps: auto, none, class names, dotted paths, or module:function.",
)
@click.option(
    "--dtype",
    type=click.Choice(["keep", "bf16", "fp16", "fp32"]),
    default="keep",
    show_default=True,
    help="Convert floating tensors.",
)
@click.option("--revision", metavar="REV", help="Branch, tag or commit of a repo id.")
@click.option("--variant", metavar="NAME", help="Use model.NAME.safetensors and the like.")
@click.option("--overwrite", is_flag=True, help="Replace an existing checkpoint, whole and in one step.")
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
@click.option(
    "--trust-remote-code", is_flag=True, help="Let the model's own code run while its layout is traced."
)
@links_option
@json_option
@click.option("--no-progress", is_flag=True, help="Show no progress bars.")
def command(*, source: str, output: str | None, as_json: bool, no_progress: bool, **options: Any) -> None:
    """Write SOURCE as one file for each rank of a device mesh, ready for torch.distributed.checkpoint.

    SOURCE is the directory or a file of a Hub model, or a repo id such as Qwen/Qwen3-8B. OUTPUT is the
    directory to make; by default its name says model and mesh. An interrupted run goes on where it stopped
    when the same command runs again.
    """
    out, show_bars = Output(as_json=as_json), not (as_json or no_progress)
    warn_of_torch(out)
    if not show_bars:
        _silence_hub(source)
    from shardkit.operations.preshard import preshard

    result = preshard(source, output, progress=make_progress(enabled=show_bars), **options)
    out.result(result, render)


def warn_of_torch(out: Output) -> None:
    """Say so where torch is of a version that shardkit was not tried with."""
    from shardkit.operations.environment import package_version

    note = torch_note(package_version("torch"))
    if note is not None:
        out.say("warning", note)


def _silence_hub(source: str) -> None:
    """Switch off huggingface_hub's bars, if it is going to be used at all."""
    from shardkit.formats.hub.repo import looks_like_repo_id

    if not os.path.lexists(source) and looks_like_repo_id(source):
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()


def render(result: PreshardResult) -> list[str]:
    """Return a result as lines for people."""
    path = escape(result.output)
    if result.dry_run:
        return [f"dry run: nothing was written to {path}", *facts(_facts(result))]
    return [f"wrote {path}", *facts(_facts(result)), "", *_how_to_load(result)]


def _facts(result: PreshardResult) -> Iterator[tuple[str, str]]:
    would = "to " if result.dry_run else ""
    yield "source", f"{escape(result.source)} ({result.source_format})"
    yield "mesh", f"{escape(result.mesh)}; world size {result.world_size}"
    yield "layout", _layout(result)
    if result.download_bytes:
        yield "to fetch", f"{format_size(result.download_bytes)} from the Hub; so far only headers were read"
    yield f"{would}read", f"{count(result.num_tensors, 'tensor')}, {format_size(result.read_bytes)}"
    yield f"{would}write", f"{count(result.num_files, 'shard file')}, {format_size(result.written_bytes)}"
    yield "balance", f"largest file over mean {result.imbalance:.4f}"
    if result.dry_run:
        yield from _per_rank(result)
    if result.num_tensors_with_empty_shards:
        yield "empty", f"{count(result.num_tensors_with_empty_shards, 'tensor')} with no rows on some ranks"
    yield from limited("tied", [" = ".join(map(escape, group)) + " (stored once)" for group in result.ties])
    yield from limited("omitted", [f"{escape(name)}: {escape(reason)}" for name, reason in result.omitted])
    yield from limited("skipped", [f"{escape(name)}: {escape(reason)}" for name, reason in result.skipped])
    if result.shares_extents:
        yield "disk", "blocks are shared with the source, most bytes are not copied"
    if result.dry_run:
        yield "memory", f"at most {format_size(result.peak_memory_bytes)} of buffers"
        yield "free disk", format_size(result.free_bytes)
    else:
        if result.resumed_files:
            yield "resumed", f"{count(result.resumed_files, 'file')} had been finished before"
        yield from check_facts(result)
        yield "time", _time(result)


def _layout(result: PreshardResult) -> str:
    origins = {"traced": "traced from the model", "declared": "declared from names and shapes"}
    return f"{origins.get(result.layout, result.layout)}, {count(result.num_units, 'unit')}"


def _per_rank(result: PreshardResult) -> Iterator[tuple[str, str]]:
    """Bytes of each shard file, runs of equal ones together."""
    yield from limited(
        "per rank", [f"shard {numbers}: {size}" for numbers, size in size_runs(result.file_bytes)]
    )


def _time(result: PreshardResult) -> str:
    rate = result.written_bytes / max(result.elapsed_s, 1e-3) / 1e9
    seconds = f"{result.elapsed_s:.2f} s"
    return seconds if result.resumed_files else f"{seconds}, {rate:.2f} GB/s"


def _how_to_load(result: PreshardResult) -> list[str]:
    return [
        "load it on every rank, into a model on meta (without to_empty()) that is wrapped for this mesh:",
        "  import shardkit",
        f"  shardkit.load_into(model, {result.output!r})  # parameters and buffers",
    ]
