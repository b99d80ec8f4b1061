"""What tensors are on the other side: one function for every verb and for training, and who decided each name.

`bind` is given the providers of a verb, in this order:

    person      rules that a person gave; they fit all names, or are refused
    manifest    what tensors were made of when they were read from the Hub's files
    shipped     the one set of rules that knows all names of a model in memory
    class_says  what the class of a config makes of the names in its files, or a live model of names in its source
    part_of     names and shapes of a larger model, of which this one is a part

Before that, `keys.select` names tensors by a person's prefixes, by recorded rules, and by the names and shapes of a
base. Each provider begins with the binding of the one before. After rules, only class and base are left to say
something. Where it is known which names are wanted, the next one is asked only if some of them are missing, and its answer
is taken only if more of them are there with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from shardkit.core.regions import Shape
from shardkit.errors import LayoutError, UsageError
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
    computed_fqns: Collection[str] = ()
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
        return plain | {"converted": {fqn: to_json(expression) for fqn, expression in self.converted.items()}}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> ClassNames:
        """Return what `to_json` made plain data of."""
        return cls(
            **{
                **plain,
                "converted": {fqn: from_json(expression) for fqn, expression in plain["converted"].items()},
                "unused": {name: tuple(shape) for name, shape in plain["unused"].items()},
                **{name: frozenset(plain[name]) for name in ("ignored", "computed_fqns", "unsaved")},
                "ties": tuple(map(tuple, plain["ties"])),
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """What tensors are on the other side."""

    expressions: Mapping[str, Expression]
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
    class_names: ClassNames | None = None
    """What the class said, if it was asked."""
    twice: tuple[str, ...] = ()
    """Names that tensors at hand have, and parts of others too: then nothing is decided."""

    @property
    def gone(self) -> frozenset[str]:
        """Names at hand of tensors that were taken apart."""
        return frozenset[str]().union(*self.apart.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorsAtHand:
    """Tensors whose names on the other side are looked for."""

    shapes: Mapping[str, Shape]
    """By name: on the Hub, or below the root of a model in memory."""
    side: RuleSide | None = "model"
    """Which side these names are of. None leaves that to a person's rules: it is the side that they know; if they know
    both, that of which the other one is wanted. Then the class is that of a live model, whose tensors are the other
    side."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Name at hand -> name that `keys.select` gave; what is absent keeps its name."""
    config: Mapping[str, Any] | None = None
    """config.json, for numbers and the type of the model; None if there is none."""
    padding: Padding | None = None
    """What is known of a padded vocabulary."""


WantedShapes = Mapping[str, Shape | None]
"""Shape by name on the other side, None for one that is not known."""
Provider = Callable[[TensorsAtHand, WantedShapes, Binding], Binding]
"""Returns a binding with what it knows; nothing is wanted where the names do not matter."""


def bind(have: TensorsAtHand, want: WantedShapes | None, providers: Iterable[Provider]) -> Binding:
    """Return what tensors are on the other side; what nobody knows keeps the name that it was given.

    Args:
        have: the tensors at hand.
        want: what is wanted of the other side; None if it does not matter.
        providers: those who may know, in the order of this module.

    Raises:
        UsageError: some of a person's rules match nothing; lists every problem.
        LayoutError: a person's rules do not fit; lists every problem.
    """
    goal = want if have.side == "model" else None
    expressions = {
        have.names.get(name, name): Stored(name, tuple(shape)) for name, shape in have.shapes.items()
    }
    assert len(expressions) == len(have.shapes)
    unchanged = binding = Binding(expressions=expressions, by=dict.fromkeys(expressions, "selection"))
    for provider in providers:
        if goal is not None and goal.items() <= _shapes(binding).items():
            break
        answer = provider(have, want or {}, binding)
        if answer.twice:
            return replace(unchanged, twice=answer.twice)
        if goal is None or _num_wanted(answer, goal) > _num_wanted(binding, goal):
            binding = answer
    return binding


