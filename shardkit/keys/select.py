"""Select the model's tensors in a checkpoint, and translate their stored names into those on the Hub.

A tensor passes through these names:

    stored name     "state_dict.model._orig_mod.layers.0.weight", in the checkpoint
    name in memory  "layers.0.weight", below the root, without the segments of wrappers
    name on the Hub "layers.0.weight" or another one, by recorded rules or by the base's names
    output name     the name on the Hub, after the user's --strip-prefix, --add-prefix and --rename
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import NamedTuple

from shardkit.core.catalog import TensorEntry
from shardkit.core.regions import Shape
from shardkit.core.text import GLOBS_HINT, count, escape, few, match_nothing, suggestion, unmatched
from shardkit.errors import ShardkitError, SourceError, UsageError
from shardkit.keys.averages import locate_averaged
from shardkit.keys.check import in_memory_warnings, own_names_warnings
from shardkit.keys.names import (
    MODULE,
    WRAPPERS,
    Segments,
    clean,
    in_order,
    is_flat_parameter,
    is_number,
    join,
    natural,
    split,
)
from shardkit.keys.renaming import HubNames, KeyRule, name_as_hub
from shardkit.keys.roots import (
    Located,
    Path,
    SortedNames,
    Want,
    list_roots,
    locate_model,
    locate_other,
    locate_root,
    locate_top,
    read_source,
)
from shardkit.keys.trainer_state import is_averaged, object_kind, optimizer_path

_MAX_SHOWN = 3  # tensors that an error lists for one name

_WEIGHTS = ("averaged weights", "other weights", "model")  # kinds of skipped parts that `--root` may choose


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """The user's options for tensors and their names."""

    weights: str = "model"
    """"model", "ema", or the name of another part."""
    root: str | None = None
    """Dotted path. All tensors below it are selected, without any guess. An empty string is the top."""
    strip_prefix: tuple[str, ...] = ()
    """Dotted prefixes to remove from names, instead of a guessed root. A trailing dot makes no difference."""
    add_prefix: str = ""
    """Prefix to put before every name. A trailing dot makes no difference."""
    rename: tuple[str, ...] = ()
    """REGEX=REPL in Python's syntax, applied in order. The last `=` is the separator, so look-aheads need no escape."""
    include: tuple[str, ...] = ()
    """Globs over output names, where `*` matches dots too. Only matching tensors are written; empty for all."""
    exclude: tuple[str, ...] = ()
    """Globs of the same kind. Matching tensors are left out, even if `include` matches them."""

    @property
    def chooses_part(self) -> bool:
        """True if the options select a part of the model."""
        return bool(self.include or self.exclude or self.root)

    @property
    def changes_names(self) -> bool:
        """True if the options change names."""
        return bool(self.strip_prefix or self.add_prefix.strip(".") or self.rename)

    @property
    def chooses_names(self) -> bool:
        """True if the options select tensors or change names."""
        return bool(self.include or self.exclude or self.root is not None or self.changes_names)


_ANY = Naming()


