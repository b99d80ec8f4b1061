"""A catalog with tensors that codecs make of stored ones, in their place.

`derive` is the one seam for what is computed: a codec says of what it makes a tensor, and gives any box of it; whoever
moves bytes treats it like a stored one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod

from shardkit.core.catalog import Catalog, Codec, Computed, SourceFile
from shardkit.core.regions import full_region

Path = tuple[str | int, ...]


def derive(catalog: Catalog, codecs: Mapping[str, Codec], gone: Collection[str] = ()) -> Catalog:
    """Return a catalog with tensors that are made, each in the place of what it is made of.

    Args:
        catalog: its extents are raw bytes, unless `encoding` says that records were not opened yet: then what is made has
            no chunks.
        derivation: by name. What they are made of is gone: each stands where the first of it was that is not in `gone`. Several
            may be made of the same: codes and scales of a weight.
        gone: stored names that the result does not have, and for which nothing stands.
    """
    derived = replace(catalog, files=list(catalog.files), tensors={}, chunks=type(catalog.chunks)())
    place = replaced(codecs, gone)
    for stored in catalog.tensors:
        if stored not in place and stored not in gone:
            derived.copy_tensor(catalog, stored, stored)
        for name in place.get(stored, ()):
            if name not in derived.tensors:
                add_computed(derived, catalog, name, codecs[name])
    if catalog.paths is not None:
        derived.paths = _paths(catalog.paths, codecs, place, gone)
    return derived


def replaced(codecs: Mapping[str, Codec], gone: Collection[str]) -> dict[str, list[str]]:
    """Return the stored names that tensors stand for: stored name -> all that is made of it."""
    place = dict[str, list[str]]()
    for name, codec in codecs.items():
        for stored in codec.of:
            if stored not in gone:
                place.setdefault(stored, []).append(name)
    return place


def add_computed(
    derived: Catalog, catalog: Catalog, name: str, codec: Codec, *, group: object = None
) -> None:
    """Add a tensor that a codec makes; it has chunks once the records of what it is made of are open."""
    chunks = []
    if catalog.encoding == "raw":
        derived.files.append(computed_file(catalog, codec, group=group))
        chunks = [(len(derived.files) - 1, 0, derived.files[-1].size, full_region(codec.shape))]
    derived.add_tensor(name, codec.dtype, codec.shape, iter(chunks))


def computed_file(catalog: Catalog, codec: Codec, *, group: object = None) -> SourceFile:
    """Return a file of the elements that a codec makes, row-major. Messages name the file of the first that it needs.

    Args:
        catalog: of raw extents; it has what the codec needs.
        codec: makes them.
        group: see `Computed`.
    """
    entry = catalog.tensors[codec.of[0]] if codec.of else None
    home = catalog.files[catalog.chunks.file[entry.first_chunk] if entry and entry.num_chunks else 0]
    return SourceFile(
        name=home.name,
        path=home.path,
        size=prod(codec.shape) * codec.dtype.itemsize,
        derivation=Computed(codec=codec, catalog=catalog, group=group),
    )


def made_among(catalog: Catalog, names: Iterable[str], codec: type) -> set[str]:
    """Return those of some tensors that `made_by` is true of."""
    if all(file.is_raw for file in catalog.files):  # a thousand ranks have half a million chunks
        return set()
    return {name for name in names if made_by(catalog, name, codec)}


def made_by(catalog: Catalog, name: str, codec: type) -> bool:
    """True if a kind of codec makes a tensor or a part of it, be it reordered or cut."""
    rows = catalog.tensors[name].chunk_ids
    computed = (catalog.files[file].derivation for file in set(catalog.chunks.file[rows.start : rows.stop]))
    return any(
        isinstance(each.codec, codec) or any(made_by(each.catalog, part, codec) for part in each.codec.of)
        for each in computed
        if isinstance(each, Computed)
    )


def _paths(
    paths: Mapping[str, Path],
    codecs: Mapping[str, Codec],
    place: Mapping[str, Sequence[str]],
    gone: Collection[str],
) -> dict[str, Path]:
    """Return the path of each tensor in the state dict that was saved, as if the made ones had been in it."""
    derived = dict[str, Path]()
    for stored, path in paths.items():
        if stored not in place and stored not in gone:
            derived[stored] = path
        for name in place.get(stored, ()):
            if name == stored:
                derived[name] = path
            elif path and stored == codecs[name].of[0]:
                before = stored.removesuffix(str(path[-1]))
                derived[name] = (*path[:-1], name.removeprefix(before))
    return derived
