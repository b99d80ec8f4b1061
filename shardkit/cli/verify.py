"""`shardkit verify`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import click

from shardkit.cli import options as opt
from shardkit.cli.output import Output, PageFile, facts, indented, max_lines, more, shown
from shardkit.core.text import count, escape, format_name, format_size
from shardkit.errors import ResourceError
from shardkit.operations.verify import verify
from shardkit.operations.verify.result import VerifyProblem, VerifyResult

_PROBLEMS = 1


@click.command(
    cls=opt.Verb,
    name="verify",
    epilog="""\b
Examples:
  shardkit verify last.ckpt
  shardkit verify Qwen3-8B-dp_shard32 --full""",
)
@click.argument("path", type=opt.PATH)
@opt.option(
    "Checks", "--full", first=True, is_flag=True, help="Read every byte that has a recorded checksum."
)
@opt.option(
    "Checks",
    "--read",
    first=True,
    metavar="AMOUNT",
    help="Read this much, in chunks chosen at random: 5% of the bytes, or 50GiB.",
)
@opt.option("Checks", "--seed", type=int, default=0, show_default=True, metavar="N", help="Seed for --read.")
@opt.option(
    "Checks",
    "--manifest",
    type=opt.PATH,
    metavar="FILE",
    help="Compare with this manifest, which lies elsewhere.",
)
@opt.option(
    "Checks",
    "--against",
    first=True,
    type=opt.PATH,
    metavar="OTHER",
    help="Compare its weights bit by bit with another checkpoint's.",
)
@opt.option(
    "Checks",
    "--rounded",
    first=True,
    is_flag=True,
    help="Weights may be rounded to bf16 or fp16 even where the dtypes are the same.",
)
@opt.strict
@opt.option(
    "Checks",
    "--hub",
    first=True,
    metavar="REPO",
    help="Compare its files with a Hub repo's, without downloading.",
)
@opt.revision
@opt.option(
    "Checks",
    "--store",
    is_flag=True,
    help="Compare the manifest with what the object store says of each file, reading none of them.",
)
@opt.option(
    "Checks",
    "--ask-class",
    is_flag=True,
    help="Ask the model's class, with transformers, which weights it would not find.",
)
@opt.jobs
@opt.page
@opt.follow_links
@opt.reporting
def command(*, out: Output, path: str, html_file: str | None, overwrite: bool, **options: Any) -> None:
    """Check that PATH is whole, and has the bytes that were written.

    PATH is a Hub model, a pre-sharded directory, any trainer's sharded checkpoint, or a run's directory, whose
    newest checkpoint is taken. By default metadata, headers,
    sizes and manifests are compared with each other; --read and --full compare bytes with checksums. A manifest is
    looked for in PATH, then beside it (PATH.shardkit.json). Exit code 0: nothing is wrong; 1: something is wrong;
    3: not a checkpoint; 5: nothing is wrong, but some files cannot be read, or the store keeps no checksum of them.
    """
    page = PageFile(html_file, (path,), overwrite=overwrite)
    result = verify(path, holdings=html_file is not None, progress=out.progress(), **options)
    out.result(result, render, max_warnings=max_lines())
    if html_file is not None:
        from shardkit.pictures.damage import damage_page

        page.write(out, damage_page(result, list(_facts(result))))
    if not result.ok:
        click.get_current_context().exit(ResourceError.exit_code if result.is_only_unreadable else _PROBLEMS)


def render(result: VerifyResult) -> list[str]:
    """Return a result as lines for people."""
    problems = result.problems
    return [
        result.headline(),
        *facts(_facts(result)),
        *([""] if problems else []),
        *_problem_lines(problems),
        *_bring_again(result),
    ]


def _problem_lines(problems: Sequence[VerifyProblem]) -> Iterator[str]:
    """Yield the lines of all problems; what is wrong with the same tensor of many layers is one line."""
    detailed = [problem for problem in problems if problem.details]
    for problem in detailed[: max_lines()]:
        yield from indented(problem.line(), sys.stdout, indent=2)
        for detail in shown(problem.details, spreads=True):
            yield from indented(detail, sys.stdout, indent=4)
    if len(detailed) > max_lines():
        yield f"  {more(len(detailed) - max_lines())}"
    plain = [problem.line() for problem in problems if not problem.details]
    for line in shown(plain, spreads=True):
        yield from indented(line, sys.stdout, indent=2)


def _bring_again(result: VerifyResult) -> Iterator[str]:
    if result.bring_again:
        yield ""
        yield f"bring again: {', '.join(shown([escape(name) for name in result.bring_again], spreads=True))}"


def _facts(result: VerifyResult) -> Iterator[tuple[str, str]]:
    if result.resolved != result.path:
        yield "took", escape(result.resolved)
    if result.format is not None:
        yield "checkpoint", format_name(result.writer or result.format)
    seed = f", seed {result.seed}" if result.seed is not None else ""
    read = ": names, headers and sizes; --full reads the bytes" if result.level == "structure" else ""
    yield "level", f"{result.level}{seed}{read}"
    if result.level == "store":
        for name in result.manifests:
            yield "held against", escape(name)
        files = count(result.num_vouched_files, "file")
        yield "store", f"CRC-32 of {files}, {format_size(result.vouched_bytes)}"
        return
    if result.num_files or result.ok:  # else it could not be opened
        tensors = f"{count(result.num_tensors, 'tensor')}, {count(result.num_chunks, 'chunk')}"
        yield "holds", f"{tensors}, {format_size(result.tensor_bytes)} in {count(result.num_files, 'file')}"
    for name in result.manifests:
        yield "held against", escape(name)
    if result.against is not None:
        rounded = f", {result.num_rounded_tensors} after rounding" if result.num_rounded_tensors else ""
        tensors = count(result.num_compared_tensors, "tensor")
        yield "compared with", f"{escape(result.against)}: {tensors}{rounded}"
    if result.repo is not None:
        yield "compared with", f"{escape(result.repo)} at {escape(result.commit or '')}"
    if result.num_checked_files or result.num_checked_chunks:
        files = f", {count(result.num_checked_files, 'whole file')}" if result.num_checked_files else ""
        chunks = count(result.num_checked_chunks, "chunk")
        yield "compared", f"{format_size(result.read_bytes)}: {chunks}{files}"
