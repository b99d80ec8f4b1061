"""Catalogs in which computed tensors replace stored ones.

`derive` is the only way to add computed tensors: a codec names the stored tensors that it needs, and returns any box of
the result. Code that moves bytes treats it like a stored tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod

from shardkit.core.catalog import Catalog, Codec, Computed, SourceFile
from shardkit.core.regions import full_region

Path = tuple[str | int, ...]


def derive(catalog: Catalog, codecs: Mapping[str, Codec], gone: Collection[str] = ()) -> Catalog:
    """Return a catalog in which computed tensors replace the stored ones that they are computed from.

    Args:
        catalog: of raw extents, or with closed records; computed tensors have no chunks then.
        codecs: by name of the computed tensor, which takes the position of its first stored tensor that is not in `gone`;
            its stored tensors are dropped. Several may share stored tensors: codes and scales of a weight.
        gone: stored names that are dropped without replacement.
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
    """Return the replacements of stored tensors: stored name -> names of the tensors computed from it."""
    place = dict[str, list[str]]()
    for name, codec in codecs.items():
        for stored in codec.of:
            if stored not in gone:
                place.setdefault(stored, []).append(name)
    return place


def add_computed(
    derived: Catalog, catalog: Catalog, name: str, codec: Codec, *, group: object = None
) -> None:
    """Add a computed tensor; it has no chunks while the records of its stored tensors are closed."""
    chunks = []
    if catalog.encoding == "raw":
        derived.files.append(computed_file(catalog, codec, group=group))
        chunks = [(len(derived.files) - 1, 0, derived.files[-1].size, full_region(codec.shape))]
    derived.add_tensor(name, codec.dtype, codec.shape, iter(chunks))


def computed_file(catalog: Catalog, codec: Codec, *, group: object = None) -> SourceFile:
    """Return a virtual file with the row-major elements of a codec. Messages name the file of its first stored tensor.

    Args:
        catalog: of raw extents; it has all tensors that the codec needs.
        codec: computes the elements.
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
    """Return the tensors for which `made_by` is true."""
    if all(file.is_raw for file in catalog.files):  # a thousand ranks have half a million chunks
        return set()
    return {name for name in names if made_by(catalog, name, codec)}


def made_by(catalog: Catalog, name: str, codec: type) -> bool:
    """True if a tensor, or a part of it, is computed by a class of codec, directly or through other codecs."""
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
    """Return the path of each tensor in the saved state dict, as if computed tensors had been saved in it."""
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
