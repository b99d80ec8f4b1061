"""Rename a model's names in memory to its base's names, by changes of prefixes that are found from names and shapes.

For a vision model, transformers builds `model.language_model.layers.0...` and `model.visual...`, and the Hub
stores `model.layers.0...` and `visual...`. The search treats the names as a tree and starts at the top. A *level* is
the set of names below one prefix. If the base has all tensors of a level below one other prefix, this is one rule. If
not, each part of the level is searched separately. A rule changes neither the ends of names nor their numbers, and
shapes must be equal.

Names that both sides have are assumed to be the same tensors. If several renamings fit, none is used.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from shardkit.core.regions import Shape
from shardkit.keys.names import Segments, is_number, join, natural, split
from shardkit.keys.ties import tied_names

# Buffers that today's models compute and files need not have: rotary frequencies, positions, causal masks,
# sinusoids. Files of transformers before 4.3x have them, some once for each layer.
_COMPUTED = re.compile(
    r"(?:^|\.)(?:rotary_emb\.inv_freq|position_ids|masked_bias|causal_mask|embed_positions\.weights)$"
)
_MASK = re.compile(r"(?:^|\.)(?:attn|attention|self_attention)\.bias$")
_MASK_NDIM = 4
_MODERN = {"gamma": "weight", "beta": "bias"}

_MAX_TRIES = 1_000_000  # candidates to compare; real models need a few hundred


def is_computed(name: str, shape: Shape) -> bool:
    """True for a buffer of old files that every model computes itself."""
    return bool(_COMPUTED.search(name) or (len(shape) == _MASK_NDIM and _MASK.search(name)))


def modern_name(name: str) -> str:
    """Return the name as which transformers reads an old name: the first BERTs' gamma and beta are weight and bias.

    Source: transformers 5.23, conversion_mapping, "legacy".
    """
    return re.sub(r"(?<=LayerNorm\.)(?:gamma|beta)$", lambda match: _MODERN[match[0]], name)


class KeyRule(NamedTuple):
    """A change of names: one prefix is replaced by another, e.g. "model.visual." by "visual."."""

    old: str
    """The prefix, with a dot at its end, or empty. Without a dot at the end it is one whole name."""
    new: str
    """The replacement, in the same form."""
    num_names: int
    """Number of names that the rule changes."""


class _PrefixGroup(NamedTuple):
    """Names below one prefix, and the prefixes that may replace it."""

    names: tuple[Segments, ...]
    old: Segments
    targets: list[Segments]
    is_copy: bool
    """The names are all of copies of tied tensors, which the base may lack."""


class _NoRenaming(Exception):
    """No renaming by prefixes fits."""


def rename_to_base(
    shapes: Mapping[str, Shape], base: Mapping[str, Shape], *, is_part: bool = False
) -> dict[str, str] | None:
    """Find the renaming that turns a model's names into those of its base, one to one and with equal shapes.

    Either side may lack a copy of a tied tensor.

    Args:
        shapes: name in the model -> shape.
        base: name in the base -> shape.
        is_part: the model may be a part of the base, below one other prefix. The base then has further tensors. Names
            that both have stay.

    Returns:
        Name -> the base's name, for names that change. It is empty if both sides are equal or no prefixes fit, and None
        if several renamings fit.
    """
    sides = _NamesOfSides(shapes, base)
    if not sides.may_fit(is_part=is_part):
        return {}
    try:
        groups = [group for group in _groups(sides) if not (is_part and group.is_copy)]
        if is_part and (len(groups) != 1 or len(groups[0].names) == 1):  # one tensor may fit anywhere
            return {}
        chosen = _choose(sides, groups)
    except _NoRenaming:
        return {}
    if chosen is None:
        return None
    names = {
        join(path): join((*new, *path[len(group.old) :])) for group, new in chosen for path in group.names
    }
    outputs = {names.get(name, name) for name in shapes}
    is_whole = is_part or outputs >= base.keys() - sides.base_copies
    return names if is_whole and len(outputs) == len(shapes) else {}


def find_rules(names: Mapping[str, str]) -> tuple[KeyRule, ...]:
    """Return rules that make exactly the given changes of names.

    Args:
        names: old name -> new name, including names that do not change.

    Returns:
        Rules in natural order. At most one rule applies to each name.
    """
    rules = list[KeyRule]()

    def whole(level: list[Segments], depth: int) -> bool:
        prefixes = {_new_prefix(path[depth:], split(names[join(path)])) for path in level}
        new = prefixes.pop()
        if prefixes or new is None:
            return False
        if new != level[0][:depth]:
            rules.append(KeyRule(_prefix(level[0][:depth]), _prefix(new), len(level)))
        return True

    def single(path: Segments) -> None:
        name = join(path)
        if names[name] != name:
            rules.append(KeyRule(name, names[name], 1))

    if not any(name.endswith(".") for name in names):  # such a name would look like a prefix
        _walk(map(split, names), whole, single)
    return tuple(sorted(rules, key=lambda rule: natural(rule.old)))


def apply_key_rules(rules: Iterable[KeyRule], names: Mapping[str, str]) -> dict[str, str]:
    """Return names changed by rules, or unchanged if a name would become empty or equal to another.

    Args:
        rules: rules from `find_rules`.
        names: any key -> name in a model.
    """
    by_prefix, changed = {rule.old: rule.new for rule in rules}, dict(names)
    for key, name in names.items():
        stops = [0, *(place for place, letter in enumerate(name, 1) if letter == "."), len(name)]
        old = next((name[:stop] for stop in stops if name[:stop] in by_prefix), None)
        if old is not None:
            changed[key] = by_prefix[old] + name[len(old) :]
            if not changed[key]:
                return dict(names)
    return changed if len(set(changed.values())) == len(changed) else dict(names)


class _NamesOfSides:
    """The names of both sides of a renaming, with an index of the base's names by `_kind`."""

    def __init__(self, shapes: Mapping[str, Shape], base: Mapping[str, Shape]) -> None:
        self.shapes, self.base = shapes, base
        self.our_copies = frozenset(name for name, _, _ in tied_names(shapes))
        self.base_copies = frozenset(name for name, _, _ in tied_names(base))
        self.unmatched = {name for name in shapes if name not in base}
        self.free = {name for name in base if name not in shapes}
        self._by_kind: dict[object, list[Segments]] = {}
        self._tries = 0
        for name in sorted(self.free):
            kind = _kind(name, base[name], name in self.base_copies)
            self._by_kind.setdefault(kind, []).append(split(name))

    def may_fit(self, *, is_part: bool) -> bool:
        """True if both sides have equally many unmatched tensors of each kind, or the model fewer if it is a part.

        This quick check comes before the search.
        """
        if not self.unmatched or not self.free or any(name.endswith(".") for name in self.unmatched):
            return False
        if any(
            tuple(self.base[name]) != tuple(self.shapes[name]) for name in self.shapes.keys() - self.unmatched
        ):
            return False
        kinds = Counter(_kind(name, self.shapes[name], False) for name in self.unmatched - self.our_copies)
        base_kinds = Counter(_kind(name, self.base[name], False) for name in self.free - self.base_copies)
        return kinds == base_kinds or (is_part and kinds <= base_kinds)

    def targets(self, level: Sequence[Segments], depth: int) -> list[Segments]:
        """Return each prefix of the base below which it has all names of a level.

        Args:
            level: the model's names, which share a prefix.
            depth: number of segments of that prefix.
        """
        first = next((path for path in level if join(path) not in self.our_copies), level[0])
        name, rest = join(first), first[depth:]
        fitting = []
        for candidate in self._by_kind.get(_kind(name, self.shapes[name], name in self.our_copies), ()):
            self._tries += 1
            if self._tries > _MAX_TRIES:
                raise _NoRenaming
            if candidate[len(candidate) - len(rest) :] == rest:
                new = candidate[: len(candidate) - len(rest)]
                if all(self._fits(path, (*new, *path[depth:])) for path in level):
                    fitting.append(new)
        return fitting

    def _fits(self, path: Segments, target: Segments) -> bool:
        self._tries += 1
        name, target_name = join(path), join(target)
        if target_name not in self.free:
            return name in self.our_copies and target_name not in self.base
        return tuple(self.shapes[name]) == tuple(self.base[target_name])


