"""Which tensors are asked for, and their names below the place where they begin."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from shardkit.core.catalog import TensorEntry
from shardkit.core.text import count, escape, suggestion
from shardkit.errors import SourceError, UsageError
from shardkit.keys.base import match_prefix
from shardkit.keys.groups import is_averaged, kind_beside, object_kind, optimizer_names, optimizer_path
from shardkit.keys.names import PEFT, Segments, clean, is_number, join, split
from shardkit.keys.roots import Root, find_root
from shardkit.keys.tree import Node, build_tree

Path = tuple[str | int, ...]
_MAX_DEPTH = 6  # of roots that are suggested
_MAX_DOTS = 1000  # every part of a name is a node that knows its path


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A checkpoint's names, sorted into what may be weights and what is not."""

    tensors: Mapping[str, TensorEntry]
    paths: Mapping[str, Path] | None
    roots: Mapping[str, Path]
    """As the layout gives them."""
    optimizer: frozenset[str]
    """Tensors of optimizers."""
    harness: frozenset[Segments]
    """Levels that hold an optimizer, a scheduler or the like."""
    is_lightning: bool
    """A LightningModule's state dict: the model is an attribute."""
    tree: Node
    """Of every tensor that is not an optimizer's."""


@dataclass(slots=True, kw_only=True)
class Located:
    """The tensors that were asked for."""

    root: Segments
    names: dict[str, Segments] = field(default_factory=dict)
    """Stored name -> path below the root, without segments of wrappers."""
    aside: dict[Segments, str] = field(default_factory=dict)
    """What was told apart on the way, and what it is."""
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def read_source(
    tensors: Mapping[str, TensorEntry],
    objects: Collection[str],
    paths: Mapping[str, Path] | None,
    roots: Mapping[str, Path],
) -> Source:
    """Sort a checkpoint's names; see `select_model` for the arguments.

    Raises:
        SourceError: names of absurdly many parts.
    """
    deep = [name for name in tensors if name.count(".") > _MAX_DOTS]
    if deep:
        raise SourceError(
            f"{count(len(deep), 'name')} of more than {_MAX_DOTS} dotted parts: no module is nested so deep",
            problems=map(escape, deep),
        )
    optimizer = optimizer_names(tensors.values())
    foreign = [clean(join(map(str, path))) for kind, path in roots.items() if kind not in ("model", "ema")]
    for prefix in foreign:
        optimizer.update(name for name in tensors if clean(name)[: len(prefix)] == prefix)
    harness, is_lightning = set[Segments](), False
    for path in {optimizer_path(name) for name in optimizer} | {_object_path(name) for name in objects}:
        if path:
            harness.add(path[:-1])
            # Lightning's Trainer alone numbers its optimizers in the state dict.
            is_lightning |= len(path) == 1 and path[0].startswith("optimizer_") and is_number(path[0][10:])
    is_lightning |= tuple(roots.get("model", ())) == ("state_dict",)
    return Source(
        tensors=tensors,
        paths=paths,
        roots=roots,
        optimizer=frozenset(optimizer),
        harness=frozenset(harness),
        is_lightning=is_lightning,
        tree=build_tree((entry for name, entry in tensors.items() if name not in optimizer), paths),
    )


def _object_path(name: str) -> Segments:
    segments = split(name)
    at = next((at for at, segment in enumerate(segments) if object_kind(segment)), None)
    return () if at is None else segments[: at + 1]


def locate_root(source: Source, root: str) -> Located:
    """Return every tensor below a path that was asked for by name.

    Raises:
        UsageError: there is nothing below it.
    """
    path = clean(root.strip(".")) if root.strip(".") else ()
    node = source.tree.find(path)
    if node is None or not node.num_tensors:
        node = build_tree(source.tensors.values()).find(path)  # an optimizer's, if somebody wants that
    if node is None or not (node.is_module or not path):
        known = sorted(
            {join(found[:depth]) for found in _all_paths(source) for depth in range(1, _MAX_DEPTH)}
        )
        raise UsageError(
            f"--root {escape(root)!r} is not in the checkpoint{suggestion(join(path), known)}",
            problems=list_roots(source),
        )
    located = Located(root=path)
    _take(located, [node])
    return located


def locate_top(source: Source) -> Located:
    """Return every tensor that is not told apart at the top, for prefixes that a person strips."""
    located = Located(root=())
    _take(located, _beside(source, source.tree, located))
    return located


def locate_model(source: Source, base: Collection[str] | None) -> Located:
    """Return the model's tensors: what matches the base's names best, else what the structure shows."""
    start = source.tree
    if "model" in source.roots:
        found = start.find(clean(join(map(str, source.roots["model"])))) if source.roots["model"] else start
        start = found or Node(path=())
    if base:
        names = [
            path
            for path, _ in start.tensors()
            if not any(is_averaged(s) for s in path[: len(start.path) + 2])
        ]
        prefix = match_prefix(names, base)
        if prefix is not None and prefix[-2:] == PEFT:
            prefix = prefix[:-2]  # what tells adapters from weights of their own stays in the names
        node = source.tree.find(prefix) if prefix is not None else None
        if node is not None and node.path[: len(start.path)] == start.path:
            located = Located(root=node.path)
            _take(located, _beside(source, node, located))
            return located
    return _from_root(_structural(source, start))


