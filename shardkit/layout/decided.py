"""What tensors are on the other side: the same order of sources for every verb, and who decided each name.

    person      rules that a person gave; they fit all names, or are refused
    manifest    what tensors were made of when they were read from the Hub's files
    shipped     the one set of rules that knows all names of a model in memory
    class       what the class of a config makes of the names in its files, or a live model of names in its source
    base        names and shapes of a larger model, of which this one is a part

Before that, `keys.select` names tensors by a person's prefixes, by recorded rules, and by the names and shapes of a
base. Each of these here begins with the result of the one before. After rules, only class and base are left to say
something. Where it is known which names are wanted, the next one is asked only if some of them are missing, and its answer
is taken only if more of them are there with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from shardkit.core.regions import Shape
from shardkit.core.text import count, escape
from shardkit.errors import LayoutError, SourceError, UsageError
from shardkit.keys.expressions import (
    Cut,
    Expression,
    Stored,
    Zeros,
    concat,
    from_json,
    leaves,
    made_name,
    substitute,
    to_json,
)
from shardkit.keys.inverse import invert
from shardkit.keys.renaming import name_part
from shardkit.keys.rule_sets import Padding, bind_in_form, choose_shipped, config_for, foreign_type
from shardkit.keys.rules import RuleSet, RuleSide

Decider = Literal["selection", "person", "manifest", "shipped", "class", "base"]
"""Who decided what a tensor is on the other side; "selection" where it has the name that it was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassNames:
    """What a model says of the names in files: a live one, or one that was built of a config."""

    names: Mapping[str, str] = field(default_factory=dict)
    """FQN -> name in the files, for all that were found."""
    converted: Mapping[str, Expression] = field(default_factory=dict)
    """FQN -> what it is made of, where the model holds tensors of the files in another form."""
    unused: Mapping[str, Shape] = field(default_factory=dict)
    """Shape by name in the files of tensors for which the model has no place."""
    fused: Mapping[str, str] = field(default_factory=dict)
    """Name in the files -> the FQN that it is a part of, where it is not known how the FQN is made."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """FQN of `fused` -> why."""
    ignored: Collection[str] = ()
    """Names in the files of tensors that the model computes itself, or leaves out as `from_pretrained` does."""
    made: Collection[str] = ()
    """FQNs that the files lack and the model makes itself, according to its class."""
    unsaved: Collection[str] = ()
    """FQNs that `save_pretrained` leaves out, because the model makes them itself."""
    ties: Collection[tuple[str, ...]] = ()
    """Groups of names that are one parameter: the files' names, else the model's."""
    missing: Collection[str] = ()
    """FQNs of weights that `from_pretrained` would initialise at random."""
    misfits: Collection[tuple[str, str]] = ()
    """(FQN, why) of weights that it could not load and for which it would refuse the files."""
    is_transformers: bool = False
    """The model is one of transformers, or holds one."""

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        plain = {part.name: getattr(self, part.name) for part in fields(self)}
        return plain | {"converted": {fqn: to_json(made) for fqn, made in self.converted.items()}}

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> ClassNames:
        """Return what `to_json` made plain data of."""
        return cls(
            **{
                **said,
                "converted": {fqn: from_json(made) for fqn, made in said["converted"].items()},
                "unused": {name: tuple(shape) for name, shape in said["unused"].items()},
                **{name: frozenset(said[name]) for name in ("ignored", "made", "unsaved")},
                "ties": tuple(map(tuple, said["ties"])),
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecidedNames:
    """What tensors are on the other side."""

    made: Mapping[str, Expression]
    """Name on the other side -> what it is made of, by the names at hand."""
    by: Mapping[str, Decider]
    """The same names -> who decided."""
    rules: RuleSet | None = None
    """Those that decided."""
    dropped: tuple[str, ...] = ()
    """Names at hand that rules or the class leave out."""
    apart: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Name on the other side -> names at hand of what it is a part of, or made of."""
    padded: Mapping[str, int] = field(default_factory=dict)
    """Name on the other side -> rows at its end that the model drops, and that are zeros."""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    candidates: tuple[RuleSet, ...] = ()
    """Shipped sets of which each would fit; none of several is taken."""
    why_not: tuple[str, ...] = ()
    """Why other shipped sets that know all names, or most, do not fit."""
    asked: ClassNames | None = None
    """What the class said, if it was asked."""

    @property
    def gone(self) -> frozenset[str]:
        """Names at hand of tensors that were taken apart."""
        return frozenset[str]().union(*self.apart.values())


