"""Compare a model with its source: decide which tensors are read or initialised, and report all differences at once."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

import torch
from torch import nn

from shardkit.core.regions import full_region
from shardkit.core.text import GLOBS_HINT, count, escape, listed, match_nothing, suggestions, unmatched
from shardkit.errors import LayoutError, UsageError
from shardkit.formats.quantised import refuse_quantised
from shardkit.keys.names import IN_BLOCK
from shardkit.layout.classes import BrokenTie
from shardkit.osft.training.model import Factoring
from shardkit.training.fill.reading import Supply, Weights, converts
from shardkit.training.ranks.local import ExpectedTensor
from shardkit.transfer.checks import CheckedSource
from shardkit.transfer.sources import same_bytes

Missing = Literal["error", "init"] | Sequence[str]
"""Treatment of tensors that the source lacks, see `check_fit`."""

_EXPERT = re.compile(r"(?:^|\.)experts\.\d+\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFit:
    """The result of comparing a model with a source that fits it."""

    initialised: frozenset[str] = frozenset()
    """FQNs of tensors that are not read."""
    grown: Mapping[str, int] = field(default_factory=dict)
    """FQN -> number of rows in the source, for tensors with more rows in the model."""
    notes: tuple[str, ...] = ()


@dataclass(kw_only=True, repr=False)  # no slots, because there are weak references to it
class ModelInitializationContext:
    """A prepared model: its tensors, the source of their values, and the tensors that are initialised.

    `prepare` returns it and `finalize` consumes it. It contains no weights, only buffers.
    """

    model: nn.Module
    """The model, with parameters on meta and real buffers on the CPU."""
    source: object
    """The user's source: a path, a repo id, or the result of `from_rank`; None initialises everything."""
    weights: Weights | None
    """The source's weights; None without a source, or if this rank cannot open it (see `unavailable`)."""
    unavailable: str | None = None
    """Why this rank cannot open the source, while others can; else None."""
    expected: dict[str, ExpectedTensor] = field(default_factory=dict)
    """FQN without wrappers (the first one, if tied) -> parameter or buffer, including non-persistent ones."""
    ties: tuple[tuple[str, ...], ...] = ()
    """Groups of names that are one parameter, first name first."""
    initialised: frozenset[str] = frozenset()
    """FQNs that are initialised and not read: `missing`, new heads, or everything without a source."""
    grown: dict[str, int] = field(default_factory=dict)
    """FQN -> number of rows in the source, for tensors to which `align_vocab` added rows; these are initialised."""
    factoring: Factoring = field(default_factory=Factoring)
    """The weights that are OSFT factors, and whether they are computed or read."""
    seed: int = 0
    """Seed of initialised values, equal on every rank."""
    blueprint: nn.Module | None = None
    """A copy of the plain model on meta, which computes initialised values; None if every tensor is read."""
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    """FQN without wrappers -> computed value of the buffer on the CPU; finalize restores buffers from these."""
    notes: tuple[str, ...] = ()
    """Remarks for the user, equal on all ranks."""
    checked: CheckedSource | None = None
    """The amount of data that all ranks together compared with the source's CRC-32s; `finalize` sets it."""

    def __repr__(self) -> str:
        """Return one line; the default would print the model and every tensor."""
        num_initialised, source = (
            len(self.initialised),
            "no source" if self.source is None else escape(str(self.source)),
        )
        return (
            f"<prepared {type(self.model).__name__} from {source}: {count(len(self.expected), 'tensor')}"
            f"{f', {num_initialised} of them initialised' if num_initialised else ''}>"
        )


def supply_of(ctx: ModelInitializationContext) -> Supply:
    """Return a prepared model's supply: its weights, and the tensors that are initialised or computed instead."""
    return Supply(
        weights=ctx.weights,
        unavailable=ctx.unavailable,
        initialised=ctx.initialised | ctx.factoring.computed,
        grown=ctx.grown,
    )


class _ModelAndSource(NamedTuple):
    """A model and its source."""

    expected: Mapping[str, ExpectedTensor]
    names: Mapping[str, Sequence[str]]
    """All names of each tensor of `expected`."""
    weights: Weights


