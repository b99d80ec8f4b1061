"""`shardkit diff`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from shardkit._folding import fold, merge_ranges, template
from shardkit.cli import options as opt
from shardkit.cli.output import Output, PageFile, facts, first_rows, picture_lines
from shardkit.core.dtypes import CASTS, short_dtype
from shardkit.core.text import count, escape, format_name, format_size, without_numbers
from shardkit.formats.hub.adapter import ADAPTER, is_adapter_file
from shardkit.operations.diff import DiffResult, TensorDiff, diff
from shardkit.operations.diff.amounts import experts_line, experts_of
from shardkit.operations.diff.options import SORTS

if TYPE_CHECKING:
    from shardkit.operations.diff.values import TensorStats
    from shardkit.pictures.page import Page

_DIFFERS = 1
_NOT_COMPARED = {"only_a": "only in A", "only_b": "only in B", "shape": "shapes differ"}
"""Texts for tensors whose values are not compared."""


@click.command(
    cls=opt.Verb,
    name="diff",
    epilog="""\b
Examples:
  shardkit diff last.ckpt last-hf
  shardkit diff run-a run-b --stats --sort difference --include '*.mlp.*'""",
)
@click.argument("a", type=opt.PATH)
@click.argument("b", type=opt.PATH)
@opt.option(
    "Checks", "--rtol", first=True, type=float, metavar="X", help="Equal where |a - b| <= atol + rtol * |b|."
)
@opt.option(
    "Checks", "--atol", type=float, metavar="X", help="The same; each is 0 if only the other is given."
)
@opt.option(
    "Checks",
    "--as",
    "as_dtype",
    first=True,
    type=click.Choice(list(CASTS)),
    help="Round A to this dtype, where B has it, before comparing.",
)
@opt.option(
    "Output",
    "--stats",
    first=True,
    is_flag=True,
    help="Show the size of differences: largest ones, cosine.",
)
@opt.globs
@opt.option(
    "Names",
    "--all",
    "all_tensors",
    is_flag=True,
    help="Also compare all other tensors, such as the optimizer's, by their stored names.",
)
@opt.strict
@opt.option(
    "Output",
    "--sort",
    type=click.Choice(SORTS),
    default="name",
    show_default=True,
    help="difference: largest differences first; turns on --stats.",
)
@opt.max_memory
@opt.picture
@opt.html
@opt.follow_links
@opt.reporting
def command(
    *,
    out: Output,
    a: str,
    b: str,
    picture: bool,
    html_file: str | None,
    **options: Any,
) -> None:
    """Compare the weights of A and B: Hub models or sharded checkpoints, in any two formats.

    Tensors are paired by their names on the Hub: = equal, ~ equal after folding, - only in A, + only in B,
    * differs. Without a tolerance, bits are compared. Exit code 0 means equal; 1 means that something
    differs.
    """
    page = PageFile(html_file, (a, b))
    result = diff(a, b, progress=out.progress(), **options)
    for warning in result.warnings:  # before the result
        out.warn(warning)
    out.result(result, render)
    if picture and not (out.is_quiet or out.as_json):
        from shardkit.pictures.glyphs import changed_lines

        out.lines(picture_lines(partial(changed_lines, result)))
    if html_file is not None:
        page.write(out, page_of(result))
    if result.differences:
        sys.stdout.flush()  # an error of the reader of stdout is reported like any other
        click.get_current_context().exit(_DIFFERS)


def page_of(result: DiffResult) -> Page:
    """Return the page of a result."""
    from shardkit.pictures.changes import changes_page

    return changes_page(result, list(_facts(result)))


def render(result: DiffResult) -> list[str]:
    """Return a result as lines of text."""
    # Figures are shown for all tensors that have them, such as those that are equal after folding.
    rows = list(_rows([tensor for tensor in result.tensors if tensor.is_difference or tensor.stats]))
    lines = first_rows(rows, indent="")
    return [*facts(_facts(result)), "", *_equal_lines(result), *lines, "", result.headline()]


def _facts(result: DiffResult) -> Iterator[tuple[str, str]]:
    sides = (
        ("A", result.a, result.resolved_a, result.format_a),
        ("B", result.b, result.resolved_b, result.format_b),
    )
    for label, path, resolved, format in sides:
        name = ADAPTER if is_adapter_file(resolved) else format_name(format)
        yield label, f"{escape(path)} ({name})"
        if resolved != path:
            yield label, f"using {escape(resolved)}"
    if result.rtol is not None:
        yield "within", f"rtol {result.rtol:g}, atol {result.atol:g}"
    if result.as_dtype is not None:
        yield "rounded", f"A to {result.as_dtype}, where B has it"
    if result.differences and (experts := experts_of(result.tensors)):
        yield "experts", experts_line(experts)
    yield "read", f"{format_size(result.read_bytes)} in {result.elapsed_s:.2f} s"


def _equal_lines(result: DiffResult) -> Iterator[str]:
    """Yield one line for all tensors that are equal, and one for those that are equal after folding."""
    if number := result.count("equal", "close", "tied"):
        close, tied = result.count("close"), result.count("tied")
        kinds = ((close, "within the tolerance"), (tied, "tied, on one side only"))
        parts = [f"{amount} {text}" for amount, text in kinds if amount]
        yield f"=  {count(number, 'tensor')}" + (f" ({', '.join(parts)})" if parts else "")
    if number := result.count("folded"):
        yield f"~  {count(number, 'weight')} folded: equal within the accuracy of factors"


class _DiffRow(NamedTuple):
    """A line of the list; the name is shown between the first two fields."""

    symbol: str
    dtypes: str
    shapes: str
    what: str


def _rows(tensors: Sequence[TensorDiff]) -> Iterator[tuple[str, ...]]:
    """Yield the lines of the list, one for tensors of several layers with similar differences."""
    alike: dict[tuple[str, ...], list[TensorDiff]] = {}
    for tensor in tensors:
        row = _row(tensor)
        kind = template(_difference(tensor, is_one=False))
        alike.setdefault((without_numbers(tensor.name), *row[:3], tensor.status, kind), []).append(tensor)
    rows = dict[str, _DiffRow]()
    for group in alike.values():
        texts = {_difference(tensor) for tensor in group}  # otherwise the minimum and maximum of each number
        what = (
            texts.pop()
            if len(texts) == 1
            else merge_ranges([_difference(tensor, is_one=False) for tensor in group])
        )
        rows |= dict.fromkeys([tensor.name for tensor in group], _row(group[0])._replace(what=what))
    for line in fold((tensor.name, rows[tensor.name]) for tensor in tensors):
        times = f"x{line.count}" if line.count > 1 else ""
        yield line.key.symbol, escape(line.pattern), times, line.key.dtypes, line.key.shapes, line.key.what


def _row(tensor: TensorDiff) -> _DiffRow:
    one = (tensor.dtype_a, tensor.shape_a), (tensor.dtype_b, tensor.shape_b)
    dtypes = [short_dtype(dtype) for dtype, _ in one if dtype is not None]
    shapes = [str(list(shape)) for _, shape in one if shape is not None]
    return _DiffRow(
        tensor.symbol,
        " -> ".join(dict.fromkeys(dtypes)),
        " -> ".join(dict.fromkeys(shapes)),
        _difference(tensor),
    )


def _difference(tensor: TensorDiff, *, is_one: bool = True) -> str:
    """Return the text about a difference; for a group of similar ones, without individual details."""
    if tensor.status == "shape" and tensor.rows is not None:
        return f"{count(tensor.rows[0], 'row')} and {count(tensor.rows[1], 'row')}"
    if tensor.status in _NOT_COMPARED:
        return _NOT_COMPARED[tensor.status]
    figures = _stats(tensor.stats) if tensor.stats else ()
    return "; ".join([*_dtype(tensor), *_values(tensor, is_one=is_one), *figures])


def _dtype(tensor: TensorDiff) -> Iterator[str]:
    if tensor.status != "dtype":
        return
    yield "dtypes differ" if tensor.num_changed else "dtypes differ, equal after conversion"


def _values(tensor: TensorDiff, *, is_one: bool) -> Iterator[str]:
    if not tensor.num_changed:
        return
    changed = tensor.share_changed or 0.0
    percent = f"{100 * changed:.3g}%" if changed >= 1e-5 else "below 0.001%"
    if tensor.relative_error is not None and percent == "100%":
        pass  # nearly every training step changes all elements: only the distance is interesting
    elif is_one:
        share = f" ({percent})" if tensor.num_elements > 1 else ""
        # If all elements differ, the first one is not interesting.
        is_news = tensor.first_changed and tensor.num_changed < tensor.num_elements
        first = f", first at {list(tensor.first_changed or ())}" if is_news else ""
        yield f"{tensor.num_changed:,} of {tensor.num_elements:,} elements{share}{first}"
    else:
        yield f"{percent} of {tensor.num_elements:,} elements each"
    if tensor.num_outside is not None:
        yield f"{tensor.num_outside:,} beyond the tolerance"
    if tensor.relative_error is not None:
        yield f"relative norm {tensor.relative_error:.3g}"


def _stats(stats: TensorStats) -> Iterator[str]:
    yield f"max abs {stats.max_abs:.3g}"
    yield f"max rel {stats.max_rel:.3g}"
    if stats.cosine is not None:
        yield f"cosine {stats.cosine:.6f}"
    if stats.num_nonfinite:
        yield f"{stats.num_nonfinite:,} with NaN or infinity"
