"""Fold many names, or lines about them, into one pattern: `layers.{0..35}.mlp.up_proj.weight`.

This module imports no other of the package: errors fold their problems, and all modules raise errors.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Generic, TypeVar

_MAX_PLACES = 16  # numbers in a name that may be folded: no model has more than five
# Without leading zeros: `01` and `1` are two names.
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")
_MIN_RUN = 3

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class FoldedNames(Generic[Key]):
    """Names that are written as one pattern.

    A pattern stands for exactly the names that were folded: if layers and experts are both folded, every
    listed layer has every listed expert.
    """

    pattern: str
    count: int
    """Number of names."""
    key: Key
    """The key that all of them had."""


def fold(items: Iterable[tuple[str, Key]]) -> list[FoldedNames[Key]]:
    """Fold names that differ only in numbers into patterns: `layers.{0..35}.mlp.up_proj.weight`.

    Only whole parts between dots count as numbers.

    Args:
        items: (name, key). Names are distinct, and only names with equal keys are folded together.

    Returns:
        Patterns in the order of each pattern's first name.
    """
    groups: dict[tuple[tuple[str | None, ...], Key], list[tuple[int, ...]]] = {}
    for name, key in items:
        parts = name.split(".")
        shape = tuple(None if _NUMBER.fullmatch(part) else part for part in parts)
        if shape.count(None) > _MAX_PLACES:
            shape = tuple(parts)
        numbers = tuple(int(part) for part, fixed in zip(parts, shape, strict=True) if fixed is None)
        groups.setdefault((shape, key), []).append(numbers)
    return [
        FoldedNames(_pattern(shape, box), prod(map(len, box)), key)
        for (shape, key), rows in groups.items()
        for box in _boxes(rows)
    ]


# A name in a line, which has a letter near its front: `layers.0.up_proj`, `0.weight`, `__0_0.distcp`; not `1.5`,
# `1e-10` or `[0,`.
_WORD = re.compile(r"(?<![\w.-])(?:[^\W\d]|[0-9]+\.[^\W\d])[\w.-]*")
_PLACE = re.compile(r"(?:^|(?<=[._-]))(?:0|[1-9][0-9]{0,8})(?=[._-]|$)")


def fold_lines(lines: Iterable[str], *, spreads: bool = False) -> list[FoldedNames[None]]:
    """Fold lines that differ only in numbers inside names: `not read: rng_state_{0..63}.pth`.

    Whole parts of a name between dots, dashes or underscores count as numbers. Other numbers, such as sizes, have to be
    equal. Two numbers that change together, as in `layers.0.a = layers.0.b`, count as one.

    Args:
        lines: for people. A repeated line is written once, but counted each time.
        spreads: fold also lines whose other numbers differ, if they are about three names or more. The pattern has the
            least and the most of each number, and ends with the number of lines.

    Returns:
        Patterns in the order of each pattern's first line.
    """
    groups: dict[tuple[str, ...], list[tuple[tuple[str, ...], tuple[int, ...]]]] = {}
    for line in lines:
        fixed, numbers = _places(line)
        groups.setdefault(tuple(map(template, fixed)) if spreads else fixed, []).append((fixed, numbers))
    return [each for rows in groups.values() for each in _fold_group(rows)]


def _fold_group(rows: Sequence[tuple[tuple[str, ...], tuple[int, ...]]]) -> Iterable[FoldedNames[None]]:
    """Fold lines of one template, each given as the texts and the numbers that alternate in it."""
    alike: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
    for fixed, numbers in rows:
        alike.setdefault(fixed, []).append(numbers)
    if len(alike) == 1 or len({numbers for _, numbers in rows}) < _MIN_RUN:
        return [each for fixed, places in alike.items() for each in _fold_rows(fixed, Counter(places))]
    texts = tuple(map(merge_ranges, zip(*alike, strict=True)))
    rows_folded = _fold_rows(texts, Counter(numbers for _, numbers in rows))
    return [replace(each, pattern=f"{each.pattern}  x{each.count}") for each in rows_folded]


def _places(line: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Split a line at the numbers in its names; return the texts around them, and the numbers."""
    fixed, numbers, at = list[str](), list[int](), 0
    for word in _WORD.finditer(line):
        for place in _PLACE.finditer(word[0]):
            fixed.append(line[at : word.start() + place.start()])
            numbers.append(int(place[0]))
            at = word.start() + place.end()
    if len(numbers) > _MAX_PLACES:
        return (line,), ()
    return (*fixed, line[at:]), tuple(numbers)