class Stripped(NamedTuple):
    """A prefix or segment that was removed from names."""

    text: str
    """A prefix with a dot at its end, or a segment."""
    num_names: int
    """Number of names that had it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A part of the checkpoint that was left out."""

    kind: str
    """"optimizer", "scheduler", "random state", "trainer state", "averaged weights", "other weights",
    "model", "not a tensor" or "excluded"."""
    path: str
    """The common prefix of its names; empty for entries in many places."""
    num_tensors: int
    num_objects: int
    """Entries that are not tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The selected tensors with their output names, and all decisions that led to them."""

    names: dict[str, str]
    """Stored name -> output name, in the order of the output."""
    root: str
    """The model's root, dotted; empty for the top."""
    stripped: tuple[Stripped, ...]
    """The prefixes and segments that were removed from names."""
    skipped: tuple[Skipped, ...]
    """The parts of the checkpoint that were left out."""
    candidates: tuple[str, ...]
    """Other roots with weights of their own, for `--root`."""
    renamed: tuple[KeyRule, ...] = ()
    """Changes from the model's names in memory to those on the Hub."""
    live: Mapping[str, str] = field(default_factory=dict)
    """Stored name -> name in memory, below the root."""
    are_hubs: bool = False
    """True if the names are the Hub's by recorded rules."""
    notes: tuple[str, ...] = ()
    """Remarks to be shown to the user."""
    warnings: tuple[str, ...] = ()
    """Possible problems of the selection."""
    renaming: tuple[str, ...] = ()
    """Possible problems of the change to the Hub's names."""
    unloadable: tuple[str, ...] = ()
    """Reasons why `from_pretrained` would not find weights under the output names."""

    def only(self, stored: Container[str]) -> Selection:
        """Return the selection without the tensors that `include` and `exclude` leave out.

        Args:
            stored: stored names of the tensors that are written, or that written tensors are made of.
        """
        names = {stored_name: name for stored_name, name in self.names.items() if stored_name in stored}
        parts = [part for part in self.skipped if part.kind != "excluded"]
        excluded = sum(part.num_tensors for part in self.skipped if part.kind == "excluded")
        excluded += len(self.names) - len(names)
        if excluded:
            parts.append(Skipped(kind="excluded", path="", num_tensors=excluded, num_objects=0))
        return replace(
            self,
            names=names,
            skipped=tuple(sorted(parts, key=lambda part: (natural(part.path), part.kind))),
        )

    def for_written_names(
        self, names: Collection[str], base: Collection[str] | None, model_type: object
    ) -> Selection:
        """Return the selection with `unloadable` for the names that are written in the end.

        Args:
            names: the names that are written.
            base: the base's names; None if they are not known.
            model_type: `model_type` in the model's config, or None.
        """
        right = names if base is None and self.are_hubs else base
        return replace(self, unloadable=own_names_warnings(names, right, model_type))

    def in_memory_warnings(self, names: Collection[str], base: Collection[str] | None) -> tuple[str, ...]:
        """Return warnings about names that transformers uses only in memory.

        Args:
            names: the names that are written in the end, after tensors were taken apart.
            base: the base's names; None if they are not known.
        """
        return in_memory_warnings(names, names if base is None and self.are_hubs else base)


def select_model(
    tensors: Mapping[str, TensorEntry],
    objects: Sequence[str] = (),
    paths: Mapping[str, Path] | None = None,
    roots: Mapping[str, Path] | None = None,
    *,
    naming: Naming = _ANY,
    base_names: Collection[str] | None = None,
    base_shapes: Mapping[str, Shape] | None = None,
    key_rules: Sequence[KeyRule] | None = None,
) -> Selection:
    """Select the model's tensors of a checkpoint, and give them the names that they have on the Hub.

    Args:
        tensors: stored name -> entry, for all tensors.
        objects: names of entries that are not tensors.
        paths: stored name -> path in the state dict that was saved (DCP's planner_data), where known.
        roots: meaning ("model", "optimizer", "ema") -> path that has it in the checkpoint's format.
        naming: the user's options; `include` and `exclude` are not applied here.
        base_names: names of the base model. The output has their order, unless they are a set.
        base_shapes: name in the base -> shape, instead of `base_names`. Names that differ from the base's only in
            prefixes then become the base's, unless `naming` changes names.
        key_rules: rules that lead to the Hub's names, as training recorded them; None if they are not known.

    Raises:
        UsageError: an option cannot be parsed, does not fit the names, or gives two tensors one name.
        SourceError: no tensor is left, two tensors get one name, or the weights cannot be named.
    """
    rules = parse_rules(naming)
    base = base_names if base_shapes is None else base_shapes
    if base is not None and not isinstance(base, (set, frozenset)):
        base = dict.fromkeys(base)  # for quick lookups in the same order
    source = read_source(tensors, objects, paths, roots or {})
    located = _locate(
        source, naming, rules, base_shapes if base_shapes is not None else dict.fromkeys(base or ())
    )
    _refuse_nothing(source, located, naming.weights)
    modules = _remove_module_segments(located, base, may_guess=naming.root is None)
    in_memory = {stored: join(path) for stored, path in located.names.items()}
    if naming.changes_names:
        hub = HubNames(in_memory, ())
    else:
        shapes = {stored: tensors[stored].shape for stored in in_memory}
        hub = name_as_hub(in_memory, shapes, key_rules, base_shapes or None)
    _refuse_flat_parameters(located)
    names, notes = apply_rules(rules, hub.names)
    _refuse_bad_names(names, naming)
    by_output = {name: stored for stored, name in names.items()}
    skipped = _group_skipped(source, objects, located)
    right = by_output if base is None and key_rules is not None else base
    return Selection(
        names={by_output[name]: name for name in in_order(by_output, base)},
        root=join(located.root),
        stripped=_list_stripped(located, names, modules, rules),
        skipped=skipped,
        candidates=tuple(part.path for part in skipped if part.kind in _WEIGHTS and part.num_tensors > 1),
        renamed=hub.rules,
        live={stored: join(path) for stored, path in located.names.items()},
        notes=(*located.notes, *notes),
        warnings=tuple(located.warnings),
        renaming=hub.warnings,
        are_hubs=right is by_output,
        unloadable=own_names_warnings(by_output, right),
    )


