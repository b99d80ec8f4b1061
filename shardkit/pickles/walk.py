"""Whether what a pickle describes can be walked through: of bounded size and depth, and not inside itself.

A few bytes can put one list into another a thousand times, and that one into a third; so size is that of the walk,
not of the memory.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from shardkit.pickles.interpreter import Refusal

MAX_NODES = 1 << 22
"""Values that somebody who walks through the result comes across."""
MAX_THINGS = 1 << 17
"""Of these, what is no plain data, such as tensors: much is kept of each."""
MAX_DEPTH = 100
CONTAINERS = (list, tuple, dict)

_SCALARS = frozenset({type(None), bool, int, float, str, bytes})


class _Size(NamedTuple):
    """Of a container and what is in it."""

    num_nodes: int
    num_things: int
    depth: int
    """Levels of containers."""


class _Visit:
    """A container that is being walked through."""

    __slots__ = ("container", "depth", "inner", "num_nodes", "num_things")

    def __init__(self, container: Any) -> None:
        values = container.values() if type(container) is dict else container
        others = [value for value in values if type(value) not in _SCALARS]
        inner = [value for value in others if type(value) in CONTAINERS]
        self.container, self.inner = container, inner
        self.num_things = len(others) - len(inner)
        self.num_nodes, self.depth = 1 + len(container) - len(inner), 1

    def add(self, size: _Size) -> None:
        """Count one of the containers inside."""
        self.num_nodes += size.num_nodes
        self.num_things += size.num_things
        self.depth = max(self.depth, size.depth + 1)


def check_walk(root: object, shared: Collection[int]) -> None:
    """Refuse what nobody should walk through: something inside itself, too deep, too large, or shared too often.

    Args:
        root: what the pickle describes.
        shared: ids of the containers that may be come across more than once; all others are not kept in mind.

    Raises:
        Refusal: says which.
    """
    if type(root) not in CONTAINERS:
        return
    sizes: dict[int, _Size] = {}  # of those that are shared and finished
    open_ids = {id(root)}
    visits = [_Visit(root)]
    num_steps = visits[0].num_nodes
    while visits:
        visit = visits[-1]
        if max(num_steps, visit.num_nodes) > MAX_NODES or visit.num_things > MAX_THINGS:
            raise Refusal(
                f"it describes more than {MAX_NODES} values, or more than {MAX_THINGS} that are no plain data"
            )
        if len(visits) + visit.depth - 1 > MAX_DEPTH:
            raise Refusal(f"what it describes is nested more than {MAX_DEPTH} levels deep")
        if not visit.inner:
            visits.pop()
            size = _Size(visit.num_nodes, visit.num_things, visit.depth)
            open_ids.discard(id(visit.container))
            if id(visit.container) in shared:
                sizes[id(visit.container)] = size
            if visits:
                visits[-1].add(size)
            continue
        child = visit.inner.pop()
        num_steps += 1
        if id(child) in open_ids:
            raise Refusal("what it describes contains itself")
        if id(child) in sizes:
            visit.add(sizes[id(child)])
            continue
        open_ids.add(id(child))
        visits.append(_Visit(child))
        num_steps += visits[-1].num_nodes
