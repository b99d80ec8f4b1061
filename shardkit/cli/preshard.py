"""`shardkit preshard`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from shardkit._version import torch_note
from shardkit.cli import options as opt
from shardkit.cli.output import (
    UNEVEN,
    Output,
    PageFile,
    cast_facts,
    copied_text,
    file_sizes,
    final_facts,
    fusion_facts,
    imbalance_text,
    list_facts,
    name_facts,
    result_lines,
)
from shardkit.core.text import count, escape, format_size
from shardkit.errors import UsageError

if TYPE_CHECKING:
    from shardkit.operations.preshard import PreshardResult
    from shardkit.pictures.page import Page


def _profiles() -> Iterable[str]:
    from shardkit.operations.preshard.profiles import PROFILES

    return PROFILES


@click.command(
    cls=opt.Verb,
    name="preshard",
    epilog="""\b
Examples:
  shardkit preshard Qwen/Qwen3-8B --world-size 32
  shardkit preshard my-model out --mesh dp_replicate=2,dp_shard=16 --dry-run""",
)
@click.argument("source", type=opt.PATH)
@click.argument("output", type=opt.PATH, required=False)
@opt.mesh
@opt.option(
    "Layout",
    "--wrap",
    first=True,
    default="auto",
    show_default=True,
    metavar="POLICY",
    help="What fully_shard wraps: auto, none, class names, dotted paths, or module:function.",
)
@opt.option(
    "Layout",
    "--parallel-rule",
    "parallel_rules",
    multiple=True,
    metavar="GLOB=STYLE",
    help="How tensors or modules are cut over tp or ep, if not as the model plans it; repeatable.",
)
@opt.option(
    "Layout",
    "--stages",
    default="auto",
    show_default=True,
    metavar="POLICY",
    help="Which stage of pp holds what: auto (blocks split evenly), or module:function.",
)
@opt.option(
    "Layout",
    "--layout",
    type=click.Choice(["auto", "traced", "declared"]),
    default="auto",
    show_default=True,
    help="Traced from the model, or declared from the names in the files; auto: traced if a model can be built.",
)
@opt.keys("none", "use the names of the model class")
@opt.option(
    "Names",
    "--names",
    type=click.Choice(["live", "hub"]),
    default="live",
    show_default=True,
    help="Names and shapes of the live model, or those of the files.",
)
@opt.option(
    "Layout",
    "--profile",
    first=True,
    default="plain",
    show_default=True,
    metavar="TRAINER",
    shell_complete=opt.completing(_profiles),
    help="The trainer that starts from it: plain, torchtitan, accelerate, lightning, lightning-mp, transformers.",
)
@opt.option(
    "Layout",
    "--attribute",
    metavar="NAME",
    help="For Lightning: the attribute of the LightningModule that holds the model; default model.",
)
@opt.dtype("--dtype", help="Convert floating tensors.")
@opt.dtype_rules
@opt.dequantize
@opt.revision
@opt.option("Input", "--variant", metavar="NAME", help="Use model.NAME.safetensors and the like.")
@opt.overwrite("checkpoint, whole and in one step")
@opt.exist_ok
@opt.dry_run
@opt.html
@opt.parts
@opt.moving
@opt.option(
    "Layout",
    "--trust-remote-code",
    is_flag=True,
    help="Allow the model's own code to run while its layout is traced.",
)
@opt.follow_links
@opt.reporting
def command(
    *,
    out: Output,
    source: str,
    output: str | None,
    html_file: str | None,
    **options: Any,
) -> None:
    """Write SOURCE as one file for each rank of a device mesh, ready for torch.distributed.checkpoint.

    SOURCE is the directory or a file of a Hub model, or a repo id such as Qwen/Qwen3-8B. OUTPUT is the
    directory to create; by default it is in the working directory, named after model and mesh. To continue an
    interrupted run, run the same command again.
    """
    if html_file is not None and options["executor"]:
        raise click.UsageError(
            "--html: the workers write no page; use shardkit inspect OUTPUT --html afterwards"
        )
    page = PageFile(html_file, (source,) if output is None else (source, output))
    from shardkit.operations.environment import package_version

    if (note := torch_note(package_version("torch"))) is not None:
        out.say("warning", note)
    if not out.shows_bars:
        opt.silence_hub()
    from shardkit.operations.preshard import preshard

    with opt.divisible(out, options) as arguments:
        holdings = html_file is not None
        result = preshard(source, output, on_step=out.step, holdings=holdings, **arguments)
    out.result(result, render)
    if html_file is not None:
        page.write(out, page_of(result))


def page_of(result: PreshardResult) -> Page:
    """Return the page of a result; missing holdings are computed from the output."""
    from shardkit.operations.inspect import inspect
    from shardkit.pictures.held import held_page

    if result.holdings is None and (result.dry_run or result.unfinished):
        raise UsageError("the page needs the holdings", hint="shardkit.preshard(..., holdings=True)")
    if result.holdings is None:
        result = replace(result, holdings=inspect(result.output, holdings=True).holdings)
    return held_page(result, kicker=_kicker(result), path=result.output, facts=list(_facts(result)))


def _kicker(result: PreshardResult) -> str:
    if result.dry_run:
        return f"plan for a mesh of {result.mesh}; nothing is written yet"
    return f"{'plan' if result.unfinished else 'pre-sharded'} for a mesh of {result.mesh}"


def render(result: PreshardResult) -> list[str]:
    """Return a result as lines of text."""
    return result_lines(result, _facts(result), partial(_how_to_load, result))


def _facts(result: PreshardResult) -> Iterator[tuple[str, str]]:
    would = "to " if result.dry_run else ""
    yield "source", f"{escape(result.source)} ({result.source_format})"
    yield "mesh", f"{escape(result.mesh)}; world size {result.world_size}"
    if result.profile != "plain":
        yield "profile", f"{result.profile}, in the form that this trainer loads"
    yield "layout", _layout(result)
    if result.download_bytes:
        yield "to fetch", f"{format_size(result.download_bytes)} from the Hub; so far only headers were read"
    yield f"{would}read", f"{count(result.num_tensors, 'tensor')}, {format_size(result.read_bytes)}"
    yield from fusion_facts(result.fused, "fused")
    yield from name_facts(result.names)
    yield f"{would}write", f"{count(result.num_files, 'shard file')}, {format_size(result.written_bytes)}"
    yield from cast_facts(result)
    if result.copied:
        yield f"{would}copy", copied_text(result.copied)
    if result.imbalance >= UNEVEN:
        yield "balance", imbalance_text(result.imbalance)
    if result.dry_run:
        yield from file_sizes(result, "per rank", "shard")
    if result.num_tensors_with_empty_shards:
        yield "empty", f"{count(result.num_tensors_with_empty_shards, 'tensor')} with no rows on some ranks"
    yield from list_facts(
        "tied", [" = ".join(map(escape, group)) + " (stored once)" for group in result.ties]
    )
    yield from list_facts("omitted", [f"{escape(name)}: {escape(reason)}" for name, reason in result.omitted])
    yield from list_facts("skipped", [f"{escape(name)}: {escape(reason)}" for name, reason in result.skipped])
    if result.shares_extents:
        yield "disk", "blocks are shared with the source, most bytes are not copied"
    yield from final_facts(result)


def _layout(result: PreshardResult) -> str:
    origins = {"traced": "traced from the model", "declared": "declared from names and shapes"}
    return f"{origins.get(result.layout, result.layout)}, {count(result.num_units, 'unit')}"


def _how_to_load(result: PreshardResult) -> list[str]:
    from shardkit.operations.preshard.profiles import PROFILES

    usage = PROFILES[result.profile].usage
    if usage:
        return [
            "start from it:",
            *(f"  {line.format(output=result.output, loader=result.loader)}" for line in usage),
        ]
    if result.mesh.startswith("pp="):
        return [
            "load it on every rank, into the state dict of its stage, which is sharded for this mesh:",
            "  import torch.distributed.checkpoint as dcp",
            f"  dcp.load(state, checkpoint_id={result.output!r})",
        ]
    return [
        "load it on every rank, into a meta-device model already wrapped for this mesh (do not call to_empty()):",
        "  import shardkit",
        f"  shardkit.load_into(model, {result.output!r})  # parameters and buffers",
    ]