def _locate(source: SortedNames, naming: Naming, rules: Rules, want: Want) -> Located:
    if naming.root is not None:
        return locate_root(source, naming.root) if naming.root.strip(".") else locate_top(source)
    if rules.strip_prefix:
        return locate_top(source)
    if naming.weights == "model":
        return locate_model(source, want)
    if naming.weights == "ema":
        return locate_averaged(source, want)
    return locate_other(source, naming.weights, want)


def _refuse_nothing(source: SortedNames, located: Located, weights: str) -> None:
    """Raise SourceError if no tensor was located as one of the `weights`; the hint says which option may find them."""
    if located.names:
        return
    if not source.tensors:
        raise SourceError("the checkpoint holds no tensors at all")
    averaged = [join(path) for path, kind in located.aside.items() if kind == "averaged weights"]
    hint = "name what holds the weights with --root"
    if averaged:
        hint = "--weights ema takes the averaged weights"
    elif len(source.optimizer) == len(source.tensors):
        hint = "this is an optimizer's part of a checkpoint: give the directory of the model"
    raise SourceError(
        f"none of the {len(source.tensors)} tensors is a weight of the {escape(weights)}",
        problems=list_roots(source) or [f"optimizer: {len(source.optimizer)} tensors"],
        hint=hint,
    )


def _refuse_flat_parameters(located: Located) -> None:
    flat = [stored for stored, path in located.names.items() if path and is_flat_parameter(path[-1])]
    SourceError.raise_for(
        list(map(escape, flat)),
        f"{len(flat)} tensors are flat parameters of FSDP1 (LOCAL_STATE_DICT): only the wrapped model knows the "
        "names and shapes inside them, so they cannot be taken apart",
        hint="load it with the training code and save again with SHARDED_STATE_DICT or FULL_STATE_DICT",
    )


def _remove_module_segments(located: Located, base: Collection[str] | None, *, may_guess: bool) -> int:
    """Remove the segment `module` from the middle of names where a wrapper added it; return how many names changed.

    The base decides: a name that it has stays, and one that it has without `module` changes. For other names, and if
    `may_guess`, a wrapper is assumed if every entry of a numbered list has `module` as its only child, since then the
    list was wrapped layer by layer:

        layers.0.module.w, layers.1.module.w -> layers.0.w, layers.1.w
        layers.0.module.w, layers.1.attn.w   -> unchanged: a model's own submodule is called `module`, as in LeViT

    A list inside another list exists once for each entry of the outer one; then all of these lists count as one.
    """
    paths = located.names.values()
    if not any(MODULE in path[:-1] for path in paths):
        return 0
    inside = defaultdict[Segments, set[Segments]](set)
    for path in paths:
        for stop in range(1, len(path) + 1):
            if is_number(path[stop - 1]):
                inside[_kind_of(path[:stop])].add(path[stop : stop + 1])
    wrapped = {kind for kind, segments in inside.items() if may_guess and segments == {(MODULE,)}}

    def is_wrapper(path: Segments, place: int) -> bool:
        return path[place] == MODULE and place < len(path) - 1 and _kind_of(path[:place]) in wrapped

    num_names = 0
    for stored, path in located.names.items():
        without = tuple(segment for place, segment in enumerate(path) if not is_wrapper(path, place))
        if base is not None:
            bare = tuple(segment for segment in path if segment != MODULE)
            without = path if join(path) in base else bare if join(bare) in base else without
        if without != path:
            located.names[stored] = without
            num_names += 1
    return num_names


def _kind_of(path: Segments) -> Segments:
    """Return a path with `*` for numbers, so that it is the same for all entries of a list."""
    return tuple("*" if is_number(segment) else segment for segment in path)


