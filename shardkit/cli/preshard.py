"""`shardkit preshard`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from shardkit._version import torch_note
from shardkit.cli import options as opt
from shardkit.cli.output import (
    UNEVEN,
    Output,
    PageFile,
    converted,
    copied,
    ending,
    file_sizes,
    limited,
    uneven,
    written,
)
from shardkit.core.factored import FACTORS
from shardkit.core.text import count, escape, format_duration, format_size
from shardkit.files import storage
from shardkit.files.location import location_of

if TYPE_CHECKING:
    from shardkit.operations.preshard import PreshardResult
    from shardkit.osft.cost import OsftResult


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
@opt.keys("none", "the model's class tells")
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
    help="The trainer that starts from it: plain, torchtitan, accelerate, lightning, lightning-mp, transformers, verl.",
)
@opt.option(
    "Layout",
    "--attribute",
    metavar="NAME",
    help="For Lightning: the attribute of the LightningModule that holds the model; default model.",
)
@opt.option("Layout", "--device", metavar="TYPE", help="For verl: the device type of its mesh; default cuda.")
@opt.osft
@opt.dtype(
    "--dtype",
    default=None,
    help="Convert floating tensors. Default keep; with --osft fp32, as factors always are.",
)
@opt.dtype_rules
@opt.dequantize
@opt.revision
@opt.option("Input", "--variant", metavar="NAME", help="Use model.NAME.safetensors and the like.")
@opt.overwrite("checkpoint, whole and in one step")
@opt.writing
@opt.html
@opt.parts
@opt.moving
@opt.option(
    "Layout",
    "--trust-remote-code",
    is_flag=True,
    help="Let the model's own code run while its layout is traced.",
)
@opt.follow_links
@opt.reporting
def command(
    *,
    out: Output,
    source: str,
    output: str | None,
    osft: float | None,
    osft_targets: str | None,
    osft_ranks: tuple[str, ...],
    osft_svd: str | None,
    html_file: str | None,
    **options: Any,
) -> None:
    """Write SOURCE as one file for each rank of a device mesh, ready for torch.distributed.checkpoint.

    SOURCE is the directory or a file of a Hub model, or a repo id such as Qwen/Qwen3-8B. OUTPUT is the
    directory to make; by default it is in the working directory, and its name gives model and mesh. To continue an
    interrupted run, run the same command again.
    """
    if html_file is not None and not options["dry_run"]:
        raise click.UsageError(
            "--html shows what would be written: add --dry-run, or use shardkit inspect --html on the output"
        )
    page = PageFile(html_file, (source,))
    from shardkit.operations.environment import package_version

    if (note := torch_note(package_version("torch"))) is not None:
        out.say("warning", note)
    if not out.shows_bars and _is_on_the_hub(source):
        opt.silence_hub()
    from shardkit.operations.preshard import preshard
    from shardkit.osft.plan import plan_of_options

    plan = plan_of_options(osft, osft_targets, osft_ranks, osft_svd)
    if not opt.given("max_memory"):
        options["max_memory"] = None
    result = opt.carry_out(
        out,
        preshard,
        source,
        output,
        osft=plan,
        on_step=out.step,
        holdings=html_file is not None,
        **options,
    )
    out.result(result, render)
    if html_file is not None:
        from shardkit.pictures.held import held_page

        kicker = f"plan for a mesh of {result.mesh}; nothing is written yet"
        page.write(out, held_page(result, kicker=kicker, path=result.output, facts=list(_facts(result))))


def _is_on_the_hub(source: str) -> bool:
    from shardkit.formats.hub.repo import named_repo

    return not storage.lexists(source) and named_repo(source) is not None


def render(result: PreshardResult) -> list[str]:
    """Return a result as lines for people."""
    of_part = _local_disk(result, is_part=True)
    return written(result, _facts(result), partial(_how_to_load, result), of_part=of_part)


def _facts(result: PreshardResult) -> Iterator[tuple[str, str]]:
    would = "to " if result.dry_run else ""
    yield "source", f"{escape(result.source)} ({result.source_format})"
    yield "mesh", f"{escape(result.mesh)}; world size {result.world_size}"
    if result.profile != "plain":
        yield "profile", f"{result.profile}, in the form that this trainer loads"
    yield "layout", _layout(result)
    if result.download_bytes:
        yield "to fetch", f"{format_size(result.download_bytes)} from the Hub; so far only headers were read"
    num_read = result.num_tensors
    if result.osft is not None:  # six factors are made of one weight
        num_read -= (len(FACTORS) - 1) * sum(kind.num_targets for kind in result.osft.kinds)
    yield f"{would}read", f"{count(num_read, 'tensor')}, {format_size(result.read_bytes)}"
    yield f"{would}write", f"{count(result.num_files, 'shard file')}, {format_size(result.written_bytes)}"
    yield from converted(result)
    if result.copied:
        yield f"{would}copy", copied(result.copied)
    if result.imbalance >= UNEVEN:
        yield "balance", uneven(result.imbalance)
    if result.dry_run:
        yield from file_sizes(result, "per rank", "shard")
    if result.osft is not None:
        yield from _factors(result.osft, dry_run=result.dry_run)
        if result.dry_run:
            yield from _local_disk(result, is_part=False)
    if result.num_tensors_with_empty_shards:
        yield "empty", f"{count(result.num_tensors_with_empty_shards, 'tensor')} with no rows on some ranks"
    yield from limited("tied", [" = ".join(map(escape, group)) + " (stored once)" for group in result.ties])
    yield from limited("omitted", [f"{escape(name)}: {escape(reason)}" for name, reason in result.omitted])
    yield from limited("skipped", [f"{escape(name)}: {escape(reason)}" for name, reason in result.skipped])
    if result.shares_extents:
        yield "disk", "blocks are shared with the source, most bytes are not copied"
    yield from ending(result)


def _factors(osft: OsftResult, *, dry_run: bool) -> Iterator[tuple[str, str]]:
    """Yield what the factors take, or how good they are."""
    number = sum(kind.num_targets for kind in osft.kinds)
    size = format_size(sum(kind.factor_bytes for kind in osft.kinds))
    if osft.max_error is not None:
        yield (
            "factors",
            f"{count(number, 'weight')}, {size}; error at most {osft.max_error:.1e}, orthogonal to "
            f"{osft.max_orthogonality:.1e}",
        )
        if osft.num_resumed:
            yield "resumed", f"{count(osft.num_resumed, 'weight')} had been computed before"
        return
    yield "factors", f"{count(number, 'weight')}, {size}"
    if not dry_run:  # other parts have made the output
        return
    lines = [
        f"{kind.num_targets} x {escape(kind.name)} [{kind.rows}, {kind.columns}]: {kind.rank} of "
        f"{min(kind.rows, kind.columns)} directions frozen; {format_size(kind.factor_bytes)}, "
        f"{kind.num_operations:.2g} operations, {format_size(kind.memory_bytes)} of memory, {format_duration(kind.expected_s)}"
        for kind in osft.kinds
    ]
    yield from limited("kind", lines)
    yield (
        "computing",
        f"{count(osft.num_workers, 'process', 'processes')}, {format_size(osft.memory_bytes)} of memory, about "
        f"{format_duration(osft.expected_s)} at {osft.operations_per_s / 1e9:.0f}e9 operations/s for each core",
    )


def _local_disk(result: PreshardResult, *, is_part: bool) -> Iterator[tuple[str, str]]:
    if result.osft is None or not result.osft.record_bytes:
        return
    until = "the output is there, beside it"
    if location_of(result.output).sends:
        until = "this part ends" if is_part else "the output is in its store"
    yield "local disk", f"{format_size(result.osft.record_bytes)} of factors, until {until}"


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
    if result.osft is not None:
        return [
            "start from it, on every rank:",
            "  import shardkit",
            f"  context = shardkit.prepare({result.source!r}, {result.output!r})",
            "  model = shardkit.finalize(shardkit.wrap(context.model, mesh), context)",
        ]
    if result.mesh.startswith("pp="):
        return [
            "load it on every rank, into the state dict of its stage, which is sharded for this mesh:",
            "  import torch.distributed.checkpoint as dcp",
            f"  dcp.load(state, checkpoint_id={result.output!r})",
        ]
    return [
        "load it on every rank, into a model on meta (without to_empty()) that is wrapped for this mesh:",
        "  import shardkit",
        f"  shardkit.load_into(model, {result.output!r})  # parameters and buffers",
    ]