def decide_names(
    shapes: Mapping[str, Shape],
    *,
    side: RuleSide | None,
    names: Mapping[str, str] | None = None,
    rules: RuleSet | None = None,
    derived: Mapping[str, Expression] | None = None,
    takes_shipped: bool = False,
    ask: Callable[[Mapping[str, Shape]], ClassNames | None] = lambda shapes: None,
    config: Mapping[str, Any] | None = None,
    padding: Padding | None = None,
    wanted: Mapping[str, Shape | None] | None = None,
    theirs: Collection[str] = (),
    wholes: Collection[Mapping[str, Shape]] = (),
) -> DecidedNames:
    """Return what tensors are on the other side; what nobody knows keeps the name that it was given.

    Args:
        shapes: by name at hand: on the Hub, or below the root of a model in memory.
        side: which side these names are of. None leaves that to a person's rules: it is the side that they know; if they
            know both, that of which the other one is wanted. Then the class is that of a live model, whose tensors are
            the other side.
        names: name at hand -> name that `keys.select` gave; None changes none.
        rules: what a person asks for.
        derived: what a manifest says that names in memory were made of.
        takes_shipped: a shipped set may decide, if it is the only one that fits.
        ask: asks the class about shapes by the names so far, which may take seconds; it may return None.
        config: config.json, for numbers and the type of the model; None if there is none.
        padding: what is known of a padded vocabulary.
        wanted: shape by name on the other side, None for one that is not known; None if it does not matter.
        theirs: names of the other side that the class does not change.
        wholes: larger models, each as shape by name on the other side: the first that has all tensors in one place counts.

    Raises:
        UsageError: some of a person's rules match nothing; lists every problem.
        LayoutError: a person's rules do not fit; lists every problem.
        SourceError: a tensor would be there under its own name, and as a part of another.
    """
    goal = wanted if side == "model" else None

    def person(decided: DecidedNames) -> DecidedNames:
        if rules is None:
            return decided
        return _by_person(decided, shapes, side, rules, config, padding, wanted or {})

    def manifest(decided: DecidedNames) -> DecidedNames:
        return _taken_apart(decided, derived or {}, "manifest")

    def shipped(decided: DecidedNames) -> DecidedNames:
        return _by_shipped(decided, side or "model", config, padding) if takes_shipped else decided

    def model_class(decided: DecidedNames) -> DecidedNames:
        asked = ask(_shapes(decided))
        return decided if asked is None else _by_class(decided, side, asked, theirs or wanted or ())

    def base(decided: DecidedNames) -> DecidedNames:
        same = dict(zip(decided.made, decided.made, strict=True))
        return _renamed(decided, name_part(same, _shapes(decided), wholes), "base")

    decided = _as_given(shapes, names or {})
    for answer in (person, manifest, shipped, model_class, base):
        if decided.rules is not None and answer in (manifest, shipped):
            continue
        if goal is not None and goal.items() <= _shapes(decided).items():
            break
        answered = answer(decided)
        if goal is None or _num_wanted(answered, goal) > _num_wanted(decided, goal):
            decided = answered
    return decided


def _by_person(
    given: DecidedNames,
    shapes: Mapping[str, Shape],
    side: RuleSide | None,
    rules: RuleSet,
    config: Mapping[str, Any] | None,
    padding: Padding | None,
    wanted: Collection[str],
) -> DecidedNames:
    config = config_for([rules], config)
    sides: tuple[RuleSide, ...] = ("hub", "model") if side is None else (side,)
    errors = list[LayoutError | UsageError]()
    for at_hand in sides:
        try:
            binding = bind_in_form(rules, shapes, config, side=at_hand, padding=padding, wanted=wanted)
        except (LayoutError, UsageError) as error:
            errors.append(error)
            continue
        if at_hand == sides[-1] or any(name in wanted for name in binding.made):
            return replace(
                given,
                made=binding.made,
                by=dict.fromkeys(binding.made, "person"),
                rules=rules,
                dropped=binding.dropped,
                notes=binding.notes,
                warnings=foreign_type(rules, config),
            )
    raise min(errors, key=lambda error: len(error.problems))


def _as_given(shapes: Mapping[str, Shape], names: Mapping[str, str]) -> DecidedNames:
    made = {names.get(name, name): Stored(name, tuple(shape)) for name, shape in shapes.items()}
    assert len(made) == len(shapes)
    return DecidedNames(made=made, by=dict.fromkeys(made, "selection"))


def _shapes(decided: DecidedNames) -> dict[str, Shape]:
    return {name: made.shape for name, made in decided.made.items()}


def _num_wanted(decided: DecidedNames, wanted: Mapping[str, Shape | None]) -> int:
    return sum(name in wanted and wanted[name] in (made.shape, None) for name, made in decided.made.items())


def _at_hand(decided: DecidedNames) -> dict[str, str]:
    """Return the names by which others know tensors: in memory, or on the Hub where one is made -> its name so far."""
    return {made.name if isinstance(made, Stored) else name: name for name, made in decided.made.items()}


