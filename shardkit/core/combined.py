"""Several catalogs of raw extents as one: the parts of a nested state dict, each below its own key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardkit.core.catalog import Catalog, SourceFile


def combine_catalogs(catalogs: Mapping[str, Catalog]) -> Catalog:
    """Return one catalog of raw extents, with the key of each part in front of its names and paths.

    Files that several parts point into are there once.
    """
    whole = Catalog(format="dcp", directory="", paths={})
    known: dict[object, int] = {}
    for key, catalog in catalogs.items():
        table, numbers = catalog.chunks, [_number(whole, known, file) for file in catalog.files]
        paths = catalog.paths or {}
        for fqn, entry in catalog.tensors.items():
            rows, name = slice(entry.chunk_ids.start, entry.chunk_ids.stop), f"{key}.{fqn}"
            whole.add_tensor_columns(
                name,
                entry.dtype,
                entry.shape,
                [numbers[file] for file in table.file[rows]],
                table.start[rows].tolist(),
                table.nbytes[rows].tolist(),
                table.regions(entry.chunk_ids),
            )
            assert whole.paths is not None
            whole.paths[name] = (key, *paths.get(fqn, (fqn,)))
    return whole


def _number(whole: Catalog, known: dict[object, int], file: SourceFile) -> int:
    """Return the file's number in the whole; files that are decoded are each their own."""
    key = (file.path, file.stamp) if file.decode is None else id(file)
    if key not in known:
        whole.files.append(file)
        known[key] = len(whole.files) - 1
    elif file.checksums is not None:
        held = whole.files[known[key]]
        both = file.checksums if held.checksums is None else held.checksums | file.checksums
        whole.files[known[key]] = replace(held, checksums=both)
    return known[key]
