"""`--include` and `--exclude`, where the output has other tensors than the checkpoint.

Both are about names in the output. A fused tensor has none of these until it is taken apart, nor has a trainer's own
before key rules were applied. So such tensors are chosen first, and what is made of them is sifted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from shardkit.core.regions import Shape
from shardkit.core.text import nothing_left
from shardkit.errors import ShardkitError
from shardkit.formats.contract import Checkpoint
from shardkit.formats.hub.base import Base, saved_derived
from shardkit.keys.expressions import Opaque
from shardkit.keys.select import Globs, Naming, Selection
from shardkit.layout.decided import ClassNames, decide_names
from shardkit.layout.traced import may_differ_in_memory
from shardkit.operations.consolidate.adapter import Chosen
from shardkit.operations.keys import AUTO, NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Sieve:
    """Sifts tensors by their names in the output."""

    globs: Globs
    undecided: frozenset[str] = frozenset()
    """Names in memory of tensors that the output may have others for; without any there is nothing to sift."""
    takes_rules: bool = False
    """Shipped key rules know all names of the checkpoint."""
    asked: ClassNames | None = None
    """What the model's class says, if it was asked."""

    def sift(self, chosen: Chosen, selection: Selection) -> Chosen:
        """Return the tensors to write, of some that have the output's names already.

        Raises:
            UsageError: nothing is.
        """
        if not self.undecided:
            return chosen
        known = {
            source: self._names(source, name, chosen, selection) for source, name in chosen.names.items()
        }
        kept = {source: name for source, name in chosen.names.items() if self.globs.take(*known[source])}
        if not kept:
            raise nothing_left(
                self.globs.include, [name for names in known.values() for name in names], len(known)
            )
        idle = [note for note in self.globs.idle(known.values()) if note in selection.notes]
        return replace(chosen, names=kept, notes=(*chosen.notes, *idle))

    def tell(self, selection: Selection, chosen: Chosen) -> Selection:
        """Return the notes about a selection, once `sift` has left some of it out."""
        if not self.undecided:
            return selection
        stored = {origin for source in chosen.names for origin in chosen.origins.get(source, (source,))}
        early = self.globs.idle(())
        return selection.only(stored, [note for note in selection.notes if note not in early])

    def without(self, chosen: Chosen, selection: Selection) -> Chosen:
        """Return some tensors without those that `--exclude` leaves out by their names in the checkpoint."""
        globs = self.globs._replace(include=())
        names = {
            source: name
            for source, name in chosen.names.items()
            if globs.take(*self._names(source, name, chosen, selection))
        }
        return replace(chosen, names=names)

    @staticmethod
    def _names(source: str, name: str, chosen: Chosen, selection: Selection) -> list[str]:
        stored = chosen.origins.get(source, (source,))
        return [name, *(known for origin in stored for known in selection.names_of(origin))]


def make_sieve(
    checkpoint: Checkpoint,
    base: Base | None,
    naming: Naming,
    keys: str,
    *,
    select: Callable[[Naming], Selection],
    ask: Callable[[Base], ClassNames | None],
) -> Sieve:
    """Find out which tensors of a checkpoint the output may have others for, where some are chosen by name.

    Args:
        checkpoint: opened.
        base: given or found, or None.
        naming: what a person asks for; nothing is looked up where that says what becomes of names.
        keys: key rules, as `--keys` takes them.
        select: chooses tensors.
        ask: asks the model's class.

    Raises:
        SourceError, IntegrityError: the manifest cannot be read, or is not what was written.
    """
    globs = Globs(naming.include, naming.exclude)
    if not (naming.include or naming.exclude) or naming.root is not None or naming.changes_names:
        return Sieve(globs=globs)
    if keys != NONE:
        shapes = _all_shapes(checkpoint, naming, select)
        config = base.config if base is not None else None
        fits = keys == AUTO and decide_names(shapes, side="model", takes_shipped=True, config=config).rules
        if keys != AUTO or fits:
            return Sieve(globs=globs, undecided=frozenset(shapes), takes_rules=bool(fits))
    changed = {fqn for fqn, made in saved_derived(checkpoint).items() if not isinstance(made, Opaque)}
    asked = None
    if (
        base is not None
        and base.is_given
        and base.tensors is not None
        and may_differ_in_memory(base.config or {})
    ):
        asked = ask(base)
    if asked is not None:
        changed |= asked.converted.keys() | {fqn for fqn, name in asked.names.items() if fqn != name}
    return Sieve(globs=globs, undecided=frozenset(changed), asked=asked)


def _all_shapes(
    checkpoint: Checkpoint, naming: Naming, select: Callable[[Naming], Selection]
) -> Mapping[str, Shape]:
    """Return the shape of each tensor of the model by its name in memory; none if they cannot be chosen."""
    try:
        live = select(replace(naming, include=(), exclude=())).live
    except ShardkitError:  # what is left out by name may be the reason
        return {}
    return {fqn: checkpoint.catalog.tensors[stored].shape for stored, fqn in live.items()}
