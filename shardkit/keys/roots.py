"""Find the model's root in a checkpoint, and the names of its tensors below it.

The *root* is the prefix of the model's names, such as ("state_dict", "model"). It is determined in this order: the root
that the user names; the trainer's own root, or a path below it; the prefix below which most names and shapes are the
base's; without a base, the *keys* of the saved state dict, which are the paths of the dicts in it. Names alone do not
show whether `model.` is such a key or part of the model's own names, so a prefix stays unless it is proved to be a key.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from shardkit.core.catalog import TensorEntry
from shardkit.core.regions import Shape
from shardkit.core.text import count, escape, few, in_shell, suggestion
from shardkit.errors import SourceError, UsageError
from shardkit.keys.names import MODULE, PEFT, Segments, clean, is_number, join, split
from shardkit.keys.trainer_state import is_averaged, leaf_kind, object_kind, optimizer_names, optimizer_path

Path = tuple[str | int, ...]
Want = Mapping[str, Shape | None]
"""Name in the base -> shape; None for an unknown shape."""

MODEL_KEYS = ("model", MODULE, "state_dict", "model_state_dict")
"""Keys under which a model's state dict is saved. Only the first may also begin names on the Hub."""
_MAX_SHOWN = 20  # roots that an error lists
_MAX_DEPTH = 6  # of the roots that are suggested
_MAX_DOTS = 1000  # in a name, because every prefix of it is looked up
_MAX_LEVELS = 64  # above a model
_MIN_SHARE = 0.25  # of the names below a prefix; fused experts and renamed towers may not match


@dataclass(slots=True)
class NamePart:
    """The tensors whose names begin with one path."""

    stored: list[str] = field(default_factory=list)
    """Their stored names."""
    is_module: bool = False
    """True if a tensor's name is longer than the path; false if the path is a tensor's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SortedNames:
    """A checkpoint's names, sorted into those that may be weights and those of optimizers."""

    tensors: Mapping[str, TensorEntry]
    roots: Mapping[str, Path]
    """Meaning, such as "model" or "ema" -> path that has this meaning in the checkpoint's format."""
    optimizer: frozenset[str]
    """Stored names of optimizers' tensors."""
    paths: Mapping[str, Segments]
    """Stored name of each other tensor -> its path without the segments of wrappers."""
    keys: frozenset[Segments]
    """Paths of dicts in the saved state dict, as far as they are known."""
    has_keys: bool
    """True if the checkpoint records the keys."""
    trainer_levels: frozenset[Segments]
    """Paths that have an optimizer, a scheduler or the like as a child, whose path is not recorded as a key."""
    is_lightning: bool
    """True for the state dict of a LightningModule, in which the model is an attribute."""

    def below(self, level: Segments) -> dict[str, NamePart]:
        """Return next segment -> `NamePart` for the children of a path, in the order of the names."""
        children = dict[str, NamePart]()
        for stored, path in self.paths.items():
            if _is_below(path, level):
                child = children.setdefault(path[len(level)], NamePart())
                child.stored.append(stored)
                child.is_module |= len(path) > len(level) + 1
        return children

    def count_below(self, level: Segments) -> int:
        """Return the number of tensors below a path."""
        return sum(_is_below(path, level) for path in self.paths.values())

    def is_beside(self, path: Segments) -> bool:
        """True for a path whose last segment was chosen by a trainer, so that it may show that it is not the model.

        This is so for an entry of a saved dict, and for a child of a level that a trainer flattened.
        """
        return path in self.keys or path[:-1] in self.trainer_levels


@dataclass(slots=True, kw_only=True)
class Located:
    """The wanted tensors, and the decisions that led to them."""

    root: Segments
    names: dict[str, Segments] = field(default_factory=dict)
    """Stored name -> path below the root, without segments of wrappers."""
    aside: dict[Segments, str] = field(default_factory=dict)
    """Path -> kind of each part that was left out."""
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add(self, tensors: Iterable[tuple[str, Segments]]) -> None:
        """Add tensors, each as (stored name, path)."""
        for stored, path in tensors:
            self.names[stored] = path[len(self.root) :]


