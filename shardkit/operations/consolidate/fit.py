"""Compare names and shapes of the output with the base's, and explain the differences.

Not every difference is an error: the model's class may compute a tensor itself or have no place for it, the vocabulary
may have grown, and `--fill-from-base` copies parts of the base that the checkpoint lacks.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import NamedTuple

from shardkit.core.regions import Shape
from shardkit.core.text import count, escape, in_shell, listed, suggestions
from shardkit.errors import LayoutError
from shardkit.formats.hub.base import Base, has_equal_bytes, refuse_adapter
from shardkit.formats.quantised import method_of
from shardkit.keys.check import (
    BaseComparison,
    compare_with_base,
    differing_expert_counts,
    holds_fused_experts,
    incomplete_parts,
    missing_globs,
)
from shardkit.keys.names import IN_BLOCK, Segments, split
from shardkit.keys.ties import tied_names
from shardkit.keys.tokens import TokenRows
from shardkit.layout.binding import ClassNames
from shardkit.operations.consolidate.options import ConsolidateOptions
from shardkit.operations.consolidate.vocabulary import RowsChange

_log = logging.getLogger("shardkit")

_OTHER_NAMES = (
    "--rename or --root may give the base's names; --allow-missing and --allow-unexpected accept others"
)
_OTHER_SHAPES = (
    "give as --base the model that it was trained from; is a part of the checkpoint missing? `shardkit inspect CHECKPOINT` "
    "lists its shapes"
)
_FUSED = (
    "transformers fuses the experts into one tensor, and the base stores them one by one: `pip install 'shardkit[trace]'`, "
    "which brings torch and transformers, takes them apart; --allow-missing and --allow-unexpected together write them as they are"
)
_FEWER = (
    "each rank has its own experts, and the checkpoint lacks those of some ranks: consolidate a checkpoint that has all, "
    "or save it again with all of them"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseFit:
    """The result of comparing the output with its base."""

    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    """Warnings about weights that the base has and the output lacks."""
    has_all_weights: bool = False
    """The base's weights are known, and the output has all of them."""
    from_base: tuple[str, ...] = ()
    """Names of tensors that are copied from the base, because the trained model has no place for them, or because the
    user asked for them."""


def base_shapes(base: Base | None) -> dict[str, Shape] | None:
    """Return the shape of each tensor of a base; None if they are not known."""
    if base is None or base.tensors is None:
        return None
    return {name: tensor.shape for name, tensor in base.tensors.items()}


