"""Convert between a trainer's own tensors and the Hub's by rules. Pure: names and shapes.

A rule set is a TOML file, for users' own models and for trainers whose names no class of transformers knows. It has two
sides: "hub", and "model" for the trainer's names. A rule names tensors on both sides, with `{i}` for numbers, and the
steps that turn the Hub's tensors into the model's:

    [[rule]]
    hub = "model.layers.{i}.self_attn.q_proj.weight"
    model = "layers.{i}.attention.wq.weight"
    steps = [{ rope = "heads" }]

    [[rule]]
    hub = ["model.layers.{i}.mlp.experts.{e}.gate_proj.weight", "model.layers.{i}.mlp.experts.{e}.up_proj.weight"]
    model = "model.layers.{i}.mlp.experts.gate_up_proj"
    steps = [{ stack = "e" }, { concat = 1 }]

Every step has an inverse, so `bind_names` applies a set in either direction. It returns expressions, after a check
that the opposite direction restores every tensor; otherwise it reports those that are not restored. The check proves
only that the expressions are invertible. It misses a mistake that both directions share, so tests compare each step in
one direction with numpy. docs/keys.md describes the file.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from math import prod
from typing import Any, Literal, NamedTuple

from shardkit._version import page
from shardkit.core.regions import Region, Shape
from shardkit.core.text import count, escape, listed, suggestion
from shardkit.errors import LayoutError, UsageError
from shardkit.keys.expressions import (
    Expression,
    Stored,
    Zeros,
    concat,
    cut,
    deinterleave,
    interleave,
    permute,
    reshape,
    stack,
    substitute,
)
from shardkit.keys.inverse import differences
from shardkit.keys.names import natural

RuleSide = Literal["hub", "model"]
FORMAT = 1

_VARIABLE = re.compile(r"\{([A-Za-z_]\w{0,31})(:any)?\}", re.ASCII)
_MAX_ROWS = 1 << 40  # more than any tensor has
_PADDED = 128  # Megatron-Core's make_vocab_size_divisible_by
_STEPS = {
    "stack": ("dim",),
    "concat": ("sizes",),
    "permute": ("only",),
    "unflatten": ("sizes", "only"),
    "flatten": ("sizes", "only"),
    "rope": ("only",),
    "interleave": ("groups", "only"),
    "pad": ("of", "to", "only"),
}
_RULE_KEYS = ("hub", "model", "steps", "steps_to_hub", "optional", "drop", "tie", "to_hub_only")
_TOP_KEYS = (
    "format",
    "name",
    "title",
    "model_types",
    "requires",
    "optional",
    "others",
    "numbers",
    "numbered",
    "rule",
)
NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")  # a number between dots; `{i}` in most patterns
_MAX_RULES, _MAX_SUGGESTIONS = 4096, 3

NamedNumbers = Mapping[str, int | str | tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One operation on the way from one side to the other, such as `{ stack = "e", dim = 1 }`."""

    kind: str
    """A key of `_STEPS`, such as "stack"."""
    value: Any
    """The value of that key, such as "e"."""
    options: Mapping[str, Any]
    """The other keys, such as {"dim": 1}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The conversion of one kind of tensors between the two sides."""

    number: int
    """Position in the file, from 1."""
    hub: tuple[str, ...]
    """Patterns of names on the Hub; empty if only the model has such tensors."""
    model: tuple[str, ...]
    """Patterns of names in the model; empty if only the Hub has such tensors."""
    steps: tuple[Step, ...] = ()
    steps_from: RuleSide = "hub"
    """The side on which the steps begin. This side may have several patterns, the other side has one."""
    is_optional: bool = False
    """True if the rule may match nothing."""
    is_to_hub_only: bool = False
    """True if the rule is used only from the model to the Hub, for names that some checkpoints have instead of another
    rule's."""
    tie: str | None = None
    """The name on the Hub that is used in place of `hub` if `hub` is missing."""

    @property
    def drops(self) -> bool:
        """True if the tensors are left out, as only one side has them."""
        return not (self.hub and self.model)

    def patterns(self, side: RuleSide) -> tuple[str, ...]:
        """Return the patterns of one side."""
        return self.hub if side == "hub" else self.model

    def __str__(self) -> str:
        shown = " + ".join(self.hub), " + ".join(self.model)
        return f"rule {self.number} ({escape(' = '.join(filter(None, shown)))})"


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleSet:
    """Rules for one kind of model of one trainer."""

    name: str
    title: str
    rules: tuple[Rule, ...]
    numbers: NamedNumbers = field(default_factory=dict)
    """Name that steps may use -> a number, a key of config.json, arithmetic on them, or several to try in turn."""
    model_types: tuple[str, ...] = ()
    """`model_type` of the configs that the set is for; empty for any."""
    requires: tuple[str, ...] = ()
    """Patterns that must each match a name in the model for the set to be chosen automatically."""
    keeps_others: bool = False
    """True if tensors that no rule matches are the same on both sides."""
    numbered: str = ""
    """Prefix of stacked layers in the model. In another form of the names, a number follows it: one name per layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedRules:
    """The result of applying rules to the tensors of one side."""

    expressions: Mapping[str, Expression]
    """Name on the other side -> expression of these tensors."""
    dropped: tuple[str, ...] = ()
    """Names of tensors that rules leave out."""
    notes: tuple[str, ...] = ()


def parse_rules(data: bytes, name: str) -> RuleSet:
    """Return the rule set in a TOML file.

    Args:
        data: the content of the file.
        name: the file's name, for messages.

    Raises:
        UsageError: the file is not a valid rule set; the error lists every problem.
    """
    content = _load(data, name)
    problems = [
        f"{escape(key)}: no such key{suggestion(key, _TOP_KEYS)}" for key in content if key not in _TOP_KEYS
    ]
    if content.get("format") != FORMAT:
        problems.append(f"format: expected {FORMAT}, found {escape(repr(content.get('format')))}")
    tables = content.get("rule")
    if not isinstance(tables, list) or not tables or len(tables) > _MAX_RULES:
        problems.append("rule: expected one [[rule]] or more")
        tables = []
    rules = []
    for number, table in enumerate(tables, 1):
        try:
            rules.append(_rule(table, number, is_optional=content.get("optional") is True))
        except _BadRule as wrong:
            problems += [f"rule {number}: {problem}" for problem in wrong.problems]
    if content.get("others", "keep") != "keep":
        problems.append(
            'others: "keep" is the only value; leave it out to refuse tensors that no rule is about'
        )
    numbers = content.get("numbers", {})
    problems += _number_problems(numbers if isinstance(numbers, dict) else {})
    UsageError.raise_for(
        problems,
        f"{escape(name)} is not a file of key rules: {count(len(problems), 'problem')}",
        hint=f"{page('keys.md')} describes it, {page('keys.schema.json')} for editors",
    )
    return RuleSet(
        name=str(content.get("name", name)),
        title=str(content.get("title", content.get("name", name))),
        rules=tuple(rules),
        numbers={key: tuple(value) if isinstance(value, list) else value for key, value in numbers.items()},
        model_types=tuple(map(str, content.get("model_types", ()))),
        requires=tuple(map(str, content.get("requires", ()))),
        keeps_others=content.get("others") == "keep",
        numbered=str(content.get("numbered", "")),
    )


def _load(data: bytes, name: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        content: dict[str, Any] = tomllib.loads(data.decode())
        return content
    except (ValueError, RecursionError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise UsageError(f"{escape(name)} is not TOML: {escape(str(error))}") from None


class _BadRule(Exception):
    """A rule in a file is not valid; `problems` has all reasons."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems


def _rule(table: Any, number: int, *, is_optional: bool) -> Rule:
    """Parse one rule of a file; `number` is its position, from 1.

    Raises:
        _BadRule: has all problems of the rule.
    """
    if not isinstance(table, dict):
        raise _BadRule("not a table")
    problems = [
        f"{escape(key)}: no such key{suggestion(key, _RULE_KEYS)}" for key in table if key not in _RULE_KEYS
    ]
    hub, model = _patterns(table, "hub", problems), _patterns(table, "model", problems)
    drops = table.get("drop") is True
    if drops == bool(hub and model) or not (hub or model):
        problems.append("it needs hub and model; or one of the two, and drop = true")
    if "steps" in table and "steps_to_hub" in table:
        problems.append("steps go from the Hub to the model and steps_to_hub back: one of the two is enough")
    steps_from: RuleSide = "model" if "steps_to_hub" in table else "hub"
    steps = _steps(table.get("steps_to_hub" if steps_from == "model" else "steps", []), problems)
    many, one = (hub, model) if steps_from == "hub" else (model, hub)
    if len(one) > 1:
        other_key = "steps" if steps_from == "model" else "steps_to_hub"
        problems.append(f"steps lead from one tensor or several to one: write {other_key} instead")
    stacked = [step.value for step in steps if step.kind == "stack"]
    if not drops and hub and model:
        outer, inner = _variables(one), _variables(many) - _variables(one)
        if _variables(one) - _variables(many):
            problems.append(f"{{{'}, {'.join(sorted(outer - _variables(many)))}}} is on one side alone")
        if inner != set(stacked) or len(stacked) != len(set(stacked)):
            problems.append(
                "each variable that is on one side alone needs a stack step, and no other has one"
            )
        if len(many) > 1 and not any(step.kind == "concat" for step in steps):
            problems.append("several tensors become one by a concat step")
    problems += [
        f"steps: only = {escape(str(only))}: expected a list of places, from 0 to {len(many) - 1}"
        for step in steps
        if (only := step.options.get("only")) is not None and not _are_indexes(only, len(many))
    ]
    if problems:
        raise _BadRule(*problems)
    tie, is_to_hub_only = table.get("tie"), table.get("to_hub_only") is True
    return Rule(
        number=number,
        hub=hub,
        model=model,
        steps=steps,
        steps_from=steps_from,
        is_optional=is_optional or drops or table.get("optional") is True or is_to_hub_only,
        is_to_hub_only=is_to_hub_only,
        tie=tie if isinstance(tie, str) else None,
    )