def check_fit(
    expected: Mapping[str, ExpectedTensor],
    ties: Iterable[Sequence[str]],
    weights: Weights,
    *,
    missing: Missing = "error",
    grown: Mapping[str, int] | None = None,
    initialises: bool = True,
    elsewhere: Collection[str] = (),
    computed: Collection[str] = (),
) -> ModelFit:
    """Compare names, shapes and dtypes of a model with its source.

    Args:
        expected: first FQN -> parameter or buffer, for all of them.
        ties: groups of names that are one parameter, the first name first.
        weights: the source, opened for this model.
        missing: treatment of tensors that the source lacks: "error" raises an error; "init" initialises them, unless
            they look renamed; globs over FQNs initialise those that match. With either of the last two, the source
            may also have weights that the model lacks, such as another head or tower, but no further blocks.
        grown: FQN -> previous number of rows, for tensors to which `align_vocab` added rows.
        initialises: true if the caller has a `missing` argument, for the hint.
        elsewhere: stored names that have a place in the models of other ranks, such as other pipeline stages.
        computed: FQNs of buffers for which the caller has values in case the source lacks them.

    Raises:
        LayoutError: the source is quantised, stores modules in pieces that are fused in the model, or differs; the
            error lists every missing, unexpected and wrong tensor.
        UsageError: a glob matches nothing.
    """
    tied = {group[0]: tuple(group) for group in ties}
    names = {fqn: tied.get(fqn, (fqn,)) for fqn in expected}
    sides = _ModelAndSource(expected, names, weights)
    if weights.quantised is not None:
        raise refuse_quantised(weights.quantised, weights.path)
    _refuse_fused(expected, weights)
    absent = [
        fqn
        for fqn, tensor in expected.items()
        if tensor.persistent and not any(name in weights.names for name in names[fqn])
    ]
    computable_names = {*computed, *(weights.match.computed_fqns if initialises else ())}
    computed_fqns = [fqn for fqn in absent if not computable_names.isdisjoint(names[fqn])]
    lacking = [fqn for fqn in absent if fqn not in computed_fqns]
    initialised = _choose(sides, lacking, missing)
    may_leave_out = missing != "error" or (weights.match.is_transformers and not lacking)
    unused = [name for name in weights.unused if name not in elsewhere]
    lost = _lost_blocks(unused, weights.stored_names(), lacking)
    unexpected = [name for name in unused if not may_leave_out or name in lost]
    problems = _problems(sides, [fqn for fqn in lacking if fqn not in initialised], unexpected)
    rows, wrong = _compare(sides, grown or {})
    if problems or wrong:
        raise LayoutError(
            f"the model and {escape(weights.path)} differ in {count(len(problems) + len(wrong), 'place')}",
            problems=[*problems, *wrong],
            hint=_hint(lacking, unexpected, wrong, missing, initialises=initialises),
        )
    if initialised:
        _refuse_renamed(sides, initialised, guess=missing == "init")
    notes = []
    if initialised:
        notes.append(
            f"not in the source, initialised: {count(len(initialised), 'tensor')}: {listed(initialised)}"
        )
    if computed_fqns:
        notes.append(f"not in the source, the model computes them: {listed(computed_fqns)}")
    if unused:
        notes.append(f"in the source, not in the model: {listed(unused)}")
    return ModelFit(initialised=frozenset((*initialised, *computed_fqns)), grown=rows, notes=tuple(notes))


def check_ties(ties: Iterable[Sequence[str]], weights: Weights) -> None:
    """Compare the stored values of tied names that are stored several times.

    Raises:
        LayoutError: the values differ, so that one of them would be lost.
        IntegrityError, ResourceError: a file cannot be read as described.
    """
    problems = [f"{escape(first)} and {escape(second)}" for first, second, _ in diverged_ties(ties, weights)]
    LayoutError.raise_for(
        problems,
        f"the model ties names whose values in {escape(weights.path)} differ: one of them would be lost",
        hint="build the model with tie_word_embeddings=False in its config",
    )