def check_fit(
    shapes: Mapping[str, Shape],
    vocabulary: RowsChange,
    ties: Iterable[Collection[str]],
    class_names: ClassNames | None,
    options: ConsolidateOptions,
    *,
    checkpoint: str,
    why_missing: str,
    left_out_shapes: Mapping[str, Shape],
    is_plain: bool = True,
    why_not_rules: Sequence[str] = (),
) -> BaseFit:
    """Compare the output with the base. Differences are errors if the user named the base, otherwise warnings.

    Args:
        shapes: by name in the output.
        vocabulary: with the base, whose shapes are adjusted to the output's rows. Without a base, or known tensors of
            it, nothing is compared.
        ties: groups of names that are one parameter.
        class_names: what the model's class says about the base's names, if it was asked.
        options: the user's options.
        checkpoint: path of the checkpoint, for a command in a hint.
        why_missing: as in `Checkpoint`.
        left_out_shapes: shape by stored name, for tensors of the checkpoint that are not written.
        is_plain: no weights of the checkpoint are quantised.
        why_not_rules: why key rules that know all names of the output, or most, were not applied.

    Raises:
        SourceError: the base that the user named is an adapter.
        LayoutError: this base is quantised in a way that shardkit does not know. Otherwise the error lists every name
            that is missing, unexpected or of another shape, and tensors that `--fill-from-base` cannot copy because they
            are not whole parts.
    """
    base, shapes_in_base = vocabulary.base, base_shapes(vocabulary.base)
    if base is not None and base.is_given:
        _refuse_base(base, is_plain=is_plain)
    if base is None or shapes_in_base is None:
        return BaseFit()
    label, allow_missing = escape(base.label), options.allow_missing
    comparison, carried, notes = _explain(
        compare_with_base(shapes, shapes_in_base, ties=ties), shapes_in_base, class_names, label
    )
    is_here = base.catalog is not None and not options.naming.chooses_part
    if carried:
        what = f"copied unchanged from {label}" if is_here else "not written"
        notes.append(f"{what}, the model computes them or has no place for them: {listed(carried)}")
    filling = _fill(comparison.missing, base, frozenset(carried), options.fill_from_base)
    comparison = replace(comparison, missing=filling.missing_names)
    notes += filling.notes(options.fill_from_base, label)
    carried = [*(carried if is_here else ()), *filling.names]
    short = list(_with_old_rows(carried, base, vocabulary.changed))
    if short and allow_missing:
        notes.append(f"not written, they have the rows of the base's vocabulary: {listed(short)}")
        carried = [name for name in carried if name not in short]
    fit = BaseFit(
        notes=tuple(notes),
        has_all_weights=not (comparison.missing or comparison.wrong_shapes),
        from_base=tuple(carried),
    )
    if comparison.is_equal and not filling.refused and (allow_missing or not short):
        if not vocabulary.changed:
            _log.debug("names and shapes are the same as in %s", label)
            return fit
        what = "names, and shapes but for the rows of the vocabulary,"
        return replace(fit, notes=(f"{what} are the same as in {label}", *notes))
    if not base.is_given:
        differences = tuple(_differences(comparison, f"the weights in {label}"))
        num_lost = 1 if comparison.missing else 0
        return replace(fit, missing=differences[:num_lost], warnings=differences[num_lost:])
    experts = list[str]()
    if not (allow_missing and options.allow_unexpected):
        comparison, experts = _take_out_experts(comparison, shapes, shapes_in_base)
    problems = [*filling.refused, *experts, *_problems(comparison, short, options)]
    if problems and why_not_rules and comparison.missing and comparison.unexpected:
        raise _unconverted_names_error(base, checkpoint, why_not_rules)
    LayoutError.raise_for(
        problems,
        f"the checkpoint does not fit --base {label}: {count(len(problems), 'difference')}"
        + (f" (it was {why_missing})" if comparison.missing and why_missing else ""),
        hint=_FEWER
        if experts
        else _hint(comparison, filling, vocabulary, checkpoint, left_out_shapes, options.fill_from_base),
    )
    return replace(fit, notes=(*_differences(comparison, label), *notes))


def _unconverted_names_error(base: Base, checkpoint: str, why_not_rules: Sequence[str]) -> LayoutError:
    """Return the error that the names are a trainer's own and no key rules fit all of them, with the reason for each."""
    return LayoutError(
        f"the checkpoint does not fit --base {escape(base.label)}: its names are a trainer's own, and no key rules fit all "
        "of them",
        problems=why_not_rules,
        hint=f"`shardkit inspect {in_shell(checkpoint)} --tensors` lists names and shapes; --keys FILE "
        "takes your own rules, and --keys NAME with --exclude GLOB a set without some tensors",
    )


def _problems(comparison: BaseComparison, short: Iterable[str], options: ConsolidateOptions) -> Iterator[str]:
    """Yield a line for each difference that the options do not allow.

    Args:
        comparison: the differences.
        short: tensors that would be copied from the base, but have its number of vocabulary rows, not the output's.
        options: the user's options.
    """
    if not options.allow_missing:
        yield from _misfits("missing", comparison.missing, comparison.unexpected)
    if not options.allow_unexpected:
        yield from _misfits("unexpected", comparison.unexpected, comparison.missing)
    for name, base_shape, shape in comparison.wrong_shapes:
        yield f"shape: {escape(name)}: {list(shape)}, in the base {list(base_shape)}"
    if not options.allow_missing:
        for name in short:
            yield f"rows: {escape(name)}: the base's, and the vocabulary has others"


def _take_out_experts(
    comparison: BaseComparison, shapes: Mapping[str, Shape], shapes_in_base: Mapping[str, Shape]
) -> tuple[BaseComparison, list[str]]:
    """Return a comparison without fused experts whose number differs from the base's, and a problem line for each."""
    numbers = differing_expert_counts(shapes, shapes_in_base)
    if not numbers:
        return comparison, []
    homes = tuple(f"{name.rpartition('.')[0]}." for name in numbers)
    lines = [
        f"shape: {escape(name)}: {list(shapes[name])}, {count(shapes[name][0], 'expert')}; the base has {number}"
        for name, number in numbers.items()
    ]
    missing, unexpected = (
        tuple(name for name in names if not name.startswith(homes))
        for names in (comparison.missing, comparison.unexpected)
    )
    return replace(comparison, missing=missing, unexpected=unexpected), lines


