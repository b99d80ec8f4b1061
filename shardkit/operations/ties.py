"""Tied weights: decide whether one copy is written, or several because training made them differ.

A sharded checkpoint has a tied tensor once for each name. The Hub keeps only the embedding, without the tensors that are
tied to it, and sets `tie_word_embeddings` in the config.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardkit.core.catalog import Catalog
from shardkit.core.text import listed
from shardkit.files.location import location_of
from shardkit.keys import ties
from shardkit.keys.ties import tied_names
from shardkit.transfer.sources import same_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Ties:
    """The decision about tied tensors."""

    dropped: Mapping[str, str]
    """Name that is left out -> name of the equal tensor that is kept."""
    diverged: tuple[tuple[str, str], ...]
    """(embedding, head) that should be tied but differ: both are kept."""
    untied: bool
    """True if head and embedding differ and are both kept, whether or not they should be tied."""


def shared_record_notes(path: str, tied: Collection[str]) -> tuple[str, ...]:
    """Return a note if tied names share a record in an output whose readers may refuse that.

    Args:
        path: path of the output.
        tied: one name of each group of tied names.
    """
    needed = location_of(path).of_shared_records
    return (f"tied names share one record ({listed(tied)}): {needed}",) if tied and needed else ()


def resolve_ties(
    catalog: Catalog,
    names: Mapping[str, str],
    *,
    declared: bool | None,
    base_names: Collection[str] | None,
    known_ties: Iterable[Sequence[str]] = (),
    equal_in_base: Callable[[str, str], bool] = lambda _one, _two: False,
) -> Ties:
    """Decide which tied tensors are left out.

    Equal values alone do not make a tie. In addition, the config must tie the two, or the base must lack one of the
    names, or the checkpoint must have one record for both. A name that the base stores is never left out. If the config
    says that nothing is tied, no name is left out, because `from_pretrained` would initialise it. Of equal, tied names,
    those that the base lacks are left out. Two names that the base stores with different values are not tied, whatever
    its config says.

    Args:
        catalog: catalog with the stored names; its records need not be open.
        names: stored name -> name in the output.
        declared: whether the config ties embeddings; None if it does not say.
        base_names: names that the base stores; None if unknown.
        known_ties: groups of names that are one parameter of the model, according to its class.
        equal_in_base: returns whether the base stores the same bytes under two of its names.
    """
    known_ties = list(known_ties)
    stored = {name: source for source, name in names.items()}

    def equal_one(name: str, keepers: Iterable[str]) -> str | None:
        same = (kept for kept in keepers if same_bytes(catalog, stored[kept], stored[name]))
        return next(same, None)

    dropped, diverged, untied = dict[str, str](), [], False
    for tied_name, keepers, is_head in tie_candidates(catalog, stored):
        base_has = tied_name in base_names if base_names is not None else None
        equal = equal_one(tied_name, keepers)
        if equal is not None:
            is_one = base_has is False or place_of(catalog, stored[equal]) == place_of(
                catalog, stored[tied_name]
            )
            if declared is not False and not base_has and (declared or is_one):
                dropped[tied_name] = equal
        elif is_head and not (base_has and not any(equal_in_base(kept, tied_name) for kept in keepers)):
            untied = True
            if declared or (declared is None and base_has is False):
                diverged.append((keepers[0], tied_name))
    groups = [] if declared is False or base_names is None else ties.tie_groups(stored)
    for group in (*known_ties, *groups):
        here = [name for name in group if name in stored and name not in dropped]
        base_has_some = [name for name in here if base_names is not None and name in base_names]
        kept_names = base_has_some or (here[:1] if group in known_ties else [])
        for tied_name in here:
            if tied_name in kept_names or tied_name in base_has_some:
                continue
            if (equal := equal_one(tied_name, kept_names)) is not None:
                dropped[tied_name] = equal
    dropped |= _share_record(catalog, stored, dropped, base_names)
    return Ties(
        dropped={tied_name: _kept_name(dropped, tied_name) for tied_name in dropped},
        diverged=tuple(diverged),
        untied=untied,
    )


def _kept_name(dropped: Mapping[str, str], name: str) -> str:
    """Return the name that is kept for a dropped one, following chains: a -> b -> c."""
    while name in dropped:
        name = dropped[name]
    return name


def _share_record(
    catalog: Catalog, stored: Mapping[str, str], dropped: Collection[str], base_names: Collection[str] | None
) -> dict[str, str]:
    """Return name -> kept name, for names that the base lacks and that share a record with a name that the base has."""
    if base_names is None:
        return {}
    kept: dict[object, str] = {}
    for name, source in stored.items():
        if name in base_names and (place := place_of(catalog, source)) is not None:
            kept.setdefault(place, name)
    lone = (
        (name, source) for name, source in stored.items() if name not in base_names and name not in dropped
    )
    return {name: kept[place] for name, source in lone if (place := place_of(catalog, source)) in kept}


def place_of(catalog: Catalog, stored: str) -> tuple[object, ...] | None:
    """Return a key for the place of a tensor's bytes: equal for tensors that share them. None if empty or not raw."""
    entry, chunks = catalog.tensors[stored], catalog.chunks
    rows = entry.chunk_ids
    if not entry.nbytes or not rows or not all(catalog.files[chunks.file[row]].is_raw for row in rows):
        return None
    extents = tuple((chunks.file[row], chunks.start[row]) for row in rows)
    return entry.dtype.name, entry.shape, extents, tuple(chunks.regions(rows))


def tie_groups(decided: Ties, names: Collection[str], *, declared: bool | None) -> list[tuple[str, ...]]:
    """Return groups of names that are one parameter. Base and output may store different names of a group.

    Args:
        decided: the decision about tied tensors.
        names: the names of both base and output.
        declared: whether the config ties embeddings.
    """
    groups: list[tuple[str, ...]] = [
        *decided.diverged,
        *((kept, name) for name, kept in decided.dropped.items()),
    ]
    return [*groups, *(ties.tie_groups(names) if declared else ())]


def tie_candidates(
    catalog: Catalog, stored: Mapping[str, str]
) -> Iterator[tuple[str, tuple[str, ...], bool]]:
    """Yield (name, names that it may be tied to, whether it is a head) for the tensors of a catalog; see `tied_names`.

    Args:
        catalog: catalog with the shapes.
        stored: name in the output -> stored name.
    """
    return tied_names({name: catalog.tensors[source].shape for name, source in stored.items()})
