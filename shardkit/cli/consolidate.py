"""`shardkit consolidate`."""

from __future__ import annotations

import os
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
    on_or_off,
    size_runs,
    source_manifest_option,
)
from shardkit.cli.progress import make_progress
from shardkit.core.text import escape, format_size

if TYPE_CHECKING:
    from shardkit.operations.consolidate.result import ConsolidateResult, SkippedPart

_ADAPTER_CONFIG = "adapter_config.json"


@click.command(
    name="consolidate",
    epilog="""\b
Examples:
  shardkit consolidate last.ckpt/
  shardkit consolidate outputs/run1 my-model --base Qwen/Qwen3-8B --dtype bf16 --dry-run""",
)
@click.argument("checkpoint")
@click.argument("output", required=False)
@click.option(
    "--base",
    metavar="MODEL",
    help="Hub directory or repo id that it was trained from: config, tokenizer, names and shapes.",
)
@click.option("--base-revision", metavar="REV", help="Branch, tag or commit of a repo id.")
@click.option(
    "--dtype",
    type=click.Choice(["keep", "base", "bf16", "fp16", "fp32"]),
    default="keep",
    show_default=True,
    help="Convert floating tensors; base: as the base stores each.",
)
@click.option(
    "--max-shard-size", default="5GB", show_default=True, metavar="SIZE", help="Most tensor bytes in a file."
)
@click.option("--single-file", is_flag=True, help="One model.safetensors, whatever its size.")
@click.option(
    "--weights",
    default="model",
    show_default=True,
    metavar="PART",
    help="model, ema, or another part of the checkpoint by its name.",
)
@click.option("--root", metavar="PATH", help="Where the model begins, dotted; nothing is guessed.")
@click.option("--strip-prefix", multiple=True, metavar="PREFIX", help="Take this off names; repeatable.")
@click.option("--add-prefix", default="", metavar="PREFIX", help="Put this before every name.")
@click.option("--rename", multiple=True, metavar="REGEX=REPL", help="Rename, in order; repeatable.")
@click.option("--include", multiple=True, metavar="GLOB", help="Only these tensors; repeatable.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="Not these tensors; repeatable.")
@click.option("--allow-missing", is_flag=True, help="Tensors of the base may be missing.")
@click.option("--allow-unexpected", is_flag=True, help="Tensors may be there that the base does not have.")
@on_or_off(
    "--ask-class",
    help="Ask the config's class whether from_pretrained would find all weights; off saves seconds.",
)
@click.option("--merge-lora", is_flag=True, help="Add an adapter to the weights that it was trained on.")
@click.option(
    "--adapter-config", metavar="FILE", help="An adapter's settings, where base and checkpoint have none."
)
@click.option("--check", is_flag=True, help="First compare the checkpoint with the checksums in it.")
@check_source_option
@source_manifest_option
@click.option("--manifest", is_flag=True, help="Put shardkit.json, with sizes and digests, into the output.")
@click.option("--manifest-file", metavar="FILE", help="Write the same there, outside the output.")
@click.option("--push-to-hub", metavar="REPO", help="Upload the finished directory to this repo.")
@click.option("--private", is_flag=True, help="A repo that has to be made is private.")
@click.option("--branch", metavar="NAME", help="Branch of that repo, made where it is absent.")
@click.option("--overwrite", is_flag=True, help="Replace an existing Hub model, whole and in one step.")
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
    help="Checksum of what is written, for resuming and for the manifest.",
)
@click.option("--sha256", is_flag=True, help="Take the sha256 of every file too, for the manifest.")
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
@click.option("--no-progress", is_flag=True, help="Show no progress bars.")
def command(*, checkpoint: str, output: str | None, as_json: bool, no_progress: bool, **options: Any) -> None:
    """Write CHECKPOINT, sharded by any trainer, as a Hub model: safetensors, config, tokenizer.

    CHECKPOINT is what a trainer saved, or a run's directory, whose newest complete checkpoint is taken.
    OUTPUT is the directory to make; by default it lies beside the checkpoint: last.ckpt/ -> last-hf/.
    Optimizer and trainer state are neither read nor written. An interrupted run goes on where it
    stopped when the same command runs again.
    """
    out, show_bars = Output(as_json=as_json), not (as_json or no_progress)
    if not show_bars:
        _silence_hub(options)
    from shardkit.operations.consolidate import consolidate

    progress = make_progress(enabled=show_bars)
    result = consolidate(checkpoint, output, progress=progress, on_warning=out.warn, **options)
    out.result(result, render)


def _silence_hub(options: dict[str, Any]) -> None:
    """Switch off huggingface_hub's bars, if it is going to be used at all."""
    if options["base"] or options["push_to_hub"]:
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()


