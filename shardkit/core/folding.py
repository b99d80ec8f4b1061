"""Names that differ only in their numbers, written as one: `layers.{0..35}.mlp.up_proj.weight`.

Only whole parts between dots count as numbers. A pattern stands for exactly the names that went into it:
where layers and experts are both folded, every listed layer has every listed expert.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

# Without leading zeros: `01` and `1` are two names.
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")
_MIN_RUN = 3

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Fold(Generic[Key]):
    """Names that are written as one pattern."""

    pattern: str
    count: int
    """How many names."""
    key: Key
    """What they have in common."""


def fold(items: Iterable[tuple[str, Key]]) -> list[Fold[Key]]:
    """Return patterns for names with equal keys, in the order of each pattern's first name.

    Args:
        items: (name, key); names are distinct.
    """
    groups: dict[tuple[tuple[str | None, ...], Key], list[tuple[int, ...]]] = {}
    for name, key in items:
        parts = name.split(".")
        shape = tuple(None if _NUMBER.fullmatch(part) else part for part in parts)
        numbers = tuple(int(part) for part, fixed in zip(parts, shape, strict=True) if fixed is None)
        groups.setdefault((shape, key), []).append(numbers)
    return [
        Fold(_pattern(shape, box), _count(box), key)
        for (shape, key), rows in groups.items()
        for box in _boxes(rows)
    ]


def _boxes(rows: Sequence[tuple[int, ...]]) -> list[tuple[tuple[int, ...], ...]]:
    """Cut rows of numbers into boxes: one tuple of values for each place, every combination present."""
    if not rows[0]:
        return [()]
    tails: dict[int, list[tuple[int, ...]]] = {}
    for first, *rest in rows:
        tails.setdefault(first, []).append(tuple(rest))
    firsts: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for first, tail in tails.items():
        firsts.setdefault(tuple(sorted(tail)), []).append(first)
    return [(tuple(sorted(values)), *box) for tail, values in firsts.items() for box in _boxes(tail)]


def _count(box: Sequence[Sequence[int]]) -> int:
    total = 1
    for values in box:
        total *= len(values)
    return total


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