def person(rules: RuleSet) -> Provider:
    """Return the provider of what a person asks for."""

    def provide(have: TensorsAtHand, want: WantedShapes, binding: Binding) -> Binding:
        config = config_for([rules], have.config)
        sides: tuple[RuleSide, ...] = ("hub", "model") if have.side is None else (have.side,)
        errors = list[LayoutError | UsageError]()
        for side in sides:
            try:
                applied = bind_in_form(
                    rules, have.shapes, config, side=side, padding=have.padding, model_names=want
                )
            except (LayoutError, UsageError) as error:
                errors.append(error)
                continue
            if side == sides[-1] or any(name in want for name in applied.expressions):
                return replace(
                    binding,
                    expressions=applied.expressions,
                    by=dict.fromkeys(applied.expressions, "person"),
                    rules=rules,
                    dropped=applied.dropped,
                    notes=applied.notes,
                    warnings=foreign_type(rules, config),
                )
        raise min(errors, key=lambda error: len(error.problems))

    return provide


def manifest(derived: Mapping[str, Expression]) -> Provider:
    """Return the provider of what a manifest says that names in memory were made of."""
    return lambda have, want, binding: (
        _taken_apart(binding, derived, "manifest") if binding.rules is None else binding
    )


def shipped(have: TensorsAtHand, _: WantedShapes, binding: Binding) -> Binding:
    """Have a shipped set decide, if it is the only one that fits; a `Provider`."""
    return _by_shipped(binding, have) if binding.rules is None else binding


def class_says(
    ask: Callable[[Mapping[str, Shape]], ClassNames | None], unchanged_names: Collection[str] = ()
) -> Provider:
    """Return the provider of what a class says.

    Args:
        ask: asks the class about shapes by the names so far, which may take seconds; it may return None.
        unchanged_names: names of the other side that the class does not change; none are those that are wanted.
    """

    def provide(have: TensorsAtHand, want: WantedShapes, binding: Binding) -> Binding:
        reply = ask(_shapes(binding))
        return binding if reply is None else _by_class(binding, have.side, reply, unchanged_names or want)

    return provide


def part_of(wholes: Collection[Mapping[str, Shape]]) -> Provider:
    """Return the provider of names in larger models, each as shape by name: the first that has all in one place counts."""

    def provide(_: TensorsAtHand, want: WantedShapes, binding: Binding) -> Binding:
        same = dict(zip(binding.expressions, binding.expressions, strict=True))
        return _renamed(binding, name_part(same, _shapes(binding), wholes), "base")

    return provide


def _shapes(binding: Binding) -> dict[str, Shape]:
    return {name: expression.shape for name, expression in binding.expressions.items()}


def _num_wanted(binding: Binding, goal: Mapping[str, Shape | None]) -> int:
    return sum(
        name in goal and goal[name] in (expression.shape, None)
        for name, expression in binding.expressions.items()
    )


def _at_hand(binding: Binding) -> dict[str, str]:
    """Return the names by which others know tensors: in memory, or on the Hub where one is made -> its name so far."""
    return {
        expression.name if isinstance(expression, Stored) else name: name
        for name, expression in binding.expressions.items()
    }


def _taken_apart(binding: Binding, derived: Mapping[str, Expression], by: Decider) -> Binding:
    """Make the Hub's tensors of those that a model in memory holds in another form.

    A tensor of another shape than it was made with, or of which a part is missing, is left as it is.
    """
    at_hand = {name_at_hand: binding.expressions[name] for name_at_hand, name in _at_hand(binding).items()}
    intact = {
        fqn: expression
        for fqn, expression in derived.items()
        if fqn in at_hand and at_hand[fqn].shape == expression.shape
    }
    padded = dict(_padded(intact))
    back = {**padded, **invert(intact)}
    whole = {
        fqn for fqn, expression in intact.items() if all(leaf.name in back for leaf in leaves(expression))
    }
    parts = {
        name: expression
        for name, expression in back.items()
        if all(leaf.name in whole for leaf in leaves(expression))
    }
    if not parts:
        return binding
    kept = {
        name: binding.expressions[name]
        for name_at_hand, name in _at_hand(binding).items()
        if name_at_hand not in whole
    }
    return replace(
        binding,
        twice=tuple(sorted(kept.keys() & parts.keys())),
        expressions=kept | {name: substitute(expression, at_hand) for name, expression in parts.items()},
        by={name: binding.by[name] for name in kept} | dict.fromkeys(parts, by),
        apart={
            name: frozenset(leaf.name for leaf in leaves(expression)) for name, expression in parts.items()
        },
        padded={
            name: expression.shape[0] - next(leaves(expression)).shape[0]
            for name, expression in padded.items()
            if name in parts
        },
    )


