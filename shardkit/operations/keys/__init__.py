"""keys: what tensors are on the other side, by a file of rules, a shipped set or transformers; and whether rules fit.

Internal: import from `shardkit`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from shardkit import formats
from shardkit._folding import fold
from shardkit._version import DOCS
from shardkit.core.catalog import TensorEntry
from shardkit.core.regions import Shape
from shardkit.core.result import Result
from shardkit.core.text import count, escape, listed, suggestion
from shardkit.errors import LayoutError, ShardkitError, UsageError
from shardkit.files import storage
from shardkit.files.links import may_follow_links
from shardkit.files.strict_json import read_small
from shardkit.formats.contract import Checkpoint
from shardkit.formats.dequantize import take_plain
from shardkit.formats.hub.base import find_base, open_base, saved_derived
from shardkit.keys.expressions import (
    Concat,
    Cut,
    Expression,
    Opaque,
    Permuted,
    Reshaped,
    Stored,
    leaves,
    pieces,
)
from shardkit.keys.rule_sets import find_shipped, foreign_type, shipped
from shardkit.keys.rules import RuleSet, RuleSide, parse_rules
from shardkit.keys.select import select_model
from shardkit.layout.decided import DecidedNames, decide_names
from shardkit.layout.traced import ask_names
from shardkit.operations.resolve import take
from shardkit.osft.fold import take_folded

AUTO, NONE = "auto", "none"
_MAX_BYTES = 4 << 20


def load_rules(given: str | os.PathLike[str]) -> RuleSet:
    """Return a rule set: a file's, or one that shardkit brings along.

    Args:
        given: path of a TOML file, or the name of a shipped set.

    Raises:
        UsageError: there is neither, or the file has mistakes; lists all.
        SourceError, ResourceError: the file cannot be read.
    """
    name = os.fspath(given)
    if not storage.lexists(name):
        rule_set = find_shipped(name)
        if rule_set is not None:
            return rule_set
        known = [rules.name for rules in shipped()]
        raise UsageError(
            f"{escape(name)}: no such file, and no rule set of that name{suggestion(name, known)}",
            problems=[f"{rules.name}: {rules.title}" for rules in shipped()],
            hint=f"give the path of a TOML file ({DOCS}/keys.md), or one of these names",
        )
    return parse_rules(read_small(name, os.path.basename(name), _MAX_BYTES), os.path.basename(name))


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundTensor:
    """A tensor on the other side."""

    name: str
    shape: Shape
    steps: str
    """What is done to what it is made of, for people: "concat 1 of concat 0"; empty for a plain tensor."""
    sources: tuple[str, ...]
    """What it is made of, names that differ only in numbers as one: `experts.{0..7}.up_proj.weight`."""
    is_reordered: bool
    """Its elements are computed in pieces; all others move as they lie."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysResult(Result):
    """What key rules make of a source."""

    source: str
    format: str
    rules: str | None
    """Name of the rule set or file; "transformers" for a class's own; None if nothing is known of the names."""
    title: str
    """What that is, for people."""
    side: str
    """The side that the source's names are of: "hub" or "model"."""
    num_stored: int
    """Tensors of the source."""
    tensors: tuple[BoundTensor, ...]
    """On the other side."""
    dropped: tuple[str, ...] = ()
    """Names of the source that have no counterpart."""
    problems: tuple[str, ...] = ()
    """Why the rules do not fit."""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if the rules fit."""
        return not self.problems

    def headline(self) -> str:
        """Return how many tensors become how many, or that the rules do not fit."""
        stored = f"{count(self.num_stored, 'tensor')} of {escape(self.source)}"
        problems = f"the rules do not fit {stored}: {count(len(self.problems), 'problem')}"
        return f"{stored} become {len(self.tensors)}" if self.ok else problems

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {**asdict(self), "ok": self.ok}


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenedSide:
    path: str
    checkpoint: Checkpoint
    side: RuleSide
    shapes: dict[str, Shape]
    config: Mapping[str, Any] | None


@may_follow_links
def check_keys(
    rules: str | os.PathLike[str],
    source: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    follow_links: bool = False,
) -> KeysResult:
    """Compare key rules with the names and shapes of a source, there and back; no tensor is read.

    Args:
        rules: path of a TOML file, or the name of a shipped set.
        source: a Hub model, or a checkpoint that holds a trainer's own names.
        base: the model whose config.json has the numbers that the rules call for.
        follow_links: read links that lead out of a checkpoint's directory as the files that they lead to.

    Returns:
        Result whose `problems` list every tensor and rule that does not fit.

    Raises:
        UsageError: there is no such rule set, or it has mistakes; lists all.
        SourceError, IntegrityError, ResourceError: the source cannot be opened.
    """
    rule_set, opened = load_rules(rules), _open(os.fspath(source), base)
    try:
        decided, problems = _decide(opened, rules=rule_set), tuple[str, ...]()
    except LayoutError as error:
        foreign, problems = foreign_type(rule_set, opened.config), tuple(error.problems)
        decided = DecidedNames(made={}, by={}, warnings=foreign)
    return _result(opened, rule_set.name, rule_set.title, decided, problems=problems)


@may_follow_links
def show_keys(
    source: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    follow_links: bool = False,
) -> KeysResult:
    """Return what each tensor of a source becomes on the other side, as preshard and consolidate make it.

    Args:
        source: a Hub model, or a sharded checkpoint.
        base: the model whose config.json tells the architecture and its numbers.
        follow_links: as for `check_keys`.

    Raises:
        SourceError, IntegrityError, ResourceError: the source cannot be opened.
    """
    opened = _open(os.fspath(source), base)
    hub = opened.checkpoint.hub
    if hub is not None and (hub.config or {}).get("architectures"):
        try:
            decided = _decide(opened, ask=partial(ask_names, hub.directory))
        except ShardkitError as error:
            reason = error.message
        else:
            return _result(opened, "transformers", "the model's class in transformers", decided)
    else:
        reason = "there is no config.json that names an architecture"
    decided = _decide(opened, takes_shipped=True)
    if decided.rules is not None:
        return _result(opened, decided.rules.name, decided.rules.title, decided, notes=decided.why_not)
    said = [f"{rules.name} fits: {rules.title}" for rules in decided.candidates]
    if decided.why_not:
        give = "" if opened.config is not None else "; give one with --base MODEL"
        said += [f"{why}{give}" for why in decided.why_not]
    elif not said:
        said.append(f"no shipped rule set knows all of these names{'' if hub is None else f', and {reason}'}")
    apart = (
        [name for name in saved_derived(opened.checkpoint) if name in opened.shapes] if hub is None else []
    )
    if apart:
        said.append(
            f"consolidate takes {count(len(apart), 'tensor')} apart, as the manifest says: {listed(apart)}"
        )
    return _result(opened, None, "names as they are", decided, notes=tuple(said))


def _decide(opened: _OpenedSide, **who: Any) -> DecidedNames:
    """Return what decides of a source's names; `who` is more of `decide_names`."""
    padding = opened.checkpoint.padding
    return decide_names(opened.shapes, side=opened.side, config=opened.config, padding=padding, **who)