def read_source(
    tensors: Mapping[str, TensorEntry],
    objects: Collection[str],
    paths: Mapping[str, Path] | None,
    roots: Mapping[str, Path],
) -> SortedNames:
    """Sort a checkpoint's names. For the arguments see `select_model`.

    Raises:
        SourceError: a name has more than 1000 dots.
    """
    deep = [name for name in tensors if name.count(".") > _MAX_DOTS]
    SourceError.raise_for(
        list(map(escape, deep)),
        f"{count(len(deep), 'name')} of more than {_MAX_DOTS} dotted parts: no module is nested so deeply",
    )
    optimizer = optimizer_names(tensors.values(), objects)
    foreign = [_clean_path(path) for kind, path in roots.items() if kind.startswith("optimizer")]
    optimizer.update(name for name in tensors for prefix in foreign if clean(name)[: len(prefix)] == prefix)
    joined = _names_without_indexes(
        {name: path for name, path in (paths or {}).items() if name not in optimizer}
    )
    dicts = {path[:-1] for path in (paths or {}).values()}
    keys = {_clean_path(path[:stop]) for path in dicts for stop in range(1, len(path) + 1)}
    optimizers = {optimizer_path(name) for name in optimizer}
    states = optimizers | {path for name in objects if (path := _object_path(name))}
    return SortedNames(
        tensors=tensors,
        roots=roots,
        optimizer=frozenset(optimizer),
        paths={name: clean(joined.get(name, name)) for name in tensors if name not in optimizer},
        keys=frozenset(keys),
        has_keys=bool(paths),
        trainer_levels=frozenset(
            path[:-1] for path in (optimizers if paths else states) if path and path not in keys
        ),
        is_lightning=tuple(roots.get("model", ())) == ("state_dict",)
        # Lightning's Trainer alone numbers its optimizers in the state dict.
        or any(
            len(path) == 1 and path[0].startswith("optimizer_") and is_number(path[0][10:]) for path in states
        ),
    )


def _clean_path(path: Iterable[str | int]) -> Segments:
    return clean(join(map(str, path))) if path else ()


def _object_path(name: str) -> Segments:
    segments = clean(name)
    place = next((place for place, segment in enumerate(segments) if object_kind(segment)), None)
    return () if place is None else segments[: place + 1]


def _names_without_indexes(paths: Mapping[str, Path]) -> dict[str, str]:
    """Return names of tensors in a list of state dicts without the index in the list: "model.1.a" becomes "model.a".

    A process with several pipeline stages saves such a list, `{"model": [first, second]}`. If two names would become
    equal, the list contains several models, and their names stay.

    Args:
        paths: stored name -> path in the saved state dict.
    """
    lists = defaultdict[Path, dict[str, Path]](dict)
    for fqn, path in paths.items():
        place = next((place for place, key in enumerate(path) if isinstance(key, int)), 0)
        if place:
            lists[path[:place]][fqn] = path
    joined = dict[str, str]()
    for above, members in lists.items():
        names = {fqn: join(map(str, (*above, *path[len(above) + 1 :]))) for fqn, path in members.items()}
        places = {path[len(above)] for path in members.values()}
        is_of_dicts = len(places) > 1 and all(len(path) > len(above) + 1 for path in members.values())
        if is_of_dicts and above[-1] != "models" and len(set(names.values())) == len(names):
            joined |= names
    return joined


def locate_root(source: SortedNames, root: str) -> Located:
    """Return every tensor below a path that the user names.

    Raises:
        UsageError: no tensor is below it.
    """
    path = clean(root.strip(".")) if root.strip(".") else ()
    paths = source.paths
    if not source.count_below(path):
        paths = {name: clean(name) for name in source.tensors}  # the user may name an optimizer
    located = Located(root=path)
    located.add(item for item in paths.items() if _is_below(item[1], path))
    if not located.names:
        prefixes = {join(each[:depth]) for each in source.paths.values() for depth in range(1, _MAX_DEPTH)}
        raise UsageError(
            f"--root {escape(root)!r} is not in the checkpoint{suggestion(join(path), sorted(prefixes))}",
            problems=list_roots(source),
            hint="give one of these paths, or leave --root out to have the model found",
        )
    return located


def locate_top(source: SortedNames) -> Located:
    """Return all tensors but those that are evidently not the model's, without removing a prefix."""
    return _locate_below(source, (), {})


def locate_model(source: SortedNames, want: Want | None, start: Segments | None = None) -> Located:
    """Return the model's tensors: those that match the base best, else those that the saved dict's keys lead to.

    Args:
        source: the checkpoint's names.
        want: name in the base -> shape; None without a base.
        start: the path at or below which the model lies, instead of the trainer's own.

    Raises:
        SourceError: there are several models, and it is not clear which one is meant.
    """
    if start is None:
        start = _clean_path(source.roots.get("model", ()))
    way = _follow_keys(source, start, want or {})
    root = _match(source, start, want, way) if want else None
    if root is not None and root != way.located.root:
        return _locate_below(source, root, want or {})
    if way.several is not None:
        raise way.several
    if root is None and way.doubt:
        way.located.notes.append(way.doubt)
    way.located.add((stored, source.paths[stored]) for stored in way.model)
    return way.located


