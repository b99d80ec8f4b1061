"""`--include` and `--exclude`: which tensors are written, by their names in the output.

What `--exclude` matches is left out before anything else is named, so that it stands in nobody's way. Tensors that key
rules, the manifest or the class name or form otherwise wait until they have the names of the output.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

from shardkit.formats.contract import Checkpoint
from shardkit.formats.hub.base import Base, saved_derived
from shardkit.keys.expressions import Opaque
from shardkit.keys.rule_sets import AUTO, NONE, known_names, load_rules
from shardkit.keys.select import Globs, Selection
from shardkit.layout.binding import ClassNames, TensorsAtHand, bind, shipped_provider
from shardkit.layout.traced import may_differ_in_memory
from shardkit.operations.consolidate.adapter import Chosen
from shardkit.operations.consolidate.options import ConsolidateOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Sieve:
    """Sifts tensors by their names in the output."""

    globs: Globs
    left_out: frozenset[str] = frozenset()
    """Names in the output of tensors that were left out before others were named."""
    takes_rules: bool = False
    """Shipped key rules know all names of the checkpoint."""
    class_names: ClassNames | None = None
    """What the model's class says, if it was asked."""

    def sift(self, chosen: Chosen) -> Chosen:
        """Return the tensors to write, of all under the names of the output.

        Raises:
            UsageError: a glob matches none of these names, or none is left.
        """
        self.globs.check({*self.left_out, *chosen.names.values()})
        return replace(chosen, names=self.taken(chosen))

    def taken(self, chosen: Chosen) -> dict[str, str]:
        """Return name in the catalog -> name so far of what the globs take, whether or not they match anything."""
        return {source: name for source, name in chosen.names.items() if self.globs.selects(name)}


def leave_out(
    checkpoint: Checkpoint,
    base: Base | None,
    selection: Selection,
    options: ConsolidateOptions,
    ask: Callable[[Base], ClassNames | None],
) -> tuple[Selection, Sieve]:
    """Return a selection without what `--exclude` leaves out at once, and what sifts the others.

    Args:
        checkpoint: opened.
        base: given or found, or None.
        selection: of all tensors of the model.
        options: what a person asks for.
        ask: asks the model's class.

    Raises:
        UsageError: nothing is left.
        SourceError, IntegrityError: the manifest cannot be read, or is not what was written.
    """
    globs = Globs(options.naming.include, options.naming.exclude)
    if not any(globs):
        return selection, Sieve(globs=globs)
    waiting = _waiting(checkpoint, base, selection, options, ask)
    left_out = {
        stored: name
        for stored, name in selection.names.items()
        if globs.excludes(name) and selection.live.get(stored, name) not in waiting.names
    }
    if len(left_out) == len(selection.names):
        globs.check(left_out.values())
    sieve = Sieve(
        globs=globs,
        left_out=frozenset(left_out.values()),
        takes_rules=waiting.takes_rules,
        class_names=waiting.class_names,
    )
    return selection.only(selection.names.keys() - left_out.keys()), sieve


class _Waiting(NamedTuple):
    names: Collection[str]
    """Names in memory of tensors that the output may have under other names."""
    takes_rules: bool = False
    class_names: ClassNames | None = None


def _waiting(
    checkpoint: Checkpoint,
    base: Base | None,
    selection: Selection,
    options: ConsolidateOptions,
    ask: Callable[[Base], ClassNames | None],
) -> _Waiting:
    """Return which tensors the output may have under other names; arguments as for `leave_out`."""
    shapes = {
        selection.live.get(stored, name): checkpoint.catalog.tensors[stored].shape
        for stored, name in selection.names.items()
    }
    if options.merge_lora:
        return _Waiting(shapes)
    if options.key_rules not in (AUTO, NONE):
        return _Waiting(known_names(load_rules(options.key_rules), shapes))
    if options.naming.root is not None or options.naming.changes_names:
        return _Waiting(())
    config = base.config if base is not None else None
    have = TensorsAtHand(shapes=shapes, config=config)
    if options.key_rules == AUTO and bind(have, None, [shipped_provider]).rules is not None:
        return _Waiting(shapes, takes_rules=True)
    changed = {
        fqn for fqn, expression in saved_derived(checkpoint).items() if not isinstance(expression, Opaque)
    }
    if (
        base is None
        or not base.is_given
        or base.tensors is None
        or not may_differ_in_memory(base.config or {})
    ):
        return _Waiting(changed)
    class_names = ask(base)
    if class_names is not None:
        changed |= class_names.converted.keys() | {
            fqn for fqn, name in class_names.names.items() if fqn != name
        }
    return _Waiting(changed, class_names=class_names)
