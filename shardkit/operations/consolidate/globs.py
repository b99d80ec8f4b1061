"""`--include` and `--exclude`: which tensors are written, by their names in the output.

Excluded tensors are removed as early as possible, before the others are named, so that they cannot make naming fail. But
key rules, the manifest or the model's class may still rename or convert some tensors. For these, called *late* here, the
globs apply once they have their names of the output.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

from shardkit.formats.contract import Checkpoint
from shardkit.formats.hub.base import Base, recorded_derived
from shardkit.keys.expressions import Opaque
from shardkit.keys.rule_sets import AUTO, NONE, known_names, load_rules
from shardkit.keys.select import Globs, Selection
from shardkit.layout.binding import ClassNames, TensorsAtHand, bind, shipped_provider
from shardkit.layout.traced import may_differ_in_memory
from shardkit.operations.consolidate.adapter import ChosenTensors
from shardkit.operations.consolidate.options import ConsolidateOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Sieve:
    """Filters tensors by their names in the output."""

    globs: Globs
    left_out: frozenset[str] = frozenset()
    """Names in the output of tensors that were removed early."""
    takes_rules: bool = False
    """Shipped key rules match all names of the checkpoint."""
    class_names: ClassNames | None = None
    """What the model's class says, if it was asked."""

    def sift(self, chosen: ChosenTensors) -> ChosenTensors:
        """Return the tensors that the globs select, once all tensors have their names of the output.

        Raises:
            UsageError: a glob matches no name, or no tensor remains.
        """
        self.globs.check({*self.left_out, *chosen.names.values()})
        return replace(chosen, names=self.selected_names(chosen))

    def selected_names(self, chosen: ChosenTensors) -> dict[str, str]:
        """Return name in the catalog -> current name, for the tensors that the globs select; they need not match any."""
        return {source: name for source, name in chosen.names.items() if self.globs.selects(name)}


def exclude_early(
    checkpoint: Checkpoint,
    base: Base | None,
    selection: Selection,
    options: ConsolidateOptions,
    ask: Callable[[Base], ClassNames | None],
) -> tuple[Selection, Sieve]:
    """Return a selection without the tensors that `--exclude` removes early, and the filter for the others.

    Args:
        checkpoint: the opened checkpoint.
        base: the base that the user named or that was found, or None.
        selection: all tensors of the model.
        options: the user's options.
        ask: asks the model's class.

    Raises:
        UsageError: no tensor remains.
        SourceError, IntegrityError: the manifest cannot be read, or was changed after it was written.
    """
    globs = Globs(options.naming.include, options.naming.exclude)
    if not any(globs):
        return selection, Sieve(globs=globs)
    late = _find_late_names(checkpoint, base, selection, options, ask)
    left_out = {
        stored: name
        for stored, name in selection.names.items()
        if globs.excludes(name) and selection.live.get(stored, name) not in late.names
    }
    if len(left_out) == len(selection.names):
        globs.check(left_out.values())
    sieve = Sieve(
        globs=globs,
        left_out=frozenset(left_out.values()),
        takes_rules=late.takes_rules,
        class_names=late.class_names,
    )
    return selection.only(selection.names.keys() - left_out.keys()), sieve


class _LateNames(NamedTuple):
    """The tensors for which globs apply late, once they have their names of the output."""

    names: Collection[str]
    """Names in memory of tensors that may have other names in the output."""
    takes_rules: bool = False
    class_names: ClassNames | None = None


def _find_late_names(
    checkpoint: Checkpoint,
    base: Base | None,
    selection: Selection,
    options: ConsolidateOptions,
    ask: Callable[[Base], ClassNames | None],
) -> _LateNames:
    """Return which tensors may have other names in the output; arguments as for `exclude_early`."""
    shapes = {
        selection.live.get(stored, name): checkpoint.catalog.tensors[stored].shape
        for stored, name in selection.names.items()
    }
    if options.merge_lora:
        return _LateNames(shapes)
    if options.key_rules not in (AUTO, NONE):
        return _LateNames(known_names(load_rules(options.key_rules), shapes))
    if options.naming.root is not None or options.naming.changes_names:
        return _LateNames(())
    config = base.config if base is not None else None
    have = TensorsAtHand(shapes=shapes, config=config)
    if options.key_rules == AUTO and bind(have, None, [shipped_provider]).rules is not None:
        return _LateNames(shapes, takes_rules=True)
    changed = {
        fqn for fqn, expression in recorded_derived(checkpoint).items() if not isinstance(expression, Opaque)
    }
    if (
        base is None
        or not base.is_given
        or base.tensors is None
        or not may_differ_in_memory(base.config or {})
    ):
        return _LateNames(changed)
    class_names = ask(base)
    if class_names is not None:
        changed |= class_names.converted.keys() | {
            fqn for fqn, name in class_names.names.items() if fqn != name
        }
    return _LateNames(changed, class_names=class_names)