def _refuse_bad_names(names: Mapping[str, str], naming: Naming) -> None:
    """Raise an error if two tensors got one name: UsageError with `--strip-prefix` or `--rename`."""
    stored_by_name: dict[str, list[str]] = {}
    for stored, name in names.items():
        stored_by_name.setdefault(name, []).append(stored)
    problems = [
        f"{escape(name)}: from {few([*map(escape, stored)], _MAX_SHOWN, ' and ')}"
        for name, stored in sorted(stored_by_name.items(), key=lambda item: natural(item[0]))
        if len(stored) > 1
    ]
    if problems:
        kind: type[ShardkitError] = UsageError if naming.strip_prefix or naming.rename else SourceError
        raise kind(
            f"{count(len(problems), 'name')} would be given to several tensors each",
            problems=problems,
            hint="choose with --root",
        )


def _list_stripped(
    located: Located, names: Mapping[str, str], modules: int, rules: Rules
) -> tuple[Stripped, ...]:
    """Return what was removed from names, with the number of names: root, wrappers' segments, `module`, `--strip-prefix`."""
    stripped = [Stripped(join(located.root) + ".", len(names))] if located.root else []
    wrappers = Counter[str]()
    for stored in names:
        wrappers.update(WRAPPERS.intersection(split(stored)))
    stripped += [Stripped(segment, wrappers[segment]) for segment in sorted(wrappers)]
    if modules:
        stripped.append(Stripped(MODULE, modules))
    for prefix in rules.strip_prefix:
        count = sum(join(located.names[stored]).startswith(prefix + ".") for stored in names)
        stripped.append(Stripped(prefix + ".", count))
    return tuple(stripped)


def _group_skipped(source: SortedNames, objects: Sequence[str], located: Located) -> tuple[Skipped, ...]:
    """Return the parts that were left out: entries grouped by kind and by the beginning of the name."""
    counts: dict[tuple[str, Segments], list[int]] = {}
    for name in source.tensors:
        if name not in located.names:
            counts.setdefault(_group(source, located, name), [0, 0])[0] += 1
    for name in objects:
        counts.setdefault(_object_group(located, name), [0, 0])[1] += 1
    groups = [
        Skipped(kind=kind, path=join(path), num_tensors=num_tensors, num_objects=num_objects)
        for (kind, path), (num_tensors, num_objects) in counts.items()
    ]
    return tuple(sorted(groups, key=lambda part: (natural(part.path), part.kind)))


def _group(source: SortedNames, located: Located, name: str) -> tuple[str, Segments]:
    segments = clean(name)
    if name in source.optimizer:
        return "optimizer", optimizer_path(name)
    for depth in range(1, len(segments) + 1):
        if segments[:depth] in located.aside:
            return located.aside[segments[:depth]], segments[:depth]
    path = _branch_path(segments, located.root)
    return (object_kind(path[-1]) or ("averaged weights" if is_averaged(path[-1]) else "other weights")), path


def _object_group(located: Located, name: str) -> tuple[str, Segments]:
    segments = clean(name)
    path = _branch_path(segments, located.root)
    kind = object_kind(path[-1])
    if kind is None and path[: len(located.root)] == located.root:
        return "not a tensor", located.root
    if len(path) == len(segments):
        return kind or "not a tensor", path if kind == "optimizer" else path[:-1]
    return kind or ("averaged weights" if is_averaged(path[-1]) else "not a tensor"), path


def _branch_path(segments: Segments, root: Segments) -> Segments:
    """Return the beginning of a name, up to the first segment that differs from the root's or is below the root.

    With root ("a", "b"): ("a", "c", "d") gives ("a", "c"), and ("a", "b", "x", "y") gives ("a", "b", "x").
    """
    for depth, segment in enumerate(root):
        if segments[depth : depth + 1] != (segment,):
            return segments[: depth + 1]
    return segments[: len(root) + 1]


# Such a regex matches no real name, and Python needs gigabytes for it.
_MANY_TIMES = re.compile(r"\{(?:\d*,)?\d{4,}")


class Globs(NamedTuple):
    """`--include` and `--exclude`: globs over output names."""

    include: tuple[str, ...]
    exclude: tuple[str, ...]

    def selects(self, name: str) -> bool:
        """True if a tensor is written."""
        return (not self.include or _matches(self.include, name)) and not self.excludes(name)

    def excludes(self, name: str) -> bool:
        """True if `exclude` matches a tensor."""
        return _matches(self.exclude, name)

    def check(self, names: Collection[str]) -> None:
        """Raise an error for globs that match no name, or that leave out all names.

        Raises:
            UsageError: lists the globs, and names similar to them.
        """
        globs = (*self.include, *self.exclude)
        idle = [glob for glob in globs if not any(_matches((glob,), name) for name in names)]
        if idle:
            what = match_nothing("--include and --exclude", len(idle), "no name")
            raise UsageError(what, problems=unmatched(idle, names), hint=GLOBS_HINT)
        if globs and not any(map(self.selects, names)):
            problem = f"--include and --exclude leave none of {count(len(names), 'tensor')}"
            raise UsageError(problem, hint=GLOBS_HINT)


