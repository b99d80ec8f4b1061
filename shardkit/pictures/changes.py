"""The page of `diff`: which modules of which layers differ, and how much."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from shardkit.core.dtypes import short_dtype
from shardkit.core.text import count, escape, few
from shardkit.operations.diff import DiffResult, Status, TensorDiff
from shardkit.pictures.page import Page, Section, legend, picture, short_names, table

_MAX_LISTED = 5000
_MAX_ROWS, _MAX_COLUMNS = 400, 400
_MAX_SHOWN = 5
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")
_OUTSIDE = -1
_ALONE: dict[Status, str] = {"only_a": "only in A", "only_b": "only in B", "shape": "the shapes differ"}
_SAID = {"equal": "equal", "close": "within the tolerance", "tied": "tied", "folded": "equal after folding"}


class MapPosition(NamedTuple):
    """Where a tensor stands in the map."""

    row: str
    """Its name with `#` for the layer and `*` for other numbers."""
    layer: int
    """-1 outside of layers."""


def place_of(name: str) -> MapPosition:
    """Return the module and the layer of a tensor, as its name tells: the first number between dots is the layer."""
    parts, layer = name.split("."), _OUTSIDE
    for index, part in enumerate(parts):
        if _NUMBER.fullmatch(part):
            parts[index] = "#" if layer == _OUTSIDE else "*"
            layer = int(part) if layer == _OUTSIDE else layer
    return MapPosition(".".join(parts), layer)


def amount_of(tensor: TensorDiff) -> float | None:
    """Return how much a tensor differs, from 0 to 1: its relative error where that is known, else the share of elements
    that differ; None if its values cannot be compared."""
    if tensor.status in _ALONE or (tensor.stats is not None and tensor.stats.num_nonfinite):
        return None
    if not tensor.is_difference:
        return 0.0
    if tensor.stats is not None:
        return tensor.stats.relative_error or 0.0
    return tensor.share_changed or 0.0


class Heat(NamedTuple):
    """The map: rows are modules, columns layers."""

    rows: list[str]
    columns: list[int]
    cells: dict[tuple[int, int], list[int]]
    """(row, column) -> indexes into the tensors."""


def heat_of(tensors: Sequence[TensorDiff]) -> Heat:
    """Return the map of some tensors."""
    places = [place_of(tensor.name) for tensor in tensors]
    rows = list(
        dict.fromkeys(place.row for place in sorted(places, key=lambda place: place.layer == _OUTSIDE))
    )
    columns = sorted({place.layer for place in places})
    row_of, column_of = ({key: index for index, key in enumerate(keys)} for keys in (rows, columns))
    cells: dict[tuple[int, int], list[int]] = {}
    for index, place in enumerate(places):
        cells.setdefault((row_of[place.row], column_of[place.layer]), []).append(index)
    return Heat(rows, columns, cells)


def changes_page(result: DiffResult, facts: Sequence[tuple[str, str]]) -> Page:
    """Return the page of a comparison.

    Args:
        result: of any comparison; with figures, colours are relative errors.
        facts: (label, text) of everything else that is to be said.
    """
    heat, has_stats = heat_of(result.tensors), any(tensor.stats is not None for tensor in result.tensors)
    listed = sorted(result.tensors, key=lambda tensor: tensor.magnitude, reverse=True)[:_MAX_LISTED]
    return Page(
        kicker="comparison of two checkpoints",
        title=" and ".join(short_names(result.a, result.b)),
        verdict=_verdict(result),
        tone="good" if result.is_equal_after_rounding else "plain",
        figures=list(_figures(result)),
        unusual=[*result.warnings, *_unusual(result)],
        notable=list(_notable(result, heat)),
        sections=list(_sections(result, listed, heat, has_stats)),
        facts=[*facts, *(("note", note) for note in result.notes)],
        left_out=list(_left_out(result, heat)),
        data=_data(result, listed, heat, has_stats),
    )


def _verdict(result: DiffResult) -> str:
    number = count(len(result.tensors), "tensor")
    if result.is_equal:
        return f"Equal: {number} hold the same {'bytes' if result.rtol is None else 'values, within the tolerance'}."
    if result.is_equal_after_rounding:
        return f"Equal after rounding or folding: none of {number} differs otherwise."
    if result.count(*_ALONE) == len(result.tensors):
        return f"None of {number} can be compared: A and B share no name and shape."
    return f"{len(result.differences)} of {number} differ{_where(result)}."


def _where(result: DiffResult) -> str:
    """Return which layers differ, where not all do: ", in layers 4 to 19"."""
    layers = {layer for tensor in result.tensors if (layer := place_of(tensor.name).layer) != _OUTSIDE}
    changed = sorted({place_of(tensor.name).layer for tensor in result.differences} & layers)
    outside = any(place_of(tensor.name).layer == _OUTSIDE for tensor in result.differences)
    if not changed or len(changed) == len(layers):
        return ""
    first, last = changed[0], changed[-1]
    if len(changed) > 1 and len(changed) == len(layers & set(range(first, last + 1))):
        text = f", in layers {first} to {last}"
    else:
        text = f", in layer {first}" if len(changed) == 1 else f", in {len(changed)} of {len(layers)} layers"
    return f"{text} and outside of layers" if outside else text


def _figures(result: DiffResult) -> Iterator[tuple[str, str]]:
    yield f"{len(result.differences):,}", f"of {count(len(result.tensors), 'tensor')} differ"
    yield f"{len(result.tensors) - len(result.differences):,}", "do not"
    changed = sum(tensor.num_changed or 0 for tensor in result.differences)
    elements = sum(tensor.num_elements for tensor in result.tensors if tensor.num_changed is not None)
    if elements:
        yield f"{100 * changed / elements:.3g}%", "of all elements that were compared differ"
    alone = result.count("only_a", "only_b", "shape")
    if alone:
        yield f"{alone:,}", "cannot be compared"


def _unusual(result: DiffResult) -> Iterator[str]:
    for status, said in _ALONE.items():
        names = [escape(tensor.name) for tensor in result.tensors if tensor.status == status]
        if names:
            yield f"{count(len(names), 'tensor')}: {said}: {few(names, _MAX_SHOWN)}."
    odd = [escape(t.name) for t in result.tensors if t.stats is not None and t.stats.num_nonfinite]
    if odd:
        yield f"{count(len(odd), 'tensor')} with NaN or infinity on one side: {few(odd, _MAX_SHOWN)}."


def _notable(result: DiffResult, heat: Heat) -> Iterator[str]:
    changed = {
        row
        for (row, _), group in heat.cells.items()
        if any(result.tensors[index].is_difference for index in group)
    }
    if changed and len(changed) < len(heat.rows):
        still = [escape(name) for row, name in enumerate(heat.rows) if row not in changed]
        yield f"Nothing differs in {count(len(still), 'kind')} of tensors: {few(still, _MAX_SHOWN)}."
    compared = [tensor for tensor in result.differences if amount_of(tensor)]
    if len(compared) > 1:
        most, name = max((amount_of(tensor) or 0.0, tensor.name) for tensor in compared)
        has_stats = any(tensor.stats is not None for tensor in result.tensors)
        much = f"a relative error of {most:.3g}" if has_stats else f"{most:.3g} of its elements"
        yield f"{escape(name)} differs most: {much}."


def _left_out(result: DiffResult, heat: Heat) -> Iterator[str]:
    if len(result.tensors) > _MAX_LISTED:
        yield f"the {_MAX_LISTED} tensors that differ most are listed, of {len(result.tensors)}; --json has all"
    if len(heat.rows) > _MAX_ROWS:
        yield f"the first {_MAX_ROWS} of {len(heat.rows)} modules are drawn"
    if len(heat.columns) > _MAX_COLUMNS:
        yield f"the first {_MAX_COLUMNS} of {len(heat.columns)} layers are drawn"


def _sections(
    result: DiffResult, listed: Sequence[TensorDiff], heat: Heat, has_stats: bool
) -> Iterator[Section]:
    measure = (
        "the norm of the difference over the norm of the tensor"
        if has_stats
        else "the share of its elements that differ; --stats measures how much"
    )
    label = f"A map of {len(heat.rows)} modules and {len(heat.columns)} layers; arrow keys go through it."
    yield Section(
        title="Which modules of which layers differ",
        lead=f"A row is a module, a column a layer. The stronger the colour, the more a tensor differs: {measure}. Of several in "
        "one place, such as experts, the one that differs most counts.",
        body=legend(
            ("none", "equal"),
            *(
                [("ramp", f"little to much: {_peak(result):.3g}")]
                if any(map(amount_of, result.tensors))
                else []
            ),
            ("mark", "cannot be compared, or NaN"),
        )
        + picture("changes", label),
    )
    rows = [_row(tensor, has_stats) for tensor in listed]
    heads = (
        ("tensor", "dtype", "shape", "differ", "relative error", "largest")
        if has_stats
        else ("tensor", "dtype", "shape", "differ")
    )
    yield Section(
        title="Every tensor",
        lead="What differs most comes first. Search by parts of a name, sort by a head.",
        body=table("tensors", "Tensors of both checkpoints", heads, rows, searchable="Search"),
    )


def _peak(result: DiffResult) -> float:
    """Return the amount of change that has the strongest colour."""
    amounts = [amount for tensor in result.tensors if (amount := amount_of(tensor)) is not None]
    return max(amounts, default=0.0) or 1.0


def _row(tensor: TensorDiff, has_stats: bool) -> list[str | tuple[str, float]]:
    dtypes = [short_dtype(dtype) for dtype in (tensor.dtype_a, tensor.dtype_b) if dtype is not None]
    shapes = [str(list(shape)) for shape in (tensor.shape_a, tensor.shape_b) if shape is not None]
    row: list[str | tuple[str, float]] = [
        escape(tensor.name),
        " -> ".join(dict.fromkeys(dtypes)),
        " -> ".join(dict.fromkeys(shapes)),
        _said(tensor),
    ]
    if has_stats:
        stats = tensor.stats
        row += (
            [("", -1.0), ("", -1.0)]
            if stats is None
            else [
                (f"{stats.relative_error or 0:.3g}", stats.relative_error or 0.0),
                (f"{stats.max_abs:.3g}", stats.max_abs),
            ]
        )
    return row


def _said(tensor: TensorDiff) -> tuple[str, float]:
    """Return the text about the values, and a number to sort by."""
    if tensor.status in _ALONE:
        return _ALONE[tensor.status], 2.0
    if tensor.status == "rounded":
        return f"equal after rounding to {short_dtype(tensor.rounded_to or '')}", 0.0
    if tensor.status in _SAID:
        return _SAID[tensor.status], 0.0
    share = tensor.share_changed or 0.0
    return (f"{100 * share:.3g}% of elements" if share else "only the dtypes"), share


def _data(result: DiffResult, listed: Sequence[TensorDiff], heat: Heat, has_stats: bool) -> dict[str, Any]:
    rows, columns = heat.rows[:_MAX_ROWS], heat.columns[:_MAX_COLUMNS]
    number_of = {tensor.name: index for index, tensor in enumerate(listed)}
    cells = [
        _cell([result.tensors[index] for index in heat.cells.get((row, column), ())], number_of, has_stats)
        for row in range(len(rows))
        for column in range(len(columns))
    ]
    return {
        "kind": "changes",
        "rows": [escape(_label(row)) for row in rows],
        "columns": ["-" if column == _OUTSIDE else str(column) for column in columns],
        "column_title": "layers" + ("; -: outside of layers" if _OUTSIDE in columns else ""),
        "cells": cells,
        "peak": _peak(result),
    }


def _label(row: str) -> str:
    """Return the label of a row: the name behind the layer, as the part before it is nearly always the same."""
    before, separator, after = row.removesuffix(".weight").partition(".#.")
    return (
        after
        if separator and after and before.count(".") <= 1 and before.startswith("model")
        else row.removesuffix(".weight")
    )


def _cell(tensors: Sequence[TensorDiff], number_of: dict[str, int], has_stats: bool) -> list[object] | None:
    """Return (amount or "bad", what is said, row of the table) of a place; None if nothing is there."""
    if not tensors:
        return None
    most = max(tensors, key=lambda tensor: tensor.magnitude)
    amount, said = amount_of(most), _said(most)[0]
    if has_stats and amount:
        said = f"relative error {amount:.3g}, {said} differ"
    if len(tensors) > 1:
        changed = sum(tensor.is_difference for tensor in tensors)
        said = f"{changed} of {len(tensors)} tensors differ; most of all {escape(most.name)}: {said}"
    return ["bad" if amount is None else amount, said, number_of.get(most.name)]
