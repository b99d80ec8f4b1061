"""What tensors are on the other side, whoever asks: one order of those who may know, and who decided each name.

    a person      rules that a person gave: they fit all names, or are refused
    shipped       the one set of rules that knows all names of a model in memory

`keys.select` has found the tensors before, and their names below the model's root.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from shardkit.core.regions import Shape
from shardkit.errors import LayoutError
from shardkit.keys.expressions import Expression, Stored, made_name
from shardkit.keys.rule_sets import Padding, bind_in_form, choose_shipped, config_for, foreign_type
from shardkit.keys.rules import RuleSet, Side
from shardkit.layout.traced import ModelNames

Decider = Literal["person", "shipped", "class", "nobody"]
"""Who decides what a tensor is on the other side, in the order in which they are asked."""


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
    """Names at hand that the rules leave out."""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    candidates: tuple[RuleSet, ...] = ()
    """Shipped sets of which each would fit; none of several is taken."""
    why_not: tuple[str, ...] = ()
    """Why other shipped sets that know all names, or most, do not fit."""


def decide_names(
    shapes: Mapping[str, Shape],
    *,
    side: Side | None,
    rules: RuleSet | None = None,
    takes_shipped: bool = False,
    asked: ModelNames | None = None,
    config: Mapping[str, Any] | None = None,
    padding: Padding | None = None,
    wanted: Collection[str] = (),
) -> DecidedNames:
    """Return what tensors are on the other side; where nobody knows, they keep their names.

    Args:
        shapes: by name.
        side: which side the names are of. None leaves that to a person's rules: it is the side that they know; if they
            know both, that of which the other one is wanted.
        rules: what a person asks for.
        takes_shipped: a shipped set may decide, if it is the only one that fits.
        asked: what the model's class says of the Hub's names.
        config: config.json, for numbers and the type of the model; None if there is none.
        padding: what is known of a padded vocabulary.
        wanted: names on the other side, where they are known.

    Raises:
        LayoutError: a person's rules do not fit; lists every problem.
    """
    if rules is not None:
        return _by_person(shapes, side, rules, config, padding, wanted)
    if asked is not None:
        return _by_class(shapes, asked)
    if takes_shipped and side is not None:
        choice = choose_shipped(shapes, config, side=side, padding=padding)
        candidates = tuple(each for each, _ in choice.fitting)
        if len(candidates) > 1 or not candidates:
            return _as_they_are(shapes, candidates=candidates, why_not=choice.reasons)
        ((rules, binding),) = choice.fitting
        return DecidedNames(
            made=binding.made,
            by=dict.fromkeys(binding.made, "shipped"),
            rules=rules,
            dropped=binding.dropped,
            notes=binding.notes,
            candidates=candidates,
            why_not=choice.reasons,
        )
    return _as_they_are(shapes)


def _by_person(
    shapes: Mapping[str, Shape],
    side: Side | None,
    rules: RuleSet,
    config: Mapping[str, Any] | None,
    padding: Padding | None,
    wanted: Collection[str],
) -> DecidedNames:
    config = config_for([rules], config)
    sides: tuple[Side, ...] = ("hub", "model") if side is None else (side,)
    errors = list[LayoutError]()
    for each in sides:
        try:
            binding = bind_in_form(rules, shapes, config, side=each, padding=padding, wanted=wanted)
        except LayoutError as error:
            errors.append(error)
            continue
        if each == sides[-1] or any(name in wanted for name in binding.made):
            return DecidedNames(
                made=binding.made,
                by=dict.fromkeys(binding.made, "person"),
                rules=rules,
                dropped=binding.dropped,
                notes=binding.notes,
                warnings=foreign_type(rules, config),
            )
    raise min(errors, key=lambda error: len(error.problems))


def _by_class(shapes: Mapping[str, Shape], asked: ModelNames) -> DecidedNames:
    made = {fqn: Stored(name, tuple(shapes[name])) for fqn, name in asked.names.items()} | dict(
        asked.converted
    )
    dropped = tuple(sorted({*asked.unused, *asked.ignored}))
    return DecidedNames(made=made, by=dict.fromkeys(made, "class"), dropped=dropped)


def _as_they_are(
    shapes: Mapping[str, Shape], *, candidates: tuple[RuleSet, ...] = (), why_not: tuple[str, ...] = ()
) -> DecidedNames:
    return DecidedNames(
        made={name: Stored(name, tuple(shape)) for name, shape in shapes.items()},
        by=dict.fromkeys(shapes, "nobody"),
        candidates=candidates,
        why_not=why_not,
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
        name: each.name if isinstance(each, Stored) else made_name(name, stored)
        for name, each in made.items()
    }
    return names, {names[name]: each for name, each in made.items() if not isinstance(each, Stored)}