def locate_other(source: SortedNames, weights: str, want: Want | None) -> Located:
    """Return weights other than the model's, which the user names: a part that the format defines, or a path's end.

    Raises:
        UsageError: no part has that name, or several have.
        SourceError: as for `locate_model`.
    """
    if source.roots.get(weights):
        return locate_model(source, want, _clean_path(source.roots[weights]))
    ends, sizes = clean(weights), Counter[Segments]()
    for path in source.paths.values():
        stops = range(len(ends), len(path))
        stop = next((stop for stop in stops if path[stop - len(ends) : stop] == ends), None)
        if stop is not None:
            sizes[path[:stop]] += 1
    outermost = [path for path in sizes if len(path) == min(map(len, sizes))]
    if len(outermost) == 1:
        return locate_model(source, want, outermost[0])
    if outermost:
        raise UsageError(
            f"--weights {escape(weights)!r}: {len(outermost)} parts of the checkpoint have that name",
            problems=[f"{_path_text(path)}: {count(sizes[path], 'tensor')}" for path in outermost],
            hint=f"choose one, as in {root_option(outermost[0])}",
        )
    named = (path[-1] for path in _possible_roots(source, has_inside=False))
    choices = list(dict.fromkeys(("model", *(source.roots.keys() - {"optimizer"}), *named)))
    raise UsageError(
        f"--weights {escape(weights)!r}: the checkpoint has no weights of that name{suggestion(weights, choices)}",
        problems=list_roots(source),
        hint=f"give --weights {' or '.join(map(repr, choices[:_MAX_SHOWN]))}; --root takes a path",
    )


def list_roots(source: SortedNames) -> list[str]:
    """Return a line for each path that could be a root, up to a limit."""
    return [
        f"{_path_text(path)}: {count(number, 'tensor')}"
        for path, number in _possible_roots(source, has_inside=True).items()
    ][:_MAX_SHOWN]


def _possible_roots(source: SortedNames, *, has_inside: bool) -> dict[Segments, int]:
    """Return path -> number of tensors for the modules on the way to the model, and those next to it.

    Args:
        source: the checkpoint's names.
        has_inside: include the model's own children. If false, they are included only if the keys do not prove that
            they are the model's children.
    """
    start = _clean_path(source.roots.get("model", ()))
    way = _follow_keys(source, start, {})
    levels = [*(start[:depth] for depth in range(len(start))), *way.levels]
    if not has_inside and source.has_keys and way.several is None and not way.doubt:
        levels.pop()
    return {
        (*level, name): len(part.stored)
        for level in levels
        for name, part in source.below(level).items()
        if part.is_module
    }


@dataclass(slots=True, kw_only=True)
class _KeyWay:
    """The path from the start of the search down to the model, by the keys of the saved state dict."""

    levels: list[Segments] = field(default_factory=list)
    """The prefixes on the way; the last one is the model's root."""
    located: Located
    """The model's root, and the parts that were left out; without the model's tensors."""
    model: list[str] = field(default_factory=list)
    """Stored names of the model's tensors."""
    may_continue: bool = False
    """True if all names begin with one more segment, which may or may not be the model's own."""
    doubt: str = ""
    """Note for the user in case no base confirms the root."""
    several: SourceError | None = None
    """The error to raise if several models are next to each other at the end."""


