"""The way back: what stored tensors are made of, given what was made of them. Pure.

Each stored tensor lies somewhere in the targets, in boxes and perhaps reordered. Put together again, these boxes are
the tensor; where they leave a gap, that part went into no target, and the tensor does not come back.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

from shardkit.core.regions import Region, Shape
from shardkit.keys.expressions import (
    Expression,
    Stored,
    assemble,
    leaves,
    locate,
    occurrences,
    reshape,
    substitute,
)

_NUM_SAMPLES = 16  # elements of each tensor


def invert(targets: Mapping[str, Expression]) -> dict[str, Expression]:
    """Return what the stored tensors are made of that some targets are made of, as expressions of these targets.

    Args:
        targets: what each target is made of.

    Returns:
        Stored name -> an expression of targets, for those that all come back.
    """
    boxes: dict[str, dict[Shape, dict[Region, Expression]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for target, expression in targets.items():
        shapes |= {leaf.name: leaf.shape for leaf in leaves(expression)}
        try:
            occurring = list(occurrences(expression, Stored(target, expression.shape)))
        except ValueError:  # by operations that are not known
            continue
        for name, region, value, view in occurring:
            parts = boxes.setdefault(name, {}).setdefault(view, {})
            parts.setdefault(region, value)  # of several targets, the first one's
    back = dict[str, Expression]()
    for name, shape in shapes.items():
        wholes = (assemble(view, list(parts.items())) for view, parts in boxes.get(name, {}).items())
        whole = next((candidate for candidate in wholes if candidate is not None), None)
        if whole is not None:
            back[name] = reshape(whole, shape)
    wrong = differences({name: substitute(expression, targets) for name, expression in back.items()}, shapes)
    return {name: expression for name, expression in back.items() if name not in wrong}


def differences(again: Mapping[str, Expression], shapes: Mapping[str, Shape]) -> dict[str, str]:
    """Follow a sample of elements of tensors that went there and back; return why they are not what they were.

    Args:
        again: name -> what the tensor is made of in the end, in terms of all that there was in the beginning.
        shapes: of that, by name.
    """
    rng, wrong = random.Random(0), dict[str, str]()
    for name, expression in again.items():
        if expression.shape != tuple(shapes[name]):
            wrong[name] = f"it comes back as {list(expression.shape)}, not {list(shapes[name])}"
            continue
        for index in _samples(expression.shape, rng):
            if locate(expression, index) not in ((name, index), None):  # None is padding
                wrong[name] = f"its element {list(index)} does not come back"
                break
    return wrong


def _samples(shape: tuple[int, ...], rng: random.Random) -> Iterator[tuple[int, ...]]:
    if 0 in shape:
        return
    yield (0,) * len(shape)
    yield tuple(size - 1 for size in shape)
    for _ in range(_NUM_SAMPLES):
        yield tuple(rng.randrange(size) for size in shape)