def check_untied(broken: Iterable[BrokenTie], weights: Weights | None) -> None:
    """Raise an error for separate parameters that the model's class ties, as they would diverge in training.

    If the source stores two different values, they are meant to be two parameters and accepted.

    Args:
        broken: result of `broken_ties` for the model.
        weights: the source, opened for this model; or None.

    Raises:
        LayoutError: there are such parameters; the error names all of them.
        IntegrityError, ResourceError: a file cannot be read as described.
    """
    apart = [tie for tie in broken if weights is None or not diverged_ties([tie], weights)]
    LayoutError.raise_for(
        [f"{escape(alias)} and {escape(kept)}" for kept, alias in apart],
        "the model's class ties parameters that are several in this model: they would train apart",
        hint="call model.tie_weights() before the model is wrapped, and wrap tied modules in one unit; if they are"
        " meant to be two, set model.config.tie_word_embeddings = False",
    )


def diverged_ties(ties: Iterable[Sequence[str]], weights: Weights) -> list[tuple[str, str, str]]:
    """Return tied names whose values in the source differ.

    Values are read unless they share a place in the source, so one rank should do this for all.

    Returns:
        (stored name of the first tensor, stored name of another, FQN of the other).

    Raises:
        IntegrityError, ResourceError: a file cannot be read as described.
    """
    unlike = []
    for group in ties:
        stored = {weights.names[name]: name for name in reversed(group) if name in weights.names}
        first, *other_names = dict.fromkeys(
            weights.names[name] for name in group if name in weights.names
        ) or [""]
        if not other_names:
            continue
        whole = {name: [full_region(weights.entry(name).shape)] for name in (first, *other_names)}
        catalog = weights.located(whole).catalog
        unlike += [
            (first, other_name, stored[other_name])
            for other_name in other_names
            if not same_bytes(catalog, first, other_name)
        ]
    return unlike


def _lost_blocks(unused: Iterable[str], used: Iterable[str], lacking: Iterable[str]) -> set[str]:
    """Return the unused stored names in numbered blocks that seem to be the model's, so that they must not be ignored.

    These are blocks in lists from which the model reads other blocks, or, if the model lacks blocks itself, all blocks,
    as they may be renamed. If the model is a part of the source, such as CLIP's vision tower, the lists of other
    towers may be ignored.

    Args:
        unused: stored names that have no place in the model.
        used: stored names from which the model is filled.
        lacking: FQNs that the source lacks.
    """
    used_blocks = {_blocks(name) for name in used}
    are_renamed = any(_blocks(fqn) is not None for fqn in lacking)
    by_name = {name: _blocks(name) for name in unused}
    return {
        name
        for name, blocks in by_name.items()
        if blocks is not None and (are_renamed or blocks in used_blocks)
    }


def _blocks(name: str) -> str | None:
    """Return the path of the outermost list of numbered modules around a tensor, or None."""
    match = IN_BLOCK.search(name)
    return None if match is None else name[: match.start()]


def _refuse_fused(expected: Mapping[str, ExpectedTensor], weights: Weights) -> None:
    """Raise an error for fused tensors of the model that cannot be made of the source's, so that they stay unfilled."""
    parts: dict[str, list[str]] = {}
    for stored, fqn in weights.match.fused.items():
        parts.setdefault(fqn, []).append(stored)
    pieces = [name for name in weights.unused if _EXPERT.search(name)]
    if not parts and pieces:
        fused = (fqn for fqn in expected if ".experts." in f".{fqn}" and not _EXPERT.search(fqn))
        parts = {fqn: pieces for fqn in fused if fqn not in weights.names}
    if not parts:
        return
    is_moe = any(_EXPERT.search(stored) for names in parts.values() for stored in names)
    what = (
        "the file stores experts one by one, the model holds them fused"
        if is_moe
        else "the model holds tensors in another form than the file stores them"
    )
    raise LayoutError(
        f"{what}, and it is not known how to make them",
        problems=[
            f"{escape(fqn)}: of {count(len(names), 'stored tensor')}: {listed(names)}"
            + (f": {weights.match.failed[fqn]}" if fqn in weights.match.failed else "")
            for fqn, names in parts.items()
        ],
        hint="load it with from_pretrained on one rank, and give shardkit.from_rank(model) as the source; or save its"
        " state_dict() with torch.distributed.checkpoint once, and give that",
    )


