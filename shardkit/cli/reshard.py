"""`shardkit reshard`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from shardkit.cli import options as opt
from shardkit.cli.output import Output, cast_facts, copied_text, file_sizes, final_facts, result_lines
from shardkit.core.text import count, escape, format_name, format_size

if TYPE_CHECKING:
    from shardkit.operations.reshard import ReshardResult


@click.command(
    cls=opt.Verb,
    name="reshard",
    epilog="""\b
Examples:
  shardkit reshard runs/last.ckpt --world-size 64
  shardkit reshard checkpoints out --mesh dp_replicate=2,dp_shard=16 --dry-run""",
)
@click.argument("checkpoint", type=opt.PATH)
@click.argument("output", type=opt.PATH, required=False)
@opt.mesh
@opt.dtype("--dtype", help="Convert floating tensors outside the optimizer; scalars stay.")
@opt.dtype("--optimizer-dtype", help="Convert the optimizer's floating tensors; scalars such as step stay.")
@opt.option(
    "Output",
    "--no-optimizer",
    first=True,
    is_flag=True,
    help="Leave out the optimizer's state.",
)
@opt.overwrite("checkpoint, whole and in one step")
@opt.exist_ok
@opt.strict
@opt.dry_run
@opt.parts
@opt.moving
@opt.follow_links
@opt.reporting
def command(*, out: Output, checkpoint: str, output: str | None, **options: Any) -> None:
    """Rewrite CHECKPOINT as OUTPUT, for another number of ranks: model, optimizer and everything else.

    CHECKPOINT is a sharded checkpoint of any trainer, or a run directory, whose newest complete checkpoint is
    used. OUTPUT is the directory to create; by default it is in the working directory, named after checkpoint
    and mesh. A DCP checkpoint remains one of the same trainer, with the files next to its shards. No model code is
    needed.
    """
    from shardkit.operations.reshard import reshard

    with opt.divisible(out, options) as arguments:
        result = reshard(checkpoint, output, **arguments)
    out.result(result, render)


def render(result: ReshardResult) -> list[str]:
    """Return a result as lines of text."""
    return result_lines(result, _facts(result), partial(_how_to_resume, result), shows_rate=False)


def _how_to_resume(result: ReshardResult) -> list[str]:
    ranks = count(result.world_size, "rank")
    load = f"  shardkit.load_into(model, {result.output!r})"
    if result.distributed_objects:
        return [f"fill a model with its weights on {ranks}:", load]
    if result.folders != ("",):
        return [f"resume on {ranks} with your trainer"]
    stock = f"  torch.distributed.checkpoint.load(state_dict, checkpoint_id={result.output!r})"
    if result.num_optimizer_tensors:
        return [f"resume on {ranks} with your trainer, or with stock torch:", stock]
    return [f"fill a model with it on {ranks}:", load, stock]


def _facts(result: ReshardResult) -> Iterator[tuple[str, str]]:
    would = "to " if result.dry_run else ""
    yield "found", format_name(result.writer)
    if result.checkpoint.rstrip("/") != result.source.rstrip("/"):
        yield "using", f"{escape(result.checkpoint)}: {result.reason}"
    yield "mesh", f"{escape(result.mesh)}; world size {result.world_size}"
    parts = [
        count(result.num_tensors, "tensor"),
        f"{result.num_optimizer_tensors} of the optimizer" if result.num_optimizer_tensors else "",
        count(result.num_objects, "byte entry", "byte entries") if result.num_objects else "",
    ]
    yield "holds", ", ".join(part for part in parts if part)
    yield f"{would}read", format_size(result.read_bytes)
    yield f"{would}write", f"{count(result.num_files, 'shard file')}, {format_size(result.written_bytes)}"
    yield from cast_facts(result)
    if result.dry_run and result.num_files > 1:
        yield from file_sizes(result, "per file", "file")
    if result.copied:
        yield f"{would}copy", copied_text(result.copied)
    yield from final_facts(result, shows_rate=False)