def _kind(name: str, shape: Shape, is_copy: bool) -> object:
    """Return the properties of a tensor that no renaming changes: end of the name, its numbers, shape, `is_copy`."""
    path = split(name)
    return path[-1], tuple(filter(is_number, path)), tuple(shape), is_copy


def _groups(sides: _NamesOfSides) -> list[_PrefixGroup]:
    """Divide the names that change into the largest groups that can be renamed by one change of prefix each.

    Raises:
        _NoRenaming: no change of prefix fits one of the tensors.
    """
    groups = list[_PrefixGroup]()

    def whole(level: list[Segments], depth: int) -> bool:
        names = set(map(join, level))
        if names.isdisjoint(sides.unmatched):
            return True
        targets = sides.targets(level, depth) if names <= sides.unmatched else []
        if targets:
            is_copy = names <= sides.our_copies
            groups.append(_PrefixGroup(tuple(level), level[0][:depth], targets, is_copy))
        return bool(targets)

    def single(path: Segments) -> None:
        name = join(path)
        if name not in sides.unmatched:
            return
        targets, is_copy = sides.targets([path], len(path) - 1), name in sides.our_copies
        if not targets and not is_copy:
            raise _NoRenaming
        groups.append(_PrefixGroup((path,), path[:-1], targets, is_copy))

    _walk(map(split, sides.shapes), whole, single)
    return groups


