"""Find the names and forms that tensors have on the other side, for every verb and for training.

The sides are "model" (the names of a model in memory) and "hub" (the names in files on the Hub). Tensors whose names
are known are *at hand*; the other side is wanted. A *binding* maps each name on the other side to an expression of
the tensors at hand, and records who decided it:

    at hand, side "model"     {"model.layers.0.mlp.experts.down_proj": (8, 64, 32)}
    binding, side "hub"       {"model.layers.0.mlp.experts.0.down_proj.weight": rows 0 of that tensor, ...}

`bind` calls providers in this order. Each starts from the binding of the one before and returns a better one:

    person_provider     the user's rules; they must fit all names
    manifest_provider   the expressions by which tensors in memory were made of the Hub's files
    shipped_provider    the set of shipped rules that fits all names, if exactly one does
    class_provider      the class of a config, for names in its files; or a live model, for names in its source
    whole_provider      the names and shapes of a larger model, which contains this one

Before that, `keys.select` has named the tensors by the user's prefixes, by recorded rules, and by the names and shapes
of a base. Once rules have decided, only `class_provider` and `whole_provider` can still change names.

A *goal* is the set of names and shapes that a caller wants. There is one only if the tensors at hand are of the side
"model". With a goal, a provider is called only while some of the wanted tensors are missing, and its binding counts only if
it has more of them. Without a goal, every provider is called: the class's answer is needed even if all names fit already,
since it lists ties, misfits and the like.
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
    computed_name,
    concat,
    from_json,
    leaves,
    substitute,
    to_json,
)
from shardkit.keys.inverse import invert
from shardkit.keys.renaming import name_part
from shardkit.keys.rule_sets import Padding, bind_in_form, choose_shipped, config_for, foreign_type
from shardkit.keys.rules import RuleSet, RuleSide

Decider = Literal["selection", "person", "manifest", "shipped", "class", "base"]
"""Who decided the name and form of a tensor on the other side; "selection" if the name from `keys.select` stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassNames:
    """How a model assigns tensors in files to its own. The model is live, or was built from a config.

    An FQN is a tensor's name in the model.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    """FQN -> name in the files, for each tensor that the files have in the model's form."""
    converted: Mapping[str, Expression] = field(default_factory=dict)
    """FQN -> expression of the files' tensors, where the model has them in another form."""
    unused: Mapping[str, Shape] = field(default_factory=dict)
    """Name in the files -> shape, for tensors that have no place in the model."""
    fused: Mapping[str, str] = field(default_factory=dict)
    """Name in the files -> FQN of which the tensor is a part, where the conversion to the FQN is not known."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """FQN in `fused` -> why the conversion is not known."""
    ignored: Collection[str] = ()
    """Names in the files of tensors that the model computes itself, or leaves out as `from_pretrained` does."""
    computed_fqns: Collection[str] = ()
    """FQNs that the files lack and the model computes itself, according to its class."""
    unsaved: Collection[str] = ()
    """FQNs that `save_pretrained` leaves out, because the model computes them itself."""
    ties: Collection[tuple[str, ...]] = ()
    """Groups of names of one parameter: names in the files, or FQNs that the files lack."""
    missing: Collection[str] = ()
    """FQNs of weights that `from_pretrained` would initialise at random."""
    misfits: Collection[tuple[str, str]] = ()
    """(FQN, reason) of weights that `from_pretrained` could not load and because of which it would refuse the files."""
    is_transformers: bool = False
    """The model is a transformers model or contains one."""

    def to_json(self) -> dict[str, Any]:
        """Return the object as plain data."""
        plain = {part.name: getattr(self, part.name) for part in fields(self)}
        return plain | {"converted": {fqn: to_json(expression) for fqn, expression in self.converted.items()}}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> ClassNames:
        """Return the object that `to_json` turned into plain data."""
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
    """The names and forms of tensors on the other side."""

    expressions: Mapping[str, Expression]
    """Name on the other side -> expression of the tensors at hand."""
    by: Mapping[str, Decider]
    """Name on the other side -> who decided it."""
    rules: RuleSet | None = None
    """The rules that decided, if rules did."""
    dropped: tuple[str, ...] = ()
    """Names at hand that the rules or the class leave out."""
    made_from: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Name on the other side -> names of the tensors at hand that were taken apart to make it."""
    padded: Mapping[str, int] = field(default_factory=dict)
    """Name on the other side -> number of rows at its end that are zeros, because the model does not have them."""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    candidates: tuple[RuleSet, ...] = ()
    """The shipped sets of rules that fit. If there are several, none is applied."""
    why_not: tuple[str, ...] = ()
    """Why other shipped sets do not fit that know all names, or most."""
    class_names: ClassNames | None = None
    """The class's answer, if `class_provider` was called."""
    clashing_names: tuple[str, ...] = ()
    """Names that both a tensor at hand and a part of another one would get. Nothing is decided then."""

    @property
    def names_taken_apart(self) -> frozenset[str]:
        """Names at hand of the tensors that were taken apart."""
        return frozenset[str]().union(*self.made_from.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorsAtHand:
    """The tensors that `bind` looks up on the other side."""

    shapes: Mapping[str, Shape]
    """Name -> shape. Names are those on the Hub, or those below the root of a model in memory."""
    side: RuleSide | None = "model"
    """The side that the names belong to. None lets the user's rules decide: it is the side that the rules know, or, if
    they know both, the side whose translation has wanted names. The class is then that of a live model, and its tensors
    are the other side."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Name at hand -> name that `keys.select` gave it. Tensors that are not listed keep their names."""
    config: Mapping[str, Any] | None = None
    """The content of config.json, for sizes and the type of the model; or None."""
    padding: Padding | None = None
    """The padding of the vocabulary, if known."""


WantedShapes = Mapping[str, Shape | None]
"""Wanted name on the other side -> shape; None for an unknown shape."""
Provider = Callable[[TensorsAtHand, WantedShapes, Binding], Binding]
"""Returns the binding with its own knowledge added. The wanted shapes are empty if any names will do."""


def bind(have: TensorsAtHand, want: WantedShapes | None, providers: Iterable[Provider]) -> Binding:
    """Return the names and forms of tensors on the other side.

    A tensor that no provider knows keeps the name from `keys.select`. If a provider would give two tensors one name,
    nothing is decided: the result is the binding before any provider, with `clashing_names`.

    Args:
        have: the tensors at hand.
        want: the wanted tensors of the other side; None if any names will do. They are the goal if the tensors at hand are
            of the side "model".
        providers: providers in the order of this module.

    Raises:
        UsageError: some of the user's rules match nothing; the error lists every problem.
        LayoutError: the user's rules do not fit; the error lists every problem.
    """
    goal = want if have.side == "model" else None
    expressions = {
        have.names.get(name, name): Stored(name, tuple(shape)) for name, shape in have.shapes.items()
    }
    assert len(expressions) == len(have.shapes)
    unchanged = binding = Binding(expressions=expressions, by=dict.fromkeys(expressions, "selection"))
    for provider in providers:
        # A wanted tensor of unknown shape (None) is never equal to one in the binding: then no provider is left out.
        if goal is not None and goal.items() <= _shapes(binding).items():
            break
        answer = provider(have, want or {}, binding)
        if answer.clashing_names:
            return replace(unchanged, clashing_names=answer.clashing_names)
        if goal is None or _num_wanted(answer, goal) > _num_wanted(binding, goal):
            binding = answer
    return binding


def person_provider(rules: RuleSet) -> Provider:
    """Return the provider that applies the user's rules."""

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


def manifest_provider(derived: Mapping[str, Expression]) -> Provider:
    """Return the provider that reverses a manifest's expressions: name in memory -> expression of the Hub's tensors."""
    return lambda have, want, binding: (
        _take_apart(binding, derived, "manifest") if binding.rules is None else binding
    )


def shipped_provider(have: TensorsAtHand, _: WantedShapes, binding: Binding) -> Binding:
    """Apply the set of shipped rules that fits, if exactly one does. This is a `Provider`."""
    return _apply_shipped_rules(binding, have) if binding.rules is None else binding


def class_provider(
    ask: Callable[[Mapping[str, Shape]], ClassNames | None], unchanged_names: Collection[str] = ()
) -> Provider:
    """Return the provider that asks a model's class.

    Args:
        ask: asks the class about shapes, by the names of the binding so far. It may take seconds and may return None.
        unchanged_names: names of the other side that the class must not change; by default the wanted names.
    """

    def provide(have: TensorsAtHand, want: WantedShapes, binding: Binding) -> Binding:
        reply = ask(_shapes(binding))
        return (
            binding
            if reply is None
            else _apply_class_names(binding, have.side, reply, unchanged_names or want)
        )

    return provide


def saved_form_provider(form: Mapping[str, Expression]) -> Provider:
    """Return the provider of the form that a class's `save_pretrained` writes.

    Args:
        form: name on the Hub -> expression of the names in memory; tensors that no expression needs are not written.
    """

    def provide(_: TensorsAtHand, __: WantedShapes, binding: Binding) -> Binding:
        at_hand = {name: binding.expressions[renamed] for name, renamed in _names_at_hand(binding).items()}
        needed = {leaf.name for expression in form.values() for leaf in leaves(expression)}
        return replace(
            binding,
            expressions={name: substitute(expression, at_hand) for name, expression in form.items()},
            by=dict.fromkeys(form, "class"),
            dropped=tuple(name for name in at_hand if name not in needed),
        )

    return provide


def whole_provider(wholes: Collection[Mapping[str, Shape]]) -> Provider:
    """Return the provider that names a part of a larger model as the larger model does.

    Args:
        wholes: candidates for the larger model, each as name -> shape. The first one counts that has all tensors in
            one place.
    """

    def provide(_: TensorsAtHand, want: WantedShapes, binding: Binding) -> Binding:
        same = dict(zip(binding.expressions, binding.expressions, strict=True))
        return _rename(binding, name_part(same, _shapes(binding), wholes), "base")

    return provide


def _shapes(binding: Binding) -> dict[str, Shape]:
    return {name: expression.shape for name, expression in binding.expressions.items()}


def _num_wanted(binding: Binding, goal: Mapping[str, Shape | None]) -> int:
    """Return how many wanted tensors a binding has, by name and, where it is known, by shape."""
    return sum(
        name in goal and goal[name] in (expression.shape, None)
        for name, expression in binding.expressions.items()
    )


def _names_at_hand(binding: Binding) -> dict[str, str]:
    """Return name at hand -> name in the binding; for a tensor made of others, its name in the binding is both."""
    return {
        expression.name if isinstance(expression, Stored) else name: name
        for name, expression in binding.expressions.items()
    }


def _take_apart(binding: Binding, derived: Mapping[str, Expression], by: Decider) -> Binding:
    """Turn tensors in memory back into the Hub's tensors that they were made of.

    A tensor stays as it is if its shape has changed since, or if not all of its parts can be recovered.

    Args:
        binding: the binding so far.
        derived: name in memory -> expression of the Hub's tensors.
        by: who knows the expressions.
    """
    at_hand = {
        name_at_hand: binding.expressions[name] for name_at_hand, name in _names_at_hand(binding).items()
    }
    intact = {
        fqn: expression
        for fqn, expression in derived.items()
        if fqn in at_hand and at_hand[fqn].shape == expression.shape
    }
    padded = dict(_padded_expressions(intact))
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
        for name_at_hand, name in _names_at_hand(binding).items()
        if name_at_hand not in whole
    }
    return replace(
        binding,
        clashing_names=tuple(sorted(kept.keys() & parts.keys())),
        expressions=kept | {name: substitute(expression, at_hand) for name, expression in parts.items()},
        by={name: binding.by[name] for name in kept} | dict.fromkeys(parts, by),
        made_from={
            name: frozenset(leaf.name for leaf in leaves(expression)) for name, expression in parts.items()
        },
        padded={
            name: expression.shape[0] - next(leaves(expression)).shape[0]
            for name, expression in padded.items()
            if name in parts
        },
    )


