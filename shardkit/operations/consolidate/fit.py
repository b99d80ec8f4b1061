"""Names and shapes of the output, compared with those of the base."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from shardkit.core.catalog import Catalog
from shardkit.core.regions import Shape
from shardkit.core.text import count, escape, listed, suggestion
from shardkit.errors import LayoutError, ShardkitError
from shardkit.formats.hub.base import Base
from shardkit.keys.check import BaseComparison, compare_with_base, holds_fused_experts
from shardkit.keys.names import in_order
from shardkit.keys.renaming import HubNames, find_rules, name_as_hub
from shardkit.layout.traced import ModelNames, ask_names

_IN_BLOCK = re.compile(r"(?:^|\.)\d+\.")  # layers.0.
_MAX_SUGGESTIONS = 3  # each searches all names
_OTHER_NAMES = (
    "--rename or --root may give the base's names; --allow-missing and --allow-unexpected accept others"
)
_FUSED = (
    "transformers fuses the experts into one tensor, and the base stores them one by one; shardkit does not take them "
    "apart yet; --allow-missing and --allow-unexpected together write them as they are"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What to tell about how the output fits its base."""

    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    """Warnings about weights that the base has and the output lacks."""
    is_whole: bool = False
    """The base's weights are known, and the output has all of them."""


def base_shapes(base: Base | None) -> dict[str, Shape] | None:
    """Return the shape of each tensor of a base; None where they are not known."""
    if base is None or base.tensors is None:
        return None
    return {name: tensor.shape for name, tensor in base.tensors.items()}


def name_merged(names: Mapping[str, str], catalog: Catalog, base: Base | None) -> HubNames:
    """Name a model that an adapter was added to. Only now are its names free of PEFT's own.

    Args:
        names: name in the catalog -> the model's name in memory.
        catalog: has the shapes.
        base: None, or one without known tensors, changes nothing.
    """
    theirs = base_shapes(base)
    shapes = {source: catalog.tensors[source].shape for source in names}
    named = name_as_hub(names, shapes, None, theirs or None)
    return named._replace(names=_in_order(named.names, theirs) or named.names)


def _in_order(names: dict[str, str], base_names: Collection[str] | None) -> dict[str, str] | None:
    """Return names in the order of the base's; None where two tensors have one name."""
    by_output = {name: source for source, name in names.items()}
    if len(by_output) < len(names):
        return None
    return {by_output[name]: name for name in in_order(by_output, base_names)}


def check_fit(
    shapes: Mapping[str, Shape],
    base: Base | None,
    ties: Iterable[Collection[str]],
    *,
    allow_missing: bool,
    allow_unexpected: bool,
    asked: ModelNames | None = None,
) -> Fit:
    """Compare the output with the base. A base that a person gave is binding; one that was found is not.

    Args:
        shapes: by name in the output.
        base: None, or one without known tensors, has nothing to compare with.
        ties: groups of names that are one parameter.
        allow_missing: names of the base may be missing.
        allow_unexpected: there may be names that the base does not have.
        asked: what the model's class says of the base's names, where it was asked.

    Raises:
        LayoutError: lists every name that is missing, unexpected or of another shape.
    """
    theirs = base_shapes(base)
    if base is None or theirs is None:
        return Fit()
    found, said = compare_with_base(shapes, theirs, ties=ties), list[str]()
    label = escape(base.label)
    if found.computed:
        said.append(f"not compared with {label}, every model computes them: {listed(found.computed)}")
    if asked is not None:
        # A block that the class has no place for is no head of another objective: it may belong to another model.
        spare = [
            name
            for name in found.missing
            if name in asked.ignored or (name in asked.unused and not _IN_BLOCK.search(name))
        ]
        made = [name for name in found.unexpected if name in asked.made]
        if spare:
            said.append(
                f"not written, the class that config.json names has no place for them: {listed(spare)}"
            )
        if made:
            said.append(f"not in {label}, the model computes them where they are missing: {listed(made)}")
        found = replace(
            found,
            missing=tuple(name for name in found.missing if name not in spare),
            unexpected=tuple(name for name in found.unexpected if name not in made),
        )
    if found.is_equal:
        return Fit(notes=(f"names and shapes are the same as in {label}", *said), is_whole=True)
    is_whole = not (found.missing or found.wrong_shapes)
    if not base.is_given:
        missing, *others = _summary(found, f"the weights in {label}")
        lost = tuple([missing] if found.missing else [])
        return Fit(warnings=tuple(others if lost else [missing, *others]), missing=lost, is_whole=is_whole)
    problems = [
        *([] if allow_missing else _lines("missing", found.missing, shapes)),
        *([] if allow_unexpected else _lines("unexpected", found.unexpected, theirs)),
        *(
            f"shape: {escape(name)}: {list(ours)}, in the base {list(base)}"
            for name, base, ours in found.wrong_shapes
        ),
    ]
    if problems:
        raise LayoutError(
            f"the checkpoint does not fit --base {label}: {count(len(problems), 'difference')}",
            problems=problems,
            hint=_FUSED if holds_fused_experts(found.unexpected) else _OTHER_NAMES,
        )
    return Fit(notes=(*_summary(found, label), *said), is_whole=is_whole)


def may_ask(shapes: Mapping[str, Shape], base: Base | None, ties: Iterable[Collection[str]]) -> bool:
    """True where the class itself may explain a misfit: by what it leaves out or computes, ties, its heads and names."""
    theirs = base_shapes(base)
    if base is None or theirs is None or not base.is_given:
        return False
    found = compare_with_base(shapes, theirs, ties=ties)
    return bool(found.missing or found.unexpected) and not found.wrong_shapes


def name_by_class(names: Mapping[str, str], base: Base, asked: ModelNames) -> HubNames:
    """Name a model's tensors as its class finds them in the base's files.

    Args:
        names: name in the catalog -> name in the output.
        base: with known tensors.
        asked: what its class says.
    """
    assert base.tensors is not None
    theirs = base.tensors
    changed = {
        source: name if name in theirs else asked.names.get(name, name) for source, name in names.items()
    }
    ordered = _in_order(changed, theirs)
    if changed == names or ordered is None:
        return HubNames(names=dict(names), rules=(), is_whole=False)
    rules = find_rules({name: changed[source] for source, name in names.items()})
    return HubNames(names=ordered, rules=rules, is_whole=False)


def ask_class(base: Base) -> ModelNames | None:
    """Ask the class that a base's config names, in a process of its own; None where it cannot be asked."""
    shapes = base_shapes(base)
    if shapes is None or not (base.config or {}).get("architectures"):
        return None
    try:
        return ask_names(base.directory, shapes)
    except ShardkitError:
        return None


def _lines(what: str, names: Iterable[str], others: Mapping[str, Shape]) -> Iterator[str]:
    for row, name in enumerate(names):
        yield f"{what}: {escape(name)}{suggestion(name, others) if row < _MAX_SUGGESTIONS else ''}"


def _summary(found: BaseComparison, label: str) -> Iterator[str]:
    if found.missing:
        yield f"missing of {label}: {count(len(found.missing), 'tensor')}: {listed(found.missing)}"
    if found.unexpected:
        yield f"not in {label}: {count(len(found.unexpected), 'tensor')}: {listed(found.unexpected)}"
    if found.wrong_shapes:
        names = [name for name, _, _ in found.wrong_shapes]
        yield f"of another shape than in {label}: {count(len(names), 'tensor')}: {listed(names)}"