def _matches(globs: Iterable[str], name: str) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The user's changes of names, parsed. They are applied in the order of the fields."""

    strip_prefix: tuple[str, ...]
    """Prefixes without a dot at the end. Of each name the first one that fits is removed."""
    add_prefix: str
    """A prefix with a dot at its end, or empty."""
    rename: tuple[tuple[str, re.Pattern[str], str], ...]
    """(the user's text, pattern, replacement). Each is applied to the result of the one before it."""


def parse_rules(naming: Naming) -> Rules:
    """Return the changes of names that the user's options describe.

    Raises:
        UsageError: lists every rename and every prefix that cannot be parsed.
    """
    problems: list[str] = []
    renames = [parsed for text in naming.rename if (parsed := _rename(text, problems)) is not None]
    problems += [f"--strip-prefix {text!r}: empty" for text in naming.strip_prefix if not text.strip(".")]
    UsageError.raise_for(
        problems,
        f"{count(len(problems), 'option')} about names cannot be read",
        hint=r"write --rename 'REGEX=REPL', e.g. --rename '^backbone\.=model.'; groups are \1 or \g<name>",
    )
    return Rules(
        strip_prefix=tuple(join(clean(text.rstrip("."))) for text in naming.strip_prefix),
        add_prefix=naming.add_prefix.rstrip(".") + "." if naming.add_prefix.strip(".") else "",
        rename=tuple(renames),
    )


def _rename(text: str, problems: list[str]) -> tuple[str, re.Pattern[str], str] | None:
    """Parse a `--rename` into (text, pattern, replacement); if it is not valid, add a line to `problems` and return None."""
    regex, equals, replacement = text.rpartition("=")
    if not equals or not regex:
        problems.append(f"--rename {escape(text)!r}: there is no = between two parts")
        return None
    if _MANY_TIMES.search(regex):
        problems.append(f"--rename {escape(text)!r}: it repeats something more than 999 times")
        return None
    try:
        pattern = re.compile(regex)
        pattern.sub(replacement, "")  # checks the replacement's group references too
    except (re.error, IndexError, OverflowError, RecursionError) as error:
        problems.append(f"--rename {escape(text)!r}: {escape(str(error))}")
        return None
    return text, pattern, replacement


def apply_rules(rules: Rules, names: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return (stored name -> output name, a note for each rename that changed nothing).

    Args:
        rules: the user's changes of names.
        names: stored name -> name before these changes.

    Raises:
        UsageError: no name has a prefix to strip, or a rename leaves a name empty.
    """
    unnamed = {stored for stored, name in names.items() if not name}  # saved so, which is allowed
    names, notes = _strip(rules.strip_prefix, names), list[str]()
    names = {stored: rules.add_prefix + name for stored, name in names.items()}
    for text, pattern, replacement in rules.rename:
        renamed = {stored: pattern.sub(replacement, name) for stored, name in names.items()}
        if renamed == names:
            notes.append(f"--rename {escape(text)!r} matches no name")
        names = renamed
    empty = [escape(stored) for stored, name in names.items() if not name and stored not in unnamed]
    UsageError.raise_for(empty, f"--rename leaves {count(len(empty), 'name')} empty")
    return names, notes


def _strip(prefixes: Sequence[str], names: Mapping[str, str]) -> dict[str, str]:
    """Return the names (stored name -> name) without the first of the prefixes that each begins with.

    Raises:
        UsageError: no name begins with one of the prefixes.
    """
    stripped, used = dict(names), set[str]()
    for stored, name in names.items():
        for prefix in prefixes:
            if name.startswith(prefix + "."):
                stripped[stored] = name[len(prefix) + 1 :]
                used.add(prefix)
                break
    idle = [prefix for prefix in prefixes if prefix not in used]
    if idle:
        known_prefixes = {join(clean(name)[:depth]) for name in names.values() for depth in range(1, 4)}
        raise UsageError(
            f"no name begins with {count(len(idle), 'prefix', 'prefixes')} to strip",
            problems=[
                f"--strip-prefix {escape(prefix)!r}{suggestion(prefix, known_prefixes)}" for prefix in idle
            ],
        )
    return stripped
