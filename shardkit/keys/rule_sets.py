"""Load rule sets, and choose the shipped one that fits a checkpoint's names.

A rule set (see `rules`) is a file of the user's, or one of those that are *shipped* with shardkit. It is written for
one form of a trainer's names. A checkpoint may have another form: layers one by one instead of stacks, or a vocabulary
padded to another number of rows. `rewrite_for_form` rewrites a set accordingly.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

from shardkit._version import page
from shardkit.core.regions import Shape
from shardkit.core.text import count, escape, listed, suggestion
from shardkit.errors import LayoutError, SourceError, UsageError
from shardkit.files import storage
from shardkit.files.strict_json import read_small
from shardkit.keys.rules import (
    NUMBER,
    AppliedRules,
    ConfigNumbers,
    Rule,
    RuleSet,
    RuleSide,
    Step,
    bind_names,
    parse_rules,
    regex_of,
)
from shardkit.keys.ties import text_part
from shardkit.keys.tokens import paddings

AUTO, NONE = "auto", "none"
"""Values of `--keys` besides a set's name and a file: the shipped set that knows all names, and no set."""
_MAX_BYTES = 4 << 20
_NEAR = 2  # a set is near if it knows more than one of this many names


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """The sizes of a vocabulary that a trainer padded, as far as they are known."""

    rows: int | None = None
    """Number of rows with padding, by the checkpoint's arguments."""
    multiple: int | None = None
    """The number of rows is a multiple of this, by the checkpoint's arguments."""
    used: int | None = None
    """Number of tokens that training used, by the checkpoint's arguments."""
    tokens: int | None = None
    """Number of tokens of the tokenizer that the user named."""


def bind_in_form(
    rules: RuleSet,
    shapes: Mapping[str, Shape],
    config: Mapping[str, Any] | None,
    *,
    side: RuleSide,
    padding: Padding | None,
    model_names: Iterable[str] = (),
) -> AppliedRules:
    """Call `bind_names` with a rule set that is rewritten for the form of the model's names.

    Args:
        rules, shapes, config, side: as for `bind_names`.
        padding: the sizes of a padded vocabulary, or None.
        model_names: names of the model to fill, if known.

    Raises:
        UsageError, LayoutError: as for `bind_names`.
    """
    if side == "hub":
        return bind_names(_one_by_one(rules, model_names), shapes, config, side=side)
    rules, notes = rewrite_for_form(rules, shapes, config, padding)
    return replace(bind_names(rules, shapes, config, side=side), notes=notes)


def rewrite_for_form(
    rules: RuleSet, shapes: Mapping[str, Shape], config: Mapping[str, Any] | None, padding: Padding | None
) -> tuple[RuleSet, tuple[str, ...]]:
    """Return a rule set rewritten for the form of a model's names and shapes, and notes for the user.

    For layers one by one, stack steps are removed and `{i}` is put into the patterns. For a padded vocabulary, `pad`
    steps get the real numbers of tokens and of rows:

        "layers.wq" with a stack step                 -> "layers.{i}.wq" without
        pad of = "vocab_size" = 32001, 32128 rows     -> pad of = 32001, to = 32128; note "127 rows of padding cut: ..."

    Args:
        rules: the set.
        shapes: name in the model -> shape.
        config: the content of config.json, for numbers; or None.
        padding: the sizes of a padded vocabulary, or None.
    """
    rules, cut = _one_by_one(rules, shapes), set[tuple[int, int]]()  # `_with_padding` fills `cut`
    numbers = ConfigNumbers(rules.numbers, config)
    changed = tuple(_with_padding(rule, shapes, numbers, padding, cut) for rule in rules.rules)
    notes = (
        f"{count(rows - kept, 'row')} of padding cut: {kept} of {rows} are tokens"
        for rows, kept in sorted(cut)
    )
    return replace(rules, rules=changed), tuple(notes)


def _one_by_one(rules: RuleSet, names: Iterable[str]) -> RuleSet:
    """Return a set for layers one by one if the names have them, else the same set.

    The rules are for stacked layers. Their last step, which stacks, is removed, and `{i}` is put into their names.
    """
    stem = re.escape(rules.numbered)
    if not stem or not any(re.match(rf"{stem}\.[0-9]+\.", name) for name in names):
        return rules

    def numbered(pattern: str, variable: str = "i") -> str:
        return re.sub(rf"^{stem}\.", f"{rules.numbered}.{{{variable}}}.", pattern)

    def apart(rule: Rule) -> Rule:
        last = rule.steps[-1] if rule.steps else None
        if last is None or last.kind != "stack" or not rule.model[0].startswith(f"{rules.numbered}."):
            return rule
        model = tuple(numbered(pattern, last.value) for pattern in rule.model)
        return replace(rule, model=model, steps=rule.steps[:-1])

    return replace(
        rules,
        rules=tuple(map(apart, rules.rules)),
        requires=tuple(map(numbered, rules.requires)),
        numbered="",
    )


