"""`shardkit inspect`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from shardkit.cli import options as opt
from shardkit.cli.output import (
    UNEVEN,
    Output,
    PageFile,
    facts,
    file_size,
    first_rows,
    imbalance_text,
    list_facts,
    max_lines,
    picture_lines,
    size_runs,
    table,
)
from shardkit.core.dtypes import short_dtype
from shardkit.core.text import count, escape, format_size
from shardkit.operations.inspect import InspectedFile, InspectedTargets, InspectResult, inspect

if TYPE_CHECKING:
    from shardkit.pictures.page import Page

_MAX_FILES = 20


@click.command(
    cls=opt.Verb,
    name="inspect",
    epilog="""\b
Examples:
  shardkit inspect Qwen3-8B-dp_shard32
  shardkit inspect last.ckpt --tensors --json""",
)
@click.argument("path", type=opt.PATH)
@opt.option(
    "Output",
    "--tensors",
    first=True,
    is_flag=True,
    help="List every tensor; otherwise layers and experts are folded.",
)
@opt.picture
@opt.html
@opt.follow_links
@opt.reporting
def command(*, out: Output, path: str, picture: bool, html_file: str | None, **options: Any) -> None:
    """Show what PATH contains: a Hub model, a pre-sharded directory, or any trainer's sharded checkpoint.

    In a run's directory, the newest complete checkpoint is used. Headers and metadata are read, but no tensor data.
    Anomalies of the checkpoint are reported on stderr.
    """
    page = PageFile(html_file, (path,))
    is_drawn = picture and not (out.is_quiet or out.as_json)
    result = inspect(path, holdings=is_drawn or html_file is not None, **options)
    out.result(result, render, max_warnings=max_lines())
    if is_drawn:
        from shardkit.pictures.glyphs import held_lines

        assert result.holdings is not None
        out.lines(picture_lines(partial(held_lines, result.holdings)))
    if html_file is not None:
        page.write(out, page_of(result))


def page_of(result: InspectResult) -> Page:
    """Return the page of a result; missing holdings are computed."""
    from shardkit.pictures.held import held_page

    if result.holdings is None:
        result = replace(result, holdings=inspect(result.path, holdings=True).holdings)
    return held_page(result, kicker=result.title(), path=result.path, facts=list(_facts(result)))


def render(result: InspectResult) -> list[str]:
    """Return a result as lines of text."""
    return [
        result.headline(),
        *facts(_facts(result)),
        "",
        "tensors",
        *_tensor_lines(result),
        "",
        "files",
        *_file_lines(result.files),
    ]


def _facts(result: InspectResult) -> Iterator[tuple[str, str]]:
    if result.resolved != result.path:
        yield "using", escape(result.resolved)
    if result.source is not None:
        yield "source", escape(result.source)
    if result.mesh is not None or result.world_size is not None:
        yield "mesh", f"{escape(result.mesh or 'none')}; world size {result.world_size}"
    elif result.kind == "dcp":
        yield "mesh", "not recorded"
    for kind, root in result.roots:
        yield "roots", f"{kind}: {escape(root) or '(all)'}"
    if result.layout is not None:
        policy = (
            "of the model that was saved" if result.policy is None else f"wrap policy {escape(result.policy)}"
        )
        yield "layout", f"{escape(result.layout)}, {policy}"
        yield from list_facts(
            "units", [_unit(unit.path, unit.class_name, unit.count) for unit in result.units]
        )
    yield "tensors", f"{count(result.num_tensors, 'tensor')}, {format_size(result.tensor_bytes)}"
    for dtype in result.dtypes:
        yield "dtypes", f"{short_dtype(dtype.dtype)}: {dtype.num_tensors}, {format_size(dtype.tensor_bytes)}"
    yield from list_facts("osft", [_targets(targets) for targets in result.osft])
    yield "files", _files(result)
    yield from list_facts("tied", [" = ".join(map(escape, group)) for group in result.ties])
    yield from list_facts("objects", list(_objects(result.objects)))
    for asset in result.assets:
        yield "assets", escape(asset)
    yield from list_facts("refused", [f"{kind}: {escape(reason)}" for kind, reason in result.refused])
    yield from list_facts("skipped", [f"{escape(name)}: {escape(reason)}" for name, reason in result.skipped])
    yield from list_facts("omitted", [f"{escape(name)}: {escape(reason)}" for name, reason in result.omitted])


def _objects(names: Sequence[str]) -> Iterator[str]:
    """Yield the entries that are not tensors; entries with a common parent, such as a param group, share a line."""
    below = Counter(name.rpartition(".")[0] for name in names)
    shown_parents = set[str]()
    for name in names:
        parent = name.rpartition(".")[0]
        if not parent or below[parent] == 1:
            yield escape(name)
        elif parent not in shown_parents:
            shown_parents.add(parent)
            yield f"{escape(parent)}: {count(below[parent], 'entry', 'entries')}"


def _targets(targets: InspectedTargets) -> str:
    shown = f"{escape(targets.path)} {list(targets.shape)}: {targets.rank} of {targets.num_directions} directions frozen"
    return f"{shown} x{targets.count}" if targets.count > 1 else shown


def _unit(path: str, class_name: str | None, number: int) -> str:
    shown = escape(path) or "(root)"
    shown += f" {escape(class_name)}" if class_name else ""
    return f"{shown} x{number}" if number > 1 else shown


def _files(result: InspectResult) -> str:
    sizes = [file.file_bytes for file in result.files if file.file_bytes is not None]
    num_files = count(len(result.files), "weight file" if result.kind == "hub" else "shard file")
    sized_files = num_files if len(sizes) == len(result.files) else f"{len(sizes)} of {num_files}"
    text = f"{sized_files}, {format_size(sum(sizes))}"
    return (
        text if (result.imbalance or 1.0) < UNEVEN else f"{text}; {imbalance_text(result.imbalance or 1.0)}"
    )


def _tensor_lines(result: InspectResult) -> list[str]:
    rows = [
        (
            escape(group.name),
            short_dtype(group.dtype),
            str(list(group.shape)),
            escape(group.placements or ""),
            f"x{group.count}" if group.count > 1 else "",
            format_size(group.tensor_bytes),
        )
        for group in result.tensors
    ]
    return table(rows, right=(4, 5))


def _file_lines(files: tuple[InspectedFile, ...]) -> list[str]:
    """List the files; if there are many, runs of equal size share a line."""
    if len(files) <= _MAX_FILES:
        return table([(escape(file.name), file_size(file.file_bytes)) for file in files], right=(1,))
    runs = size_runs([file.file_bytes for file in files])
    return first_rows([(_span(files, numbers), size) for numbers, size in runs])


def _span(files: tuple[InspectedFile, ...], numbers: str) -> str:
    first, _, last = numbers.partition("-")
    name = escape(files[int(first)].name)
    return f"{name} to {escape(files[int(last)].name)}" if last else name