def _padded_expressions(expressions: Mapping[str, Expression]) -> Iterator[tuple[str, Expression]]:
    """Yield (name on the Hub, expression) of each tensor of which the model has only the first rows.

    In the expression, zeros fill the other rows. For example, Inkling 2 has a head of `unpadded_vocab_size` rows, and
    `save_pretrained` of transformers 5.24 writes zeros for the rest of the `vocab_size`.
    """
    users = Counter(leaf.name for expression in expressions.values() for leaf in leaves(expression))
    for fqn, expression in expressions.items():
        match expression:
            case Cut(Stored(name, (rows, *row_shape)), ((*offsets,), (first, *sizes))):
                if users[name] == 1 and not any(offsets) and sizes == row_shape:
                    yield name, concat([Stored(fqn, expression.shape), Zeros((rows - first, *row_shape))], 0)


def _apply_shipped_rules(binding: Binding, have: TensorsAtHand) -> Binding:
    """Return the binding by the only shipped set of rules that fits; if there is not exactly one, add which fit, or why not."""
    at_hand = {
        name_at_hand: binding.expressions[name] for name_at_hand, name in _names_at_hand(binding).items()
    }
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


def _apply_class_names(
    binding: Binding, side: RuleSide | None, reply: ClassNames, unchanged_names: Collection[str]
) -> Binding:
    """Return the binding by the class's answer.

    If the tensors at hand are those of files, the result has exactly the tensors of the model, made of them. If they are the
    model's, those that the class converted are taken apart, and the others get their names in the files.

    Args:
        binding: the binding so far.
        side: of the tensors at hand.
        reply: the class's answer about the names of the binding.
        unchanged_names: names of the other side that stay.
    """
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
    answered = replace(_take_apart(binding, reply.converted, "class"), class_names=reply)
    changed = {
        name: name
        if name in unchanged_names
        else reply.names.get(name) or reply.names.get(name_at_hand, name)
        for name_at_hand, name in _names_at_hand(answered).items()
    }
    return _rename(answered, changed, "class")


def _rename(binding: Binding, names: Mapping[str, str], by: Decider) -> Binding:
    """Rename tensors of a binding (old -> new), unless two of them would get the same name."""
    if len(set(names.values())) < len(names):
        return binding
    return replace(
        binding,
        expressions={names[name]: expression for name, expression in binding.expressions.items()},
        by={names[name]: who if names[name] == name else by for name, who in binding.by.items()},
    )


def name_in_catalog(
    expressions: Mapping[str, Expression], stored: Collection[str]
) -> tuple[dict[str, str], dict[str, Expression]]:
    """Give every expression a name in a catalog.

    A stored tensor has a name already. Any other expression gets a new name, which the caller adds to the catalog.

    Args:
        expressions: name -> expression of tensors in the catalog.
        stored: all names in the catalog.

    Returns:
        (name -> name in the catalog, new name in the catalog -> its expression).
    """
    names = {
        name: expression.name if isinstance(expression, Stored) else computed_name(name, stored)
        for name, expression in expressions.items()
    }
    return names, {
        names[name]: expression
        for name, expression in expressions.items()
        if not isinstance(expression, Stored)
    }