def _patterns(table: Mapping[str, Any], key: str, problems: list[str]) -> tuple[str, ...]:
    value = table.get(key, ())
    patterns = (value,) if isinstance(value, str) else value
    if not isinstance(patterns, (list, tuple)) or not all(
        isinstance(pattern, str) and pattern for pattern in patterns
    ):
        problems.append(f"{key}: expected a name, or a list of names")
        return ()
    return tuple(patterns)


def _steps(value: Any, problems: list[str]) -> tuple[Step, ...]:
    """Return the valid steps of a rule's `steps`, a table or a list of them, such as [{"stack": "e", "dim": 1}].

    For each other one, a line is added to `problems`.
    """
    steps = list[Step]()
    for table in value if isinstance(value, list) else [value]:
        kinds = [key for key in table if key in _STEPS] if isinstance(table, dict) else []
        if len(kinds) != 1 or set(table) - {kinds[0], *_STEPS[kinds[0]]}:
            problems.append(
                f"steps: expected one of {', '.join(_STEPS)} with its options, found {escape(str(table))}"
            )
            continue
        options = {key: option for key, option in table.items() if key != kinds[0]}
        if kinds[0] in ("unflatten", "flatten") and not isinstance(options.get("sizes"), list):
            problems.append(f"steps: {kinds[0]} needs sizes = [...]")
            continue
        if not _is_step_value(kinds[0], table[kinds[0]]) or type(options.get("dim", 0)) is not int:
            takes = "stack takes a variable and a dim, concat a dim, permute a list with each dim once"
            problems.append(f"steps: {escape(str(table))}: {takes}")
            continue
        if kinds[0] == "pad" and "of" not in options:
            problems.append("steps: pad needs of = ROWS ON THE HUB")
            continue
        steps.append(Step(kind=kinds[0], value=table[kinds[0]], options=options))
    return tuple(steps)


def _is_step_value(kind: str, value: Any) -> bool:
    """True if a value has the right type for a kind of step. Shapes and config are not considered."""
    if kind == "permute":
        are_dims = isinstance(value, list) and all(type(dim) is int for dim in value)
        return are_dims and sorted(dim + len(value) * (dim < 0) for dim in value) == [*range(len(value))]
    return type(value) is {"stack": str, "concat": int}.get(kind, type(value))


def _are_indexes(value: Any, length: int) -> bool:
    """True if a value is a list, not empty, of valid indexes into a list of `length` entries."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(place) is int and 0 <= place < length for place in value)
    )


def _number_problems(numbers: Mapping[str, Any]) -> Iterator[str]:
    """Yield the problems of a file's numbers, including numbers that no step uses."""
    for key, value in numbers.items():
        if not _is_number(value):
            yield f"numbers.{escape(key)}: expected a number, a key of config.json, or a list of them"
            continue
        for item in value if isinstance(value, list) else [value]:
            try:
                _check_number(item)
            except ValueError as error:
                yield f"numbers.{escape(key)}: {error}"