def _follow_keys(source: SortedNames, start: Segments, want: Want) -> _KeyWay:
    """Descend to the model through keys of the saved dict, a LightningModule's attribute, and `module` of wrappers."""
    way = _KeyWay(located=Located(root=start))
    level, has_attribute, has_model_key = start, source.is_lightning, False
    for _ in range(_MAX_LEVELS):
        way.levels.append(level)
        way.located.root = level
        parts = _model_parts(source, level, way.located, want)
        modules = [name for name, part in parts.items() if part.is_module]
        only = modules[0] if len(parts) == len(modules) == 1 else None
        child = None
        if modules and all((*level, name) in source.keys for name in modules):
            words = [name for name in modules if name in MODEL_KEYS]
            child = words[0] if len(words) == 1 else only
            if child is None and (not has_model_key or all(map(is_number, modules))):
                way.several = _several_models_error(
                    {(*level, name): len(parts[name].stored) for name in modules}
                )
        elif only is not None and not _is_peft(source, (*level, only)):
            has_others = level in source.trainer_levels or any(
                path[:-1] == level for path in way.located.aside
            )
            if only in MODEL_KEYS[1:] or (has_others and not source.has_keys):
                child = only
            elif has_attribute:
                child, has_attribute = only, False
        way.model = [stored for part in parts.values() for stored in part.stored]
        if child is None:
            break
        has_model_key |= child in MODEL_KEYS
        _leave_out(way.located, level, {name: part for name, part in parts.items() if name != child}, child)
        level = (*level, child)
    if only and not (source.has_keys or "model" in source.roots or _is_peft(source, (*level, only))):
        way.may_continue = True
        way.doubt = (
            f"every name begins with {_path_text((*level, only))}, which may or may not be the model's own: it was kept; "
            f"{root_option((*level, only))} or --base MODEL decides it"
        )
    elif has_attribute and len(modules) > 1 and way.several is None:
        way.doubt = (
            f"all of the LightningModule was taken: {_sizes(level, parts)}; {root_option((*level, modules[0]))} takes one "
            "attribute alone"
        )
    return way


def _leave_out(located: Located, level: Segments, parts: Mapping[str, NamePart], model: str) -> None:
    if parts:
        located.notes.append(
            f"took {_path_text((*level, model))} as the model; left out beside it: {_sizes(level, parts)}"
        )
    located.aside |= {(*level, name): "other weights" for name in parts}


def _sizes(level: Segments, parts: Mapping[str, NamePart]) -> str:
    return few([f"{_path_text((*level, name))} ({len(part.stored)})" for name, part in parts.items()], 5)


def _is_peft(source: SortedNames, path: Segments) -> bool:
    return (path[-1], *source.below(path)) == PEFT


def _model_parts(source: SortedNames, level: Segments, located: Located, want: Want) -> dict[str, NamePart]:
    """Return the children of a level that may be the model's, and note the others in `located.aside`."""
    parts = source.below(level)
    modules = [name for name, part in parts.items() if part.is_module]
    most = max((len(part.stored) for part in parts.values()), default=0)
    has_keys_only = bool(modules) and all((*level, name) in source.keys for name in modules)
    is_average = parts.keys() == {MODULE, "n_averaged"}  # torch's AveragedModel

    def kind_of(path: Segments, part: NamePart) -> str | None:
        is_beside = source.is_beside(path)
        if part.is_module:
            if is_averaged(path[-1]) and (is_beside or 2 * len(part.stored) >= most):
                return "averaged weights"
            return object_kind(path[-1]) if is_beside else None
        if is_average:
            return "trainer state"
        if not has_keys_only and level not in source.trainer_levels:
            return None
        return leaf_kind(path[-1], source.tensors[part.stored[0]], has_trainers_name=not has_keys_only)

    for name, part in list(parts.items()):
        kind = kind_of(path := (*level, name), part)
        in_model = (join(source.paths[stored][len(level) :]) for stored in part.stored)
        if kind is not None and not any(inner in want for inner in in_model):
            located.aside[path] = kind
            del parts[name]
    return parts


def _several_models_error(models: Mapping[Segments, int]) -> SourceError:
    return SourceError(
        f"the checkpoint holds {len(models)} models, and nothing tells which one is meant",
        problems=[f"{_path_text(path)}: {count(number, 'tensor')}" for path, number in models.items()],
        hint=f"choose one, as in {root_option(next(iter(models)))}; --root '' takes everything as it stands",
    )


class _Prefixes(NamedTuple):
    """The prefixes before a common end of a stored name and a name in the base."""

    stored: Segments
    """Prefix of the stored name."""
    base: Segments
    """Prefix of the base's name."""