class _Filling(NamedTuple):
    """Which tensors `--fill-from-base` copies. All names are the base's."""

    names: tuple[str, ...]
    """Tensors that are copied from the base."""
    checkpoint_names: frozenset[str]
    """Tensors that the checkpoint has."""
    missing_names: tuple[str, ...]
    """Tensors that remain missing: no glob matches them."""
    refused: tuple[str, ...] = ()
    """A line for each tensor that a glob matches and that cannot be copied."""

    def notes(self, fill: Iterable[str], label: str) -> Iterator[str]:
        """Yield the notes about copied tensors, and about globs of `fill` that match nothing."""
        if self.names:
            parts = listed(missing_globs(self.names, self.checkpoint_names))
            yield f"copied unchanged from {label}: {count(len(self.names), 'tensor')}: {parts}"
        for glob in fill:
            if not any(fnmatchcase(name, glob) for name in self.names):
                yield f"--fill-from-base {escape(glob)!r} matches no tensor that is missing"


def _fill(missing: Collection[str], base: Base, carried: Collection[str], fill: Sequence[str]) -> _Filling:
    """Decide which missing tensors `--fill-from-base` copies from the base.

    Args:
        missing: names of the base that the output lacks.
        base: a base with known tensors.
        carried: names that are copied from the base for other reasons.
        fill: the globs of `--fill-from-base`.
    """
    assert base.tensors is not None
    checkpoint_names = frozenset(base.tensors.keys() - set(missing) - set(carried))
    fill_names = {name: None for name in missing if any(fnmatchcase(name, glob) for glob in fill)}
    missing_names = [name for name in missing if name not in fill_names]
    torn = {
        name: f"others of {escape(part) or 'the model'} would not come from the base"
        for name, part in incomplete_parts(fill_names, [*checkpoint_names, *missing_names]).items()
    }
    if not checkpoint_names:
        torn = dict.fromkeys(fill_names, "the checkpoint has no tensor of the base")
    for name, keeper in _tied_in(base, fill_names, checkpoint_names) if fill_names else ():
        torn[name] = f"the base has the same bytes under {escape(keeper)}, which is in the checkpoint"
    return _Filling(
        names=tuple(name for name in fill_names if name not in torn),
        checkpoint_names=checkpoint_names,
        missing_names=tuple(missing_names),
        refused=tuple(f"not a whole part: {escape(name)}: {why}" for name, why in torn.items()),
    )


