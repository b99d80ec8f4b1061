"""The page of `diff`: which modules of which layers differ, and how much."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from shardkit.core.dtypes import short_dtype
from shardkit.core.text import count, escape, few
from shardkit.operations.diff import DiffResult, Status, TensorDiff
from shardkit.operations.diff.amounts import Experts, amount_of, experts_line, experts_of, layer_names
from shardkit.pictures.page import Page, Section, legend, picture, short_names, table

_MAX_LISTED = 5000
_MAX_ROWS, _MAX_COLUMNS, _MAX_EXPERTS = 400, 400, 1024
_MAX_SHOWN = 5
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")
_OUTSIDE = -1
_NOT_COMPARED: dict[Status, str] = {
    "only_a": "only in A",
    "only_b": "only in B",
    "shape": "the shapes differ",
}
_EQUAL_TEXTS = {
    "equal": "equal",
    "close": "within the tolerance",
    "tied": "tied",
    "folded": "equal after folding",
}


class MapPosition(NamedTuple):
    """Position of a tensor in the map."""

    row: str
    """The name with `#` for the layer and `*` for other numbers."""
    layer: int
    """-1 outside of layers."""


def place_of(name: str) -> MapPosition:
    """Return module and layer of a tensor, from its name: the first number between dots is the layer."""
    parts, layer = name.split("."), _OUTSIDE
    for index, part in enumerate(parts):
        if _NUMBER.fullmatch(part):
            parts[index] = "#" if layer == _OUTSIDE else "*"
            layer = int(part) if layer == _OUTSIDE else layer
    return MapPosition(".".join(parts), layer)


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
        result: the comparison.
        facts: further (label, text) rows.
    """
    heat, experts = heat_of(result.tensors), experts_of(result.tensors)
    has_stats = any(t.stats is not None for t in result.tensors)
    listed = sorted(result.tensors, key=lambda tensor: tensor.magnitude, reverse=True)[:_MAX_LISTED]
    return Page(
        kicker="comparison of two checkpoints",
        title=" and ".join(short_names(result.a, result.b)),
        verdict=_verdict(result),
        tone="plain" if result.differences else "good",
        figures=list(_figures(result)),
        unusual=[*result.warnings, *_unusual(result)],
        notable=list(_notable(result, heat, experts)),
        sections=list(_sections(result, listed, heat, experts, has_stats)),
        facts=[*facts, *(("note", note) for note in result.notes)],
        left_out=list(_left_out_lines(result, heat, experts)),
        data={**_data(result, listed, heat), "experts": _expert_data(experts)},
    )


def _verdict(result: DiffResult) -> str:
    number = f"{len(result.tensors):,} tensor{'s' * (len(result.tensors) != 1)}"
    if result.is_equal:
        content = "bytes" if result.rtol is None else "values, within the tolerance"
        if result.as_dtype is not None:
            content += f", with A rounded to {result.as_dtype}"
        return f"Equal: {number} hold the same {content}."
    if not result.differences:
        return f"Equal after folding: none of {number} differs otherwise."
    if result.count(*_NOT_COMPARED) == len(result.tensors):
        return f"None of {number} can be compared: A and B share no name and shape."
    return f"{len(result.differences):,} of {number} differ{_where(result)}."


def _where(result: DiffResult) -> str:
    """Return the layers that differ, such as ", in layers 4 to 19"; empty if all do."""
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
    yield f"{len(result.differences):,}", f"of {len(result.tensors):,} tensors differ"
    yield f"{len(result.tensors) - len(result.differences):,}", "identical"
    changed = sum(tensor.num_changed or 0 for tensor in result.differences)
    elements = sum(tensor.num_elements for tensor in result.tensors if tensor.num_changed is not None)
    if elements:
        yield f"{100 * changed / elements:.3g}%", "of all elements that were compared differ"
    alone = result.count("only_a", "only_b", "shape")
    if alone:
        yield f"{alone:,}", "cannot be compared"


def _unusual(result: DiffResult) -> Iterator[str]:
    for status, meaning in _NOT_COMPARED.items():
        names = [escape(tensor.name) for tensor in result.tensors if tensor.status == status]
        if names:
            yield f"{count(len(names), 'tensor')}: {meaning}: {few(names, _MAX_SHOWN)}."
    odd = [escape(t.name) for t in result.tensors if t.stats is not None and t.stats.num_nonfinite]
    if odd:
        yield f"{count(len(odd), 'tensor')} with NaN or infinity on one side: {few(odd, _MAX_SHOWN)}."


def _notable(result: DiffResult, heat: Heat, experts: Experts) -> Iterator[str]:
    if experts and result.differences:
        yield f"Experts: {experts_line(experts)}."
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
        much = f"a relative norm of {most:.3g}" if _has_norms(result) else f"{most:.3g} of its elements"
        yield f"{escape(name)} differs most: {much}."


def _has_norms(result: DiffResult) -> bool:
    return any(tensor.relative_error is not None for tensor in result.tensors)


def _left_out_lines(result: DiffResult, heat: Heat, experts: Experts) -> Iterator[str]:
    if len(result.tensors) > _MAX_LISTED:
        yield f"the {_MAX_LISTED} tensors that differ most are listed, of {len(result.tensors)}; --json has all"
    if len(heat.rows) > _MAX_ROWS:
        yield f"the first {_MAX_ROWS} of {len(heat.rows)} modules are drawn"
    if len(heat.columns) > _MAX_COLUMNS:
        yield f"the first {_MAX_COLUMNS} of {len(heat.columns)} layers are drawn"
    if len(experts) > _MAX_ROWS or len(_numbers(experts)) > _MAX_EXPERTS:
        yield f"the first {_MAX_EXPERTS} experts of the first {_MAX_ROWS} layers with experts are drawn"