def _with_padding(
    rule: Rule,
    shapes: Mapping[str, Shape],
    numbers: ConfigNumbers,
    padding: Padding | None,
    cut: set[tuple[int, int]],
) -> Rule:
    """Return a rule whose `pad` steps have the model's number of rows; add (rows, tokens) to `cut` if these differ."""

    def with_rows(step: Step) -> Step:
        matched = [shape for name, shape in shapes.items() if any(map(_matching(name), rule.model))]
        if step.kind != "pad" or "to" in step.options or len(matched) != 1:
            return step
        rows = matched[0][step.value]
        try:
            kept = _num_tokens(rows, numbers.value(step.options["of"]), padding or Padding())
        except ValueError:  # reported when the rule is applied
            return step
        if kept < rows:
            cut.add((rows, kept))
        return replace(step, options={**step.options, "of": kept, "to": rows})

    return replace(rule, steps=tuple(map(with_rows, rule.steps)))


def _matching(name: str) -> Any:
    return lambda pattern: regex_of(pattern).fullmatch(name)


def _num_tokens(rows: int, counted: int, padding: Padding) -> int:
    """Return the number of a model's rows that are tokens, not padding.

    Args:
        rows: number of rows, perhaps with padding.
        counted: number of tokens, by the config.
        padding: other sizes that are known.
    """
    tokens = max(counted, padding.tokens or 0)
    if tokens == counted and (padding.used or 0) > counted:  # tokens were added, but which is not known
        return rows
    multiple = padding.multiple if padding.rows == rows else None
    fitting = paddings(tokens) if multiple is None else {-(-tokens // multiple) * multiple}
    return tokens if rows in fitting else rows


@cache
def shipped_sets() -> tuple[RuleSet, ...]:
    """Return the rule sets that are shipped with shardkit."""
    folder, sets = os.path.join(os.path.dirname(__file__), "shipped"), list[RuleSet]()
    for name in sorted(os.listdir(folder)):
        with open(os.path.join(folder, name), "rb") as file:
            sets.append(parse_rules(file.read(), name.removesuffix(".toml")))
    return tuple(sets)


def find_shipped(name: str) -> RuleSet | None:
    """Return the shipped rule set with a name, or None."""
    return next((rules for rules in shipped_sets() if rules.name == name), None)


def load_rules(name_or_path: str | os.PathLike[str]) -> RuleSet:
    """Return the rule set in a file, or a shipped one.

    Args:
        name_or_path: path of a TOML file, or the name of a shipped set.

    Raises:
        UsageError: there is neither, or the file has mistakes; the error lists all of them.
        SourceError, ResourceError: the file cannot be read.
    """
    name = os.fspath(name_or_path)
    if not storage.lexists(name):
        rule_set = find_shipped(name)
        if rule_set is not None:
            return rule_set
        shipped_names = [rules.name for rules in shipped_sets()]
        raise UsageError(
            f"{escape(name)}: no such file, and no rule set of that name{suggestion(name, shipped_names)}",
            problems=[f"{rules.name}: {rules.title}" for rules in shipped_sets()],
            hint=f"give the path of a TOML file ({page('keys.md')}), or one of these names",
        )
    return parse_rules(read_small(name, os.path.basename(name), _MAX_BYTES), os.path.basename(name))


class Choice(NamedTuple):
    """The shipped rule sets for a checkpoint's names."""

    fitting: tuple[tuple[RuleSet, AppliedRules], ...]
    """(set, its result) for each set that can be applied."""
    reasons: tuple[str, ...]
    """Why other sets that know all of the names, or most, cannot be applied."""


def choose_shipped(
    shapes: Mapping[str, Shape],
    config: Mapping[str, Any] | None,
    *,
    side: RuleSide,
    padding: Padding | None,
) -> Choice:
    """Return the shipped rule sets that know all names of a checkpoint and can be applied to them.

    Args:
        shapes: name -> shape.
        config: the content of config.json, or None.
        side: the side that the names belong to.
        padding: the sizes of a padded vocabulary, or None.
    """
    fitting, reasons = list[tuple[RuleSet, AppliedRules]](), list[str]()
    model_type = (config or {}).get("model_type")
    forms = [_one_by_one(rules, shapes) if side == "model" else rules for rules in shipped_sets()]
    candidates = [rules for rules in forms if _knows_all(rules, shapes, side)]
    if not candidates:
        return Choice((), tuple(_near_misses(forms, shapes, model_type)) if side == "model" else ())
    config = config_for(candidates, config)
    model_type = (config or {}).get("model_type")
    if model_type is None and len(candidates) > 1:
        titles = " and ".join(rules.title for rules in candidates)
        return Choice((), (f"{titles} have these names: a config.json tells which it is",))
    for rules in _for_type(candidates, model_type):
        if foreign := _why_foreign(rules, model_type):
            reasons.append(foreign)
            continue
        try:
            fitting.append((rules, bind_in_form(rules, shapes, config, side=side, padding=padding)))
        except (LayoutError, SourceError, UsageError) as error:
            reasons.append(f"{rules.title}: {error.problems[0]}")
    return Choice(tuple(fitting), tuple(reasons))


def config_for(sets: Iterable[RuleSet], config: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the config whose `model_type` fits the rule sets: the config itself, or that of its language model."""
    part, all_sets = text_part(config), list(sets)
    types = [(side or {}).get("model_type") for side in (config, part)]
    is_whole, is_part = (
        any(not _why_foreign(rules, model_type) for rules in all_sets) for model_type in types
    )
    return part if part and types[1] is not None and is_part and not is_whole else config


def _for_type(sets: list[RuleSet], model_type: object) -> list[RuleSet]:
    """Return the sets that may be for a type of model, or all sets if none of them may."""
    return [rules for rules in sets if not _why_foreign(rules, model_type)] or sets


def _why_foreign(rules: RuleSet, model_type: object) -> str:
    """Return why a set is not for a type of model, or an empty string if it may be for it."""
    if not rules.model_types or model_type is None or model_type in rules.model_types:
        return ""
    return f"{rules.title}: it is for {', '.join(rules.model_types)}, not for {escape(str(model_type))}"


def foreign_type(rules: RuleSet, config: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return a warning if the user's rules were written for another architecture than the config's."""
    model_type = (config_for([rules], config) or {}).get("model_type")
    if not _why_foreign(rules, model_type):
        return ()
    return (
        f"the key rules of {escape(rules.title)} are for {', '.join(map(escape, rules.model_types))}, and {escape(str(model_type))} "
        "is none of these: names may fit while rows are in another order",
    )


def _knows_all(rules: RuleSet, names: Iterable[str], side: RuleSide) -> bool:
    """True if a rule set has a pattern for every name of one side, and there is a name.

    On the model's side, each pattern in `requires` must also match a name: these tell apart sets whose patterns fit the
    same names. A set that keeps other tensors has a pattern for every name.
    """
    all_names, patterns = list(names), _patterns_of(rules, side)
    has_required = side == "hub" or _has_required(rules, all_names)
    return (
        has_required
        and bool(all_names)
        and all(any(p.fullmatch(name) for p in patterns) for name in all_names)
    )


def known_names(rules: RuleSet, names: Collection[str]) -> frozenset[str]:
    """Return the names of a model that a rule of a set matches."""
    patterns = _patterns_of(_one_by_one(rules, names), "model")
    return frozenset(name for name in names if any(p.fullmatch(name) for p in patterns))


def _patterns_of(rules: RuleSet, side: RuleSide) -> list[re.Pattern[str]]:
    patterns = [regex_of(pattern) for rule in rules.rules for pattern in rule.patterns(side)]
    return [*patterns, re.compile(".*")] if rules.keeps_others else patterns


def _has_required(rules: RuleSet, names: Iterable[str]) -> bool:
    all_names = list(names)
    return all(any(map(regex_of(pattern).fullmatch, all_names)) for pattern in rules.requires)


def _near_misses(forms: Sequence[RuleSet], names: Iterable[str], model_type: object) -> list[str]:
    """Return the reasons why the sets that know most of a model's names cannot be applied."""
    alike = dict[str, str]()  # one name for all that differ only in numbers, of which there may be 100,000
    for name in names:
        alike.setdefault(NUMBER.sub("{i}", name), name)
    lacking = dict[str, list[str]]()
    for rules in forms:
        if not rules.keeps_others and _has_required(rules, alike.values()):
            patterns = _patterns_of(rules, "model")
            unknown = [one for one in alike.values() if not any(p.fullmatch(one) for p in patterns)]
            lacking[rules.name] = unknown
    least = min(map(len, lacking.values()), default=0)
    if least * _NEAR >= len(alike):
        return []
    near = [rules for rules in forms if len(lacking.get(rules.name, alike)) == least]
    return [
        _why_foreign(rules, model_type)
        or f"{rules.title} ({rules.name}): no rule is about {listed(lacking[rules.name])}"
        for rules in _for_type(near, model_type)
    ]
