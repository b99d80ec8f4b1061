"""Invert expressions: from targets as expressions of stored tensors, to stored tensors as expressions of targets. Pure.

The elements of each stored tensor lie in boxes of the targets, perhaps reordered. Assembled, these boxes give the
tensor again. If they leave a gap, no target has that part, and the tensor cannot be recovered.
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
    """Return stored tensors as expressions of targets.

    For example, {"qkv": concat([Stored("q", ...), Stored("k", ...)], 0)} gives "q" and "k" as two cuts of "qkv".

    Args:
        targets: name of each target -> expression of stored tensors.

    Returns:
        Stored name -> expression of targets, for the stored tensors that can be recovered completely.
    """
    boxes: dict[str, dict[Shape, dict[Region, Expression]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for target, expression in targets.items():
        shapes |= {leaf.name: leaf.shape for leaf in leaves(expression)}
        try:
            occurring = list(occurrences(expression, Stored(target, expression.shape)))
        except ValueError:  # the expression has no inverse
            continue
        for name, region, value, view in occurring:
            parts = boxes.setdefault(name, {}).setdefault(view, {})
            parts.setdefault(region, value)  # if several targets have the box, the first one counts
    back = dict[str, Expression]()
    for name, shape in shapes.items():
        wholes = (assemble(view, list(parts.items())) for view, parts in boxes.get(name, {}).items())
        whole = next((candidate for candidate in wholes if candidate is not None), None)
        if whole is not None:
            back[name] = reshape(whole, shape)
    wrong = differences({name: substitute(expression, targets) for name, expression in back.items()}, shapes)
    return {name: expression for name, expression in back.items() if name not in wrong}


def differences(again: Mapping[str, Expression], shapes: Mapping[str, Shape]) -> dict[str, str]:
    """Check tensors that were converted and converted back; return name -> problem for those that changed.

    A sample of elements of each tensor is compared.

    Args:
        again: name -> the tensor after both conversions, as an expression of the original tensors.
        shapes: name -> shape of the original tensor.
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