def _check_number(formula: int | str) -> None:
    """Raise ValueError unless a formula is a number, a name or arithmetic on them."""
    nodes: list[ast.expr] = [] if isinstance(formula, int) else [_parse_formula(formula)]
    while nodes:
        match nodes.pop():
            case ast.BinOp(a, operator, b) if type(operator) in _ARITHMETIC:
                nodes += [a, b]
            case ast.Constant(value=int()) | ast.Name() | ast.Attribute():
                pass
            case _:
                raise ValueError(_not_a_number(formula))


def _not_a_number(value: object) -> str:
    return f"{escape(str(value))} is not a number, a name or arithmetic on them"


def _is_number(value: Any) -> bool:
    many = value if isinstance(value, list) else [value]
    return all((isinstance(item, (int, str)) and not isinstance(item, bool)) for item in many) and bool(many)


def _variables(patterns: Iterable[str]) -> set[str]:
    return {variable for pattern in patterns for variable, _ in _VARIABLE.findall(pattern)}


@cache
def regex_of(pattern: str) -> re.Pattern[str]:
    r"""Return the regular expression for a pattern. A variable that occurs twice must have one value.

    For example, "layers.{i}.weight" becomes `layers\.(?P<i>[0-9]+)\.weight`.
    """
    text, stop, seen = "", 0, set[str]()
    for variable in _VARIABLE.finditer(pattern):
        text += re.escape(pattern[stop : variable.start()])
        name = variable[1]
        text += f"(?P={name})" if name in seen else f"(?P<{name}>{'.+' if variable[2] else '[0-9]+'})"
        seen.add(name)
        stop = variable.end()
    return re.compile(text + re.escape(pattern[stop:]))


def _fill_pattern(pattern: str, values: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda variable: values.get(variable[1], variable[0]), pattern)


class ConfigNumbers:
    """Evaluates the numbers that steps use by name.

    Args:
        numbers: the numbers of a rule set.
        config: the content of config.json, or None.
    """

    def __init__(self, numbers: NamedNumbers, config: Mapping[str, Any] | None) -> None:
        self._numbers, self._config = numbers, config
        self._busy: set[str] = set()

    def value(self, formula: Any) -> int:
        """Return the value of a formula: a number, a name, or arithmetic on them, such as "hidden_size // heads".

        Raises:
            ValueError: the formula is not valid, or a name is not known.
        """
        if isinstance(formula, int) and not isinstance(formula, bool):
            return formula
        if not isinstance(formula, str):
            raise ValueError(f"{escape(str(formula))} is not a number")
        return self._evaluate(_parse_formula(formula), formula)

    def _evaluate(self, node: ast.expr, formula: str) -> int:
        """Return the value of a parsed formula. Raises ValueError, with the whole `formula`, if it has none."""
        match node:
            case ast.Constant(value=int() as number) if not isinstance(number, bool):
                return number
            case ast.BinOp(first, operator, second) if type(operator) in _ARITHMETIC:
                a, b = self._evaluate(first, formula), self._evaluate(second, formula)
                if type(operator) in (ast.FloorDiv, ast.Mod) and b == 0:
                    raise ValueError(f"{escape(formula)} divides by zero")
                return int(_ARITHMETIC[type(operator)](a, b))
            case ast.Name() | ast.Attribute():
                return self._value_of(ast.unparse(node))
        raise ValueError(_not_a_number(formula))

    def _value_of(self, name: str) -> int:
        """Return the number with a name: by the file's `numbers`, else by the config, where dots separate nested keys.

        A number may have the name of the key that it is made of: while it is evaluated, its name means the key.

        Raises:
            ValueError: the number is not known.
        """
        if name in self._numbers and name not in self._busy:
            tried = self._numbers[name]
            self._busy.add(name)
            try:
                return self._first_known(name, tried if isinstance(tried, tuple) else (tried,))
            finally:
                self._busy.discard(name)
        value: Any = self._config
        for key in name.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        where = "there is no config.json" if self._config is None else "config.json does not have it"
        raise ValueError(f"the number {escape(name)} is not known: {where}")

    def _first_known(self, name: str, tried: Sequence[int | str]) -> int:
        error = ValueError(f"the number {escape(name)} is not known")
        for candidate in tried:
            try:
                return self.value(candidate)
            except ValueError as caught:
                error = caught
        raise error