def render(result: ConsolidateResult) -> list[str]:
    """Return a result as lines for people."""
    path = escape(result.output)
    if result.unloadable:
        path += f", which from_pretrained would not load whole: {result.unloadable[0]}"
    if result.dry_run:
        return [f"dry run: nothing was written to {path}", *facts(_facts(result))]
    return [f"wrote {path}", *facts(_facts(result)), "", *_how_to_load(result)]


def _facts(result: ConsolidateResult) -> Iterator[tuple[str, str]]:
    would = "to " if result.dry_run else ""
    yield "found", f"{escape(result.writer)} ({escape(result.format)})"
    if result.resolved != result.checkpoint:
        yield "took", f"{escape(result.resolved)}: {result.reason}"
    yield from _names(result)
    if result.base is not None:
        yield "base", _base(result)
    yield from limited("tied", [f"{escape(a)} = {escape(b)} (stored once)" for a, b in result.ties])
    yield from limited("untied", [f"{escape(a)} and {escape(b)} differ: both kept" for a, b in result.untied])
    yield from limited("skipped", [_skipped(part) for part in result.skipped])
    if result.checked:
        yield "checked", "before a byte moved: all that is read is what the checksums beside it say"
    yield f"{would}read", f"{count(result.num_tensors, 'tensor')}, {format_size(result.read_bytes)}"
    yield f"{would}write", _written(result)
    for dtype in result.dtypes:
        yield "dtypes", f"{dtype.dtype}: {dtype.num_tensors}, {format_size(dtype.tensor_bytes)}"
    if result.dry_run:
        yield from limited("files", [f"{numbers}: {size}" for numbers, size in size_runs(result.file_bytes)])
        yield "memory", f"at most {format_size(result.peak_memory_bytes)} of buffers"
        yield "free disk", format_size(result.free_bytes)
        return
    if result.held_against == "class" and not result.unloadable:
        yield "names", f"{result.model_class or 'the class'} finds all of its weights"
    if result.resumed_files:
        yield "resumed", f"{count(result.resumed_files, 'file')} had been finished before"
    yield from check_facts(result)
    if result.pushed_to is not None:
        yield "pushed", escape(result.pushed_to)
    yield "time", _time(result)


def _names(result: ConsolidateResult) -> Iterator[tuple[str, str]]:
    """What was taken for the model, and what went out of its names."""
    root = f"everything below {escape(result.root)}" if result.root else "names as they are"
    others = f"; also there: {', '.join(map(escape, result.candidates))}" if result.candidates else ""
    yield "weights", f"{escape(result.weights)}, {root}{others}"
    yield from limited(
        "stripped", [f"{escape(text)} from {count(number, 'name')}" for text, number in result.stripped]
    )
    yield from limited(
        "renamed",
        [
            f"{count(number, 'tensor')}: {escape(old) or '(nothing)'} -> {escape(new) or '(nothing)'}"
            for old, new, number in result.renamed
        ],
    )


def _base(result: ConsolidateResult) -> str:
    # An adapter's config is the adapter's own, wherever it came from.
    names = [name for name in result.assets if result.kind != "adapter" or name != _ADAPTER_CONFIG]
    shown = f", {count(len(names), 'file')}: {', '.join(map(escape, names))}"
    return escape(result.base or "") + (shown if names else "")


def _skipped(part: SkippedPart) -> str:
    counts = [count(part.num_tensors, "tensor")] if part.num_tensors else []
    counts += [f"{part.num_objects} other"] if part.num_objects else []
    return ": ".join(filter(None, [escape(part.what), escape(part.where), ", ".join(counts)]))


def _written(result: ConsolidateResult) -> str:
    size = f"{count(result.num_files, 'weight file')}, {format_size(result.written_bytes)}"
    return f"{size}, {result.num_parameters:,} parameters"


def _time(result: ConsolidateResult) -> str:
    rate = result.written_bytes / max(result.elapsed_s, 1e-3) / 1e9
    seconds = f"{result.elapsed_s:.2f} s"
    return seconds if result.resumed_files else f"{seconds}, {rate:.2f} GB/s"


def _how_to_load(result: ConsolidateResult) -> list[str]:
    path = result.output
    if result.kind == "adapter" and _ADAPTER_CONFIG in result.assets:
        return ["load it onto its model:", f"  peft.PeftModel.from_pretrained(model, {path!r})"]
    if "config.json" in result.assets and not result.unloadable:
        return ["load it:", f"  transformers.{result.model_class or 'AutoModel'}.from_pretrained({path!r})"]
    file = os.path.join(path, result.file_names[0])
    each = "" if result.num_files == 1 else "  # and so on, as the index says"
    return ["load its tensors:", f"  safetensors.torch.load_file({file!r}){each}"]