def locate_averaged(source: Source, base: Collection[str] | None) -> Located:
    """Return the averaged weights (EMA), under the names that the model's tensors have.

    Raises:
        UsageError: there are none, or several.
        SourceError: they are kept as a list, without names.
    """
    model = locate_model(source, base)
    node = _averaged_node(source, model)
    while True:
        # What ema-pytorch and torch's AveragedModel keep: the averaged copy, counters, the online model.
        inner = [child for child in node.children.values() if child.is_module and is_averaged(child.path[-1])]
        if not inner:
            break
        node = inner[0]
    tensors = list(node.tensors())
    if all(is_number(segment) for path, _ in tensors for segment in path[len(node.path) :]):
        raise SourceError(
            f"the averaged weights under {escape(join(node.path))} are a list of {len(tensors)} tensors without "
            "names: which parameter each belongs to is known only to the model's code",
            hint="load them with the training code and save the averaged model's state dict",
        )
    located = Located(root=node.path, aside={model.root: "model"} if model.names and model.root else {})
    if _take_dotless(located, node, model):
        return located
    known = {join(path) for path in model.names.values()}
    prefix = match_prefix([path[len(node.path) :] for path, _ in tensors], known)
    if prefix is not None:
        found = node.find(prefix)
        assert found is not None
        located.root = found.path
        _take(located, _beside(source, found, located))
        return located
    return _from_root(_structural(source, node))


def locate_other(source: Source, weights: str) -> Located:
    """Return the weights that the layout, or the checkpoint itself, knows under some other name.

    Raises:
        UsageError: nothing is called so.
    """
    if source.roots.get(weights):
        return locate_root(source, join(map(str, source.roots[weights])))
    model = locate_model(source, None)
    nodes = [node for path in model.aside if (node := source.tree.find(path)) is not None]
    nodes += _on_the_way(source, model.root)
    for node in nodes:
        if node.path[-1] == weights and node.is_module:
            return _from_root(_structural(source, node))
    known = [node.path[-1] for node in nodes]
    raise UsageError(
        f"--weights {escape(weights)!r}: the checkpoint has no weights of that name{suggestion(weights, known)}",
        problems=list_roots(source),
    )


def list_roots(source: Source) -> list[str]:
    """Return a line for each path that has something below it and could be a root, at most a few."""
    lines = []
    for node in source.tree.children.values():
        lines.append(f"{escape(join(node.path))}: {count(node.num_tensors, 'tensor')}")
        if len(node.children) <= 4:
            lines += [
                f"{escape(join(child.path))}: {count(child.num_tensors, 'tensor')}"
                for child in node.children.values()
                if child.is_module
            ]
    return lines[:20]


def _all_paths(source: Source) -> list[Segments]:
    return [path for path, _ in source.tree.tensors()]


def _structural(source: Source, start: Node) -> Root:
    return find_root(
        source.tree,
        start,
        harness=source.harness,
        is_lightning=source.is_lightning,
        knows_dicts=source.paths is not None,
    )


def _from_root(found: Root) -> Located:
    located = Located(root=found.node.path, notes=found.notes, warnings=found.warnings)
    located.aside = {node.path: kind or "other weights" for node, kind in found.aside}
    _take(located, found.parts)
    return located


def _take(located: Located, parts: Collection[Node]) -> None:
    for part in parts:
        for path, entry in part.tensors():
            located.names[entry.fqn] = path[len(located.root) :] or path[-1:]


def _beside(source: Source, node: Node, located: Located) -> list[Node]:
    """Return the children of a level that is the model's, without what stands beside it."""
    parts, children = [], list(node.children.values())
    for child in children:
        kind = kind_beside(child, siblings=children, is_dict=False, is_harness=node.path in source.harness)
        if kind is None:
            parts.append(child)
        else:
            located.aside[child.path] = kind
    return parts


def _on_the_way(source: Source, root: Segments) -> list[Node]:
    """Return everything on the levels above a root, those that lead to it included."""
    levels = [source.tree.find(root[:depth]) for depth in range(len(root))]
    return [child for level in levels if level is not None for child in level.children.values()]


def _averaged_node(source: Source, model: Located) -> Node:
    if source.roots.get("ema"):
        paths = [clean(join(map(str, source.roots["ema"])))]
    else:
        beside = [node.path for node in _on_the_way(source, model.root) if is_averaged(node.path[-1])]
        paths = [path for path, kind in model.aside.items() if kind == "averaged weights"]
        paths += [path for path in beside if path not in paths and path != model.root[: len(path)]]
    nodes = [node for path in paths if (node := source.tree.find(path)) is not None and node.num_tensors]
    if not nodes:
        raise UsageError(
            "--weights ema: the checkpoint holds no averaged weights", problems=list_roots(source)
        )
    if len(nodes) > 1:
        raise UsageError(
            f"--weights ema: the checkpoint holds {len(nodes)} sets of averaged weights",
            problems=[f"{escape(join(node.path))}: {node.num_tensors} tensors" for node in nodes],
            hint=f"choose one, as in --root {escape(join(nodes[0].path))}",
        )
    return nodes[0]


def _take_dotless(located: Located, node: Node, model: Located) -> bool:
    """Take averaged weights stored as buffers, whose names cannot have dots: the model's names without them."""
    by_dotless = {join(path).replace(".", ""): path for path in model.names.values()}
    found = {
        child.entries[0].fqn: by_dotless[segment]
        for segment, child in node.children.items()
        if child.entries and segment in by_dotless
    }
    if 2 * len(found) <= len(node.children) or any(len(path) == 1 for path in found.values()):
        return False
    located.names.update(found)
    located.notes.append(
        f"{len(found)} averaged weights are stored without dots; their names are the model's"
    )
    return True