def _choose(
    sides: _NamesOfSides, groups: Sequence[_PrefixGroup]
) -> list[tuple[_PrefixGroup, Segments]] | None:
    """Choose the new prefix of each group, by elimination; return None if several choices remain.

    Raises:
        _NoRenaming: two groups would need the same names of the base.
    """
    taken_places, chosen = set[str](), list[tuple[_PrefixGroup, Segments]]()
    for of_copies in (False, True):  # copies get the names that the others leave
        pending = [group for group in groups if group.is_copy == of_copies]
        while pending:
            waiting = []
            for group in pending:
                open_to = [
                    new for new in group.targets if taken_places.isdisjoint(_names_in_base(sides, group, new))
                ]
                if not open_to and not of_copies:
                    raise _NoRenaming
                if len(open_to) > 1:
                    waiting.append(group)
                elif open_to:
                    taken_places.update(_names_in_base(sides, group, open_to[0]))
                    chosen.append((group, open_to[0]))
            if len(waiting) == len(pending):
                return None
            pending = waiting
    return chosen


def _names_in_base(sides: _NamesOfSides, group: _PrefixGroup, new: Segments) -> set[str]:
    """Return the unmatched names of the base that a group would get with a new prefix."""
    return {join((*new, *path[len(group.old) :])) for path in group.names} & sides.free


def _walk(
    paths: Iterable[Segments],
    whole: Callable[[list[Segments], int], bool],
    single: Callable[[Segments], None],
) -> None:
    """Visit names as a tree from the top: first each level as a whole, then its parts if necessary.

    Args:
        paths: names in segments.
        whole: called with the names of a level and the length of their prefix; returns True if the level's parts need
            no visit.
        single: called with each tensor that lies directly on a level for which `whole` returned False.
    """
    stack = [(sorted(paths), 0)]
    while stack:
        level, depth = stack.pop()
        if not level or whole(level, depth):
            continue
        parts: dict[str, list[Segments]] = {}
        for path in level:
            if len(path) == depth + 1:
                single(path)
            else:
                parts.setdefault(path[depth], []).append(path)
        stack.extend((part, depth + 1) for part in parts.values())