def _open(path: str, base: str | os.PathLike[str] | None) -> _OpenedSide:
    if storage.exists(path):
        taken = take(path)
        path, checkpoint = taken.resolved.path, taken.open()
    else:
        checkpoint = formats.open(path)
    checkpoint = _without_factors(checkpoint)
    given = None if base is None else open_base(os.fspath(base))
    if checkpoint.hub is not None:
        checkpoint = take_plain(checkpoint, dequantize=True)
        assert checkpoint.hub is not None
        config = given.config if given is not None else checkpoint.hub.config
        tensors: Mapping[str, TensorEntry] = checkpoint.catalog.tensors
        shapes = {name: entry.shape for name, entry in tensors.items()}
        return _OpenedSide(path=path, checkpoint=checkpoint, side="hub", shapes=shapes, config=config)
    catalog = checkpoint.catalog
    selection = select_model(catalog.tensors, catalog.objects, catalog.paths, checkpoint.roots)
    known_base = given or find_base(checkpoint)
    return _OpenedSide(
        path=path,
        checkpoint=checkpoint,
        side="model",
        shapes={selection.live[name]: catalog.tensors[name].shape for name in selection.names},
        config=known_base.config if known_base is not None else None,
    )


def _without_factors(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with the weights that its OSFT factors fold to, which are what rules are about."""
    folded = take_folded(checkpoint)
    if folded.folded is None:
        return folded
    note = f"factors of OSFT are shown as the dense weights that they are: {len(folded.folded.targets)}"
    return replace(folded, notes=(*folded.notes, note))


def _result(
    opened: _OpenedSide,
    rules: str | None,
    title: str,
    decided: DecidedNames,
    *,
    problems: tuple[str, ...] = (),
    notes: Iterable[str] = (),
) -> KeysResult:
    return KeysResult(
        source=opened.path,
        format=opened.checkpoint.format,
        rules=rules,
        title=title,
        side=opened.side,
        num_stored=len(opened.shapes),
        tensors=tuple(
            BoundTensor(
                name=name,
                shape=made.shape,
                steps=" of ".join(_steps(made)),
                sources=tuple(
                    folded.pattern
                    for folded in fold(
                        (name, None) for name in dict.fromkeys(leaf.name for leaf in leaves(made))
                    )
                ),
                is_reordered=not all(piece.is_box for piece in pieces(made)),
            )
            for name, made in decided.made.items()
        ),
        dropped=decided.dropped,
        problems=problems,
        notes=(*opened.checkpoint.notes, *notes),
        warnings=decided.warnings,
    )


def _steps(made: Expression) -> Iterator[str]:
    """Yield what is done to the first part of an expression, from the outside in."""
    while not isinstance(made, Stored):
        match made:
            case Concat():
                yield f"concat {made.dim}"
                made = made.parts[0]
            case Cut():
                yield f"box {list(made.region.sizes)} at {list(made.region.offsets)}"
                made = made.of
            case Permuted():
                yield f"permute {list(made.dims)}"
                made = made.of
            case Reshaped():
                yield f"reshape {list(made.shape)}"
                made = made.of
            case Opaque():
                yield "transformers' own code"
                return
            case _:
                yield "zeros"
                return


def line(tensor: BoundTensor) -> str:
    """Return a tensor of the other side for people: its name, its shape, and what it is made of."""
    made_of = " of ".join(filter(None, (tensor.steps, ", ".join(map(escape, tensor.sources)))))
    return f"{escape(tensor.name)} {list(tensor.shape)} = {made_of}"
