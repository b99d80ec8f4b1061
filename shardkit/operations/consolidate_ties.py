"""Tied weights: one copy where the copies are equal, both where training has made them differ.

A sharded checkpoint holds tied tensors once for each name. The Hub keeps the embedding and drops what is
tied to it, and says `tie_word_embeddings` in the config.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from shardkit.core.catalog import Catalog
from shardkit.keys.ties import role_of, tied_names
from shardkit.operations.same_bytes import same_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Ties:
    """What became of tied tensors."""

    dropped: Mapping[str, str]
    """Name that is left out -> name of its equal that is kept."""
    diverged: tuple[tuple[str, str], ...]
    """(embedding, head) that ought to be tied and differ: both are kept."""
    untied: bool
    """Head and embedding are both kept and differ, whether or not they ought to be tied."""


def resolve_ties(
    catalog: Catalog,
    names: Mapping[str, str],
    *,
    declared: bool | None,
    base_names: Collection[str] | None,
) -> Ties:
    """Decide which of the tensors that may be tied are left out.

    Args:
        catalog: raw extents, by stored name.
        names: stored name -> name in the output.
        declared: what the config says of `tie_word_embeddings`; None where it does not say.
        base_names: names that the base stores; None where that is not known. A name that it stores is never
            left out.
    """
    stored = {name: source for source, name in names.items()}
    dropped, diverged, untied = dict[str, str](), [], False
    for other, keepers, is_head in tie_candidates(catalog, stored):
        base_has = other in base_names if base_names is not None else None
        equal = next((kept for kept in keepers if same_bytes(catalog, stored[kept], stored[other])), None)
        if equal is not None:
            if not base_has and not (is_head and declared is False):
                dropped[other] = equal
        elif is_head:
            untied = True
            if declared or (declared is None and base_has is False):
                diverged.append((keepers[0], other))
    return Ties(dropped=dropped, diverged=tuple(diverged), untied=untied)


def tie_groups(ties: Ties, names: Collection[str], *, declared: bool | None) -> list[tuple[str, ...]]:
    """Return groups of names that are one parameter, of which one side may store only some.

    Args:
        ties: what was decided.
        names: of both sides.
        declared: what the config says of `tie_word_embeddings`.
    """
    groups: list[tuple[str, ...]] = [*ties.diverged, *((kept, name) for name, kept in ties.dropped.items())]
    if declared:
        groups.append(tuple(name for name in names if role_of(name) is not None))
    return groups


def declared_tie(config: Mapping[str, object] | None) -> bool | None:
    """Return what a config says of tied embeddings; of a model of several parts, what its text part says."""
    for part in (config, *(_part(config, key) for key in ("text_config", "llm_config", "language_config"))):
        value = part.get("tie_word_embeddings") if part else None
        if isinstance(value, bool):
            return value
    return None


def _part(config: Mapping[str, object] | None, key: str) -> Mapping[str, object] | None:
    value = config.get(key) if config else None
    return value if isinstance(value, dict) else None


def tie_candidates(
    catalog: Catalog, stored: Mapping[str, str]
) -> Iterator[tuple[str, tuple[str, ...], bool]]:
    """Yield what `tied_names` does of the tensors of a catalog.

    Args:
        catalog: has their shapes.
        stored: name in the output -> stored name.
    """
    return tied_names({name: catalog.tensors[source].shape for name, source in stored.items()})