def _new_prefix(rest: Segments, new: Segments) -> Segments | None:
    """Return the prefix that turns the end `rest` of a name into the name `new`; None if `new` has another end."""
    start = len(new) - len(rest)
    return new[:start] if start >= 0 and new[start:] == rest else None


def _prefix(path: Segments) -> str:
    return join(path) + "." if path else ""


class HubNames(NamedTuple):
    """The names of a model's tensors on the Hub."""

    names: dict[str, str]
    """Stored name -> name on the Hub."""
    rules: tuple[KeyRule, ...]
    """The changes from names in memory to names on the Hub."""
    warnings: tuple[str, ...] = ()


def name_as_hub(
    live: Mapping[str, str],
    shapes: Mapping[str, Shape],
    key_rules: Sequence[KeyRule] | None,
    base: Mapping[str, Shape] | None,
    *,
    is_part: bool = False,
) -> HubNames:
    """Return the Hub's name of every tensor, by recorded rules and by the base's names and shapes.

    Args:
        live: stored name -> name in memory.
        shapes: stored name -> shape, for all tensors.
        key_rules: recorded rules, or None.
        base: name in the base -> shape, or None.
        is_part: the model may be a part of the base.
    """
    names, is_ambiguous = dict(live), False
    if len(set(names.values())) == len(names):  # else the caller refuses the names
        names = apply_key_rules(key_rules or (), names)
        if base is not None:
            names, is_ambiguous = _rename_as_base(names, shapes, base, is_part=is_part)
    warning = (
        "the names are not the base's, and several renamings of prefixes would make them so: they were left as they "
        "are; choose one with --rename"
    )
    return HubNames(
        names=names,
        rules=find_rules({name: names[stored] for stored, name in live.items()}) if names != live else (),
        warnings=(warning,) if is_ambiguous else (),
    )


def name_part(
    names: Mapping[str, str], shapes: Mapping[str, Shape], larger_models: Iterable[Mapping[str, Shape]]
) -> dict[str, str]:
    """Return the names that the tensors of a part have in the first larger model that contains them all.

    A model contains them if a change of prefixes gives all of them names and shapes of the model:

        layers.0.w, layers.1.w -> model.language_model.layers.0.w, model.language_model.layers.1.w

    Args:
        names: key -> name in the part. The keys are the caller's; the result has the same ones. If no larger model
            contains the tensors, or if the names fit one without a change, the names are returned unchanged.
        shapes: the same key -> shape.
        larger_models: for each candidate, name -> shape.
    """
    answers = (name_as_hub(names, shapes, None, larger, is_part=True) for larger in larger_models)
    return next((answer.names for answer in answers if answer.rules), dict(names))


def _rename_as_base(
    names: Mapping[str, str], shapes: Mapping[str, Shape], base: Mapping[str, Shape], *, is_part: bool
) -> tuple[dict[str, str], bool]:
    """Return (stored name -> the base's name, whether several renamings fit).

    Names may differ in their prefixes, and by old spellings and computed buffers in the base.
    """
    spelled = {modern_name(name): name for name in base}
    modern = {stored: modern_name(name) for stored, name in names.items()}
    modern_base = {name: base[old] for name, old in spelled.items()}
    modern_shapes = {name: shapes[stored] for stored, name in modern.items()}
    fit = rename_to_base(modern_shapes, modern_base, is_part=is_part) or rename_to_base(
        _without_computed(modern_shapes), _without_computed(modern_base), is_part=is_part
    )

    def name_of(stored: str) -> str:
        name = (fit or {}).get(modern[stored], modern[stored])
        return spelled.get(name, names[stored] if name == modern[stored] else name)

    return {stored: name_of(stored) for stored in names}, fit is None


def _without_computed(base: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the tensors without the buffers of old files that models compute themselves."""
    return {name: shape for name, shape in base.items() if not is_computed(name, shape)}
