"""Pictures for a terminal, drawn with characters: shades show amounts, bars show totals. No colours are used.

A picture is a table. Each *cell* is one character, whose shade shows its *amount*, a number from 0 to 1. The pictures are:

    held_lines      which rank (or file) holds how many bytes of which *unit*: a module with a `fully_shard` call of its
                    own, or a layer if no such modules are recorded. `Holdings` has these numbers; ranks with equal rows
                    share one, so `Holder.cells` is the index of a row in `Holdings.cells`
    changed_lines   how much the tensors of a module differ between two checkpoints, by layer. `amount_of` returns the number
                    of a tensor: its relative error, or else the share of its elements that differ

An amount is the square root of (number / largest number in the picture), so that small numbers remain visible.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from shardkit.core.text import escape, format_size
from shardkit.operations.diff import DiffResult
from shardkit.operations.diff.amounts import amount_of
from shardkit.operations.holdings import Holdings
from shardkit.pictures.changes import heat_of

Amount = float | Literal["bad"] | None
"""From 0 to 1, where 1 is the largest of the picture; "bad" if tensors cannot be compared; None for an empty cell."""

_MAX_ROWS = 32
_BAR, _MIN_COLUMNS, _MAX_LABEL = 16, 8, 40
_INDENT = "  "


class Glyphs(NamedTuple):
    """Characters for amounts, from nothing to all, and for bars in eighths."""

    shades: str
    bars: str
    bad: str


BLOCKS = Glyphs("\u00b7\u2591\u2592\u2593\u2588", "\u258f\u258e\u258d\u258c\u258b\u258a\u2589\u2588", "X")
ASCII = Glyphs(".-+*#", "#", "X")


class Row(NamedTuple):
    """A line of a picture."""

    label: str
    amounts: Sequence[Amount]
    total: int | None = None
    """Total bytes, for a bar."""


def glyphs_for(encoding: str | None) -> Glyphs:
    """Return block characters if the encoding has them, else ASCII."""
    try:
        "".join(BLOCKS).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return BLOCKS


def held_lines(holdings: Holdings, width: int, glyphs: Glyphs) -> Iterator[str]:
    """Yield the map of ranks x units, with a bar for each rank's bytes; neighbours with equal contents share a line.

    Args:
        holdings: what to draw.
        width: of the terminal, in characters.
        glyphs: what to draw with.
    """
    noun, peak = (
        ("rank" if holdings.has_ranks else "file"),
        max((max(row, default=0) for row in holdings.cells), default=0) or 1,
    )
    rows = [
        Row(_held_label(holdings, first, last), [math.sqrt(n / peak) for n in holdings.cells[cells]], total)
        for first, last, cells, total in _runs(holdings)
    ]
    what = "units, in forward order" if holdings.has_units else "layers, found by name"
    yield f"{noun}s x {what} ({len(holdings.units)}); {glyphs.shades[0]} nothing, {glyphs.shades[1:]} few to many bytes"
    yield from _draw_rows(rows, width, glyphs)


def _runs(holdings: Holdings) -> Iterator[tuple[int, int, int, int]]:
    """Yield (first, last, index into `Holdings.cells`, bytes of each) for each run of neighbours with equal rows.

    Equal rows have equal bytes, as a holder's bytes are the sum of its row.
    """
    first = 0
    for index, holder in enumerate(holdings.holders):
        following = holdings.holders[index + 1] if index + 1 < len(holdings.holders) else None
        if following is None or following.cells != holder.cells:
            yield first, index, holder.cells, holder.held_bytes
            first = index + 1


def _held_label(holdings: Holdings, first: int, last: int) -> str:
    if holdings.has_ranks:
        return f"rank {first}" if first == last else f"ranks {first}-{last}"
    name = escape(holdings.files[first].name)
    return name if first == last else f"{name} and {last - first} more"


def changed_lines(result: DiffResult, width: int, glyphs: Glyphs) -> Iterator[str]:
    """Yield the map of modules x layers; stronger shades are larger differences.

    Args:
        result: of a comparison.
        width: of the terminal, in characters.
        glyphs: what to draw with.
    """
    heat = heat_of(result.tensors)
    # Not scaled yet; None for a tensor that cannot be compared.
    amounts = [amount_of(tensor) for tensor in result.tensors]
    peak = max((amount for amount in amounts if amount is not None), default=0.0) or 1.0
    rows = []
    for row, label in enumerate(heat.rows):
        cells = [heat.cells.get((row, column)) for column in range(len(heat.columns))]
        rows.append(Row(escape(label), [_cell(cell, amounts, peak) for cell in cells]))
    yield f"modules x layers ({len(heat.columns)}); {glyphs.shades[0]} equal, {glyphs.shades[1:]} little to much, {glyphs.bad} cannot be compared"
    yield from _draw_rows(rows, width, glyphs)


def _cell(cell: Sequence[int] | None, amounts: Sequence[float | None], peak: float) -> Amount:
    """Return the largest amount in a cell, scaled.

    Args:
        cell: indexes of its tensors in `amounts`.
        amounts: of all tensors, as `amount_of` returns them.
        peak: the largest of them.
    """
    if not cell:
        return None
    values = [amounts[index] for index in cell]
    return "bad" if None in values else math.sqrt(max(n or 0.0 for n in values) / peak)


def _draw_rows(rows: Sequence[Row], width: int, glyphs: Glyphs) -> Iterator[str]:
    has_bars = any(row.total is not None for row in rows)
    rest = 2 * len(_INDENT) + (_BAR + 14 if has_bars else 0)
    label = min(
        max((len(row.label) for row in rows), default=0), _MAX_LABEL, max(width - rest - _MIN_COLUMNS, 8)
    )
    if has_bars and width < label + rest + _MIN_COLUMNS:  # a narrow terminal: the numbers suffice
        has_bars, rest = False, 2 * len(_INDENT) + 12
    room = max(width - label - rest, _MIN_COLUMNS)
    peak = max((row.total or 0 for row in rows), default=0) or 1
    for row in rows[:_MAX_ROWS]:
        cells = "".join(_shade(amount, glyphs) for amount in _squeeze(row.amounts, room))
        # Long labels are cut at the front: names differ at their ends.
        shown = row.label if len(row.label) <= label else f"...{row.label[3 - label :]}"
        line = f"{_INDENT}{shown.ljust(label)}{_INDENT}{cells}"
        if row.total is not None:
            line += f"{_INDENT}{_bar(row.total / peak, glyphs)}" if has_bars else _INDENT
            line += f" {format_size(row.total)}"
        yield line.rstrip()
    if len(rows) > _MAX_ROWS:
        yield f"{_INDENT}... {len(rows) - _MAX_ROWS} more lines, see --html"


def _squeeze(amounts: Sequence[Amount], room: int) -> Sequence[Amount]:
    """Return at most `room` amounts: the largest of neighbours that share a character."""
    step = -(-len(amounts) // room)
    if step <= 1:
        return amounts
    return [_largest(amounts[start : start + step]) for start in range(0, len(amounts), step)]


def _largest(amounts: Sequence[Amount]) -> Amount:
    if "bad" in amounts:
        return "bad"
    numbers = [amount for amount in amounts if isinstance(amount, (int, float))]
    return max(numbers) if numbers else None


def _shade(amount: Amount, glyphs: Glyphs) -> str:
    if amount is None:
        return " "
    if isinstance(amount, str):
        return glyphs.bad
    steps = len(glyphs.shades) - 1
    return glyphs.shades[min(math.ceil(amount * steps), steps)]


def _bar(share: float, glyphs: Glyphs) -> str:
    eighths = round(share * _BAR * len(glyphs.bars))
    whole, rest = divmod(eighths, len(glyphs.bars))
    return (glyphs.bars[-1] * whole + (glyphs.bars[rest - 1] if rest else "")).ljust(_BAR)