def _match(source: SortedNames, start: Segments, want: Want, way: _KeyWay) -> Segments | None:
    """Return the prefix below which most names and shapes are the base's; None if too few are.

    The base's names may be longer, such as a text model's names in a larger model. Averaged weights do not count.

    Args:
        source: the checkpoint's names.
        start: path with which the prefix begins.
        want: name in the base -> shape.
        way: the result of `_follow_keys`. Its root is used if names below the prefix are not simply the base's.

    Raises:
        SourceError: two prefixes match equally well.
    """
    matches = _matches(source, start, want)
    counts = Counter(prefixes for tensor in matches.values() for prefixes in tensor)
    best = _best_prefixes(counts)
    if not best:
        return None
    keys_root = way.located.root
    prefixes = best.get(keys_root) or min(best.values(), key=lambda prefixes: len(prefixes.stored))
    root, most = prefixes.stored, counts[prefixes]
    if most < _MIN_SHARE * (len(way.model) if prefixes.base else source.count_below(root)):
        return None
    ties = sorted(tie for tie in best if len(tie) == len(root))
    if len(ties) > 1 and root != keys_root:
        raise _several_models_error({tie: source.count_below(tie) for tie in ties})
    if prefixes.base or _most_elsewhere(source, matches, prefixes) >= _MIN_SHARE * most:
        # The names are those of a model in memory, and the base has parts of it under other prefixes.
        if way.may_continue:
            return _common_prefix(
                [min(tensor, key=lambda each: len(each.stored)).stored for tensor in matches.values()]
            )
        is_all = source.count_below(root) == source.count_below(keys_root)
        return keys_root if way.several is None and _is_below(root, keys_root) and not is_all else root
    depths = range(len(start), len(root))
    outer = next((root[:depth] for depth in depths if counts[_Prefixes(root[:depth], ())]), root)
    return outer[:-2] if outer[-2:] == PEFT else outer  # PEFT's segments stay, as they mark adapters


def _matches(source: SortedNames, start: Segments, want: Want) -> dict[str, set[_Prefixes]]:
    """Return stored name -> pairs of prefixes, one for each end that a name of the base with an equal shape has too."""
    ends = defaultdict[Segments, list[tuple[Segments, Shape | None]]](list)
    for name, shape in want.items():
        path = split(name)
        for depth, segment in enumerate(path):
            ends[path[depth:]].append((path[:depth], shape))
            if is_number(segment):  # a model's root is never inside a layer
                break
    matches = defaultdict[str, set[_Prefixes]](set)
    for stored, path in source.paths.items():
        if not _is_below(path, start) or any(map(is_averaged, path[len(start) : len(start) + 2])):
            continue
        stored_shape = tuple(source.tensors[stored].shape)
        for depth in range(len(start), len(path)):
            for before, shape in ends.get(path[depth:], ()):
                if shape is None or tuple(shape) == stored_shape:
                    matches[stored].add(_Prefixes(path[:depth], before))
    return matches


def _best_prefixes(counts: Mapping[_Prefixes, int]) -> dict[Segments, _Prefixes]:
    """Return stored prefix -> pair, for the pairs with the most matches; of equal renamings only the outermost."""
    most = max(counts.values(), default=0)
    best = dict[Segments, _Prefixes]()
    for each in sorted(counts, key=lambda each: (len(each.stored), len(each.base), each)):
        is_inside = any(
            _is_below(each.stored, outer.stored)
            and each.base == outer.base + each.stored[len(outer.stored) :]
            for outer in best.values()
        )
        if counts[each] == most and each.stored not in best and not is_inside:
            best[each.stored] = each
    return best


def _most_elsewhere(source: SortedNames, matches: Mapping[str, set[_Prefixes]], best: _Prefixes) -> int:
    """Return the largest number of tensors that match under another prefix, and not a name that `best` matches."""

    def base_name(stored: str, prefixes: _Prefixes) -> Segments:
        return prefixes.base + source.paths[stored][len(prefixes.stored) :]

    matched = {base_name(stored, best) for stored, tensor in matches.items() if best in tensor}
    counts = Counter(
        each
        for stored, tensor in matches.items()
        if best not in tensor
        for each in tensor
        if base_name(stored, each) not in matched
    )
    return max(counts.values(), default=0)


def _common_prefix(paths: list[Segments]) -> Segments:
    first, last = min(paths), max(paths)
    same = (depth for depth in range(len(first)) if first[: depth + 1] != last[: depth + 1])
    return first[: next(same, len(first))]


def _is_below(path: Segments, root: Segments) -> bool:
    return len(path) > len(root) and path[: len(root)] == root


def _locate_below(source: SortedNames, root: Segments, want: Want) -> Located:
    """Return all tensors below a path but those that are evidently not the model's."""
    located = Located(root=root)
    parts = _model_parts(source, root, located, want).values()
    located.add((stored, source.paths[stored]) for part in parts for stored in part.stored)
    return located


def _path_text(path: Segments) -> str:
    return escape(join(path))


def root_option(path: Segments) -> str:
    """Return the option that selects the tensors below a path, quoted for a shell."""
    return f"--root {in_shell(join(path))}"