def _fold_rows(fixed: Sequence[str], rows: Counter[tuple[int, ...]]) -> Iterable[FoldedNames[None]]:
    columns = list(zip(*rows, strict=True))
    free = list(dict.fromkeys(columns))
    where = [free.index(column) for column in columns]
    for box in _boxes(list(zip(*free, strict=True)) or [()]):
        texts = [format_numbers(box[index]) for index in where]
        line = "".join(part for pair in zip(fixed, [*texts, ""], strict=True) for part in pair)
        number = sum(rows[tuple(row[index] for index in where)] for row in product(*box))
        yield FoldedNames(line, number, None)


_NUMERAL = r"(?<![\w.-])-?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?(?!\w)"
_QUANTITY = re.compile(f"{_NUMERAL}(?:(?: to |:){_NUMERAL})?")  # a number, or a range: `0:4`, `3 to 5`


def template(text: str) -> str:
    """Return text with "#" for each number, which is equal for texts that differ only in numbers."""
    return _QUANTITY.sub("#", text)


def merge_ranges(texts: Sequence[str]) -> str:
    """Merge texts of one `template` into one, with the least and the most of each number: `3 to 5 of 9 elements`."""
    parts = _QUANTITY.split(texts[0])
    ranges = map(_range, zip(*map(_QUANTITY.findall, texts), strict=True))
    return "".join(part for pair in zip(parts, [*ranges, ""], strict=True) for part in pair)


def _range(quantities: Sequence[str]) -> str:
    ends = [re.split(" to |:", each) for each in quantities]
    least, most = min((e[0] for e in ends), key=_value), max((e[-1] for e in ends), key=_value)
    return least if least == most else f"{least}{':' if ':' in quantities[0] else ' to '}{most}"


def _value(numeral: str) -> float:
    return float(numeral.replace(",", ""))


def _boxes(rows: Sequence[tuple[int, ...]]) -> list[tuple[tuple[int, ...], ...]]:
    """Divide rows of numbers into boxes, each of which has a tuple of values for each column and all their combinations.

    The rows (0, 5), (0, 6), (1, 5), (1, 6) are the box ((0, 1), (5, 6)).
    """
    if not rows[0]:
        return [()]
    tails: dict[int, list[tuple[int, ...]]] = {}
    for first, *rest in rows:
        tails.setdefault(first, []).append(tuple(rest))
    firsts: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for first, tail in tails.items():
        firsts.setdefault(tuple(sorted(tail)), []).append(first)
    return [(tuple(sorted(values)), *box) for tail, values in firsts.items() for box in _boxes(tail)]


def _pattern(shape: Sequence[str | None], box: Sequence[Sequence[int]]) -> str:
    places = iter(box)
    return ".".join(format_numbers(next(places)) if part is None else part for part in shape)


def format_numbers(values: Sequence[int]) -> str:
    """Return ascending numbers as a shell would expand them: `7`, `{0..35}`, `{1..47..2}`, `{0..2,5,9}`."""
    if len(values) == 1:
        return str(values[0])
    step = values[1] - values[0]
    if step > 1 and len(values) >= _MIN_RUN and list(values) == list(range(values[0], values[-1] + 1, step)):
        return f"{{{values[0]}..{values[-1]}..{step}}}"
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return "{" + ",".join(map(_run, runs)) + "}"


def _run(run: Sequence[int]) -> str:
    return f"{run[0]}..{run[-1]}" if len(run) >= _MIN_RUN else ",".join(map(str, run))