def _padded(expressions: Mapping[str, Expression]) -> Iterator[tuple[str, Expression]]:
    """Yield the tensors of which a model has the first rows alone, with zeros for the others.

    Inkling 2 has a head of `unpadded_vocab_size` rows, and `save_pretrained` of transformers 5.24 writes the rest of the
    `vocab_size` as zeros.
    """
    users = Counter(leaf.name for expression in expressions.values() for leaf in leaves(expression))
    for fqn, expression in expressions.items():
        match expression:
            case Cut(Stored(name, (rows, *row_shape)), ((*offsets,), (first, *sizes))):
                if users[name] == 1 and not any(offsets) and sizes == row_shape:
                    yield name, concat([Stored(fqn, expression.shape), Zeros((rows - first, *row_shape))], 0)


def _by_shipped(binding: Binding, have: TensorsAtHand) -> Binding:
    at_hand = {name_at_hand: binding.expressions[name] for name_at_hand, name in _at_hand(binding).items()}
    shapes = {name_at_hand: expression.shape for name_at_hand, expression in at_hand.items()}
    side = have.side or "model"
    choice = choose_shipped(shapes, have.config, side=side, padding=have.padding)
    answered = replace(
        binding, candidates=tuple(rules for rules, _ in choice.fitting), why_not=choice.reasons
    )
    if len(choice.fitting) != 1:
        return answered
    ((rules, applied),) = choice.fitting
    return replace(
        answered,
        expressions={
            name: substitute(expression, at_hand) for name, expression in applied.expressions.items()
        },
        by=dict.fromkeys(applied.expressions, "shipped"),
        rules=rules,
        dropped=applied.dropped,
        notes=applied.notes,
    )


def _by_class(
    binding: Binding, side: RuleSide | None, reply: ClassNames, unchanged_names: Collection[str]
) -> Binding:
    if side != "model":
        expressions = {fqn: binding.expressions[name] for fqn, name in reply.names.items()}
        expressions |= {fqn: substitute(parts, binding.expressions) for fqn, parts in reply.converted.items()}
        dropped = tuple(sorted({*binding.dropped, *reply.unused, *reply.ignored}))
        return replace(
            binding,
            expressions=expressions,
            by=dict.fromkeys(expressions, "class"),
            dropped=dropped,
            class_names=reply,
        )
    answered = replace(_taken_apart(binding, reply.converted, "class"), class_names=reply)
    changed = {
        name: name
        if name in unchanged_names
        else reply.names.get(name) or reply.names.get(name_at_hand, name)
        for name_at_hand, name in _at_hand(answered).items()
    }
    return _renamed(answered, changed, "class")


def _renamed(binding: Binding, names: Mapping[str, str], by: Decider) -> Binding:
    """Give tensors other names on the other side, unless two would have one."""
    if len(set(names.values())) < len(names):
        return binding
    return replace(
        binding,
        expressions={names[name]: expression for name, expression in binding.expressions.items()},
        by={names[name]: who if names[name] == name else by for name, who in binding.by.items()},
    )


def as_tensors(
    expressions: Mapping[str, Expression], stored: Collection[str]
) -> tuple[dict[str, str], dict[str, Expression]]:
    """Return the name in a catalog of what is made, and what those are made of that are no stored tensors themselves.

    Args:
        expressions: name -> what it is made of, by names in the catalog.
        stored: all names in the catalog.
    """
    names = {
        name: expression.name if isinstance(expression, Stored) else made_name(name, stored)
        for name, expression in expressions.items()
    }
    return names, {
        names[name]: expression
        for name, expression in expressions.items()
        if not isinstance(expression, Stored)
    }
