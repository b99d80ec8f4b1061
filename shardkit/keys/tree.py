"""Names as the tree of modules that they came from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from shardkit.core.catalog import TensorEntry
from shardkit.keys.names import Segments, clean, is_number, join


@dataclass(slots=True, kw_only=True)
class Node:
    """A module, a dict of a state dict, or a tensor."""

    path: Segments
    children: dict[str, Node] = field(default_factory=dict)
    """In the order in which they were first seen."""
    entries: list[TensorEntry] = field(default_factory=list)
    """The tensors of exactly this name: one, but where a wrapped and a plain spelling both exist."""
    num_tensors: int = 0
    """At and below this node."""
    num_elements: int = 0
    """Of all tensors at and below it."""
    is_dict: bool = False
    """The checkpoint says that it was a dict of the state dict that was saved, not a module."""

    @property
    def is_container(self) -> bool:
        """True for a list of modules: all its children are numbered."""
        return bool(self.children) and not self.entries and all(map(is_number, self.children))

    @property
    def is_module(self) -> bool:
        """True where there is something below it."""
        return bool(self.children)

    def find(self, path: Iterable[str]) -> Node | None:
        """Return the node at a path below this one."""
        node: Node | None = self
        for segment in path:
            if node is None:
                return None
            node = node.children.get(segment)
        return node

    def tensors(self) -> Iterator[tuple[Segments, TensorEntry]]:
        """Yield every tensor at and below this node with its path from the top."""
        stack = [self]
        while stack:
            node = stack.pop()
            for entry in node.entries:
                yield node.path, entry
            stack.extend(reversed(node.children.values()))


def build_tree(
    entries: Iterable[TensorEntry], paths: Mapping[str, tuple[str | int, ...]] | None = None
) -> Node:
    """Return the tree of some tensors' names, without the segments of wrappers.

    Args:
        entries: the tensors, under their stored names.
        paths: of each name in the state dict that was saved, where that is known.
    """
    top, dicts = Node(path=()), set[tuple[str | int, ...]]()
    for entry in entries:
        segments = clean(entry.fqn)
        node = top
        node.num_tensors, node.num_elements = node.num_tensors + 1, node.num_elements + entry.num_elements
        for depth, segment in enumerate(segments, 1):
            child = node.children.get(segment)
            if child is None:
                child = node.children[segment] = Node(path=segments[:depth])
            node = child
            node.num_tensors += 1
            node.num_elements += entry.num_elements
        node.entries.append(entry)
        path = paths.get(entry.fqn) if paths else None
        if path is not None:
            dicts.add(path[:-1])
    for path in dicts:
        for stop in range(1, len(path) + 1):
            found = top.find(clean(join(map(str, path[:stop]))))
            if found is not None:
                found.is_dict = True
    return top