def _tied_in(
    base: Base, fill_names: Collection[str], checkpoint_names: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Yield (name, equal name) for tensors that would be copied although they may be tied to one of the checkpoint."""
    for name, keepers, _ in tied_names(base_shapes(base) or {}):
        for one, two in ((one, two) for keeper in keepers for one, two in ((name, keeper), (keeper, name))):
            if one in fill_names and two in checkpoint_names and has_equal_bytes(base, one, two):
                yield one, two


def _hint(
    comparison: BaseComparison,
    filling: _Filling,
    vocabulary: RowsChange,
    checkpoint: str,
    left_out_shapes: Mapping[str, Shape],
    fill: Sequence[str],
) -> str:
    """Return the hint for a checkpoint that does not fit; for a part of a larger model, the `--fill-from-base` to add."""
    if filling.refused:
        return (
            "only whole parts can be copied from the base, not one layer of a stack or one tensor of a module"
        )
    if holds_fused_experts(comparison.unexpected):
        return _FUSED
    if comparison.unexpected or incomplete_parts(comparison.missing, filling.checkpoint_names):
        return _OTHER_NAMES
    shapes_in_base, kept = (
        base_shapes(vocabulary.base) or {},
        {_end(name, shape) for name, shape in left_out_shapes.items()},
    )
    # The missing tensors were trained, and are in the checkpoint below another prefix.
    if any(_end(name, shapes_in_base[name]) in kept for name in comparison.missing):
        return _OTHER_NAMES
    if comparison.wrong_shapes:
        return vocabulary.hint or _OTHER_SHAPES
    if not comparison.missing:
        return "--allow-missing leaves them out"
    base, globs = vocabulary.base, [*fill, *missing_globs(comparison.missing, filling.checkpoint_names)]
    assert base is not None
    options = " ".join(f"--fill-from-base {in_shell(glob)}" for glob in globs)
    if base.catalog is None:
        return f"{options} takes them from a base on this machine: `{base.download}` brings it here"
    command = f"shardkit consolidate {in_shell(checkpoint)} --base {in_shell(base.label)} {options}"
    return f"if they were not trained, copy them from the base: `{command}`"


def _end(name: str, shape: Shape) -> tuple[Segments, Shape]:
    return split(name)[-2:], tuple(shape)


def _with_old_rows(carried: Iterable[str], base: Base, rows: Sequence[TokenRows]) -> Iterator[str]:
    """Yield tensors to copy that have as many rows as the base's vocabulary, if the output's vocabulary has others."""
    old = {change.old for change in rows}
    for name in carried:
        shape = base.catalog.tensors[name].shape if base.catalog is not None else ()
        if len(shape) > 1 and shape[0] in old:
            yield name


def _refuse_base(base: Base, *, is_plain: bool) -> None:
    """Refuse a base that is an adapter, or that is quantised while the checkpoint is not."""
    refuse_adapter(base)
    method = method_of(base.config)  # a base that could be dequantised has none any more
    if is_plain and method is not None:
        raise LayoutError(
            f"--base {escape(base.label)} is quantised ({escape(method)}), the weights of the checkpoint are not",
            hint="give as --base the model that it was quantised from",
        )


def _explain(
    comparison: BaseComparison,
    shapes_in_base: Mapping[str, Shape],
    class_names: ClassNames | None,
    label: str,
) -> tuple[BaseComparison, list[str], list[str]]:
    """Remove from a comparison the tensors that the model computes itself or has no place for.

    There are four kinds of these:
    - `comparison.computed`: buffers that every model computes, such as rotary tables, recognised by name;
    - `class_names.ignored`: tensors of the base that its class computes, or leaves out as `from_pretrained` does;
    - `class_names.unused`: tensors of the base that its class has no place for;
    - `class_names.computed_fqns`: tensors that the base lacks and its class computes. The base has no name for them, so the
      output has them under their names in memory.

    Returns:
        The remaining differences, names of removed tensors that can be copied from the base, and notes.
    """
    spare_names, optional_names, notes = list[str](), list[str](), list[str]()
    if class_names is not None:
        # Only tensors outside of blocks: an unused one is the head of another objective. A block that the class has no
        # place for may mean that the base is another model.
        spare_names = [
            name
            for name in comparison.missing
            if name in class_names.ignored or (name in class_names.unused and not IN_BLOCK.search(name))
        ]
        optional_names = [name for name in comparison.unexpected if name in class_names.computed_fqns]
    computed = [name for name in comparison.computed if name not in shapes_in_base]
    if computed:
        notes.append(f"not compared with {label}, every model computes them: {listed(computed)}")
    if optional_names:
        notes.append(
            f"not in {label}, the model computes them where they are missing: {listed(optional_names)}"
        )
    remainder = replace(
        comparison,
        missing=tuple(name for name in comparison.missing if name not in spare_names),
        unexpected=tuple(name for name in comparison.unexpected if name not in optional_names),
    )
    return remainder, [*(name for name in comparison.computed if name in shapes_in_base), *spare_names], notes


def _misfits(what: str, names: Sequence[str], candidates: Sequence[str]) -> Iterator[str]:
    """Yield a line for each name, with the most similar candidate as a hint: "missing: a.weight (...)"."""
    closest = suggestions(names, candidates)
    for name in names:
        yield f"{what}: {escape(name)}{closest.get(name, '')}"


def _differences(comparison: BaseComparison, label: str) -> Iterator[str]:
    """Yield a line for each kind of difference; the one about missing tensors is first."""
    if comparison.missing:
        yield f"missing of {label}: {count(len(comparison.missing), 'tensor')}: {listed(comparison.missing)}"
    if comparison.unexpected:
        yield f"not in {label}: {count(len(comparison.unexpected), 'tensor')}: {listed(comparison.unexpected)}"
    if comparison.wrong_shapes:
        names = [name for name, _, _ in comparison.wrong_shapes]
        yield f"of another shape than in {label}: {count(len(names), 'tensor')}: {listed(names)}"