def _choose(sides: _ModelAndSource, lacking: Sequence[str], missing: Missing) -> list[str]:
    """Return the FQNs, among those that the source lacks, that are initialised."""
    if missing == "init":
        return list(lacking)
    if missing == "error":
        return []
    if isinstance(missing, str):
        raise UsageError(
            f"missing={escape(missing)!r} is neither 'error' nor 'init'", hint="give globs as a list"
        )
    every = [name for names in sides.names.values() for name in names]
    idle = [glob for glob in missing if not any(fnmatchcase(name, glob) for name in every)]
    if idle:
        raise UsageError(
            match_nothing("missing=", len(idle), "nothing in the model"),
            problems=unmatched(idle, every),
            hint=GLOBS_HINT,
        )
    return [
        fqn
        for fqn in lacking
        if any(fnmatchcase(name, glob) for name in sides.names[fqn] for glob in missing)
    ]


def _problems(sides: _ModelAndSource, lacking: Sequence[str], unexpected: Sequence[str]) -> list[str]:
    unused, problems = sides.weights.unused, []
    shapes = {fqn: sides.expected[fqn].shape for fqn in lacking}
    for what, names, name_shapes, candidates in (
        ("missing", lacking, shapes, unused),
        ("unexpected", unexpected, unused, lacking),
    ):
        closest = suggestions(names, candidates)
        problems += [
            f"{what}: {escape(name)} {list(name_shapes[name])}{closest.get(name, '')}" for name in names
        ]
    return problems


def _compare(sides: _ModelAndSource, grown: Mapping[str, int]) -> tuple[dict[str, int], list[str]]:
    """Return (FQN of each grown tensor -> rows in the source, problems with shapes and dtypes)."""
    weights = sides.weights
    rows: dict[str, int] = {}
    wrong: list[str] = []
    for fqn, tensor in sides.expected.items():
        for name in sides.names[fqn]:
            if not tensor.persistent or name not in weights.names:
                continue
            entry, shown = weights.entry(weights.names[name]), escape(name)
            is_grown = fqn in grown and entry.shape[1:] == tensor.shape[1:] and bool(entry.shape)
            if is_grown and entry.shape[0] < tensor.shape[0]:
                rows[fqn] = entry.shape[0]
            elif entry.shape != tensor.shape:
                shapes = f"{list(tensor.shape)} in the model, {list(entry.shape)} in the source"
                wrong.append(f"shape: {shown}: {shapes}")
            if not converts(entry.dtype, tensor.dtype):
                model_dtype = str(tensor.dtype).removeprefix("torch.")
                wrong.append(f"dtype: {shown}: {model_dtype} in the model, {entry.dtype.name} in the source")
    return rows, wrong


def _hint(
    lacking: Sequence[str],
    unexpected: Sequence[str],
    wrong: Sequence[str],
    missing: Missing,
    *,
    initialises: bool,
) -> str:
    if (lacking or unexpected) and not initialises:
        return "prepare(..., missing=...) and finalize take a source with other heads or without adapters"
    if lacking and missing == "error":
        return "missing='init' or missing=['score.*'] initialises what the source lacks, such as a new head or adapter"
    if unexpected and missing == "error":
        return "missing='init' lets the source have a head that the model lacks"
    if any(line.startswith("shape: ") for line in wrong):
        return "is it this model's source? if only rows of the vocabulary differ, give prepare the tokenizer"
    return "is it this model's source?"


def _refuse_renamed(sides: _ModelAndSource, initialised: Collection[str], *, guess: bool) -> None:
    """Raise an error if a tensor would be initialised that the source seems to have under another name.

    Args:
        sides: the model and its source.
        initialised: FQNs to be initialised.
        guess: true if the user did not list these tensors; then an unused stored tensor with an equal shape and end of
            the name is sufficient reason.
    """
    weights, expected = sides.weights, sides.expected
    by_look: dict[tuple[tuple[int, ...], str], list[str]] = {}
    for name, shape in weights.unused.items():
        by_look.setdefault((tuple(shape), name.rpartition(".")[2]), []).append(name)
    problems = []
    for fqn in initialised if guess else ():
        alike = by_look.get((expected[fqn].shape, fqn.rpartition(".")[2]))
        if alike:
            problems.append(f"{escape(fqn)} {list(expected[fqn].shape)}: the source has {listed(alike)}")
    if not weights.names:
        problems.append("none of the model's tensors is in the source")
    LayoutError.raise_for(
        problems,
        f"missing= would initialise what {escape(weights.path)} seems to have under other names",
        hint="if these are new after all, name them: missing=['score.*']",
    )
