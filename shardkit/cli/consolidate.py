"""`shardkit consolidate`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from shardkit.cli import options as opt
from shardkit.cli.output import (
    Output,
    copied_text,
    file_sizes,
    final_facts,
    fusion_facts,
    list_facts,
    name_facts,
    result_lines,
)
from shardkit.core.dtypes import short_dtype
from shardkit.core.text import count, escape, format_name, format_size

if TYPE_CHECKING:
    from shardkit.operations.consolidate import ConsolidateResult, SkippedPart, Upload

_ADAPTER_CONFIG = "adapter_config.json"


CHOOSING = opt.group(
    opt.option(
        "Input",
        "--base",
        first=True,
        type=opt.PATH,
        metavar="MODEL",
        help="The base model of the training, a Hub directory or repo id: for config, tokenizer, names, shapes.",
    ),
    opt.option("Input", "--base-revision", metavar="REV", help="Branch, tag or commit of a repo id."),
    opt.option(
        "Input",
        "--config",
        type=click.Choice(["checkpoint", "base"]),
        default="checkpoint",
        help="With --base: config, tokenizer and processor of the checkpoint, if it has them, or all of the base.",
    ),
    opt.option(
        "Input",
        "--tokenizer",
        first=True,
        type=opt.PATH,
        metavar="DIR",
        help="Use this tokenizer instead of the base's, for a changed vocabulary.",
    ),
    opt.dtype("--dtype", "base", help="Convert floating tensors; base: each as it is stored in the base."),
    opt.dtype_rules,
    opt.dequantize,
    opt.option(
        "Dtypes",
        "--quantize",
        type=click.Choice(["base"]),
        help="Quantise to fp8 what the base has in fp8, in its form; all other tensors get its dtypes.",
    ),
    opt.option(
        "Output",
        "--max-shard-size",
        metavar="SIZE",
        help="Max. tensor bytes in a file. Default: files as the base has them, else 5GB.",
    ),
    opt.option("Output", "--single-file", is_flag=True, help="One model.safetensors, whatever its size."),
    opt.naming,
    opt.keys("auto", "a set that knows all names"),
    opt.on_or_off(
        "--ask-class",
        help="Check with the config's class that from_pretrained finds all weights; off saves seconds.",
    ),
    opt.option("OSFT", "--keep-factors", is_flag=True, help="Write OSFT factors unfolded."),
    opt.option(
        "Output",
        "--merge-lora",
        first=True,
        is_flag=True,
        help="Add an adapter to the weights that it was trained on.",
    ),
    opt.option(
        "Input",
        "--adapter-config",
        type=opt.PATH,
        metavar="FILE",
        help="Adapter settings, if base and checkpoint have none.",
    ),
)
"""The options that say what is written, and in which form."""


@click.command(
    cls=opt.Verb,
    name="consolidate",
    epilog="""\b