def _taken_apart(decided: DecidedNames, derived: Mapping[str, Expression], by: Decider) -> DecidedNames:
    """Make the Hub's tensors of those that a model in memory holds in another form.

    A tensor of another shape than it was made with, or of which a part is missing, is left as it is.
    """
    at_hand = {known: decided.made[name] for known, name in _at_hand(decided).items()}
    held = {fqn: made for fqn, made in derived.items() if fqn in at_hand and at_hand[fqn].shape == made.shape}
    padded = dict(_padded(held))
    back = {**padded, **invert(held)}
    whole = {fqn for fqn, made in held.items() if all(leaf.name in back for leaf in leaves(made))}
    parts = {name: made for name, made in back.items() if all(leaf.name in whole for leaf in leaves(made))}
    if not parts:
        return decided
    kept = {name: decided.made[name] for known, name in _at_hand(decided).items() if known not in whole}
    twice = sorted(kept.keys() & parts.keys())
    SourceError.raise_for(
        [escape(name) for name in twice],
        f"{count(len(twice), 'tensor')} would be there twice: under {'its' if len(twice) == 1 else 'their'} own "
        "name, and as a part of another",
        hint="--exclude leaves out both",
    )
    return replace(
        decided,
        made=kept | {name: substitute(made, at_hand) for name, made in parts.items()},
        by={name: decided.by[name] for name in kept} | dict.fromkeys(parts, by),
        apart={name: frozenset(leaf.name for leaf in leaves(made)) for name, made in parts.items()},
        padded={
            name: made.shape[0] - next(leaves(made)).shape[0]
            for name, made in padded.items()
            if name in parts
        },
    )


def _padded(held: Mapping[str, Expression]) -> Iterator[tuple[str, Expression]]:
    """Yield the tensors of which a model has the first rows alone, with zeros for the others.

    Inkling 2 has a head of `unpadded_vocab_size` rows, and `save_pretrained` of transformers 5.24 writes the rest of the
    `vocab_size` as zeros.
    """
    users = Counter(leaf.name for made in held.values() for leaf in leaves(made))
    for fqn, made in held.items():
        match made:
            case Cut(Stored(name, (rows, *others)), ((*offsets,), (first, *sizes))):
                if users[name] == 1 and not any(offsets) and sizes == others:
                    yield name, concat([Stored(fqn, made.shape), Zeros((rows - first, *others))], 0)


def _by_shipped(
    decided: DecidedNames, side: RuleSide, config: Mapping[str, Any] | None, padding: Padding | None
) -> DecidedNames:
    at_hand = {known: decided.made[name] for known, name in _at_hand(decided).items()}
    shapes = {known: made.shape for known, made in at_hand.items()}
    choice = choose_shipped(shapes, config, side=side, padding=padding)
    answered = replace(
        decided, candidates=tuple(rules for rules, _ in choice.fitting), why_not=choice.reasons
    )
    if len(choice.fitting) != 1:
        return answered
    ((rules, binding),) = choice.fitting
    return replace(
        answered,
        made={name: substitute(made, at_hand) for name, made in binding.made.items()},
        by=dict.fromkeys(binding.made, "shipped"),
        rules=rules,
        dropped=binding.dropped,
        notes=binding.notes,
    )


def _by_class(
    decided: DecidedNames, side: RuleSide | None, asked: ClassNames, theirs: Collection[str]
) -> DecidedNames:
    if side != "model":
        made = {fqn: decided.made[name] for fqn, name in asked.names.items()}
        made |= {fqn: substitute(parts, decided.made) for fqn, parts in asked.converted.items()}
        dropped = tuple(sorted({*decided.dropped, *asked.unused, *asked.ignored}))
        return replace(decided, made=made, by=dict.fromkeys(made, "class"), dropped=dropped, asked=asked)
    answered = replace(_taken_apart(decided, asked.converted, "class"), asked=asked)
    changed = {
        name: name if name in theirs else asked.names.get(name) or asked.names.get(known, name)
        for known, name in _at_hand(answered).items()
    }
    return _renamed(answered, changed, "class")


def _renamed(decided: DecidedNames, names: Mapping[str, str], by: Decider) -> DecidedNames:
    """Give tensors other names on the other side, unless two would have one."""
    if len(set(names.values())) < len(names):
        return decided
    return replace(
        decided,
        made={names[name]: made for name, made in decided.made.items()},
        by={names[name]: who if names[name] == name else by for name, who in decided.by.items()},
    )


def as_tensors(
    made: Mapping[str, Expression], stored: Collection[str]
) -> tuple[dict[str, str], dict[str, Expression]]:
    """Return the name in a catalog of what is made, and what those are made of that are no stored tensors themselves.

    Args:
        made: name -> what it is made of, by names in the catalog.
        stored: all names in the catalog.
    """
    names = {
        name: expression.name if isinstance(expression, Stored) else made_name(name, stored)
        for name, expression in made.items()
    }
    return names, {
        names[name]: expression for name, expression in made.items() if not isinstance(expression, Stored)
    }
