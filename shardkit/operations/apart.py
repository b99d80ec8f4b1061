"""Tensors of a model in memory as those of the Hub's files: what it holds fused is taken apart, and the like."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from shardkit.core.catalog import Catalog
from shardkit.keys.expressions import Cut, Expression, Stored, Zeros, concat, leaves, made_name, under_names
from shardkit.keys.inverse import invert
from shardkit.transfer.codecs.bound import bind


class Apart(NamedTuple):
    """What became of some tensors."""

    catalog: Catalog
    """The given one, with the Hub's tensors that are made of others."""
    made: Mapping[str, str]
    """Name on the Hub -> name in the catalog, of those that are made."""
    gone: frozenset[str]
    """Names in memory of what they are made of."""
    origins: Mapping[str, frozenset[str]]
    """Name in the catalog of each that is made -> names in the given catalog of what it is made of."""
    padded: Mapping[str, int]
    """Name on the Hub -> rows at its end that the model drops, and that are zeros."""


def take_apart(catalog: Catalog, sources: Mapping[str, str], derived: Mapping[str, Expression]) -> Apart:
    """Make the Hub's tensors of those that a model in memory holds in another form.

    A tensor of another shape than it was made with, or of which a part is missing, is left as it is.

    Args:
        catalog: of raw extents.
        sources: name in memory -> name in the catalog.
        derived: what names in memory were made of on the Hub.
    """
    held = {
        fqn: made
        for fqn, made in derived.items()
        if fqn in sources and catalog.tensors[sources[fqn]].shape == made.shape
    }
    padded = _padded(held)
    back = {**padded, **invert(held).made}
    whole = {fqn for fqn, made in held.items() if all(leaf.name in back for leaf in leaves(made))}
    apart = {
        name: under_names(made, sources)
        for name, made in back.items()
        if all(leaf.name in whole for leaf in leaves(made))
    }
    if not apart:
        return Apart(catalog, {}, frozenset(), {}, {})
    made_names = {name: made_name(name, catalog.tensors) for name in apart}
    bound = bind(catalog, {made_names[name]: made for name, made in apart.items()})
    origins = {
        made_names[name]: frozenset(leaf.name for leaf in leaves(made)) for name, made in apart.items()
    }
    rows = {
        name: made.shape[0] - next(leaves(made)).shape[0] for name, made in padded.items() if name in apart
    }
    return Apart(bound, made_names, frozenset(whole), origins, rows)


def _padded(held: Mapping[str, Expression]) -> dict[str, Expression]:
    """Return the tensors of which a model has the first rows alone, with zeros for the others.

    Inkling 2 has a head of `unpadded_vocab_size` rows, and `save_pretrained` of transformers 5.24 writes the rest of the
    `vocab_size` as zeros.
    """
    users = Counter(leaf.name for made in held.values() for leaf in leaves(made))
    found = dict[str, Expression]()
    for fqn, made in held.items():
        match made:
            case Cut(Stored(name, (rows, *others)), ((*offsets,), (first, *sizes))):
                if users[name] == 1 and not any(offsets) and sizes == others:
                    found[name] = concat([Stored(fqn, made.shape), Zeros((rows - first, *others))], 0)
    return found
