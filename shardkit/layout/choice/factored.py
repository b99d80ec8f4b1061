"""Layouts in which weights are OSFT factors: six names in the place of one, cut as `fully_shard` cuts them.

A traced layout has the factors from the model itself. In a declared one they stand for weights whose names say that
they are targets. Either way the source has dense weights, so they are what is compared with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from shardkit.core.factored import Target
from shardkit.keys.expressions import made_name
from shardkit.layout.layout import Layout, TensorLayout


def put_factors(
    layout: Layout, targets: Iterable[Target], placed: Mapping[str, TensorLayout], stored: Collection[str]
) -> Layout:
    """Return a layout with factors in the place of dense weights, whose sources it keeps.

    Args:
        layout: of dense weights.
        targets: which of them become factors.
        placed: the layout of each factor, by FQN.
        stored: names of the source's tensors.
    """
    targets = tuple(targets)
    six = {target.weight: tuple(target.shapes) for target in targets}
    names = [name for fqn in layout.tensors for name in six.get(fqn, (fqn,))]
    return replace(
        layout,
        tensors={name: placed[name] if name in placed else layout.tensors[name] for name in names},
        sources={
            **layout.sources,
            **{name: made_name(name, stored) for factors in six.values() for name in factors},
        },
        factored={target.path: target for target in targets},
    )


def put_dense(layout: Layout, targets: Iterable[Target]) -> Layout:
    """Return a traced layout with dense weights in the place of factors, to compare it with a source.

    Where the dense weights lie means nothing.
    """
    tensors = dict(layout.tensors)
    for target in targets:
        first, *_ = (tensors.pop(name) for name in list(target.shapes))
        shape = (target.rows, target.columns)
        tensors[target.weight] = replace(first, fqn=target.weight, shape=shape)
    return replace(layout, tensors=tensors)


def factors_below(factored: Mapping[str, Target], root: str) -> dict[str, Target]:
    """Return targets by path with `root` before every path."""
    return {root + path: replace(target, path=root + path) for path, target in factored.items()}