Examples:
  shardkit consolidate last.ckpt/
  shardkit consolidate outputs/run1 my-model --base Qwen/Qwen3-8B --dtype bf16""",
)
@click.argument("checkpoint", type=opt.PATH)
@click.argument("output", type=opt.PATH, required=False)
@CHOOSING
@opt.recording
@opt.publishing
@opt.overwrite("Hub model, whole and in one step")
@opt.exist_ok
@opt.strict
@opt.dry_run
@opt.parts
@opt.moving
@opt.follow_links
@opt.reporting
def command(*, out: Output, checkpoint: str, output: str | None, **options: Any) -> None:
    """Write CHECKPOINT, sharded by any trainer, as a Hub model: safetensors, config, tokenizer.

    CHECKPOINT is a checkpoint of a trainer, or a run's directory, whose newest complete checkpoint is used.
    OUTPUT is the directory to create; by default it is in the working directory, named after the checkpoint:
    last.ckpt/ -> last-hf/. Optimizer and trainer state are neither read nor written. To continue an interrupted run, run
    the same command again.
    """
    if not out.shows_bars:
        opt.silence_hub()
    from shardkit.operations.consolidate import consolidate

    with opt.divisible(out, options) as arguments:
        result = consolidate(checkpoint, output, on_step=out.step, **arguments)
    out.result(result, render)


def render(result: ConsolidateResult) -> list[str]:
    """Return a result as lines of text."""
    return result_lines(result, _facts(result), partial(_how_to_load, result))


def _facts(result: ConsolidateResult) -> Iterator[tuple[str, str]]:
    would = "to " if result.dry_run else ""
    yield "found", format_name(result.writer)
    if result.resolved != result.checkpoint:
        yield "using", f"{escape(result.resolved)}: {result.reason}"
    yield from _names(result)
    if result.base is not None:
        yield "base", _base(result)
    if result.from_checkpoint:
        yield "beside", f"from the checkpoint, {copied_text(result.from_checkpoint)}"
    yield from list_facts("tied", [f"{escape(a)} = {escape(b)} (stored once)" for a, b in result.ties])
    yield from list_facts(
        "untied", [f"{escape(a)} and {escape(b)} differ: both kept" for a, b in result.untied]
    )
    yield from list_facts("skipped", [_skipped(part) for part in result.skipped])
    yield f"{would}read", f"{count(result.num_tensors, 'tensor')}, {format_size(result.read_bytes)}"
    size = f"{count(result.num_files, 'weight file')}, {format_size(result.written_bytes)}"
    yield f"{would}write", f"{size}, {result.num_parameters:,} parameters"
    for dtype in result.dtypes:
        yield (
            "dtypes",
            f"{short_dtype(dtype.dtype)}: {dtype.num_tensors}, {format_size(dtype.tensor_bytes)}",
        )
    if result.dry_run and result.num_files > 1:
        yield from file_sizes(result, "per file", "file")
    elif result.held_against == "class" and not result.unloadable:
        yield "names", f"{result.model_class or 'the class'} finds all of its weights"
    if result.upload is not None:
        yield "to upload", _upload(result.upload)
    pushed = [] if result.pushed_to is None else [("pushed", escape(result.pushed_to))]
    yield from final_facts(result, *pushed)


def _names(result: ConsolidateResult) -> Iterator[tuple[str, str]]:
    """Yield which part of the checkpoint is the model, and what was removed from its names."""
    root = f"everything below {escape(result.root)}" if result.root else "names as they are"
    alternatives = f"; also there: {', '.join(map(escape, result.candidates))}" if result.candidates else ""
    yield "weights", f"{escape(result.weights)}, {root}{alternatives}"
    stripped = [f"{escape(text)} from {count(number, 'name')}" for text, number in result.stripped]
    yield from list_facts("stripped", stripped)
    renamed = [
        f"{count(number, 'tensor')}: {escape(old) or '(nothing)'} -> {escape(new) or '(nothing)'}"
        for old, new, number in result.renamed
    ]
    yield from list_facts("renamed", renamed)
    yield from fusion_facts(result.split, "split")
    yield from name_facts(result.names)


def _base(result: ConsolidateResult) -> str:
    # An adapter's config belongs to the adapter, wherever it came from.
    excluded = {*result.from_checkpoint, *([_ADAPTER_CONFIG] if result.kind == "adapter" else [])}
    names = [name for name in result.assets if name not in excluded]
    return escape(result.base or "") + (f", {copied_text(names)}" if names else "")


def _upload(upload: Upload) -> str:
    branch = "its default branch" if upload.branch is None else f"branch {escape(upload.branch)}"
    new = "private" if upload.private else "public, unless your account makes new ones private"
    return f"at most {format_size(upload.upload_bytes)} to {escape(upload.repo)}, {branch}; if the repo is new, it is {new}"


def _skipped(part: SkippedPart) -> str:
    counts = [count(part.num_tensors, "tensor")] if part.num_tensors else []
    counts += [f"{part.num_objects} other"] if part.num_objects else []
    names = dict.fromkeys([escape(part.what), escape(part.where)])  # an optimizer may be in `optimizer`
    return ": ".join(filter(None, [*names, ", ".join(counts)]))


def _how_to_load(result: ConsolidateResult) -> list[str]:
    path = result.output
    if result.kind == "adapter" and _ADAPTER_CONFIG in result.assets:
        return ["load it onto its model:", f"  peft.PeftModel.from_pretrained(model, {path!r})"]
    if result.library is not None and "config.json" in result.assets and not result.unloadable:
        variant = "" if result.variant is None else f", variant={result.variant!r}"
        name = result.model_class or "AutoModel"
        code = ", trust_remote_code=True" if (result.model_class or "").startswith("AutoModel") else ""
        return ["load it:", f"  {result.library}.{name}.from_pretrained({path!r}{variant}{code})"]
    file = os.path.join(path, result.file_names[0])
    comment = "" if result.num_files == 1 else "  # and so on, as the index says"
    return ["load its tensors:", f"  safetensors.torch.load_file({file!r}){comment}"]