_ARITHMETIC: Mapping[type, Any] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
}


@cache
def _parse_formula(formula: str) -> ast.expr:
    if len(formula) > 200:
        raise ValueError("a number of more than 200 characters")
    try:
        return ast.parse(formula, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(_not_a_number(formula)) from None


def _sizes(formulas: Sequence[Any], total: int, env: ConfigNumbers) -> list[int]:
    """Return the values of formulas for sizes; -1 becomes the size with which their product is `total`."""
    sizes = [-1 if formula == -1 else env.value(formula) for formula in formulas]
    product = prod(size for size in sizes if size != -1)
    return [total // max(product, 1) if size == -1 else size for size in sizes]


def _dim(value: Any, shape: Shape) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not -len(shape) <= value < len(shape):
        raise ValueError(f"there is no dim {escape(str(value))} in {list(shape)}")
    return value % len(shape)


def _per_head(of: Expression, num_heads: int, *, to_pairs: bool) -> Expression:
    """Reorder the rows of each head for rotary embeddings: from halves, as on the Hub, to pairs (re, im), or back."""
    rows = of.shape[0]
    if num_heads < 1 or rows % (2 * num_heads):
        raise ValueError(f"{rows} rows are not {num_heads} heads of an even size")
    apart = reshape(of, (num_heads, rows // num_heads, *of.shape[1:]))
    return reshape((interleave if to_pairs else deinterleave)(apart, 1, 2), of.shape)


_PartsByKey = list[dict[tuple[int, ...], Expression]]
"""For each pattern: values of the variables that are not stacked yet -> tensor."""


def _apply_steps(
    steps: Sequence[Step], parts: _PartsByKey, stacked: list[str], env: ConfigNumbers
) -> Expression:
    """Apply steps to the tensors of all patterns, and return the one tensor that results.

    Args:
        steps: the steps of a rule.
        parts: the tensors.
        stacked: names of the variables in the keys of `parts`, in their order. The list is emptied.
        env: numbers that steps use.
    """
    for step in steps:
        if step.kind == "stack":
            place = stacked.index(step.value)
            parts = [_stack_parts(part, place, step.options.get("dim", 0), step.value) for part in parts]
            stacked.remove(step.value)
        elif step.kind == "concat":
            keys = parts[0].keys()
            if any(part.keys() != keys for part in parts):
                raise ValueError("the tensors to put together do not have the same numbers")
            parts = [{key: concat([part[key] for part in parts], int(step.value)) for key in parts[0]}]
        else:
            parts = [
                {key: _apply_step(step, tensor, env) for key, tensor in part.items()}
                if _is_for_place(step, place)
                else part
                for place, part in enumerate(parts)
            ]
    (result,) = (tensor for part in parts for tensor in part.values())
    return result


def _stack_parts(
    part: Mapping[tuple[int, ...], Expression], place: int, dim: int, variable: str
) -> dict[tuple[int, ...], Expression]:
    """Stack the tensors that differ only in one variable.

    Args:
        part: values of the rule's variables -> tensor.
        place: position of the variable in these values, which the result lacks.
        dim: the new dim.
        variable: name of the variable, for messages.

    Raises:
        ValueError: the variable's values are not 0, 1, 2, ... without a gap.
    """
    groups: dict[tuple[int, ...], dict[int, Expression]] = {}
    for key, tensor in part.items():
        groups.setdefault((*key[:place], *key[place + 1 :]), {})[key[place]] = tensor
    for members in groups.values():
        if sorted(members) != list(range(len(members))):
            gap = next(n for n in range(len(members)) if n not in members)
            raise ValueError(f"{{{variable}}} is not 0 to {max(members)} without a gap: {gap} is missing")
    return {key: stack([members[n] for n in range(len(members))], dim) for key, members in groups.items()}


def _apply_step(step: Step, of: Expression, env: ConfigNumbers) -> Expression:
    """Apply a step that has one input to a tensor."""
    match step.kind:
        case "permute":
            return permute(of, step.value)
        case "unflatten":
            dim = _dim(step.value, of.shape)
            return reshape(
                of,
                (*of.shape[:dim], *_sizes(step.options["sizes"], of.shape[dim], env), *of.shape[dim + 1 :]),
            )
        case "flatten":
            dim = _dim(step.value, of.shape)
            stop = dim + len(step.options["sizes"])
            return reshape(of, (*of.shape[:dim], prod(of.shape[dim:stop]), *of.shape[stop:]))
        case "rope":
            return _per_head(of, env.value(step.value), to_pairs=True)
        case "interleave":
            return interleave(of, _dim(step.value, of.shape), env.value(step.options.get("groups", 2)))
        case "pad":
            dim, size = _dim(step.value, of.shape), env.value(step.options["of"])
            to = env.value(step.options["to"]) if "to" in step.options else -(-size // _PADDED) * _PADDED
            if not size <= to <= _MAX_ROWS:
                raise ValueError(f"pad: cannot pad {size} rows to {to}")
            more = (*of.shape[:dim], to - of.shape[dim], *of.shape[dim + 1 :])
            return of if to <= of.shape[dim] else concat([of, Zeros(more)], dim)
    raise AssertionError(step.kind)


def _undo_step(step: Step, of: Expression, env: ConfigNumbers) -> Expression:
    """Apply the inverse of a step that has one input to a tensor."""
    match step.kind:
        case "permute":
            dims = [dim % len(step.value) for dim in step.value]
            return permute(of, [dims.index(dim) for dim in range(len(dims))])
        case "unflatten":
            return _apply_step(Step(kind="flatten", value=step.value, options=step.options), of, env)
        case "flatten":
            return _apply_step(Step(kind="unflatten", value=step.value, options=step.options), of, env)
        case "rope":
            return _per_head(of, env.value(step.value), to_pairs=False)
        case "interleave":
            return deinterleave(of, _dim(step.value, of.shape), env.value(step.options.get("groups", 2)))
        case "pad":
            dim, size = _dim(step.value, of.shape), env.value(step.options["of"])
            sizes = (*of.shape[:dim], min(size, of.shape[dim]), *of.shape[dim + 1 :])
            return cut(of, Region((0,) * len(sizes), sizes))
    raise AssertionError(step.kind)


def _undo_steps(rule: Rule, of: Expression, env: ConfigNumbers) -> _PartsByKey:
    """Apply the inverse of a rule's steps to a tensor, and return the tensors of all patterns.

    The keys have the values of the stacked variables, in the order of the rule's stack steps.
    """
    parts: _PartsByKey = [{(): of}]
    order = list[str]()
    for step in reversed(rule.steps):
        if step.kind == "stack":
            dim = step.options.get("dim", 0)
            parts = [
                {
                    (n, *key): tensor
                    for key, whole in part.items()
                    for n, tensor in enumerate(_unstack(whole, dim))
                }
                for part in parts
            ]
            order.insert(0, step.value)
        elif step.kind == "concat":
            parts = _undo_concat(parts, step, len(rule.patterns(rule.steps_from)), env)
        else:
            parts = [
                {key: _undo_step(step, tensor, env) for key, tensor in part.items()}
                if _is_for_place(step, place)
                else part
                for place, part in enumerate(parts)
            ]
    return parts


def _is_for_place(step: Step, place: int) -> bool:
    """True unless a step has `only`, and it lacks this position in the list of names."""
    only = step.options.get("only")
    return only is None or place in only


def _unstack(of: Expression, dim: int) -> Iterator[Expression]:
    dim = _dim(dim, of.shape)
    for n in range(of.shape[dim]):
        offsets = tuple(n if d == dim else 0 for d in range(len(of.shape)))
        sizes = tuple(1 if d == dim else size for d, size in enumerate(of.shape))
        yield reshape(cut(of, Region(offsets, sizes)), (*of.shape[:dim], *of.shape[dim + 1 :]))


def _undo_concat(parts: _PartsByKey, step: Step, number: int, env: ConfigNumbers) -> _PartsByKey:
    """Cut each tensor into the `number` parts that a concat step joined: of the step's sizes, else of equal sizes.

    Raises:
        ValueError: the sizes do not add up to the tensor's.
    """
    (part,) = parts
    apart: _PartsByKey = [{} for _ in range(number)]
    for key, whole in part.items():
        dim = _dim(step.value, whole.shape)
        total, formulas = whole.shape[dim], step.options.get("sizes")
        sizes = (
            [env.value(formula) for formula in formulas]
            if formulas is not None
            else [total // number] * number
        )
        if len(sizes) != number or sum(sizes) != total:
            raise ValueError(f"dim {dim} of {list(whole.shape)} is not {' + '.join(map(str, sizes))}")
        start = 0
        for place, size in enumerate(sizes):
            offsets = tuple(start if d == dim else 0 for d in range(len(whole.shape)))
            box = tuple(size if d == dim else n for d, n in enumerate(whole.shape))
            apart[place][key] = cut(whole, Region(offsets, box))
            start += size
    return apart


class _Match(NamedTuple):
    """Tensors of one side that a rule matches, with one set of values for the variables that both sides have."""

    rule: Rule
    outer: Mapping[str, str]
    """Values of the variables that both sides have."""
    names: tuple[tuple[str, Mapping[str, str]], ...]
    """(name, values of all its variables), pattern by pattern."""


def bind_names(
    rules: RuleSet,
    shapes: Mapping[str, Shape],
    config: Mapping[str, Any] | None,
    *,
    side: RuleSide,
    made_by: Mapping[str, Rule] | None = None,
) -> AppliedRules:
    """Return the tensors of the other side as expressions.

    Args:
        rules: the set.
        shapes: name -> shape.
        config: the content of config.json, for numbers; or None.
        side: the side that the names belong to.
        made_by: for the check of the opposite direction: name -> the rule that made it, the only one to apply to it.

    Raises:
        UsageError: some rules match nothing; the error lists all other problems too.
        LayoutError: no rule matches a tensor, two tensors would get one name, a number is not known, shapes do not fit,
            or the opposite direction does not restore a tensor; the error lists all problems.
    """
    outputs, dropped, problems, sources = dict[str, Expression](), list[str](), list[str](), dict[str, Rule]()
    owners: dict[str, Rule] = {}
    used = set[int]()
    matches = _matches(rules, shapes, side, owners, problems, made_by)
    env = ConfigNumbers(rules.numbers, config)
    other_side: RuleSide = "model" if side == "hub" else "hub"
    for match in matches:
        rule = match.rule
        used.add(rule.number)  # a rule that uses its tie owns no name
        if rule.drops:
            dropped += [name for name, _ in match.names]
            continue
        try:
            expressions = _apply_rule(match, shapes, side, other_side, env)
        except (ValueError, TypeError) as error:
            problems.append(f"{rule}: {escape(match.names[0][0])}: {error}")
            continue
        for name, expression in expressions.items():
            if name in outputs:
                problems.append(f"{escape(name)}: made twice, by {sources[name]} and by {rule}")
            outputs[name], sources[name] = expression, rule
    used.update(rule.number for rule in owners.values())
    idle = [rule for rule in rules.rules if rule.number not in used and not rule.is_optional]
    problems += [f"{rule}: matches nothing" for rule in idle]
    names_left = [name for name in shapes if name not in owners]
    if rules.keeps_others:
        twice = [name for name in names_left if name in outputs]
        problems += [f"{escape(name)}: made by {sources[name]}, and there already" for name in twice]
        outputs |= {name: Stored(name, tuple(shapes[name])) for name in names_left}
        names_left = []
    known_patterns = [pattern for rule in rules.rules for pattern in rule.patterns(side)]
    problems += [
        f"{escape(name)} {list(shapes[name])}: no rule is about it"
        + (suggestion(NUMBER.sub("{i}", name), known_patterns) if place < _MAX_SUGGESTIONS else "")
        for place, name in enumerate(names_left)
    ]
    if made_by is None and not problems:
        problems += _not_restored(rules, outputs, sources, shapes, dropped, config, side)
    (UsageError if idle else LayoutError).raise_for(
        problems,
        f"the key rules of {escape(rules.title)} do not fit: {count(len(problems), 'problem')}",
        hint="inspect with --tensors lists names and shapes; optional = true lets a rule match nothing, drop = true "
        "leaves tensors out",
    )
    return AppliedRules(expressions=outputs, dropped=tuple(dropped))


def _matches(
    rules: RuleSet,
    shapes: Mapping[str, Shape],
    side: RuleSide,
    owners: dict[str, Rule],
    problems: list[str],
    made_by: Mapping[str, Rule] | None,
) -> Iterator[_Match]:
    """Yield the matches of each rule. Record each name's rule in `owners`, and conflicts in `problems`."""
    names = sorted(shapes, key=natural)
    for rule in rules.rules:
        if made_by is None and side == "hub" and rule.is_to_hub_only:
            continue
        patterns = rule.patterns(side)
        outer = _variables(rule.hub) & _variables(rule.model) if not rule.drops else _variables(patterns)
        groups: dict[tuple[str, ...], list[list[tuple[str, Mapping[str, str]]]]] = {}
        for place, pattern in enumerate(patterns):
            for name in names:
                match = regex_of(pattern).fullmatch(name)
                if match is None or (made_by or {}).get(name, rule) is not rule:
                    continue
                values = match.groupdict()
                key = tuple(values.get(variable, "") for variable in sorted(outer))
                groups.setdefault(key, [[] for _ in patterns])[place].append((name, values))
        if not groups and rule.tie is not None and side == "hub" and rule.tie in shapes:
            yield _Match(rule, {}, ((rule.tie, {}),))
        for key, by_pattern in groups.items():
            common = dict(zip(sorted(outer), key, strict=True))
            members = tuple(chain.from_iterable(by_pattern))
            for name, _ in members:
                if name in owners:
                    problems.append(f"{escape(name)}: {owners[name]} and {rule} are about it")
                owners[name] = rule
            lacking = [pattern for pattern, matched in zip(patterns, by_pattern, strict=True) if not matched]
            if lacking:
                shown = [_fill_pattern(pattern, common) for pattern in lacking]
                problems.append(f"{rule}: {listed(shown)} is missing")
            else:
                yield _Match(rule, common, members)


def _apply_rule(
    match: _Match, shapes: Mapping[str, Shape], side: RuleSide, other_side: RuleSide, env: ConfigNumbers
) -> dict[str, Expression]:
    """Apply a rule to the tensors of a match; return name on the other side -> expression."""
    rule = match.rule
    stacked = [step.value for step in rule.steps if step.kind == "stack"]
    if rule.steps_from == side:
        parts: _PartsByKey = [{} for _ in rule.patterns(side)]
        for name, values in match.names:
            place = next(
                (n for n, pattern in enumerate(rule.patterns(side)) if regex_of(pattern).fullmatch(name)), 0
            )
            key = tuple(int(values[variable]) for variable in stacked)
            parts[place][key] = Stored(name, tuple(shapes[name]))
        (pattern,) = rule.patterns(other_side)
        return {_fill_pattern(pattern, match.outer): _apply_steps(rule.steps, parts, list(stacked), env)}
    ((name, values),) = match.names
    apart = _undo_steps(rule, Stored(name, tuple(shapes[name])), env)
    return {
        _fill_pattern(pattern, {**values, **dict(zip(stacked, map(str, key), strict=True))}): expression
        for pattern, part in zip(rule.patterns(other_side), apart, strict=True)
        for key, expression in part.items()
    }


def _not_restored(
    rules: RuleSet,
    expressions: Mapping[str, Expression],
    made_by: Mapping[str, Rule],
    shapes: Mapping[str, Shape],
    dropped: Sequence[str],
    config: Mapping[str, Any] | None,
    side: RuleSide,
) -> Iterator[str]:
    """Yield a line for each tensor that the opposite direction does not restore."""
    other_side: RuleSide = "model" if side == "hub" else "hub"
    made_shapes = {name: expression.shape for name, expression in expressions.items()}
    try:
        back = bind_names(rules, made_shapes, config, side=other_side, made_by=made_by)
    except (LayoutError, UsageError) as error:
        yield from (f"on the way back: {problem}" for problem in error.problems)
        return
    again = {name: substitute(expression, expressions) for name, expression in back.expressions.items()}
    for name in shapes:
        if name in dropped:
            continue
        if name not in again:
            yield f"{escape(name)}: it does not come back"
        elif again[name] != Stored(name, tuple(shapes[name])):
            wrong = differences({name: again[name]}, shapes)
            if wrong:
                yield f"{escape(name)}: {wrong[name]}"