def _sections(
    result: DiffResult, listed: Sequence[TensorDiff], heat: Heat, experts: Experts, has_stats: bool
) -> Iterator[Section]:
    measure = (
        "the norm of the difference over the norm of the tensor"
        if _has_norms(result)
        else "the share of its elements that differ"
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
    if experts:
        label = (
            f"A map of {len(experts)} layers and {len(_numbers(experts))} experts; arrow keys go through it."
        )
        yield Section(
            title="Which experts of which layers differ",
            lead="A row is a layer, a column an expert. Grey experts are identical in A and B. Of the tensors of one expert, the one "
            "that differs most counts.",
            body=legend(
                ("none", "identical"), ("ramp", "little to much"), ("mark", "cannot be compared, or NaN")
            )
            + picture("experts", label),
        )
    rows = [_row(tensor, has_stats) for tensor in listed]
    heads = ("tensor", "dtype", "shape", "differ", "relative norm", *(("largest",) if has_stats else ()))
    yield Section(
        title="Every tensor",
        lead="The largest differences come first. Filter by name; click a column header to sort.",
        body=table("tensors", "Tensors of both checkpoints", heads, rows, searchable="Search"),
    )


def _peak(result: DiffResult) -> float:
    """Return the amount of change that is drawn in the strongest colour."""
    amounts = [amount for tensor in result.tensors if (amount := amount_of(tensor)) is not None]
    return max(amounts, default=0.0) or 1.0


def _row(tensor: TensorDiff, has_stats: bool) -> list[str | tuple[str, float]]:
    dtypes = [short_dtype(dtype) for dtype in (tensor.dtype_a, tensor.dtype_b) if dtype is not None]
    shapes = [str(list(shape)) for shape in (tensor.shape_a, tensor.shape_b) if shape is not None]
    row: list[str | tuple[str, float]] = [
        escape(tensor.name),
        " -> ".join(dict.fromkeys(dtypes)),
        " -> ".join(dict.fromkeys(shapes)),
        _amount_text(tensor),
        ("", -1.0)
        if tensor.relative_error is None
        else (f"{tensor.relative_error:.3g}", tensor.relative_error),
    ]
    if has_stats:
        stats = tensor.stats
        row.append(("", -1.0) if stats is None else (f"{stats.max_abs:.3g}", stats.max_abs))
    return row


def _amount_text(tensor: TensorDiff) -> tuple[str, float]:
    """Return a text about the values, and a number to sort by."""
    if tensor.status in _NOT_COMPARED:
        return _NOT_COMPARED[tensor.status], 2.0
    if tensor.status in _EQUAL_TEXTS:
        return _EQUAL_TEXTS[tensor.status], 0.0
    share = tensor.share_changed or 0.0
    return (f"{100 * share:.3g}% of elements" if share else "only the dtypes"), share


def _data(result: DiffResult, listed: Sequence[TensorDiff], heat: Heat) -> dict[str, Any]:
    rows, columns = heat.rows[:_MAX_ROWS], heat.columns[:_MAX_COLUMNS]
    number_of = {tensor.name: index for index, tensor in enumerate(listed)}
    cells = [
        _cell([result.tensors[index] for index in heat.cells.get((row, column), ())], number_of)
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


def _numbers(experts: Experts) -> list[int]:
    """Return the expert numbers of all layers."""
    return sorted({number for amounts in experts.values() for number in amounts})


def _expert_data(experts: Experts) -> dict[str, Any]:
    """Return the map of experts; a cell is an amount, "bad", or None if the layer lacks the expert."""
    rows, columns = list(experts)[:_MAX_ROWS], _numbers(experts)[:_MAX_EXPERTS]
    cells: list[float | str | None] = []
    for row in rows:
        amounts = ((number in experts[row], experts[row].get(number)) for number in columns)
        cells += [
            None if not is_there else "bad" if amount is None else float(f"{amount:.3g}")
            for is_there, amount in amounts
        ]
    return {
        "rows": layer_names(rows),
        "columns": columns,
        "cells": cells,
        "peak": max((cell for cell in cells if isinstance(cell, float)), default=0.0) or 1.0,
    }


def _label(row: str) -> str:
    """Return the label of a row: the name after the layer; the part before it hardly ever varies."""
    before, separator, after = row.removesuffix(".weight").partition(".#.")
    return (
        after
        if separator and after and before.count(".") <= 1 and before.startswith("model")
        else row.removesuffix(".weight")
    )


def _cell(tensors: Sequence[TensorDiff], number_of: dict[str, int]) -> list[object] | None:
    """Return (amount or "bad", text, row of the table) of a cell; None if it is empty."""
    if not tensors:
        return None
    most = max(tensors, key=lambda tensor: tensor.magnitude)
    amount, text = amount_of(most), _amount_text(most)[0]
    if most.relative_error is not None and most.is_difference:
        text = f"relative norm {most.relative_error:.3g}, {text} differ"
    if len(tensors) > 1:
        changed = sum(tensor.is_difference for tensor in tensors)
        text = f"{changed} of {len(tensors)} tensors differ; most of all {escape(most.name)}: {text}"
    return ["bad" if amount is None else amount, text, number_of.get(most.name)]
