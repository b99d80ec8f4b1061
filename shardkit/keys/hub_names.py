"""What the Hub calls a model's tensors, where that differs from their names in memory by prefixes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardkit.core.regions import Shape
from shardkit.keys.base import is_computed, modern_name
from shardkit.keys.renaming import KeyRule, apply_key_rules, covers, find_rules, rename_to_base


class HubNames(NamedTuple):
    """A model's tensors, named."""

    names: dict[str, str]
    """Stored name -> name on the Hub."""
    rules: tuple[KeyRule, ...]
    """What changed."""
    is_whole: bool
    """Every name of the base is among them, but for copies of tied tensors."""
    warnings: tuple[str, ...] = ()


def name_as_hub(
    found: Mapping[str, str],
    shapes: Mapping[str, Shape],
    key_rules: Sequence[KeyRule] | None,
    base: Mapping[str, Shape] | None,
) -> HubNames:
    """Return the Hub's name of every tensor, by rules that are known and by the base's names and shapes.

    Args:
        found: stored name -> name in memory.
        shapes: by stored name, of all tensors.
        key_rules: that were recorded, or None.
        base: shape by name in the base, or None.
    """
    names, is_ambiguous = dict(found), False
    if len(set(names.values())) == len(names):  # else it is going to be refused
        recorded = apply_key_rules(key_rules or (), names.values()).names
        names = {stored: recorded.get(name, name) for stored, name in names.items()}
        if base is not None:
            names, is_ambiguous = _as_base(names, shapes, base)
    warning = (
        "the names are not the base's, and several renamings by prefixes would make them so: they were left as they "
        "are; --rename tells which is right"
    )
    return HubNames(
        names=names,
        rules=find_rules({name: names[stored] for stored, name in found.items()}) if names != found else (),
        is_whole=base is not None and covers(names.values(), _needed(base)),
        warnings=(warning,) if is_ambiguous else (),
    )


def _as_base(
    names: Mapping[str, str], shapes: Mapping[str, Shape], base: Mapping[str, Shape]
) -> tuple[dict[str, str], bool]:
    """Return the base's names, where prefixes or its age make the difference, and whether several ways do."""
    spelled = {modern_name(name): name for name in base}
    modern = {stored: modern_name(name) for stored, name in names.items()}
    theirs = {name: base[old] for name, old in spelled.items()}
    ours = {name: shapes[stored] for stored, name in modern.items()}
    fit = rename_to_base(ours, theirs)
    if not fit.names:
        fit = rename_to_base(_needed(ours), _needed(theirs))

    def name_of(stored: str) -> str:
        name = fit.names.get(modern[stored], modern[stored])
        return spelled.get(name, names[stored] if name == modern[stored] else name)

    return {stored: name_of(stored) for stored in names}, fit.is_ambiguous


def _needed(base: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return tensors without the buffers that old files have and no model needs."""
    return {name: shape for name, shape in base.items() if not is_computed(name, shape)}
