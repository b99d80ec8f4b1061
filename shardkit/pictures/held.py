"""The page of `inspect` and `preshard --dry-run`: contents of ranks, cuts of tensors, layout of files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape as html
from typing import TYPE_CHECKING, Any

from shardkit.core.dtypes import short_dtype
from shardkit.core.text import count, escape, format_size
from shardkit.operations.holdings import HeldUnit, Holdings, Strip, imbalance_of
from shardkit.pictures.page import Page, Section, details, legend, picture, short_names, table

if TYPE_CHECKING:
    from shardkit.operations.inspect import InspectResult
    from shardkit.operations.preshard import PreshardResult

_UNEVEN = 1.01  # a smaller imbalance does not matter
_HEAVY_UNIT = 0.25
_MANY_GAPS = 0.2
_MAX_DRAWN = 48  # files, and ranks, in the picture of who reads what
_MAX_LANES = 32
_MAX_LISTED = 2000


def held_page(
    result: InspectResult | PreshardResult, *, kicker: str, path: str, facts: Sequence[tuple[str, str]]
) -> Page:
    """Return the page of a layout.

    Args:
        result: with `holdings`.
        kicker: the kind of checkpoint, in a few words.
        path: of the checkpoint, which may not exist yet.
        facts: further (label, text) rows.
    """
    holdings = result.holdings
    assert holdings is not None
    return Page(
        kicker=kicker,
        title=short_names(path)[0],
        verdict=_verdict(holdings),
        figures=list(_figures(holdings, result.imbalance)),
        unusual=[*result.warnings, *_without_experts(holdings)],
        notable=list(_notable(holdings)),
        usual="Nothing is out of the ordinary: all ranks hold about as much." if holdings.has_ranks else "",
        sections=list(_sections(holdings)),
        facts=[("path", escape(path)), *facts, *(("note", note) for note in result.notes)],
        left_out=holdings.merged,
        data=_data(holdings),
    )


def _verdict(holdings: Holdings) -> str:
    size = format_size(holdings.tensor_bytes)
    if not holdings.has_ranks:
        return f"{count(_num_tensors(holdings), 'tensor')}, {size}, in {count(len(holdings.files), 'file')}."
    most = max((holder.held_bytes for holder in holdings.holders), default=0)
    return f"{holdings.num_holders:,} {'rank shares' if holdings.num_holders == 1 else 'ranks share'} {size}: each holds at most {format_size(most)}."


def _num_tensors(holdings: Holdings) -> int:
    return sum(tensor.count for tensor in holdings.tensors)


def _figures(holdings: Holdings, imbalance: float | None) -> Iterator[tuple[str, str]]:
    yield format_size(holdings.tensor_bytes), f"in {count(_num_tensors(holdings), 'tensor')}"
    if holdings.has_ranks:
        # A rank may have a file without records: it is counted, but not drawn.
        records = "" if all(holder.held_bytes for holder in holdings.holders) else " with records"
        yield f"{holdings.num_holders:,}", f"ranks, {count(len(holdings.files), 'file')}{records}"
    else:
        yield f"{len(holdings.files):,}", "files; no mesh is recorded" if len(holdings.files) > 1 else "file"
    if len(holdings.holders) > 1 and imbalance is not None:  # as in the command's output
        yield f"{imbalance:.2f} x", "largest file over the mean"
    if holdings.has_ranks:
        read, naive = _read_bytes(holdings), holdings.num_holders * holdings.tensor_bytes
        yield format_size(read), f"read in total ({format_size(naive)} if each rank read all)"


def _noun(holdings: Holdings) -> str:
    return "rank" if holdings.has_ranks else "file"


def _read_bytes(holdings: Holdings) -> int:
    return sum(holder.held_bytes for holder in holdings.holders)


def _notable(holdings: Holdings) -> Iterator[str]:
    sizes = [holder.held_bytes for holder in holdings.holders]
    if holdings.has_ranks and len(sizes) > 1 and imbalance_of(sizes) >= _UNEVEN:
        largest, least = sizes.index(max(sizes)), sizes.index(min(sizes))
        yield (
            f"The bytes are uneven: {_row_name(holdings, largest)} holds {format_size(max(sizes))}, "
            f"{_row_name(holdings, least)} {f'only {format_size(min(sizes))}' if min(sizes) else 'nothing'}."
        )
    if holdings.has_ranks:
        empty = sum(tensor.count for tensor in holdings.tensors if tensor.num_without)
        if empty:
            have = "has" if empty == 1 else "have"
            yield f"{count(empty, 'tensor')} {have} too few rows for all ranks, so some ranks get none."
        many = sum(holder.num_files > 1 for holder in holdings.holders)
        if many:
            yield f"{count(many, 'rank')} of {len(holdings.holders)} read from more than one file."
    totals = [sum(cells) for cells in zip(*_rows(holdings), strict=True)]
    # Layers guessed from names are not gathered.
    if holdings.has_units and len(totals) > 4 and max(totals) > _HEAVY_UNIT * sum(totals):
        unit = holdings.units[totals.index(max(totals))]
        name = _unit_name(holdings, unit)
        yield (
            f"{name[0].upper() if not unit.path else name[0]}{name[1:]} has {max(totals) / sum(totals):.0%} of all bytes; a rank gathers "
            f"{format_size(unit.gathered_bytes)} at once."
        )
    gaps, total = _gap_bytes(holdings)
    if total and gaps > _MANY_GAPS * total:
        yield f"{gaps / total:.0%} of the files' bytes are headers and padding, as the tensors are small."


def _without_experts(holdings: Holdings) -> Iterator[str]:
    """Yield advice if there are fewer fused experts than ranks over which they are cut."""
    fused = [
        (tensor.num_without, holdings.cuts[tensor.cut].shape[0])
        for tensor in holdings.tensors
        if ".experts." in tensor.name and len(holdings.cuts[tensor.cut].shape) == 3
    ]
    num_without, num_experts = max(fused, default=(0, 0))
    if num_without:
        ranks = "rank holds" if num_without == 1 else "ranks hold"
        yield (
            f"{num_without:,} of {len(holdings.holders):,} {ranks} no expert: experts are cut along dim 0, and there are "
            f"{num_experts}. Share them with ep in --mesh, or cut another dim with shard_placement_fn."
        )


def _rows(holdings: Holdings) -> list[tuple[int, ...]]:
    return [holdings.cells[holder.cells] for holder in holdings.holders]


def _gap_bytes(holdings: Holdings) -> tuple[int, int]:
    """Return (bytes outside of tensors, all bytes) of the files."""
    total = sum(file.file_bytes or 0 for file in holdings.files)
    return max(total - holdings.tensor_bytes, 0), total


def _row_name(holdings: Holdings, row: int) -> str:
    return f"rank {row}" if holdings.has_ranks else escape(holdings.files[row].name)


def _unit_name(holdings: Holdings, unit: HeldUnit) -> str:
    first = escape(unit.path) or ("the root unit" if holdings.has_units else "what is in no layer")
    return first if unit.last is None or unit.count == 1 else f"{first} to {escape(unit.last)}"


def _sections(holdings: Holdings) -> Iterator[Section]:
    if holdings.has_ranks and holdings.num_holders > 1:
        yield _flow_section(holdings)
    yield _matrix_section(holdings)
    yield _tensor_section(holdings)
    if _lanes(holdings):  # decoded partitions have no position in a file
        yield _file_section(holdings)


def _flow_section(holdings: Holdings) -> Section:
    ranks, read = holdings.num_holders, _read_bytes(holdings)
    naive = ranks * holdings.tensor_bytes
    most = max(holder.held_bytes for holder in holdings.holders)
    shown = f" {min(ranks, _MAX_DRAWN)} of {ranks:,} ranks are drawn." if ranks > _MAX_DRAWN else ""
    body = (
        '<div class="pair"><div class="naive"><h3>The naive way: every rank reads the whole model</h3>'
        f'<p class="big">{html(format_size(naive))}</p><p>{ranks:,} x {html(format_size(holdings.tensor_bytes))}</p>'
        f"{picture('naive', f'Every one of {ranks} ranks reads all of the model.')}</div>"
        '<div class="ours"><h3>From these files: every rank reads its own part</h3>'
        f'<p class="big">{html(format_size(read))}</p><p>at most {html(format_size(most))} for a rank</p>'
        f"{picture('ours', 'Lines lead from each file to the ranks that read it.')}</div></div>"
    )
    return Section(
        title="Who reads what from where",
        lead=f"A line is a file that a rank reads; the thicker, the more bytes.{shown}",
        body=body,
    )


def _matrix_section(holdings: Holdings) -> Section:
    noun, peak = _noun(holdings), max((max(row, default=0) for row in holdings.cells), default=0)
    what = "a unit of fully_shard, in forward order" if holdings.has_units else "a layer, found by name"
    key = legend(
        ("none", "nothing"),
        ("ramp", f"few to many bytes, at most {format_size(peak)}"),
        ("bar", f"all bytes of a {noun}"),
    )
    rows = [
        (
            (_row_name(holdings, row), float(row)) if holdings.has_ranks else _row_name(holdings, row),
            (format_size(holder.held_bytes), holder.held_bytes),
            ", ".join(escape(holdings.files[file].name) for file, _ in holder.reads[:3])
            + (f" and {holder.num_files - 3} more" if holder.num_files > 3 else ""),
        )
        for row, holder in enumerate(holdings.holders[:_MAX_LISTED])
    ]
    listed = table("holders", f"All bytes of each {noun}, and their files", (noun, "bytes", "files"), rows)
    label = f"A grid of {len(holdings.holders)} {noun}s and {len(holdings.units)} columns; arrow keys go through it."
    return Section(
        title=f"What each {noun} holds",
        lead=f"A row is a {noun}, a column is {what}. The stronger the colour, the more bytes. Hover over a cell or use the arrow keys.",
        body=key + picture("matrix", label) + details(f"The same as a table, {noun} by {noun}", listed),
    )


def _tensor_section(holdings: Holdings) -> Section:
    rows = [
        (
            escape(tensor.name) + (f" x{tensor.count}" if tensor.count > 1 else ""),
            short_dtype(tensor.dtype),
            str(list(holdings.cuts[tensor.cut].shape)),
            (format_size(tensor.tensor_bytes), tensor.tensor_bytes),
            (f"{holdings.cuts[tensor.cut].num_pieces:,}", holdings.cuts[tensor.cut].num_pieces),
        )
        for tensor in holdings.tensors
    ]
    listed = table(
        "tensors",
        "Choose a tensor to see how it is cut",
        ("tensor", "dtype", "shape", "bytes", "pieces"),
        rows,
        searchable="Search",
    )
    view = f'<div class="view"><h3 id="tensor-name"></h3>{picture("tensor", "The tensor as a rectangle, cut by its owners.")}</div>'
    owner = (
        "the file, and so the rank, that holds the piece"
        if holdings.has_ranks
        else "the file that holds the piece"
    )
    return Section(
        title="How each tensor is cut",
        lead=f"The rectangle is the chosen tensor; a colour is {owner}. Filter by name; click a column header to sort.",
        body=f'<div class="pick">{listed}{view}</div>',
    )


def _file_section(holdings: Holdings) -> Section:
    gaps, total = _gap_bytes(holdings)
    lanes = _lanes(holdings)
    num_alike = len(holdings.files) - len(lanes)
    alike = f" {num_alike} files are filled like one of those." if num_alike else ""
    share = (
        f" Headers of files and records, and padding, are {gaps / total:.2%} of all bytes." if total else ""
    )
    key = legend(("record", "records, one after the other"), ("gap", "header, padding or gap"))
    return Section(
        title="How the files are filled",
        lead=f"A bar is a file from its first byte to its last, with records and gaps.{alike}{share}",
        body=key + picture("strips", f"{count(len(lanes), 'file')} as bars of records and gaps."),
    )


def _lanes(holdings: Holdings) -> list[dict[str, Any]]:
    """Return the first few lanes, one for all files with the same layout."""
    lanes: dict[tuple[int, int | None], list[int]] = {}
    for number, file in enumerate(holdings.files):
        if file.strip is not None:
            lanes.setdefault((file.strip, file.file_bytes), []).append(number)
    return [
        {
            "label": escape(holdings.files[files[0]].name)
            + (f" and {count(len(files) - 1, 'file')} like it" if len(files) > 1 else ""),
            "bytes": size or 0,
            "strip": strip,
        }
        for (strip, size), files in list(lanes.items())[:_MAX_LANES]
    ]


def _column_title(holdings: Holdings) -> str:
    stems = Counter(
        unit.path.rpartition(".")[0] for unit in holdings.units if unit.path.rpartition(".")[2].isdecimal()
    )
    where = f" of {escape(stems.most_common(1)[0][0])}" if stems else ""
    rest = "; rest: the root unit" if holdings.has_units else "; rest: what is in no layer"
    return f"{'units' if holdings.has_units else 'layers'}{where}" + (
        rest if any(not u.path for u in holdings.units) else ""
    )


def _readers(holdings: Holdings) -> list[list[int]]:
    """Return for each file the ranks that read most of their bytes from it."""
    readers: list[list[int]] = [[] for _ in holdings.files]
    for rank, holder in enumerate(holdings.holders):
        if holder.reads:
            readers[holder.reads[0][0]].append(rank)
    return readers


def _evenly_spread(number: int) -> list[int]:
    """Return the indexes to draw of `number` items, evenly spread."""
    if number <= _MAX_DRAWN:
        return list(range(number))
    return [index * (number - 1) // (_MAX_DRAWN - 1) for index in range(_MAX_DRAWN)]


def _flow(holdings: Holdings) -> dict[str, Any]:
    """Return the data of the picture of who reads what: lines from files (left) to ranks (right), the naive way and ours.

    A link is [index on the left, index on the right, bytes]. For the script, "tone" is the lines' colour, and "thick" the
    width in pixels of the line with most bytes.
    """
    holders, ranks = holdings.holders, _evenly_spread(len(holdings.holders))
    files = list(dict.fromkeys(file for rank in ranks for file, _ in holders[rank].reads))[:_MAX_DRAWN]
    index_of = {file: place for place, file in enumerate(files)}
    shard_links = [
        [index_of[file], place, nbytes]
        for place, rank in enumerate(ranks)
        for file, nbytes in holders[rank].reads
        if file in index_of
    ]
    right = [f"rank {rank}" for rank in ranks]
    naive = [[0, place, 1] for place in range(len(ranks))]
    return {
        "naive": {
            "left": ["the whole model"],
            "right": right,
            "links": naive,
            "readers": "ranks",
            "tone": "bad",
            "thick": 5,
        },
        "ours": {
            "left": [escape(holdings.files[file].name) for file in files],
            "right": right,
            "links": shard_links,
            "readers": "ranks",
            "tone": "good",
        },
    }


def _data(holdings: Holdings) -> dict[str, Any]:
    sizes = [tensor.tensor_bytes for tensor in holdings.tensors]
    return {
        "kind": "held",
        "has_ranks": holdings.has_ranks,
        "units": [_unit_name(holdings, unit) for unit in holdings.units],
        # The number of each layer; short names for all else.
        "ticks": [unit.path.rpartition(".")[2] if unit.path else "rest" for unit in holdings.units],
        "column_title": _column_title(holdings),
        "holders": [
            [holder.cells, holder.held_bytes, holder.reads, holder.num_files] for holder in holdings.holders
        ],
        "cells": holdings.cells,
        "files": [{"name": escape(file.name)} for file in holdings.files],
        "readers": _readers(holdings) if holdings.has_ranks else [],
        "strips": [strip_data(strip) for strip in holdings.strips],
        "lanes": _lanes(holdings),
        "tensors": [escape(tensor.name) for tensor in holdings.tensors],
        "cut_of": [tensor.cut for tensor in holdings.tensors],
        "cuts": [
            {"shape": cut.shape, "num_pieces": cut.num_pieces, "files": cut.files, "boxes": cut.boxes}
            for cut in holdings.cuts
        ],
        "first_tensor": sizes.index(max(sizes)) if sizes else 0,
        "flow": _flow(holdings) if holdings.has_ranks and holdings.num_holders > 1 else None,
    }


def strip_data(strip: Strip) -> dict[str, Any]:
    """Return the records of a file in the form that the script expects."""
    return {"starts": strip.starts, "nbytes": strip.nbytes, "tensors": strip.tensors, "counts": strip.counts}
