"""`shardkit verify`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from shardkit.cli import options as opt
from shardkit.cli.output import Output, PageFile, facts, max_lines, more_line, shown_lines, wrap_indented
from shardkit.core.text import count, escape, format_name, format_size
from shardkit.errors import ResourceError, UsageError
from shardkit.operations.verify import verify
from shardkit.operations.verify.result import VerifyProblem, VerifyResult

if TYPE_CHECKING:
    from shardkit.pictures.page import Page

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
    "--manifest",
    type=opt.PATH,
    metavar="FILE",
    help="Compare with this manifest instead of one in or beside PATH.",
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
@opt.jobs
@opt.html
@opt.follow_links
@opt.reporting
def command(*, out: Output, path: str, html_file: str | None, **options: Any) -> None:
    """Check that PATH is complete and undamaged.

    PATH is a Hub model, a pre-sharded directory, any trainer's sharded checkpoint, or a run's directory, whose
    newest checkpoint is used. By default metadata, headers, sizes and manifests are compared with each other;
    --full compares bytes with checksums. A manifest is used if it is in PATH, or beside it (PATH.shardkit.json).
    If transformers is installed, the class of a Hub model checks that it finds all weights, which takes seconds.
    Exit code 0: nothing is wrong; 1: something is wrong; 3: not a checkpoint; 5: nothing is wrong, but some
    files cannot be read.
    """
    page = PageFile(html_file, (path,))
    result = verify(path, holdings=html_file is not None, progress=out.progress(), **options)
    out.result(result, render, max_warnings=max_lines())
    if html_file is not None:
        page.write(out, page_of(result))
    if not result.ok:
        click.get_current_context().exit(ResourceError.exit_code if result.is_only_unreadable else _PROBLEMS)


def page_of(result: VerifyResult) -> Page:
    """Return the page of a result."""
    from shardkit.pictures.damage import damage_page

    if result.holdings is None:
        raise UsageError("the page needs the holdings", hint="shardkit.verify(..., holdings=True)")
    return damage_page(result, list(_facts(result)))


def render(result: VerifyResult) -> list[str]:
    """Return a result as lines of text."""
    problems = result.problems
    return [
        result.headline(),
        *facts(_facts(result)),
        *([""] if problems else []),
        *_problem_lines(problems),
        *_files_to_copy(result),
    ]


def _problem_lines(problems: Sequence[VerifyProblem]) -> Iterator[str]:
    """Yield the lines of all problems; the same problem in many layers is one line."""
    detailed = [problem for problem in problems if problem.details]
    for problem in detailed[: max_lines()]:
        yield from wrap_indented(problem.line(), sys.stdout, indent=2)
        for detail in shown_lines(problem.details, spreads=True):
            yield from wrap_indented(detail, sys.stdout, indent=4)
    if len(detailed) > max_lines():
        yield f"  {more_line(len(detailed) - max_lines())}"
    plain = [problem.line() for problem in problems if not problem.details]
    for line in shown_lines(plain, spreads=True):
        yield from wrap_indented(line, sys.stdout, indent=2)


def _files_to_copy(result: VerifyResult) -> Iterator[str]:
    if result.bring_again:
        yield ""
        yield f"copy these files again: {', '.join(shown_lines([escape(name) for name in result.bring_again], spreads=True))}"


def _facts(result: VerifyResult) -> Iterator[tuple[str, str]]:
    if result.resolved != result.path:
        yield "using", escape(result.resolved)
    if result.format is not None:
        yield "checkpoint", format_name(result.writer or result.format)
    read = ": names, headers and sizes; --full reads the bytes" if result.level == "structure" else ""
    yield "level", f"{result.level}{read}"
    if result.num_files or result.ok:  # otherwise it could not be opened
        tensors = f"{count(result.num_tensors, 'tensor')}, {count(result.num_chunks, 'chunk')}"
        yield "holds", f"{tensors}, {format_size(result.tensor_bytes)} in {count(result.num_files, 'file')}"
    for name in result.manifests:
        yield "checked against", escape(name)
    if result.repo is not None:
        yield "compared with", f"{escape(result.repo)} at {escape(result.commit or '')}"
    if result.num_checked_files or result.num_checked_chunks:
        files = f", {count(result.num_checked_files, 'whole file')}" if result.num_checked_files else ""
        chunks = count(result.num_checked_chunks, "chunk")
        yield "compared", f"{format_size(result.read_bytes)}: {chunks}{files}"
